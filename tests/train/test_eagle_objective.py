"""EAGLE's objective against an independent decoder: losses, noise, dependencies, reduction, sizes."""

import math

import pytest
import torch
from torch import Tensor

from spectrain.heads.base import HeadError
from spectrain.heads.eagle import EagleConfig, EagleHead
from spectrain.heads.target_tensors import FinalNorm, TargetTensors
from spectrain.tests.fresh import loud_head
from spectrain.tests.train.formulas import influences, law_of, normed, row_loss
from spectrain.tests.train.reference_decoder import assert_decoders_logits, teacher_forced
from spectrain.tests.train.toys import (
    Document,
    counted,
    numbered_documents,
    on_final,
    pack,
    random_document,
    random_target,
    share,
    tiny_eagle_config,
    tiny_facts,
)
from spectrain.train.attention import UnrolledAttend
from spectrain.train.batch import TrainBatch
from spectrain.train.losses import LossKind
from spectrain.train.objectives import rollout
from spectrain.train.objectives.eagle import EagleObjective, EagleSettings
from spectrain.train.objectives.rollout import unroll

STYLES = {"plain": {}, "two layers": {"num_layers": 2}, "fc bias": {"fc_bias": True}}


def quiet(**settings: object) -> EagleSettings:
    return EagleSettings(noise=0.0, **settings)


def documents(*lengths: int, seed: int = 1, prompt: int = 0) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    return [on_final(random_document(n, 16, 16, generator, prompt=prompt)) for n in lengths]


def predicted(head: EagleHead, target: TargetTensors, batch: TrainBatch, settings: EagleSettings) -> Tensor:
    """The head's output [batch, seq, hidden] in a real call of the objective."""
    captured: list[Tensor] = []
    hook = head.register_forward_hook(lambda _m, _i, output: captured.append(output.logits_states))
    EagleObjective(head.config, settings)(head, target, batch)
    hook.remove()
    (states,) = captured
    return states


@pytest.mark.parametrize("style", STYLES)
def test_training_logits_equal_an_incremental_decoder(style: str):
    config, target = tiny_eagle_config(**STYLES[style]), random_target(16, 16)
    head = loud_head(config, target, random_norms=True)
    rows = [documents(7), documents(4, 2, seed=2)]
    batch = pack(rows, target, 1, seq=8)
    for moved in (0, 7):
        found = head.logits(predicted(head, target, batch._replace(positions=batch.positions + moved), quiet()), target)
        assert assert_decoders_logits(found[None], rows, head, target) == 6 + 3 + 1


@pytest.mark.parametrize("style", STYLES)
def test_drafts_from_its_own_predictions_equal_an_incremental_decoder(style: str):
    """Training takes one step; what the head feeds back matters in serving alone."""
    config, target = tiny_eagle_config(**STYLES[style]), random_target(16, 16)
    head = loud_head(config, target, random_norms=True)
    (document,) = documents(8)
    batch = pack([[document]], target, 1)
    attend = UnrolledAttend(batch.document_ids, "dense")
    states = unroll(head, target, batch, head.combine(batch.aux_states, target), attend, [torch.arange(8)] * 4)
    found = head.logits(states, target).unflatten(0, (4, 8))
    for (t, k), expected in teacher_forced(head, target, document.token_ids, document.aux, 4).items():
        torch.testing.assert_close(found[k, t], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["ce", "kl", "tv", "lk_alpha"])
def test_loss_equals_the_formula_on_the_decoders_states(kind: LossKind):
    """Labels are the next state after the final norm, applied once, and its law."""
    config, target = tiny_eagle_config(), random_target(16, 16)
    head = loud_head(config, target, random_norms=True)
    rows = [documents(7), documents(4, 2, seed=2)]
    objective = EagleObjective(config, quiet(loss=kind, feature_weight=0.7, law_weight=0.3))
    batch = counted(objective, head, pack(rows, target, 1))
    output = objective(head, target, batch)
    inverse = torch.linalg.pinv(target.lm_head)  # lm_head [16, 16] is regular, so logits give the state back
    features, laws, count = 0.0, 0.0, 0
    for document in (d for row in rows for d in row):
        labels, law, text = normed(target, document.final), law_of(target, document.final), document.token_ids.tolist()
        for (t, _), logits in teacher_forced(head, target, document.token_ids, document.aux, 1).items():
            if t + 2 >= len(text):
                continue
            gap = (inverse @ logits - labels[t + 1]).abs()
            features += float(torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean())
            loss = row_loss(kind, logits, law[t + 1], text[t + 2])
            assert loss is not None
            laws += loss
            count += 1
    assert batch.denominators.tolist() == [count] and count == 7
    expected = (0.7 * features + 0.3 * laws) / count
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert share(output, "feature_0") == pytest.approx(features / count, rel=1e-4)
    assert share(output, "loss_0") == pytest.approx(laws / count, rel=1e-4)


def test_the_published_weights_are_the_defaults():
    settings = EagleSettings()
    assert (settings.feature_weight, settings.law_weight, settings.noise, settings.loss) == (1.0, 0.1, 0.1, "kl")


@pytest.mark.parametrize(("tokens", "width"), [(512, 0.1), (2048, 0.025), (128, 0.4)])
def test_noise_shrinks_with_the_document_and_fills_its_width(tokens: int, width: float):
    config, target = tiny_eagle_config(), random_target(16, 16)
    head = loud_head(config, target)
    # a short neighbour in the same row has a width of its own
    rows = [documents(tokens, 64)]
    batch = pack(rows, target, 1, seq=tokens + 70)
    given: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _m, args: given.append(args[0].states))
    objective = EagleObjective(config, EagleSettings())
    for training in (True, True, False):
        head.train(training)
        with torch.no_grad():
            objective(head, target, batch)
    hook.remove()
    clean = head.combine(batch.aux_states, target)
    noise = (given[0] - clean)[0, :tokens]
    assert torch.equal(given[0], given[1])  # a function of document, epoch and position
    assert torch.equal(given[2], clean)
    assert 0.99 * width < float(noise.abs().max()) <= width + 1e-5
    assert float(noise.mean()) == pytest.approx(0, abs=4 * width / math.sqrt(3 * noise.numel()))
    assert float(noise.std()) == pytest.approx(width / math.sqrt(3), rel=0.02)
    short = (given[0] - clean)[0, tokens : tokens + 64]
    assert 0.95 * 0.8 < float(short.abs().max()) <= 0.8 + 1e-5


def test_noise_follows_the_document_and_its_epoch_and_leaves_labels_alone(monkeypatch: pytest.MonkeyPatch):
    config, target = tiny_eagle_config(), random_target(16, 16)
    head = loud_head(config, target).train()
    first, second = documents(9, 6)
    seeds = {9: 5, 6: 8}

    def states(rows: list[list[Document]], shift: int = 0) -> list[Tensor]:
        batch = pack(rows, target, 1)
        assert batch.document_seeds is not None
        flat = torch.cat([torch.full((len(d.token_ids),), seeds[len(d.token_ids)]) for d in rows[0]])
        found: list[Tensor] = []
        hook = head.register_forward_pre_hook(lambda _m, args: found.append(args[0].states))
        EagleObjective(config, EagleSettings())(head, target, batch._replace(document_seeds=flat[None] + shift))
        hook.remove()
        return list(found[0][0].split([len(d.token_ids) for d in rows[0]]))

    together, swapped, alone = states([[first, second]]), states([[second, first]]), states([[first]])
    assert torch.equal(together[0], swapped[1]) and torch.equal(together[0], alone[0])
    assert torch.equal(together[1], swapped[0])
    assert not torch.equal(alone[0], states([[first]], shift=1)[0])
    seen: list[Tensor] = []
    original = rollout.soft_labels

    def watched(*arguments: object) -> object:
        labels = original(*arguments)
        seen.append(labels.normed)
        return labels

    monkeypatch.setattr(rollout, "soft_labels", watched)
    states([[first]])
    torch.testing.assert_close(seen[0], target.norm(first.final[1:8]))


def test_each_row_depends_on_exactly_what_the_drafter_knows():
    """States h_0..h_t and tokens x_1..x_{t+1} of its own document: all of them, nothing else."""
    config, target = tiny_eagle_config(vocab=32), random_target(32, 16)
    head = loud_head(config, target)
    lengths, generator = [6, 5], torch.Generator().manual_seed(0)
    batch = pack([[on_final(d) for d in numbered_documents(lengths, 16, generator)]], target, 1, seq=13)
    aux, embeds = batch.aux_states.requires_grad_(), target.embed_tokens.requires_grad_()
    states = predicted(head, target, batch._replace(aux_states=aux), quiet())
    probe = torch.randn(16, generator=generator)
    start = 0
    for n in lengths:
        for t in range(n - 1):
            by_state, by_token = torch.autograd.grad(states[0, start + t] @ probe, [aux, embeds], retain_graph=True)
            assert by_state[0].abs().sum((-1, -2)).nonzero().squeeze(1).tolist() == list(range(start, start + t + 1))
            assert by_token.abs().sum(-1).nonzero().squeeze(1).tolist() == list(range(start + 1, start + t + 2))
        start += n


def test_only_the_table_of_counted_rows_can_change_the_loss():
    """Mask 00111011 counts rows 1, 2 and 5: x_0 and x_7, states 0..5 as inputs, 2, 3 and 6 as labels."""
    config, target = tiny_eagle_config(), random_target(16, 16)
    head = loud_head(config, target)
    mask = torch.tensor([c == "1" for c in "00111011"])
    document = random_document(8, 16, 16, torch.Generator().manual_seed(3))._replace(loss_mask=mask)
    document = on_final(document)
    found = influences(EagleObjective(config, quiet(loss="kl")), head, target, document)
    assert found == ({1, 2, 3, 4, 5, 6}, {0, 1, 2, 3, 4, 5}, {2, 3, 6})


def test_the_folder_is_vllms_and_sglangs_and_a_bias_that_vllm_would_drop_is_refused_by_name():
    config, target = tiny_eagle_config(num_layers=2), random_target(16, 16)
    head = loud_head(config, target)
    assert set(head.state_dict()) == {
        "fc.weight",
        "fc.bias",
        *(f"layers.{i}.self_attn.{n}_proj.weight" for i in range(2) for n in "qkvo"),
        *(f"layers.{i}.mlp.{n}_proj.weight" for i in range(2) for n in ("gate", "up", "down")),
        *(f"layers.{i}.post_attention_layernorm.weight" for i in range(2)),
        "layers.1.input_layernorm.weight",
    }
    # without one in the file SGLang's would be random
    assert not head.state_dict()["fc.bias"].any() and "fc.bias" not in dict(head.named_parameters())
    serving = config.serving_config()
    assert (
        serving["architectures"] == ["LlamaForCausalLMEagle", "LlamaForCausalLM"] and serving["model_type"] == "llama"
    )
    assert serving["num_hidden_layers"] == 2 and serving["vocab_size"] == 16
    biased = tiny_eagle_config(fc_bias=True)
    assert biased.serving_config()["architectures"] == ["LlamaForCausalLMEagle"]
    assert "fc.bias" in dict(loud_head(biased, target).named_parameters())


def test_what_the_head_cannot_do_is_refused():
    facts = tiny_facts()
    with pytest.raises(HeadError, match="after the target's last layer"):
        EagleConfig.derive(facts, {"layer_ids": (2,)})
    with pytest.raises(HeadError, match="draft_vocab_size"):
        EagleConfig.derive(facts, {"draft_vocab_size": 8})
    plain = random_target(16, 16)
    generator = torch.Generator().manual_seed(0)
    norm = FinalNorm("none", None, None, 0.0)
    for shaped in (
        TargetTensors(plain.embed_tokens, plain.lm_head, torch.ones(16), norm),
        TargetTensors(plain.embed_tokens, plain.lm_head, None, norm, logit_scale=0.5),
        TargetTensors(plain.embed_tokens, plain.lm_head, None, norm, softcap=30.0),
    ):
        with pytest.raises(HeadError, match="train eagle3"):
            EagleHead(tiny_eagle_config()).initialise(shaped, generator)
    for name in ("noise", "law_weight", "feature_weight"):
        with pytest.raises(ValueError, match=f"objective.{name}"):
            EagleSettings(**{name: -1.0})
    head = loud_head(tiny_eagle_config(), plain)
    batch = pack([documents(5)], plain, 1)
    with pytest.raises(ValueError, match="shards without id L"):
        EagleObjective(head.config, quiet())(head, plain, batch._replace(final_states=None))
