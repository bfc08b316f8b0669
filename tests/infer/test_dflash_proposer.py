"""DFlash in the engine: lossless with any head, every logit that of a drafter written apart, whatever the batch."""

import dataclasses

import pytest
import torch

from spectrain.heads.dflash import DFlashConfig, DFlashHead
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.planes import Planes
from spectrain.infer.proposers.base import Drafts, DraftStep
from spectrain.infer.proposers.dflash import DFlashProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import loud_head
from spectrain.tests.infer.draft_steps import step_of
from spectrain.tests.models import rand_llama
from spectrain.tests.train.blocks import BlockDrafter

CONFIG = EngineConfig(num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=16)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
STYLES = {
    "plain": {},
    "from the anchor": {"sample_from_anchor": True},
    "causal": {"causal": True, "num_layers": 2},
    "window": {"sliding_window": 9},
    "causal window from the anchor": {"causal": True, "sliding_window": 8, "sample_from_anchor": True},
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 3, 5, 17, 26, 2, 9)]


@pytest.fixture(scope="module")
def plain(target, prompts) -> list[list[int]]:
    return [o.token_ids for o in Engine(target, NoneProposer(), CONFIG).generate(prompts, GREEDY)]


def head_of(target: Target, **settings) -> DFlashHead:
    shape = {"mask_token_id": 0, "num_layers": 1, "block_size": 6, **settings}
    return loud_head(DFlashConfig.derive(target.facts, shape), target.tensors(), random_norms=True)


class SteeredProposer(DFlashProposer):
    """Keeps every draft logit by (request, known tokens), and hands over the text itself, spoilt here and there."""

    def __init__(self, head, target, k: int, texts: dict[int, list[int]], spoil: float) -> None:
        super().__init__(head, target, k)
        self.texts, self.spoil = texts, spoil
        self.generator = torch.Generator().manual_seed(0)
        self.logits: dict[tuple[int, int], torch.Tensor] = {}

    def _draw(self, logits: torch.Tensor, step: DraftStep) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(logits.shape[:2], dtype=torch.int64)
        for i, (request, length) in enumerate(zip(step.request_ids, step.seq_lens.tolist(), strict=True)):
            ahead = self.texts[request][length : length + tokens.shape[1]]
            tokens[i, : len(ahead)] = torch.tensor(ahead, dtype=torch.int64)
            if step.room[i]:
                self.logits[request, length] = logits[i].clone()
        return tokens, logits

    def propose(self, step: DraftStep) -> Drafts:
        drafts = super().propose(step)
        wrong = torch.rand(drafts.token_ids.shape, generator=self.generator) < self.spoil
        return drafts._replace(token_ids=torch.where(wrong, (drafts.token_ids + 1) % 97, drafts.token_ids))


@pytest.mark.parametrize(
    ("style", "spoil", "changes"),
    [
        ("plain", 1.0, {"max_batch_tokens": 13}),
        ("plain", 0.3, {"num_blocks": 26}),
        ("from the anchor", 0.0, {}),
        ("causal", 0.3, {"num_blocks": 26}),
        ("window", 0.0, {"max_batch_tokens": 13}),
        ("causal window from the anchor", 1.0, {}),
    ],
)
def test_every_draft_logit_is_the_independent_drafters(target, prompts, plain, style, spoil, changes):
    """With all, some or no draft accepted, preemptions and prompts in pieces; up to the last draft of each request."""
    head, k = head_of(target, **STYLES[style]), 4
    texts = {i: prompt + output for i, (prompt, output) in enumerate(zip(prompts, plain, strict=True))}
    proposer = SteeredProposer(head, target.tensors(), k, texts, spoil)
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=k, **changes))
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
    statistics = engine.statistics
    assert (statistics.num_preemptions > 0) == ("num_blocks" in changes)
    assert (statistics.accepted_tokens == 0) == (spoil == 1.0)
    assert (statistics.accepted_tokens == statistics.draft_tokens) == (spoil == 0.0)
    compared = 0
    for request, text in texts.items():
        with torch.no_grad():
            states = rand_llama(max_position_embeddings=128)(torch.tensor([text]), output_hidden_states=True)
        aux = torch.stack([states.hidden_states[i][0] for i in head.config.layer_ids], dim=1)
        drafter = BlockDrafter(head, target.tensors(), aux)
        keys = [length for owner, length in proposer.logits if owner == request]
        # the drafter is slow: some of the places, the last one of each request among them
        for length in sorted(keys)[:: max(1, len(keys) // 3)] + [max(keys)]:
            logits = proposer.logits[request, length]
            first = head.config.first_draft_slot
            size = k + first if head.config.causal else head.config.block_size
            expected = drafter.logits(length - 1, text[length - 1], size)[first : first + k]
            torch.testing.assert_close(logits, expected, atol=5e-4, rtol=1e-4)
            compared += 1
        if spoil == 1.0:
            # nothing was accepted, so a block was drafted behind every token that left room for a draft
            assert sorted(keys) == list(range(len(prompts[request]) + 1, len(text) - 1))
    assert compared >= 3 * len(texts)


def test_a_context_is_used_to_its_end(target, prompts):
    """A block reaches past the last position of the context; requests that fill it end as plain ones do."""
    config = dataclasses.replace(CONFIG, max_length=29)
    plain = [o.token_ids for o in Engine(target, NoneProposer(), config).generate(prompts, GREEDY)]
    assert max(len(p) + len(o) for p, o in zip(prompts, plain, strict=True)) == 29
    for block_size in (3, 30):
        proposer = DFlashProposer(head_of(target, block_size=block_size), target.tensors(), 2)
        engine = Engine(target, proposer, dataclasses.replace(config, num_draft_tokens=2))
        assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain


@pytest.mark.parametrize("ahead", [False, True])
def test_probabilistic_drafts_carry_the_law_of_their_slot(target, prompts, ahead):
    proposer = DFlashProposer(head_of(target), target.tensors(), 4, "probabilistic")
    laws: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    draw = proposer._draw

    def watch(logits: torch.Tensor, step: DraftStep) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, law = draw(logits, step)
        laws.append((logits, step.temperature, law))
        return tokens, law

    proposer._draw = watch
    config = dataclasses.replace(CONFIG, num_draft_tokens=4, launch_ahead=ahead)
    params = [
        SamplingParams(max_tokens=20, temperature=t, seed=i) for i, t in enumerate((0.0, 0.5, 2.0, 1.0, 0.7, 1.3, 3.0))
    ]
    outputs = Engine(target, proposer, config).generate(prompts, params)
    assert all(o.error is None for o in outputs)
    for logits, temperature, law in laws:
        hot = temperature > 0
        torch.testing.assert_close(law[hot].exp(), (logits[hot] / temperature[hot, None, None]).softmax(-1))


def test_a_cache_made_for_the_batch_has_room_for_its_blocks(target: Target) -> None:
    """Every request drafts all it may up to its own end, though rows of a block reach beyond that."""
    k, new = 3, 9
    config = EngineConfig(num_draft_tokens=k, block_size=4, max_batch_size=4, max_length=3 + new)
    proposer = DFlashProposer(head_of(target, block_size=16), target.tensors(), k)
    engine = Engine(target, proposer, config)
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    outputs = engine.generate([[5, 6, 7 + i] for i in range(4)], params)
    counts = engine.statistics
    assert all(len(output.token_ids) == new for output in outputs) and counts.num_preemptions == 0
    again = DFlashProposer(proposer.head, target.tensors(), k)
    roomy = Engine(target, again, dataclasses.replace(config, num_blocks=400))
    roomy.generate([[5, 6, 7 + i] for i in range(4)], params)
    assert counts.drafted_per_position == roomy.statistics.drafted_per_position


def test_a_request_without_room_leaves_its_blocks_alone(target) -> None:
    """At the end of the context a block's rows would wrap to the start of the last page, where final rows lie."""
    proposer = DFlashProposer(head_of(target), target.tensors(), 3)
    planes = Planes(proposer.requirements.planes, 6, 4, torch.device("cpu"))
    proposer.bind(planes, 2)
    step = step_of([[7] * 3, [8] * 7], room=[3, 0])
    proposer.propose(step._replace(block_tables=torch.tensor([[1, 2, 3], [4, 5, 0]], dtype=torch.int32)))
    plane = planes["draft.0"].k
    assert plane[1:4].abs().sum() > 0 and plane[4:].abs().sum() == 0
