"""Medusa and MLP speculator drafting in the engine: lossless with any head, and nothing depends on the batch."""

import dataclasses

import pytest
import torch
from torch import Tensor

from spectrain.heads.base import HeadError
from spectrain.heads.medusa import MedusaConfig, MedusaHead
from spectrain.heads.per_step import PerStepHead
from spectrain.heads.resolve import resolve
from spectrain.infer.engine import Engine, EngineConfig
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.proposers.per_step import PerStepProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.models import COMMON, build, rand_llama
from spectrain.tests.train.per_step import NETWORKS, STYLES
from spectrain.tests.train.toys import MK

CONFIG = EngineConfig(num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=16)
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(max_position_embeddings=128))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 3, 5, 17, 26, 2, 9)]


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    return [o.token_ids for o in Engine(target, NoneProposer(), CONFIG).generate(prompts, GREEDY)]


def head_of(target: Target, style: str, heads: int = 5) -> PerStepHead:
    """Medusa as it starts, which is right now and then on a random target; an MLP speculator is mostly wrong."""
    kind, settings = STYLES[style]
    if "draft_vocab_size" in settings:
        settings = {**settings, "draft_vocab_size": 50}
    config = kind.derive(target.facts, {**settings, "num_heads": heads})
    head = NETWORKS[kind](config)
    if config.is_reduced:
        head.set_draft_vocab(torch.arange(3, 3 + config.draft_vocab_size))
    head.initialise(target.tensors(), torch.Generator().manual_seed(0))
    return head


def proposer_of(target: Target, style: str, k: int, sampling: str = "greedy") -> PerStepProposer:
    head = head_of(target, style)
    return resolve(head.config.proposer)(head, target.tensors(), k, sampling)


@pytest.mark.parametrize(
    ("style", "k"),
    [("medusa", 5), ("medusa, shared lm_head and token map", 2), ("mlp", 1), ("mlp", 5), ("mlp, tied and scaled", 3)],
)
def test_greedy_output_never_changes(target, prompts, plain, style: str, k: int):
    config = dataclasses.replace(CONFIG, num_draft_tokens=k, num_blocks=60)
    engine = Engine(target, proposer_of(target, style, k), config)
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
    assert engine.statistics.draft_tokens > 0


@pytest.mark.parametrize("style", ["medusa", "mlp"])
def test_drafts_do_not_depend_on_batch_chunks_preemption_or_cached_prefixes(target, prompts, plain, style: str):
    seen = []
    changes = ({}, {"max_batch_size": 1, "max_batch_tokens": 7}, {"num_blocks": 40}, {"prefix_cache": True})
    for change in changes:
        proposer, drafts = proposer_of(target, style, 4), {}

        def keep(step, propose=proposer.propose, drafts=drafts):
            found = propose(step)
            for i, (request, length) in enumerate(zip(step.request_ids, step.seq_lens.tolist(), strict=True)):
                drafts[request, length] = found.token_ids[i, : found.lengths[i]].tolist()
            return found

        proposer.propose = keep
        engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=4, **change))
        for round_ in range(2 if "prefix_cache" in change else 1):
            if round_:  # the second time every full block of the prompts is found
                drafts.clear()
            assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
        assert ("num_blocks" in change) == (engine.statistics.num_preemptions > 0)
        seen.append({(request % len(prompts), length): tokens for (request, length), tokens in drafts.items()})
    for drafts in seen[1:]:
        common = seen[0].keys() & drafts.keys()
        assert len(common) > 80
        for key in common:
            shared = min(len(seen[0][key]), len(drafts[key]))
            assert seen[0][key][:shared] == drafts[key][:shared]


def test_more_drafts_than_heads_are_refused(target):
    with pytest.raises(HeadError, match="at most 5 tokens a step.*lower --num-draft-tokens"):
        proposer_of(target, "medusa", 6)


def markov_target() -> Target:
    """Tokens of the law MK: the state names the last token, whatever came before it."""
    model = build(
        "Llama", **{**COMMON, "vocab_size": 3, "num_hidden_layers": 1, "eos_token_id": None, "bos_token_id": None}
    )
    decoder = model.get_decoder()
    with torch.no_grad():
        decoder.embed_tokens.weight.copy_(torch.eye(3, 32))
        decoder.norm.weight.fill_(1.0)
        for layer in decoder.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.get_output_embeddings().weight.copy_(output_of(MK))
    return Target.from_model(model)


def output_of(law: Tensor) -> Tensor:
    """The matrix whose softmax after normed state onehot(c) * sqrt(32) is law[c]."""
    weight = torch.zeros(3, 32)
    weight[:, :3] = law.log().T / 32**0.5
    return weight


def test_sampled_acceptance_is_the_closed_form_of_perfect_medusa_heads():
    """Heads whose laws are P^2..P^5: .767621, .543182, .369060, .246224 of a stationary text's first drafts survive.

    Later drafts of a request start where earlier ones were rejected, which is no stationary place.
    """
    target = markov_target()
    head = MedusaHead(MedusaConfig.derive(target.facts, {"num_heads": 4}))
    head.initialise(target.tensors(), torch.Generator().manual_seed(0))
    with torch.no_grad():
        for i, part in enumerate(head.lm_heads.parameters()):
            part.copy_(output_of(torch.linalg.matrix_power(MK, i + 2)))
    proposer = resolve(head.config.proposer)(head, target.tensors(), 4, "probabilistic")
    known: dict[int, list[int]] = {}

    def keep(step, propose=proposer.propose):
        for request, length in zip(step.request_ids, step.seq_lens.tolist(), strict=True):
            known.setdefault(request, []).append(length)
        return propose(step)

    proposer.propose = keep
    config = EngineConfig(num_draft_tokens=4, num_blocks=2000, block_size=4, max_batch_tokens=4096, max_batch_size=400)
    prompts = [[0]] * 1600 + [[1]] * 1400 + [[2]] * 720
    params = [SamplingParams(max_tokens=8, temperature=1.0, seed=i) for i in range(3720)]
    Engine(target, proposer, config).generate(prompts, params)
    accepted = torch.tensor([lengths[1] - lengths[0] - 1 for lengths in known.values()])
    assert len(accepted) == 3720
    for i, expected in enumerate((0.767621, 0.543182, 0.369060, 0.246224)):
        assert float((accepted > i).float().mean()) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("style", ["medusa", "mlp"])
def test_the_law_of_a_sampled_draft_is_the_heads_at_the_requests_temperature(target, prompts, style: str):
    proposer = proposer_of(target, style, 3, "probabilistic")
    laws = []

    def keep(step, propose=proposer.propose):
        found = propose(step)
        laws.append((step, proposer._states[step.slots].clone(), found))
        return found

    proposer.propose = keep
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=3))
    params = [SamplingParams(max_tokens=9, temperature=0.5 + 0.25 * i, seed=i) for i in range(len(prompts))]
    engine.generate(prompts, params)
    compared = 0
    for step, states, drafts in laws:
        tokens = step.last_token_ids
        for k in range(drafts.token_ids.shape[1]):
            with torch.no_grad():
                logits_states, states = proposer.head(states, tokens, k)
                logits = proposer.head.logits(logits_states, proposer.target, k)
            torch.testing.assert_close(drafts.log_probs[:, k], (logits / step.temperature[:, None]).log_softmax(-1))
            tokens, compared = drafts.token_ids[:, k], compared + 1
    assert compared > 10


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("style", ["medusa", "medusa, shared lm_head and token map", "mlp, tied and scaled"])
def test_recorded_steps_say_what_eager_ones_say(prompts, style: str, temperature: float):
    target = Target.from_model(rand_llama(max_position_embeddings=128).cuda())
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=5 + 9 * (i % 5)) for i in range(len(prompts))]
    outputs = []
    for eager in (False, True):
        head = head_of(target, style).cuda()
        sampling = "probabilistic" if temperature else "greedy"
        proposer = resolve(head.config.proposer)(head, target.tensors(), 5, sampling)
        config = dataclasses.replace(CONFIG, block_size=16, num_draft_tokens=5, eager=eager)
        outputs.append([o.token_ids for o in Engine(target, proposer, config).generate(prompts, params)])
    assert outputs[0] == outputs[1]
    if not temperature:
        plain = Engine(target, NoneProposer(), dataclasses.replace(CONFIG, block_size=16)).generate(prompts, params)
        assert outputs[0] == [o.token_ids for o in plain]
