"""The rejection kernels against their PyTorch twins; compiled on a GPU, else interpreted by `test_triton.py`."""

import math

import pytest
import torch
from torch import Tensor

from spectrain.kernels import reference, rejection, sampling
from spectrain.kernels.records import RejectionInputs, Stream, VerifyMode, law_columns

# The interpreter computes with numpy, which warns where a GPU just gives NaN.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poison_outputs")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STANDARD = VerifyMode.STANDARD
VOCABULARIES = [1037, 32_000, 151_936] if DEVICE == "cuda" else [1037]


def random_inputs(
    lengths: list[int],
    vocab: int,
    seed: int,
    law: str = "point",
    temperature: float | None = None,
    mode: VerifyMode = STANDARD,
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
    log_probs, columns = None, None
    if law != "point" and k:
        rows = (cu_rows[:-1, None] + torch.arange(k)).clamp(max=len(logits) - 1)
        near = logits.clamp(min=-20)[rows] + 0.5 * torch.randn(batch, k, vocab, generator=generator)
        if law == "reduced":
            known = torch.randperm(vocab, generator=generator)[: -(-vocab // 2)].sort().values
            near, columns = near[..., known], law_columns(known, vocab)
        log_probs = near.log_softmax(dim=-1)
    temperatures = torch.tensor([(0.0, 1.0, 0.7)[b % 3] if temperature is None else temperature for b in range(batch)])
    tensors = (
        logits,
        drafts,
        cu_rows,
        torch.randint(0, 4000, (batch,), generator=generator),
        temperatures,
        torch.randint(-(2**62), 2**62, (batch,), generator=generator),
        log_probs,
        columns,
    )
    rates = (0.5 + 0.5 * torch.rand(k, generator=generator)).to(DEVICE) if mode is VerifyMode.SYNTHETIC else None
    return RejectionInputs(*(None if t is None else t.to(DEVICE) for t in tensors), mode=mode, rates=rates)


def assert_equal_to_twin(inputs: RejectionInputs, fp64_gumbel: bool = False) -> None:
    found = rejection.verify(inputs, fp64_gumbel=fp64_gumbel)
    expected = reference.rejection.verify(inputs, fp64_gumbel=fp64_gumbel)
    for name in found._fields:
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), f"{name}: {ours} != {theirs}"


def set_block(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (reference.sampling, rejection, sampling):
        monkeypatch.setattr(module, "VOCAB_BLOCK", size)


@pytest.mark.parametrize("mode", list(VerifyMode))
@pytest.mark.parametrize("law", ["point", "full", "reduced"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_verify_equals_twin(vocab: int, law: str, mode: VerifyMode, monkeypatch: pytest.MonkeyPatch) -> None:
    set_block(monkeypatch, 4096 if DEVICE == "cuda" else 512)
    inputs = random_inputs([3, 1, 4, 0, 2, 4, 4], vocab, seed=1, law=law, mode=mode)
    assert_equal_to_twin(inputs)
    assert len(set(rejection.verify(inputs).num_emitted.tolist())) > 1


@pytest.mark.parametrize("law", ["point", "full"])
def test_float64_noise_equals_twin(law: str) -> None:
    assert_equal_to_twin(random_inputs([3, 1, 0, 2], 1037, seed=2, law=law, temperature=1.0), fp64_gumbel=True)


@pytest.mark.parametrize("mode", list(VerifyMode))
@pytest.mark.parametrize("k", range(1, 9))
def test_one_to_eight_drafts(k: int, mode: VerifyMode) -> None:
    inputs = random_inputs([k, k, k - 1, k], 50, seed=k, law="full", temperature=1.0, mode=mode)
    assert_equal_to_twin(inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logits_count_as_what_they_are_in_float32(dtype: torch.dtype) -> None:
    inputs = random_inputs([3, 1, 0, 2], 1037, seed=2, law="full")
    inputs = inputs._replace(target_logits=inputs.target_logits.to(dtype))
    assert_equal_to_twin(inputs)
    wide = rejection.verify(inputs._replace(target_logits=inputs.target_logits.float()))
    assert torch.equal(rejection.verify(inputs).token_ids, wide.token_ids)


@pytest.mark.parametrize(
    ("law", "mode"),
    [("point", STANDARD), ("full", STANDARD), ("full", VerifyMode.BLOCK), ("point", VerifyMode.SYNTHETIC)],
)
def test_tokens_do_not_depend_on_the_batch(law: str, mode: VerifyMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit under permutation, padding requests of one garbage row, rows that belong to nobody and a wider k."""
    set_block(monkeypatch, 4096 if DEVICE == "cuda" else 512)
    lengths = [3, 0, 2, 3]
    inputs = random_inputs(lengths, VOCABULARIES[-1], seed=4, law=law, temperature=1.0, mode=mode)
    expected = rejection.verify(inputs).token_ids
    generator = torch.Generator().manual_seed(0)
    for padding in (0, 3):
        order = torch.randperm(len(lengths), generator=generator).tolist()
        mixed = recompose(inputs, order, padding, wider=padding)
        found = rejection.verify(mixed).token_ids
        assert torch.equal(found[: len(order), :4], expected[order])
        assert (found[: len(order), 4:] == -1).all() and (found[len(order) :] == -1).all()


def recompose(inputs: RejectionInputs, order: list[int], padding: int, wider: int) -> RejectionInputs:
    """The requests in another order, followed by padding requests of one NaN row and by rows of nobody."""
    spans = [inputs.target_logits[inputs.cu_rows[b] : inputs.cu_rows[b + 1]] for b in order]
    garbage = torch.full((padding + wider, inputs.target_logits.shape[1]), math.nan, device=DEVICE)
    ends = torch.tensor([0, *(len(span) for span in spans), *[1] * padding], device=DEVICE).cumsum(0)

    def pad(tensor: Tensor, value: float) -> Tensor:
        shape = (len(order) + padding, *(n + wider for n in tensor.shape[1:2]), *tensor.shape[2:])
        padded = torch.full(shape, value, dtype=tensor.dtype, device=DEVICE)
        padded[(slice(len(order)), *(slice(n) for n in tensor.shape[1:2]))] = tensor[order]
        return padded

    law, rates = inputs.draft_log_probs, inputs.rates
    return inputs._replace(
        target_logits=torch.cat([*spans, garbage]),
        draft_token_ids=pad(inputs.draft_token_ids, -1),
        cu_rows=ends.int(),
        positions=pad(inputs.positions, 0),
        temperature=pad(inputs.temperature, 1),
        seeds=pad(inputs.seeds, 0),
        draft_log_probs=None if law is None else pad(law, math.nan),
        rates=None if rates is None else torch.nn.functional.pad(rates, (0, wider), value=1.0),
    )


def test_a_request_without_rows_fails_alone() -> None:
    inputs = random_inputs([1, 1], 40, seed=8, temperature=1.0)
    expected = rejection.verify(inputs).token_ids
    cu_rows = inputs.cu_rows[[0, 1, 1]]
    short = inputs._replace(cu_rows=cu_rows)
    assert_equal_to_twin(short)
    out = rejection.verify(short)
    assert out.failed.tolist() == [False, True] and torch.equal(out.token_ids[0], expected[0])


@pytest.mark.parametrize("mode", list(VerifyMode))
def test_bad_draft_law_is_rejected_and_leaves_the_target(mode: VerifyMode) -> None:
    inputs = random_inputs([2, 2, 2], 30, seed=9, law="full", temperature=1.0, mode=mode)
    assert inputs.draft_log_probs is not None
    inputs.draft_log_probs[1] = math.nan
    assert_equal_to_twin(inputs)
    out = rejection.verify(inputs._replace(mode=VerifyMode.STANDARD, rates=None))
    assert not out.failed.any() and int(out.num_emitted[1]) == 1 and int(out.token_ids[1, 0]) > 0


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are a matter of the GPU")
@pytest.mark.parametrize("mode", list(VerifyMode))
@pytest.mark.parametrize("law", ["point", "full"])
def test_a_captured_graph_verifies_what_its_buffers_hold(law: str, mode: VerifyMode) -> None:
    inputs, others = (random_inputs([3, 1, 2], 5003, seed=seed, law=law, mode=mode) for seed in (1, 2))
    expected = rejection.verify(others)
    rejection.verify(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rejection.verify(inputs)
    for held, value in zip(inputs, others, strict=True):
        if isinstance(held, Tensor):
            held.copy_(value)
    graph.replay()
    for found, wanted in zip(out, expected, strict=True):
        assert torch.equal(found, wanted)


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
    for mode, law in ((VerifyMode.STANDARD, None), (VerifyMode.BLOCK, inputs.target_logits.nan_to_num()[::3])):
        law = None if law is None else law.log_softmax(-1)[:, None].expand(-1, 2, -1)
        assert_equal_to_twin(inputs._replace(mode=mode, draft_log_probs=law))
    assert rejection.verify(inputs).failed.any()


def test_degenerate_residual_falls_back_to_target() -> None:
    inputs = random_inputs([1, 1, 1], 9, seed=5, temperature=1.0)
    law = inputs.target_logits[::2].log_softmax(-1)[:, None] + 1e-3  # a hair above p, so that no p - q is positive
    drafts = torch.zeros(3, 1, dtype=torch.int64, device=DEVICE)  # token 0 has p = q = 0: rejected, and p - q = 0
    assert_equal_to_twin(inputs._replace(draft_token_ids=drafts, draft_log_probs=law))
    assert (rejection.verify(inputs._replace(draft_token_ids=drafts, draft_log_probs=law)).token_ids[:, 0] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 7), (2, 1024), (5, 2051), (2, 70_000)])
def test_argmax_is_the_lowest_id_of_the_maximum(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator(DEVICE).manual_seed(shape[1])
    rows = torch.randint(-9, 9, shape, generator=generator, device=DEVICE).to(dtype)  # maxima are many
    expected = (rows == rows.amax(1, keepdim=True)).int().argmax(1) if rows.numel() else torch.empty(0)
    for logits in (rows, rows - 64, torch.cat([rows, rows], 1)[:, : shape[1]], rows.t().contiguous().t()):
        found, twin = sampling.argmax(logits), reference.sampling.argmax(logits)
        assert found.dtype == torch.int64 and found.tolist() == twin.tolist() == expected.tolist()


@pytest.mark.parametrize("stream", list(Stream))
def test_sample_equals_twin(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs([0] * 7, 2051, seed=11)
    arguments = (inputs.target_logits, inputs.temperature, inputs.seeds, inputs.positions, stream)
    assert torch.equal(sampling.sample(*arguments), reference.sampling.sample(*arguments))
    set_block(monkeypatch, 64)
    assert torch.equal(sampling.sample(*arguments), reference.sampling.sample(*arguments))
