"""Sampling settings: what is refused, and what each step does to a row's law, in a block as when decoding plainly."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spectrain.infer import sampling
from spectrain.infer.sampling import (
    NEUTRAL,
    LogitsRows,
    SamplingParams,
    SamplingTable,
    features_of,
    process_logits,
    top_logprobs,
)

CPU = torch.device("cpu")
VOCAB = 13
ENDS = (2, 5)


@dataclass
class Row:
    """One logits row of one request: it sees `tokens`, whose first `prompt_len` are the prompt."""

    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    logits: Tensor  # [vocab]


def table_of(params: list[SamplingParams], vocab_size: int, ends: tuple[int, ...] = ENDS) -> SamplingTable:
    table = SamplingTable(len(params) + 1, vocab_size, CPU)
    for row, p in enumerate(params):
        table.set(row, p, ends)
    return table


def process(logits: Tensor, params: list[SamplingParams], counts: list[int]) -> Tensor:
    """Rows of requests with an empty past but for one prompt token each; row j is at position j."""
    table = table_of(params, logits.shape[1])
    slots = torch.repeat_interleave(torch.arange(len(params)), torch.tensor(counts))
    positions = torch.cat([torch.arange(n) for n in counts])
    tokens = torch.zeros(len(params) + 1, max(counts) + 3, dtype=torch.int32)
    prompt_lens = torch.ones(len(params) + 1, dtype=torch.int64)
    return process_logits(logits, LogitsRows(slots, positions), table, tokens, prompt_lens, features_of(params))


def law_of(logits: Tensor, **params: Any) -> list[float]:
    return process(logits[None], [SamplingParams(**params)], [1])[0].softmax(-1).tolist()


def naive_logits(row: Row) -> list[float]:
    """One row by hand, in Python floats; -inf = forbidden."""
    p, output = row.params, row.tokens[row.prompt_len :]
    values = [float(value) + p.logit_bias.get(token, 0.0) for token, value in enumerate(row.logits)]
    forbidden = set() if p.allowed_token_ids is None else set(range(len(values))) - set(p.allowed_token_ids)
    if len(output) < p.min_tokens:
        forbidden |= set(ENDS)
    for word in p.bad_words:
        before = list(word[:-1])
        if len(output) >= len(before) and output[len(output) - len(before) :] == before:
            forbidden.add(word[-1])
    for token, value in enumerate(values):
        if token in row.tokens:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        count = output.count(token)
        value -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
        values[token] = -math.inf if token in forbidden else value
    if p.temperature == 0:
        return values
    values = [value / p.temperature for value in values]
    floor = max(values) + (math.log(p.min_p) if p.min_p else -math.inf)
    ranked = sorted((t for t, v in enumerate(values) if v >= floor and v > -math.inf), key=lambda t: (-values[t], t))
    if p.top_k:
        ranked = [t for t in ranked if values[t] >= values[ranked[min(p.top_k, len(ranked)) - 1]]]
    weights = {t: math.exp(values[t] - max(values)) for t in ranked}
    kept, mass = [], 0.0
    for t in ranked:
        if kept and p.top_p < 1 and mass >= p.top_p * sum(weights.values()):
            break
        kept.append(t)
        mass += weights[t]
    return [value if t in kept else -math.inf for t, value in enumerate(values)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1e38},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": 2.5},
        {"frequency_penalty": math.nan},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {3: math.inf}},
        {"bad_words": ((),)},
        {"bad_words": ((3, -4),)},
        {"allowed_token_ids": ()},
        {"allowed_token_ids": (-1,)},
        {"seed": 2**63},
        {"max_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"stop_token_ids": (3, -1)},
        {"stop": "end"},
        {"stop": ("",)},
        {"logprobs": -1},
        {"temperature": "hot"},
        {"top_p": None},
        {"logit_bias": {1.5: 1.0}},
        {"logit_bias": {3: "much"}},
        {"bad_words": (3,)},
        {"allowed_token_ids": (1.5,)},
        {"stop_token_ids": (2.5,)},
        {"stop": (3,)},
        {"max_tokens": "many"},
    ],
    ids=str,
)
def test_values_outside_their_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be .*found.*$"):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias must hold token ids in 0..12, found 13"),
        ({"bad_words": ((1, 99),)}, "bad_words must hold .* found 99"),
        ({"allowed_token_ids": (3, 13)}, "allowed_token_ids must hold .* found 13"),
        ({"stop_token_ids": (50,)}, "stop_token_ids must hold .* found 50"),
        ({"logprobs": 14}, "logprobs must be at most the vocabulary of 13, found 14"),
        ({"allowed_token_ids": (4,), "bad_words": ((4,),)}, "must leave at least one token"),
        ({"allowed_token_ids": ENDS, "min_tokens": 1}, "must leave at least one token"),
        ({"bad_words": tuple((token,) for token in range(VOCAB))}, "must leave at least one token"),
    ],
    ids=str,
)
def test_ids_outside_the_vocabulary_and_settings_that_leave_no_token_are_refused(params, message) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params).check_vocabulary(VOCAB, ENDS)


def test_settings_that_leave_a_token_pass() -> None:
    SamplingParams(allowed_token_ids=ENDS, logprobs=VOCAB, bad_words=((2, 5), (1,))).check_vocabulary(VOCAB, ENDS)
    SamplingParams(allowed_token_ids=(2, 3), min_tokens=2).check_vocabulary(VOCAB, ENDS)


def test_temperature_comes_before_top_p() -> None:
    """Top-p first would keep two tokens, 0.56/0.44."""
    law = law_of(torch.tensor([2.0, 1.5, 0.5, 0.0]), temperature=2.0, top_p=0.7)
    assert law == pytest.approx([0.4416, 0.3439, 0.2086, 0.0], abs=0.01)
    assert sum(p > 0 for p in law) == 3


@pytest.mark.parametrize("top_k", [0, 4])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_k: int) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for top_p, kept in ((1e-6, 1), (0.49, 1), (0.79, 2), (0.81, 3)):
        assert sum(p > 0 for p in law_of(logits, temperature=1.0, top_p=top_p, top_k=top_k)) == kept
    assert law_of(torch.zeros(4), temperature=1.0, top_p=0.26, top_k=top_k) == [0.5, 0.5, 0.0, 0.0]


def test_top_p_counts_ties_beyond_the_kth_place() -> None:
    """All five tied tokens survive top_k = 2, so each has a fifth of the mass."""
    assert law_of(torch.zeros(5), temperature=1.0, top_k=2, top_p=0.7) == [0.25, 0.25, 0.25, 0.25, 0.0]
    assert law_of(torch.zeros(5), temperature=1.0, top_k=2, top_p=0.3) == [0.5, 0.5, 0.0, 0.0, 0.0]


def test_top_k_keeps_ties_and_may_exceed_the_vocabulary() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    assert [p > 0 for p in law_of(logits, temperature=1.0, top_k=2)] == [False, True, True, True, False]
    assert all(p > 0 for p in law_of(logits, temperature=1.0, top_k=50))
    assert all(p > 0 for p in law_of(logits, temperature=1.0, top_k=2**70))


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.31, 1.0, 1.9]),
        "top_k": st.integers(1, 6),
        "top_p": st.sampled_from([0.137, 0.613, 0.931]),
        "min_p": st.sampled_from([0.0713, 1.0]),
        "repetition_penalty": st.sampled_from([0.71, 1.37]),
        "presence_penalty": st.sampled_from([-0.77, 0.53]),
        "frequency_penalty": st.sampled_from([-0.31, 0.47]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -0.83, 1.21]), max_size=5),
        "bad_words": st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
        "allowed_token_ids": st.sets(st.integers(0, VOCAB - 1), min_size=8).map(tuple),
        "min_tokens": st.integers(1, 5),
    },
).map(lambda values: SamplingParams(**values))
REQUESTS = st.lists(
    st.tuples(SETTINGS, st.integers(1, 4), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=4
)


def blocks_of(requests: list[tuple[SamplingParams, int, int, int]], seed: int) -> tuple[list[Row], Tensor, list[int]]:
    """Rows of one step, the token table [num_rows, width], and the slot of each row."""
    generator = torch.Generator().manual_seed(seed)
    rows, slots = [], []
    # what lies behind the last draft belongs to nobody and must not count
    table = torch.randint(0, 5, (len(requests) + 1, 14), generator=generator, dtype=torch.int32)
    for slot, (params, prompt_len, num_output, num_drafts) in enumerate(requests):
        known = prompt_len + num_output
        for end in range(known, known + num_drafts + 1):
            logits = torch.randn(VOCAB, generator=generator) * 2
            logits[torch.randint(0, VOCAB, (4,), generator=generator)] = 0.75  # ties
            rows.append(Row(params, table[slot, :end].tolist(), prompt_len, logits))
            slots.append(slot)
    return rows, table, slots


def together(requests, rows: list[Row], tokens: Tensor, slots: list[int], table: SamplingTable | None = None) -> Tensor:
    params = [request[0] for request in requests]
    table = table or table_of(params, VOCAB)
    where = LogitsRows(torch.tensor(slots), torch.tensor([len(row.tokens) - 1 for row in rows]))
    prompt_lens = torch.tensor([*(request[1] for request in requests), 0])
    logits = torch.stack([row.logits for row in rows])
    before = logits.clone()
    found = process_logits(logits, where, table, tokens, prompt_lens, features_of(params))
    assert torch.equal(logits, before), "the input was changed"
    return found


def alone(row: Row) -> Tensor:
    """The row as plain decoding meets it: no batch mates, no drafts, nothing behind its prefix."""
    tokens = torch.tensor([row.tokens, [0] * len(row.tokens)], dtype=torch.int32)
    where = LogitsRows(torch.tensor([0]), torch.tensor([len(row.tokens) - 1]))
    lens, wanted = torch.tensor([row.prompt_len, 0]), features_of([row.params])
    return process_logits(row.logits[None], where, table_of([row.params], VOCAB), tokens, lens, wanted)[0]


@settings(max_examples=120, deadline=None)
@given(REQUESTS, st.integers(0, 2**31))
def test_a_block_equals_plain_decoding_row_by_row_and_the_rule_written_out(requests, seed: int) -> None:
    rows, tokens, slots = blocks_of(requests, seed)
    found = together(requests, rows, tokens, slots)
    for row, logits in zip(rows, found, strict=True):
        assert torch.equal(logits, alone(row))
        assert logits.tolist() == pytest.approx(naive_logits(row), abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(REQUESTS, REQUESTS, st.integers(0, 2**31))
def test_a_row_of_the_table_forgets_its_last_request(requests, earlier, seed: int) -> None:
    table = SamplingTable(len(requests) + 1, VOCAB, CPU)
    for row, request in enumerate(earlier[: len(requests)]):
        table.set(row, request[0], (1, 3, 6, 7))
    for row, request in enumerate(requests):
        table.set(row, request[0], ENDS)
    rows, tokens, slots = blocks_of(requests, seed)
    assert torch.equal(together(requests, rows, tokens, slots, table), together(requests, rows, tokens, slots))


@pytest.mark.parametrize("elements", [1, 40, 10**9])
def test_the_number_of_rows_taken_at_once_changes_nothing(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SamplingParams(
        temperature=0.7, top_p=0.8, repetition_penalty=1.2, frequency_penalty=0.3, bad_words=((1, 2),), min_tokens=3
    )
    requests = [(full, 2, 1, 4), (SamplingParams(), 1, 3, 2), (SamplingParams(temperature=1.0, top_k=3), 3, 0, 4)]
    rows, tokens, slots = blocks_of(requests, 5)
    monkeypatch.setattr(sampling, "CHUNK_ELEMENTS", elements)
    found = together(requests, rows, tokens, slots)
    assert all(torch.equal(logits, alone(row)) for row, logits in zip(rows, found, strict=True))


def test_the_padding_row_is_neutral_whatever_the_step_asks_for() -> None:
    requests = [
        (
            SamplingParams(
                temperature=0.5,
                top_k=2,
                top_p=0.5,
                min_p=0.5,
                repetition_penalty=2.0,
                presence_penalty=1.0,
                logit_bias={1: 5.0},
                bad_words=((3,),),
                allowed_token_ids=(3, 4, 5),
                min_tokens=9,
            ),
            1,
            0,
            0,
        )
    ]
    rows, tokens, _ = blocks_of(requests, 0)
    padding = Row(SamplingParams(), [0], 0, torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)))
    found = together(requests, [*rows, padding], tokens, [0, 1])
    assert torch.equal(found[1], padding.logits)


def test_steps_that_no_request_asks_for_are_skipped() -> None:
    assert features_of([SamplingParams(temperature=1.0), SamplingParams(top_k=3, top_p=0.5, min_p=0.1)]) == NEUTRAL
    assert features_of([]) == NEUTRAL
    found = features_of([SamplingParams(temperature=1.0, top_k=5, top_p=0.9), SamplingParams(min_tokens=1)])
    assert found == NEUTRAL._replace(largest_top_k=8, top_p=True, top_p_within_top_k=True, min_tokens=True)
    assert not features_of([SamplingParams(temperature=1, top_k=5), SamplingParams(temperature=1, top_p=0.9)])[-2]


def test_placeholders_among_the_drafts_are_no_tokens() -> None:
    """A draft of -1 is rejected, so no row behind it counts; it must only not index."""
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, bad_words=((3, 4),))
    tokens = torch.tensor([[3, -1, 99, 0], [0, 0, 0, 0]], dtype=torch.int32)
    where = LogitsRows(torch.tensor([0, 0, 0]), torch.tensor([0, 1, 2]))
    found = process_logits(
        torch.ones(3, VOCAB), where, table_of([params], VOCAB), tokens, torch.tensor([1, 0]), features_of([params])
    )
    expected = torch.ones(VOCAB)
    expected[3] = 0.5
    assert torch.equal(found, expected.expand(3, -1))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_tiny_temperatures_give_the_argmax_and_no_nan(temperature: float) -> None:
    law = law_of(torch.tensor([1e4, -3e4, 9.9e3, -math.inf]), temperature=temperature)
    assert law == [1.0, 0.0, 0.0, 0.0]


def test_vocabulary_wide_top_p_off_keeps_every_token() -> None:
    """Cumulated float32 mass passes 1 before the end of a large vocabulary; a row without top-p must not notice."""
    logits = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)]
    found = process(logits, params, [1, 1])
    assert torch.isfinite(found[0]).all() and not torch.isfinite(found[1]).all()
    kept = found[1].softmax(-1)[torch.isfinite(found[1])]
    least = kept.min() * (kept.numel() > 0)
    mass = logits[1].double().softmax(-1)[torch.isfinite(found[1])].sum()
    assert 0.9 <= mass < 0.9 + float(least)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_stay_so(bad: float) -> None:
    """Verification fails such a request; a step that hid the number would let it go on."""
    logits = torch.zeros(VOCAB)
    logits[7] = bad
    for params in ({"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.3}, {"presence_penalty": 1.0}):
        found = process(logits[None], [SamplingParams(temperature=1.0, **params)], [1])[0]
        assert not (found < math.inf).all()


def test_bfloat16_logits_are_processed_in_float32() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)).bfloat16()
    for params in (SamplingParams(), SamplingParams(temperature=0.7), SamplingParams(temperature=0.7, top_k=3)):
        found = process(logits, [params], [4])
        assert found.dtype == torch.float32
        assert torch.equal(found, process(logits.float(), [params], [4]))


def test_logprobs_are_those_of_the_raw_law_with_the_emitted_token_first() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3)).bfloat16()
    rows, emitted = torch.tensor([4, 0, 0, 2]), torch.tensor([7, 1, -1, 12])
    law = logits.double().log_softmax(-1)
    for num_best in (0, 1, 4, VOCAB):
        ids, values = top_logprobs(logits, rows, emitted, num_best)
        assert ids.shape == values.shape == (4, 1 + num_best)
        assert ids[:, 0].tolist() == [7, 1, 0, 12]
        torch.testing.assert_close(values.double(), law[rows].gather(1, ids), atol=1e-5, rtol=0)
        torch.testing.assert_close(
            values[:, 1:].double(), law[rows].sort(-1, descending=True).values[:, :num_best], atol=1e-5, rtol=0
        )


@pytest.mark.gpu
class TestDevice:
    """On the GPU: rows depend on nothing but themselves, nothing waits for the host, a graph replays it."""

    VOCAB, WIDTH = 151_936, 300
    EVERYTHING = SamplingParams(
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.001,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={5: 2.0, 100_000: -3.0},
        bad_words=((7,), (8, 9)),
        allowed_token_ids=tuple(range(0, 151_936, 2)),
        min_tokens=40,
    )
    PARAMS = (
        SamplingParams(),
        EVERYTHING,
        SamplingParams(temperature=1.3, top_p=0.95),
        SamplingParams(temperature=0.6, top_k=7, top_p=0.5),
        SamplingParams(repetition_penalty=0.8, frequency_penalty=-0.5),
    )

    def step(self, device: torch.device, params: tuple[SamplingParams, ...], rows_each: int = 6):
        """Inputs of `process_logits`: blocks of `rows_each` rows at the end of the tokens of each request."""
        generator = torch.Generator().manual_seed(0)
        count = len(params)
        logits = torch.randn(count * rows_each, self.VOCAB, generator=generator) * 3
        tokens = torch.randint(0, self.VOCAB, (count + 1, self.WIDTH), generator=generator, dtype=torch.int32)
        table = SamplingTable(count + 1, self.VOCAB, device)
        for row, p in enumerate(params):
            table.set(row, p, ENDS)
        positions = torch.arange(self.WIDTH - rows_each, self.WIDTH).repeat(count)
        where = LogitsRows(torch.arange(count).repeat_interleave(rows_each).to(device), positions.to(device))
        lens = torch.full((count + 1,), 270, device=device)
        return logits.to(device), where, table, tokens.to(device), lens, features_of(params)

    def test_a_row_alone_equals_the_row_in_the_batch_bit_for_bit(self) -> None:
        logits, where, table, tokens, lens, wanted = self.step(torch.device("cuda"), self.PARAMS)
        found = process_logits(logits, where, table, tokens, lens, wanted)
        for row in range(len(logits)):
            own = features_of([self.PARAMS[row // 6]])
            one = LogitsRows(*(t[row : row + 1] for t in where))
            assert torch.equal(process_logits(logits[row : row + 1], one, table, tokens, lens, own)[0], found[row])

    def test_it_agrees_with_the_cpu(self) -> None:
        found = process_logits(*self.step(torch.device("cuda"), self.PARAMS)).cpu()
        expected = process_logits(*self.step(CPU, self.PARAMS))
        both = torch.isfinite(found) & torch.isfinite(expected)
        torch.testing.assert_close(found[both], expected[both], atol=1e-4, rtol=1e-5)
        # rounding may move the edge of a top-p set by a token
        assert ((torch.isfinite(found) != torch.isfinite(expected)).sum(dim=-1) <= 1).all()

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode")
    def test_nothing_waits_for_the_host_and_a_graph_replays_it(self) -> None:
        inputs = self.step(torch.device("cuda"), self.PARAMS)
        emitted = torch.arange(30, device="cuda")

        def call() -> tuple[Tensor, ...]:
            return process_logits(*inputs), *top_logprobs(inputs[0], emitted, emitted, 5)

        call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = call()
        inputs[0].copy_(inputs[0].flip(0))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(replayed, call(), strict=True))
