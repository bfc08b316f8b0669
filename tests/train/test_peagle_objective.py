"""P-EAGLE's objective against an independent decoder, and the conditional drop of its later steps."""

import pytest
import torch
from torch import Tensor

from spectrain.heads.base import HeadError
from spectrain.heads.peagle import PEagleConfig, PEagleHead
from spectrain.heads.target_tensors import TargetTensors
from spectrain.tests.fresh import loud_head
from spectrain.tests.train.formulas import influences
from spectrain.tests.train.reference_decoder import assert_decoders_logits, decoder_losses
from spectrain.tests.train.toys import (
    Document,
    counted,
    numbered_documents,
    pack,
    random_document,
    random_target,
    tiny_facts,
    tiny_peagle_config,
)
from spectrain.train.alignment import valid_rows
from spectrain.train.attention import ParallelAttend
from spectrain.train.batch import TrainBatch
from spectrain.train.conditional_drop import drop_rows
from spectrain.train.losses import LossKind
from spectrain.train.objectives.peagle import PEagleObjective, PEagleSettings

STYLES = {
    "llama": {},
    "four layers": {"num_layers": 4},
    "two layers, every flag": {
        "num_layers": 2,
        "layer_style": "qwen3",
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": True,
    },
    "reduced vocabulary, five layers fused": {"draft_vocab_size": 11, "layers": 5},
}


def documents(*lengths: int, seed: int = 1, layers: int = 3, prompt: int = 0) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    return [random_document(n, 16, 16, generator, layers=layers, prompt=prompt) for n in lengths]


def every_row(batch: TrainBatch, steps: int) -> list[Tensor]:
    return [torch.arange(batch.token_ids.numel())] * steps


def logits_of(head: PEagleHead, target: TargetTensors, batch: TrainBatch, steps: int) -> Tensor:
    """Draft logits [steps, batch, seq, draft_vocab] of every row of every step."""
    objective = PEagleObjective(head.config, PEagleSettings(steps=steps))
    states = objective.unroll(head, target, batch, every_row(batch, steps))
    return head.logits(states, target).unflatten(0, (steps, *batch.token_ids.shape))


@pytest.mark.parametrize("style", STYLES)
def test_training_logits_equal_an_incremental_decoder(style: str):
    config, target = tiny_peagle_config(**STYLES[style]), random_target(16, 16)
    head = loud_head(config, target, random_norms=True)
    layers = len(config.layer_ids)
    rows = [documents(7, layers=layers), documents(4, 2, seed=2, layers=layers), documents(1, 5, seed=3, layers=layers)]
    batch = pack(rows, target, 4, seq=8)
    found = logits_of(head, target, batch, 4)
    moved = logits_of(head, target, batch._replace(positions=batch.positions + 7), 4)
    for logits, tolerance in ((found, 1e-5), (moved, 2e-5)):
        assert assert_decoders_logits(logits, rows, head, target, tolerance) == 18 + 6 + 1 + 0 + 10


@pytest.mark.parametrize("kind", ["ce", "kl", "tv", "lk_alpha"])
def test_loss_is_the_mean_over_rows_of_each_step_and_every_step_weighs_the_same(kind: LossKind):
    config, target = tiny_peagle_config(draft_vocab_size=11), random_target(16, 16)
    head = loud_head(config, target, random_norms=True).eval()
    objective = PEagleObjective(config, PEagleSettings(steps=3, loss=kind))
    parts = documents(7, 9)
    batch = counted(objective, head, pack([parts], target, 3))
    losses = decoder_losses(kind, [parts], head, target, 3)
    assert batch.denominators.tolist() == [len(part) for part in losses] and all(losses)
    expected = sum(sum(part) / len(part) for part in losses)
    assert float(objective(head, target, batch).loss.detach()) == pytest.approx(expected, rel=1e-5)


def test_each_row_depends_on_exactly_what_the_drafter_knows():
    """States h_0..h_t and tokens x_1..x_{t+1} whatever the step; later steps on the stand-ins besides."""
    config, target = tiny_peagle_config(vocab=32, num_layers=2), random_target(32, 16)
    head = loud_head(config, target)
    lengths, steps, generator = [6, 5], 3, torch.Generator().manual_seed(0)
    batch = pack([numbered_documents(lengths, 16, generator)], target, steps, seq=13)
    aux, embeds = batch.aux_states.requires_grad_(), target.embed_tokens.requires_grad_()
    logits = logits_of(head, target, batch._replace(aux_states=aux), steps)
    probe = torch.randn(logits.shape[-1], generator=generator)
    start = 0
    for n in lengths:
        for k in range(steps):
            for t in range(n - 1):
                by_state, by_token, by_mask = torch.autograd.grad(
                    logits[k, 0, start + t] @ probe, [aux, embeds, head.mask_hidden], retain_graph=True
                )
                tokens = list(range(start + 1, start + t + 2)) + [31] * (k > 0)
                assert by_state[0].abs().sum((-1, -2)).nonzero().squeeze(1).tolist() == [*range(start, start + t + 1)]
                assert by_token.abs().sum(-1).nonzero().squeeze(1).tolist() == tokens
                assert bool(by_mask.abs().sum() > 0) == (k > 0)
        start += n


def test_only_the_table_of_counted_rows_can_change_the_loss():
    """Mask 00111011 counts (1,0) (2,0) (5,0) (1,1), whose later step asks for no token or state beyond the first's."""
    config, target = tiny_peagle_config(), random_target(16, 16)
    head = loud_head(config, target).eval()
    mask = torch.tensor([c == "1" for c in "00111011"])
    document = documents(8)[0]._replace(loss_mask=mask)
    found = influences(PEagleObjective(config, PEagleSettings(steps=3)), head, target, document)
    assert found == ({1, 2, 3, 4, 5, 6}, {0, 1, 2, 3, 4, 5}, {2, 3, 6})


def test_draft_rows_attend_as_an_explicit_mask_says():
    """Six tokens, steps 1 and 2: true rows up to the one drafted from, then the row's own steps."""
    generator = torch.Generator().manual_seed(0)
    seq, from_rows, steps = 6, torch.tensor([1, 1, 3, 4, 4]), torch.tensor([1, 2, 1, 1, 2])
    q, k, v = (torch.randn(seq + 5, heads, 8, generator=generator) for heads in (4, 2, 2))
    attend = ParallelAttend(torch.tensor([[0, 0, 1, 1, 1, 1]]), from_rows, steps, 2, "dense")
    visible = torch.tensor(
        [
            [int(c) for c in row]
            for row in (
                "100000" + "00000",
                "110000" + "00000",
                "001000" + "00000",
                "001100" + "00000",
                "001110" + "00000",
                "001111" + "00000",
                "110000" + "10000",
                "110000" + "11000",
                "001100" + "00100",
                "001110" + "00010",
                "001110" + "00011",
            )
        ],
        dtype=torch.bool,
    )
    wide = [x.repeat_interleave(4 // x.shape[1], dim=1).transpose(0, 1) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=visible).transpose(0, 1)
    torch.testing.assert_close(attend(0, q, k, v), expected, atol=1e-6, rtol=1e-5)


def test_long_lines_in_blocks_equal_short_ones_and_so_do_their_gradients():
    generator = torch.Generator().manual_seed(0)
    batch, seq = 2, 150
    document_ids = (torch.arange(seq) // 60)[None].repeat(batch, 1)
    from_rows = torch.arange(batch * seq).repeat_interleave(2)
    steps = torch.tensor([1, 2]).repeat(batch * seq)
    total = batch * seq + len(steps)
    q, k, v = (torch.randn(total, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    probe = torch.randn(total, 2, 4, generator=generator, dtype=torch.float64)
    out = ParallelAttend(document_ids, from_rows, steps, 2, "dense")(0, *inputs)
    found = torch.autograd.grad((out * probe).sum(), inputs)
    row = torch.cat([torch.arange(batch * seq), from_rows])
    step = torch.cat([torch.zeros(batch * seq, dtype=torch.int64), steps])
    line = (document_ids + 10 * torch.arange(batch)[:, None]).flatten()
    own = (row[:, None] == row) & (step <= step[:, None]) & (step > 0)
    prefix = (step == 0) & (row <= row[:, None]) & (line[row][:, None] == line[row])
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in inputs), attn_mask=own | prefix
    ).transpose(0, 1)
    torch.testing.assert_close(out, expected, atol=3e-6, rtol=1e-5)  # scores are float32
    torch.testing.assert_close(found, torch.autograd.grad((expected * probe).sum(), inputs), atol=3e-6, rtol=1e-5)


def supervised(tokens: int, rows: int) -> Document:
    """A document of which exactly `rows` rows count at step 0, and far more tokens than steps."""
    (document,) = documents(tokens)
    return document._replace(loss_mask=torch.arange(tokens) < rows + 2)


@pytest.mark.parametrize(
    ("rows", "steps", "floor", "counts"),
    [(6, 3, 0.2, [6, 4, 2]), (512, 8, 0.2, [512, 358, 250, 175, 122, 102, 102, 102]), (10, 3, 0.0, [10, 7, 4])],
)
def test_each_step_keeps_the_stated_number_of_rows_and_only_of_those_kept_before(rows, steps, floor, counts):
    target = random_target(16, 16)
    batch = pack([[supervised(rows + 2, rows)]], target, steps)
    valid = torch.zeros(steps, 1, rows + 2, dtype=torch.bool)
    valid[:, :, :rows] = True
    kept = drop_rows(valid, batch, 0.7, floor)
    assert kept.sum((1, 2)).tolist() == counts
    assert (kept[1:] <= kept[:-1]).all()
    assert batch.document_seeds is not None
    other = drop_rows(valid, batch._replace(document_seeds=batch.document_seeds + 1), 0.7, floor)
    assert other.sum((1, 2)).tolist() == counts and not torch.equal(other, kept)


def test_the_drop_counts_rows_by_document_and_never_revives_one():
    target = random_target(16, 16)
    batch = pack([[supervised(14, 10), supervised(9, 5)], [supervised(23, 20)]], target, 3)
    valid = valid_rows(batch, 3)
    kept = drop_rows(valid, batch, 0.5, 0.0)
    assert (kept <= valid).all() and torch.equal(kept[0], valid[0])
    found = [int(kept[1, 0, :14].sum()), int(kept[1, 0, 14:].sum()), int(kept[1, 1].sum())]
    # half of each document's rows, but for the last, which no later step has
    assert all(half - 1 <= n <= half for n, half in zip(found, (5, 2, 10), strict=True)), found


def test_dropping_rows_changes_no_value_and_no_label_of_those_kept():
    config, target = tiny_peagle_config(num_layers=2, draft_vocab_size=11), random_target(16, 16)
    head = loud_head(config, target, random_norms=True)
    objective = PEagleObjective(config, PEagleSettings(steps=4, retention=0.6))
    batch = pack([documents(30, 17, prompt=2), documents(40, seed=5)], target, 4)
    whole, part = (objective.supervise(head.train(mode), batch) for mode in (False, True))
    assert 0 < part.weights[3].sum() < part.weights[1].sum() < whole.weights[1].sum()
    assert torch.equal(part.weights[0], whole.weights[0])
    assert torch.equal(part.labels, whole.labels) and torch.equal(part.tops, whole.tops)
    assert (part.valid <= whole.valid).all()
    everywhere = logits_of(head, target, batch, 4).flatten(1, 2)
    per_step = [mask.nonzero().squeeze(1) for mask in part.weights]
    found = head.logits(objective.unroll(head, target, batch, per_step), target)
    expected = torch.cat([everywhere[k, rows] for k, rows in enumerate(per_step)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_folder_is_vllms_with_the_mask_under_both_names():
    config, target = tiny_peagle_config(mask_token_id=5), random_target(16, 16)
    head = loud_head(config, target)
    assert head.state_dict()["mask_hidden"].shape == (1, 3 * 16)
    serving = config.serving_config()
    assert serving["architectures"] == ["LlamaForCausalLMEagle3"]
    assert serving["pard_token"] == serving["ptd_token_id"] == 5
    assert PEagleConfig.from_dict(config.to_dict()) == config
    fresh = PEagleHead(config)
    fresh.initialise(target, torch.Generator().manual_seed(0))
    fresh.assert_filled()
    with pytest.raises(HeadError, match="rows, found 16"):
        tiny_peagle_config(mask_token_id=16)
    undecided = PEagleConfig.derive(tiny_facts(), {"layer_ids": (2, 3, 4)})
    with pytest.raises(HeadError, match="mask token"):
        PEagleHead(undecided)
    with pytest.raises(ValueError, match="objective.retention"):
        PEagleSettings(retention=1.5)
