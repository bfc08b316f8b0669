"""Draft models and PARD in the engine: lossless, and drafting what transformers says they draft, whatever the batch."""

import dataclasses
from pathlib import Path

import pytest
import torch

from spectrain.heads.pard import Pard
from spectrain.infer.engine import Engine, EngineConfig
from spectrain.infer.proposers.draft_model import DraftModelProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.proposers.pard import PardProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.kernels import reference
from spectrain.tests.language_models import MASK, chain_drafts, in_transformers, parallel_logits, random_draft_model
from spectrain.tests.models import rand_llama

CONFIG = EngineConfig(num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=16)
NEW_TOKENS = 25
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
METHODS = ["draft_model", "pard"]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(rand_llama(max_position_embeddings=128))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 3, 17, 26, 9)]


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    return [o.token_ids for o in Engine(target, NoneProposer(), CONFIG).generate(prompts, GREEDY)]


class Recorder:
    """Keeps every draft by (request, known tokens)."""

    drafts: dict[tuple[int, int], list[int]]

    def propose(self, step):
        drafts = super().propose(step)  # pyright: ignore[reportAttributeAccessIssue]
        self.drafts = getattr(self, "drafts", {})
        for i, (request, length) in enumerate(zip(step.request_ids, step.seq_lens.tolist(), strict=True)):
            self.drafts[request, length] = drafts.token_ids[i, : drafts.lengths[i]].tolist()
        return drafts


class RecordingDraftModel(Recorder, DraftModelProposer):
    pass


class RecordingPard(Recorder, PardProposer):
    pass


def proposer_of(method: str, target: Target, k: int, sampling: str = "greedy", **settings):
    head = random_draft_model(target.facts, parallel=method == "pard", **settings)
    kind = RecordingPard if method == "pard" else RecordingDraftModel
    return kind(head, target.tensors(), k, sampling)


@pytest.mark.parametrize(
    ("k", "settings"),
    [(1, {}), (2, {}), (5, {"family": "qwen3"}), (3, {"family": "qwen2", "tie_word_embeddings": True})],
    ids=["one", "two", "qwen3", "qwen2-tied"],
)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_never_changes(target, prompts, plain, method, k, settings):
    proposer = proposer_of(method, target, k, **settings)
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=k, num_blocks=45))
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
    assert engine.statistics.draft_tokens > 0


@pytest.fixture
def poisoned_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention leaves rows that belong to nobody as they were: here NaN, which they then carry into block 0."""
    attention = reference.paged_attention

    def poisoned(q, k_plane, v_plane, cu_seqlens, *arguments, **settings):
        out = attention(q, k_plane, v_plane, cu_seqlens, *arguments, **settings)
        out[int(cu_seqlens[-1]) :] = torch.nan
        return out

    monkeypatch.setattr(reference, "paged_attention", poisoned)


@pytest.mark.usefixtures("poisoned_padding")
@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_those_of_transformers_whatever_batch_chunks_or_preemptions(
    target, prompts, plain, method, tmp_path: Path
):
    k, expected = 4, {}
    model = in_transformers(proposer_of(method, target, k).head, tmp_path / "head")
    texts = [prompt + output for prompt, output in zip(prompts, plain, strict=True)]
    for changes in ({}, {"max_batch_size": 1}, {"max_batch_tokens": 7}, {"num_blocks": 33}, {"launch_ahead": True}):
        proposer = proposer_of(method, target, k)
        engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=k, **changes))
        assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
        assert ("num_blocks" in changes) == (engine.statistics.num_preemptions > 0)
        compared = 0
        for (request, length), tokens in proposer.drafts.items():
            text = texts[request]
            # a request that ended takes one more step, of which nobody knows the text
            if length % 3 == 0 and length < len(text):
                if (request, length) not in expected:
                    expected[request, length] = reference_drafts(method, model, text[:length], k)
                assert tokens == expected[request, length][: len(tokens)]
                compared += len(tokens) > 0
        assert compared > 25


def reference_drafts(method: str, model, text: list[int], k: int) -> list[int]:
    return (
        parallel_logits(model, text, MASK, k).argmax(-1).tolist() if method == "pard" else chain_drafts(model, text, k)
    )


def test_a_parallel_draft_is_fed_the_whole_text_then_masks_at_contiguous_positions(target):
    """Prompt 5 6 7 and k = 4: the next token and three masks follow it, and all four are read."""
    head = random_draft_model(target.facts, parallel=True)
    assert isinstance(head, Pard)
    proposer = PardProposer(head, target.tensors(), 4)
    seen: list[tuple[list[int], list[int]]] = []
    read = proposer._read

    def spy(batch):
        seen.append((batch.token_ids.tolist(), batch.positions.tolist()))
        return read(batch)

    proposer._read = spy
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=4))
    prompt = [5, 6, 7]
    engine.add_request(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    (first,) = plain_tokens(target, prompt, 1)
    assert seen == [([5, 6, 7, first, MASK, MASK, MASK], [0, 1, 2, 3, 4, 5, 6])]
    engine.step()
    # whatever was rejected went, and the row after the newest token's begins again at its position
    tokens, positions = seen[1]
    kept = [i for i in range(len(tokens)) if positions[i] == 3 + i]
    known = [first, *plain_tokens(target, prompt + [first], len(kept) - 4)]
    assert [tokens[i] for i in kept] == [*known, MASK, MASK, MASK]


def plain_tokens(target: Target, prompt: list[int], count: int) -> list[int]:
    engine = Engine(target, NoneProposer(), CONFIG)
    tokens = engine.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True))[0].token_ids
    return tokens


@pytest.mark.parametrize("method", METHODS)
def test_drafts_end_where_the_draft_model_ends(target, prompts, plain, method):
    """One made for fewer positions than its target drafts up to them and then leaves the target alone."""
    proposer = proposer_of(method, target, 4, max_position_embeddings=24)
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=4))
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
    reached = [length + len(tokens) for (_, length), tokens in proposer.drafts.items() if tokens]
    assert max(reached) <= 25
    assert engine.statistics.num_decode_steps > 0


@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
@pytest.mark.parametrize("method", METHODS)
def test_sampled_output_follows_the_targets_law(method, sampling):
    """The first three tokens of a small target, two of them drafted, against enumeration of its law."""
    target = Target.from_model(rand_llama(2, vocab_size=7, eos_token_id=None, bos_token_id=None, pad_token_id=None))
    head = random_draft_model(target.facts, parallel=method == "pard")
    kind = PardProposer if method == "pard" else DraftModelProposer
    config = EngineConfig(num_draft_tokens=2, num_blocks=600, block_size=4, max_batch_size=128, max_batch_tokens=512)
    engine = Engine(target, kind(head, target.tensors(), 2, sampling), config)  # pyright: ignore[reportArgumentType]
    runs, prompt = 3000, [3, 5]
    params = [SamplingParams(max_tokens=4, temperature=8.0, seed=i, ignore_eos=True) for i in range(runs)]
    outputs = [tuple(o.token_ids) for o in engine.generate([prompt] * runs, params)]
    assert 0 < engine.statistics.accepted_tokens < engine.statistics.draft_tokens
    law = joint_law(rand_llama(2, vocab_size=7, eos_token_id=None, bos_token_id=None, pad_token_id=None), prompt, 8.0)
    counts = torch.zeros_like(law)
    for a, b, c, _ in outputs:
        counts[a, b, c] += 1
    likely = law * runs > 5
    statistic = (((counts - law * runs) ** 2) / (law * runs))[likely].sum()
    freedom = int(likely.sum())
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


@torch.no_grad()
def joint_law(model, prompt: list[int], temperature: float) -> torch.Tensor:
    """Probabilities [7, 7, 7] of the three tokens after a prompt."""
    texts = torch.tensor([[*prompt, a, b] for a in range(7) for b in range(7)])
    laws = (model(input_ids=texts, use_cache=False).logits / temperature).softmax(-1)
    first, second, third = (laws[:, len(prompt) - 1 + i].view(7, 7, 7) for i in range(3))
    return first[0, 0][:, None, None] * second[:, 0][:, :, None] * third
