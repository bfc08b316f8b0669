"""The rejection kernels against their PyTorch twins; compiled on a GPU, else interpreted by `test_triton.py`."""

import math

import pytest
import torch

from spectrain.kernels import reference, rejection
from spectrain.kernels.records import RejectionInputs, Stream

# The interpreter computes with numpy, which warns where a GPU just gives NaN.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poison_outputs")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARIES = [1037, 32_000, 151_936] if DEVICE == "cuda" else [1037]


def random_inputs(
    lengths: list[int], vocab: int, seed: int, law: str = "point", temperature: float | None = None
) -> RejectionInputs:
    """Requests of mixed temperature whose drafts are often good, with a placeholder in the last of them."""
    generator = torch.Generator().manual_seed(seed)
    batch, k = len(lengths), max(lengths)
    cu_rows = torch.tensor([0, *torch.tensor([n + 1 for n in lengths]).cumsum(0).tolist()], dtype=torch.int32)
    logits = 3 * torch.randn(int(cu_rows[-1]), vocab, generator=generator)
    logits[:, 0] = -torch.inf
    drafts = torch.full((batch, k), -1)
    for b, n in enumerate(lengths):
        drafts[b, :n] = logits[cu_rows[b] : cu_rows[b] + n].argmax(dim=-1)
    wrong = torch.rand(drafts.shape, generator=generator) < 0.2
    drafts = torch.where(wrong & (drafts >= 0), torch.randint(0, vocab, drafts.shape, generator=generator), drafts)
    if k:
        drafts[-1, lengths[-1] - 1] = -1
    log_probs, token_map = None, None
    if law != "point" and k:
        width = vocab
        if law == "reduced":
            width = vocab // 2
            token_map = torch.randperm(vocab, generator=generator)[:width].sort().values
        log_probs = torch.randn(batch, k, width, generator=generator).log_softmax(dim=-1)
    temperatures = torch.tensor([(0.0, 1.0, 0.7)[b % 3] if temperature is None else temperature for b in range(batch)])
    tensors = (
        logits,
        drafts,
        cu_rows,
        torch.randint(0, 4000, (batch,), generator=generator),
        temperatures,
        torch.randint(-(2**62), 2**62, (batch,), generator=generator),
        log_probs,
        token_map,
    )
    return RejectionInputs(*(None if t is None else t.to(DEVICE) for t in tensors))


def assert_equal_to_twin(inputs: RejectionInputs, fp64_gumbel: bool = False) -> None:
    found = rejection.verify(inputs, fp64_gumbel=fp64_gumbel)
    expected = reference.verify(inputs, fp64_gumbel=fp64_gumbel)
    for name in found._fields:
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), f"{name}: {ours} != {theirs}"


@pytest.mark.parametrize("fp64_gumbel", [False, True])
@pytest.mark.parametrize("law", ["point", "full", "reduced"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_verify_equals_twin(vocab: int, law: str, fp64_gumbel: bool) -> None:
    inputs = random_inputs([3, 1, 4, 0, 2, 4], vocab, seed=1, law=law)
    assert_equal_to_twin(inputs, fp64_gumbel)
    assert len(set(rejection.verify(inputs).num_emitted.tolist())) > 1


@pytest.mark.parametrize("vocab", [1, 63, 1024, 8193])
def test_vocabulary_tail_is_masked(vocab: int) -> None:
    inputs = random_inputs([2, 0, 1], vocab, seed=vocab, temperature=1.0)
    wide = torch.full((inputs.target_logits.shape[0], vocab + 50), 1e4, device=DEVICE)
    wide[:, :vocab] = inputs.target_logits if vocab > 1 else 0.0
    assert_equal_to_twin(inputs._replace(target_logits=wide[:, :vocab]))


def test_no_drafts_at_all() -> None:
    assert_equal_to_twin(random_inputs([0, 0, 0, 0], 100, seed=1))


def test_empty_batch() -> None:
    inputs = random_inputs([1], 10, seed=0)
    empty = inputs._replace(
        target_logits=inputs.target_logits[:0],
        draft_token_ids=inputs.draft_token_ids[:0],
        cu_rows=inputs.cu_rows[:1],
        positions=inputs.positions[:0],
        temperature=inputs.temperature[:0],
        seeds=inputs.seeds[:0],
    )
    assert rejection.verify(empty).token_ids.shape == (0, 2)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_bad_row_fails_only_its_request(poison: float) -> None:
    inputs = random_inputs([2, 2, 2, 2, 2, 2], 300, seed=3)
    for row in (3, 7, 11, 15):  # first row of request 1, second of 2, last of 3, first of 5
        if math.isinf(poison) and poison < 0:
            inputs.target_logits[row] = poison
        else:
            inputs.target_logits[row, 77] = poison
    assert_equal_to_twin(inputs)
    assert rejection.verify(inputs).failed.any()


def test_degenerate_residual_falls_back_to_target() -> None:
    inputs = random_inputs([1, 1, 1], 9, seed=5, temperature=1.0)
    law = inputs.target_logits[::2].log_softmax(-1)[:, None] + 1e-3  # a hair above p, so that no p - q is positive
    drafts = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE)  # token 0 has p = q = 0: rejected, and p - q = 0
    assert_equal_to_twin(inputs._replace(draft_token_ids=drafts, draft_log_probs=law))
    assert (rejection.verify(inputs._replace(draft_token_ids=drafts, draft_log_probs=law)).token_ids[:, 0] > 0).all()


@pytest.mark.parametrize("stream", list(Stream))
def test_sample_equals_twin(stream: Stream) -> None:
    inputs = random_inputs([0] * 7, 2051, seed=11)
    arguments = (inputs.target_logits, inputs.temperature, inputs.seeds, inputs.positions, stream)
    assert torch.equal(rejection.sample(*arguments), reference.sample(*arguments))
