"""The rejection pipeline against a naive loop, and its behaviour on odd input, on CPU."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spectrain.kernels import dispatch, reference
from spectrain.kernels.noise import BLOCK_COUNTERS, gumbels, noise_keys, uniforms
from spectrain.kernels.records import VOCAB_BLOCK, RejectionInputs, RejectionOutputs, Stream, VerifyMode, law_columns


def softmax(logits: Sequence[float]) -> list[float]:
    largest = max(logits)
    weights = [math.exp(value - largest) for value in logits]
    return [weight / sum(weights) for weight in weights]


def race(weights: list[float], row: int, noise: "Noise") -> int:
    """A block by its mass, then a token within it."""
    size = noise.block_size
    masses = [sum(weights[start : start + size]) for start in range(0, len(weights), size)]

    def best(items: list[float], gumbel: list[float]) -> int:
        scores = [math.log(m) + g if m > 0 else -math.inf for m, g in zip(items, gumbel, strict=False)]
        return scores.index(max(scores))

    start = size * best(masses, noise.blocks[row])
    return start + best(weights[start : start + size], noise.tokens[row][start : start + size])


class Noise(NamedTuple):
    """What decides one request, per row."""

    log_uniforms: list[float]
    tokens: list[list[float]]
    blocks: list[list[float]]
    block_size: int


def usable(logits: list[float]) -> bool:
    return not any(math.isnan(value) for value in logits) and max(logits) not in (math.inf, -math.inf)


def verify_one(
    target_logits: list[list[float]],
    drafts: list[int],
    greedy: bool,
    noise: Noise,
    laws: list[dict[int, float]] | None,
    mode: VerifyMode,
    rates: list[float],
) -> list[int]:
    """Tokens of one request: the textbook rules, given their noise. A law maps target ids to q; empty list = failed."""
    vocab = len(target_logits[0])
    length = next((i for i, draft in enumerate(drafts) if not 0 <= draft < vocab), len(drafts))

    def law(step: int) -> list[float]:
        if step >= length:
            return [0.0] * vocab
        known = {drafts[step]: 1.0} if laws is None else laws[step]
        return [known.get(token, 0.0) for token in range(vocab)]

    def finish(step: int, weight: float = 1.0) -> list[int]:
        p = softmax(target_logits[step])
        left = [max(weight * a - b, 0.0) for a, b in zip(p, law(step), strict=True)]
        return [*drafts[:step], race(left if sum(left) > 0 else p, step, noise)]

    if mode is VerifyMode.BLOCK and laws is not None and not greedy:
        return block_rule(target_logits, drafts, length, noise, law, finish)
    for step, logits in enumerate(target_logits):
        if not usable(logits):
            return []
        p, q = softmax(logits), law(step)
        if step < length:
            draft = drafts[step]
            keep = q[draft] > 0 and p[draft] > 0 and noise.log_uniforms[step] + math.log(q[draft]) < math.log(p[draft])
            if greedy:
                keep = draft == logits.index(max(logits))
            if mode is VerifyMode.SYNTHETIC:
                keep = noise.log_uniforms[step] < (math.log(rates[step]) if rates[step] else -math.inf)
            if keep:
                continue
        return [*drafts[:step], logits.index(max(logits))] if greedy else finish(step)
    raise AssertionError("the bonus row always ends the loop")


def block_rule(
    target_logits: list[list[float]],
    drafts: list[int],
    length: int,
    noise: Noise,
    law: Callable[[int], list[float]],
    finish: Callable[[int, float], list[int]],
) -> list[int]:
    """Sun et al. 2403.10444, algorithm 2."""
    if not all(usable(logits) for logits in target_logits[:length]):
        return []
    weights = [1.0]
    for step in range(length):
        p, q = softmax(target_logits[step])[drafts[step]], law(step)[drafts[step]]
        weights.append(min(1.0, weights[-1] * p / q) if q > 0 else 0.0)
    kept = 0
    for i in range(1, length + 1):
        weight = weights[i]
        chance = weight
        if i < length:
            p = softmax(target_logits[i])
            left = sum(max(weight * a - b, 0.0) for a, b in zip(p, law(i), strict=True))
            chance = 1.0 if weight == 1.0 else left / (left + 1 - weight)
        if math.exp(noise.log_uniforms[i - 1]) < chance:
            kept = i
    return finish(kept, weights[kept]) if usable(target_logits[kept]) else []


def make_inputs(
    seed: int, lengths: list[int], vocab: int, with_law: bool = False, spread: float = 2.0, temperature: float = 1.0
) -> RejectionInputs:
    generator = torch.Generator().manual_seed(seed)
    batch, k = len(lengths), max(lengths)
    num_rows = sum(lengths) + batch
    return RejectionInputs(
        target_logits=spread * torch.randn(num_rows, vocab, generator=generator),
        draft_token_ids=torch.randint(0, vocab, (batch, k), generator=generator),
        cu_rows=torch.tensor([0, *(torch.tensor(lengths) + 1).cumsum(0).tolist()], dtype=torch.int32),
        positions=torch.randint(0, 500, (batch,), generator=generator),
        temperature=torch.full((batch,), temperature),
        seeds=torch.randint(-(2**62), 2**62, (batch,), generator=generator),
        draft_log_probs=torch.randn(batch, k, vocab, generator=generator).log_softmax(-1) if with_law else None,
    )


def emitted(out: RejectionOutputs) -> list[list[int]]:
    """The tokens of each request; checks the layout on the way."""
    rows = out.token_ids.tolist()
    for row, count, failed in zip(rows, out.num_emitted.tolist(), out.failed.tolist(), strict=True):
        assert (count == 0) == failed
        assert all(token >= 0 for token in row[:count]) and all(token == -1 for token in row[count:])
    return [row[:count] for row, count in zip(rows, out.num_emitted.tolist(), strict=True)]


def by_naive_loop(inputs: RejectionInputs, block_size: int = VOCAB_BLOCK) -> Iterator[list[int]]:
    vocab = inputs.target_logits.shape[1]
    columns = list(range(vocab)) if inputs.law_columns is None else inputs.law_columns.tolist()
    for b, (start, end) in enumerate(zip(inputs.cu_rows[:-1].tolist(), inputs.cu_rows[1:].tolist(), strict=True)):
        positions = inputs.positions[b] + torch.arange(end - start)
        seeds = inputs.seeds[b].expand(end - start)
        laws = None
        if inputs.draft_log_probs is not None:
            rows = inputs.draft_log_probs[b].exp().tolist()
            laws = [{token: row[column] for token, column in enumerate(columns) if column >= 0} for row in rows]
        recover = noise_keys(seeds, positions, Stream.RECOVER)[:, None]
        yield verify_one(
            inputs.target_logits[start:end].tolist(),
            inputs.draft_token_ids[b, : end - start - 1].tolist(),
            float(inputs.temperature[b]) == 0,
            Noise(
                uniforms(noise_keys(seeds, positions[:1], Stream.ACCEPT), torch.arange(end - start)).log().tolist(),
                gumbels(recover, torch.arange(vocab)).tolist(),
                gumbels(recover, BLOCK_COUNTERS + torch.arange(-(-vocab // block_size))).tolist(),
                block_size,
            ),
            laws,
            inputs.mode,
            [] if inputs.rates is None else inputs.rates.tolist(),
        )


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    vocab=st.integers(2, 9),
    law=st.sampled_from(["point", "full", "reduced"]),
    spread=st.sampled_from([0.5, 3.0]),
    mode=st.sampled_from(list(VerifyMode)),
    block_size=st.sampled_from([2, 3, VOCAB_BLOCK]),
    data=st.data(),
)
def test_equals_the_naive_loop(
    seed: int,
    lengths: list[int],
    vocab: int,
    law: str,
    spread: float,
    mode: VerifyMode,
    block_size: int,
    data: st.DataObject,
) -> None:
    inputs = make_inputs(seed, lengths, vocab, with_law=law == "full", spread=spread)
    if law == "reduced":
        width = data.draw(st.integers(1, vocab))
        token_map = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:width].sort().values
        log_probs = torch.randn(*inputs.draft_token_ids.shape, width, generator=torch.Generator().manual_seed(seed))
        inputs = inputs._replace(draft_log_probs=log_probs.log_softmax(-1), law_columns=law_columns(token_map, vocab))
    if mode is VerifyMode.SYNTHETIC:
        rates = data.draw(st.lists(st.sampled_from([0.0, 0.3, 0.8, 1.0]), min_size=4, max_size=4))
        inputs = inputs._replace(rates=torch.tensor(rates))
    inputs = inputs._replace(mode=mode)
    temperature = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(lengths), max_size=len(lengths)))
    )
    inputs = inputs._replace(temperature=temperature)
    for row, what in data.draw(
        st.dictionaries(
            st.integers(0, inputs.target_logits.shape[0] - 1), st.sampled_from(["nan", "inf", "ban"]), max_size=2
        )
    ).items():
        inputs.target_logits[row, seed % vocab] = {"nan": math.nan, "inf": math.inf, "ban": -math.inf}[what]
    if inputs.draft_token_ids.numel() and data.draw(st.booleans()):
        inputs.draft_token_ids.view(-1)[seed % inputs.draft_token_ids.numel()] = data.draw(
            st.sampled_from([-1, -9, vocab])
        )
    with mock.patch.object(reference.sampling, "VOCAB_BLOCK", block_size):
        found = emitted(dispatch.verify(inputs))
    assert found == list(by_naive_loop(inputs, block_size))


@pytest.mark.parametrize("with_law", [False, True], ids=["point", "law"])
def test_tokens_do_not_depend_on_the_batch(with_law: bool) -> None:
    """Bit for bit, with several threads and rows longer than one summation block."""
    lengths, vocab = [4, 0, 2, 3, 1], 40_013
    inputs = make_inputs(0, lengths, vocab, with_law=with_law, spread=0.1)
    for b in range(len(lengths)):  # drafts good enough to be accepted now and then
        rows = slice(int(inputs.cu_rows[b]), int(inputs.cu_rows[b]) + lengths[b])
        inputs.target_logits[rows].scatter_(1, inputs.draft_token_ids[b, : lengths[b], None], 11.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = emitted(dispatch.verify(inputs))
        alone = []
        for b in range(len(lengths)):
            rows = inputs.target_logits[inputs.cu_rows[b] : inputs.cu_rows[b + 1]].clone()
            own = RejectionInputs(
                rows,
                *(inputs.draft_token_ids[b : b + 1], torch.tensor([0, len(rows)], dtype=torch.int32)),
                *(t[b : b + 1] for t in (inputs.positions, inputs.temperature, inputs.seeds)),
                None if inputs.draft_log_probs is None else inputs.draft_log_probs[b : b + 1],
            )
            alone += emitted(dispatch.verify(own))
    finally:
        torch.set_num_threads(threads)
    assert together == alone
    assert {len(tokens) for tokens in together} > {1}


@settings(max_examples=25, deadline=None)
@given(
    order=st.permutations(range(4)),
    padding=st.integers(0, 4),
    spare=st.integers(0, 3),
    with_law=st.booleans(),
    mode=st.sampled_from(list(VerifyMode)),
)
def test_tokens_do_not_depend_on_order_or_padding(
    order: list[int], padding: int, spare: int, with_law: bool, mode: VerifyMode
) -> None:
    """Padding requests own one garbage row and no drafts; spare rows and draft columns belong to nobody."""
    lengths, vocab, size = [3, 0, 2, 3], 50, 4 + padding
    inputs = make_inputs(2, lengths, vocab, with_law=with_law)._replace(mode=mode)
    inputs = inputs._replace(rates=torch.full((3 + spare,), 0.7) if mode is VerifyMode.SYNTHETIC else None)
    starts = inputs.cu_rows.tolist()
    rows = [inputs.target_logits[starts[b] : starts[b + 1]] for b in order]
    drafts = torch.full((size, 3 + spare), -1)
    drafts[:4, :3] = inputs.draft_token_ids[list(order)]
    law = inputs.draft_log_probs
    if law is not None:
        law = torch.nn.functional.pad(law[list(order)], (0, 0, 0, spare, 0, padding), value=math.nan)

    def grow(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[list(order)], torch.ones(padding, dtype=tensor.dtype)])

    mixed = inputs._replace(
        target_logits=torch.cat([*rows, torch.full((padding + spare, vocab), math.nan)]),
        draft_token_ids=drafts,
        cu_rows=torch.tensor([0, *(len(r) for r in rows), *[1] * padding]).cumsum(0).int(),
        positions=grow(inputs.positions),
        temperature=grow(inputs.temperature),
        seeds=grow(inputs.seeds),
        draft_log_probs=law,
    )
    expected, found = emitted(dispatch.verify(inputs)), emitted(dispatch.verify(mixed))
    assert found == [*(expected[b] for b in order), *[[]] * padding]


def test_a_seed_decides_and_another_seed_differs() -> None:
    inputs = make_inputs(3, [3] * 40, 50)
    first, again = emitted(dispatch.verify(inputs)), emitted(dispatch.verify(inputs))
    other = emitted(dispatch.verify(inputs._replace(seeds=inputs.seeds + 1)))
    assert first == again and sum(a == b for a, b in zip(first, other, strict=True)) < 20


def test_greedy_ignores_seeds_and_takes_the_lowest_id_of_a_tie() -> None:
    inputs = make_inputs(4, [1, 1], 6, temperature=0.0)
    inputs.target_logits[:] = torch.tensor([0.0, 2.0, 1.0, 2.0, 0.0, 2.0])
    inputs = inputs._replace(draft_token_ids=torch.tensor([[1], [3]]))
    for seed in range(5):
        assert emitted(dispatch.verify(inputs._replace(seeds=torch.full((2,), seed)))) == [[1, 1], [1]]


@pytest.mark.parametrize("placeholder", [-1, -(2**40), 6, 2**40])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("with_law", [False, True], ids=["point", "law"])
def test_placeholders_are_rejected_and_never_index(placeholder: int, temperature: float, with_law: bool) -> None:
    inputs = make_inputs(5, [2, 2], 6, temperature=temperature, with_law=with_law)
    inputs.draft_token_ids[:] = placeholder
    out = dispatch.verify(inputs)
    assert out.num_emitted.tolist() == [1, 1] and (out.token_ids[:, 0] < 6).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_rows_fail_only_their_own_request(temperature: float) -> None:
    inputs = make_inputs(6, [2, 2, 2], 7, temperature=temperature)
    sound = emitted(dispatch.verify(inputs))
    inputs.target_logits[3, 2] = math.nan  # the first row of request 1
    out = dispatch.verify(inputs)
    assert out.failed.tolist() == [False, True, False]
    assert emitted(out) == [sound[0], [], sound[2]]


def test_a_nan_row_behind_the_rejection_is_not_needed() -> None:
    inputs = make_inputs(7, [2], 7, temperature=0.0)
    inputs.draft_token_ids[0, 0] = inputs.target_logits[0].argmin()
    inputs.target_logits[1:] = math.nan
    assert not dispatch.verify(inputs).failed.any()


def test_empty_residual_falls_back_to_the_target() -> None:
    """Draft = target and a forced rejection (token 0 has probability 0): p - q is 0 everywhere."""
    logits = torch.tensor([-math.inf, 0.0, 1.0, 0.5]).expand(400, 4)
    inputs = RejectionInputs(
        target_logits=logits,
        draft_token_ids=torch.zeros(200, 1, dtype=torch.int64),
        cu_rows=torch.arange(201, dtype=torch.int32) * 2,
        positions=torch.zeros(200, dtype=torch.int64),
        temperature=torch.ones(200),
        seeds=torch.arange(200),
        draft_log_probs=logits[:200, None].log_softmax(-1) + 1e-3,
    )
    out = dispatch.verify(inputs)
    assert not out.failed.any() and set(out.token_ids[:, 0].tolist()) == {1, 2, 3}


def test_shapes_are_checked() -> None:
    inputs = make_inputs(8, [2, 1], 6, with_law=True)
    for broken in (
        inputs._replace(cu_rows=inputs.cu_rows[:-1]),
        inputs._replace(seeds=inputs.seeds[:1]),
        inputs._replace(law_columns=torch.arange(3, dtype=torch.int32)),
        inputs._replace(draft_log_probs=None, law_columns=torch.arange(6, dtype=torch.int32)),
    ):
        with pytest.raises(ValueError, match="must be|pass both"):
            dispatch.verify(broken)


def test_rates_belong_to_the_synthetic_mode() -> None:
    inputs = make_inputs(8, [2, 1], 6)
    for broken, message in (
        (inputs._replace(rates=torch.ones(2)), "the mode is standard"),
        (inputs._replace(mode=VerifyMode.SYNTHETIC), "none were given"),
        (inputs._replace(mode=VerifyMode.SYNTHETIC, rates=torch.ones(1)), r"at least 2, one per draft, found \[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            dispatch.verify(broken)
    assert [mode.lossless for mode in VerifyMode] == [True, True, False]


def test_types_are_checked() -> None:
    inputs = make_inputs(8, [2, 1], 6, with_law=True)
    assert inputs.draft_log_probs is not None
    with pytest.raises(ValueError, match="target_logits must be float32, bfloat16 or float16, found torch.float64"):
        dispatch.verify(inputs._replace(target_logits=inputs.target_logits.double()))
    with pytest.raises(ValueError, match="draft_log_probs must be float32, found torch.bfloat16"):
        dispatch.verify(inputs._replace(draft_log_probs=inputs.draft_log_probs.bfloat16()))


def test_a_tiny_temperature_is_greedy_but_for_exact_ties() -> None:
    """Logits divided by 1e-6 are as large as 1e7: no NaN, and only the argmax is left of the law."""
    inputs = make_inputs(12, [2] * 50, 11)
    sharp = emitted(dispatch.verify(inputs._replace(target_logits=inputs.target_logits / 1e-6)))
    assert sharp == emitted(dispatch.verify(inputs._replace(temperature=torch.zeros(50))))


def test_float64_gumbel_draws_the_same_law() -> None:
    inputs = make_inputs(9, [2] * 500, 30)
    narrow, wide = emitted(dispatch.verify(inputs)), emitted(dispatch.verify(inputs, fp64_gumbel=True))
    assert sum(a == b for a, b in zip(narrow, wide, strict=True)) > 495


def test_a_last_block_that_is_not_full_does_not_favour_its_last_token() -> None:
    count, vocab = 4000, 5
    seeds = torch.arange(count)
    with mock.patch.object(reference.sampling, "VOCAB_BLOCK", 3):
        drawn = reference.sampling.sample(
            torch.zeros(count, vocab), torch.ones(count), seeds, torch.zeros_like(seeds), Stream.RECOVER
        )
    shares = torch.bincount(drawn, minlength=vocab) / count
    assert (shares - 1 / vocab).abs().max() < 0.03
