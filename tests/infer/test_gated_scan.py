"""The scan and the convolution of packed rows against one token after another, in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from spectrain.infer.batch import RequestRows, request_rows
from spectrain.infer.gated_scan import ScanInputs, causal_conv, gated_scan
from spectrain.infer.parity import packed_batch

HEADS, KEY_HEADS, KEY, VALUE, CHANNELS, TAPS = 4, 2, 5, 3, 6, 4
GENERATOR = torch.Generator().manual_seed(3)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def inputs_of(length: int, kind: str = "delta") -> ScanInputs:
    q, k = (F.normalize(draw(length, KEY_HEADS, KEY), dim=-1) for _ in range(2))
    decay = -F.softplus(draw(length, HEADS, *([KEY] if kind == "by key" else [])) - 2)
    beta = draw(length, HEADS).sigmoid() if kind == "delta" else None
    return ScanInputs(q, k, draw(length, HEADS, VALUE), decay, beta)


def one_by_one(x: ScanInputs) -> tuple[Tensor, list[Tensor]]:
    """Outputs [length, heads, value], and the state after each row, as the recurrence is written on paper."""
    outputs, states = [], []
    state = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64)
    for t in range(len(x.q)):
        q, k = (torch.stack([part[t, head // (HEADS // KEY_HEADS)] for head in range(HEADS)]) for part in (x.q, x.k))
        decay = x.log_decay[t].exp().view(HEADS, -1).expand(HEADS, KEY)
        state = torch.einsum("hk,hkv->hkv", decay, state)
        written = x.v[t]
        if x.beta is not None:
            written = torch.einsum("h,hv->hv", x.beta[t], x.v[t] - torch.einsum("hk,hkv->hv", k, state))
        state = state + torch.einsum("hk,hv->hkv", k, written)
        outputs.append(torch.einsum("hk,hkv->hv", q, state))
        states.append(state)
    return torch.stack(outputs), states


def join(parts: list[ScanInputs]) -> ScanInputs:
    return ScanInputs(*(None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)))


def cut(x: ScanInputs, start: int, end: int) -> ScanInputs:
    return ScanInputs(*(None if part is None else part[start:end] for part in x))


def rows_of(pieces: list[tuple[int, int, int]], padding: int = 0) -> RequestRows:
    """Rows of (table row, first position, rows) each, and `padding` rows of nobody behind them."""
    batch = packed_batch(
        [[0] * count for _, _, count in pieces],
        [start for _, start, _ in pieces],
        [range(200)] * len(pieces),
        4,
        torch.device("cpu"),
        state_rows=[row for row, _, _ in pieces],
    )
    return request_rows(batch._replace(token_ids=F.pad(batch.token_ids, (0, padding))))


@pytest.mark.parametrize("kind", ["delta", "plain", "by key"])
@pytest.mark.parametrize("kept", [1, 2, 5])
def test_pieces_of_any_length_give_what_single_rows_give(kind: str, kept: int):
    """Several requests, cut at random, in steps whose rows stand in any order; whatever stood in the rows before."""
    lengths = [1, 63, 64, 65, 130, 200]
    texts = [inputs_of(length, kind) for length in lengths]
    expected = [one_by_one(text) for text in texts]
    memory = torch.full((len(texts) + 1, kept, HEADS, KEY, VALUE), torch.nan, dtype=torch.float64)
    done = [0] * len(texts)
    sizes = itertools.cycle([3, 70, 1, 2, 5, 64, 1, 129, 4])
    while left := [i for i in range(len(texts)) if done[i] < lengths[i]]:
        left = [left[j] for j in torch.randperm(len(left), generator=GENERATOR).tolist()]
        pieces = [(i, done[i], min(next(sizes), lengths[i] - done[i])) for i in left]
        x = join([cut(texts[i], start, start + count) for i, start, count in pieces])
        padding = ScanInputs(*(None if part is None else torch.full_like(part[:2], torch.nan) for part in x))
        rows = rows_of(pieces, padding=len(padding.q))
        out = gated_scan(join([x, padding]), memory, rows)
        for (i, start, count), first in zip(pieces, rows.first.tolist(), strict=True):
            wanted, states = expected[i]
            torch.testing.assert_close(out[first : first + count], wanted[start : start + count], atol=1e-11, rtol=0)
            held = range(start, start + count)
            if count > kept:
                held = held[-kept if kind == "by key" else -1 :]
            for position in held:
                torch.testing.assert_close(memory[i, position % kept], states[position], atol=1e-11, rtol=0)
            done[i] += count


@pytest.mark.parametrize("num_inputs", [TAPS - 1, TAPS + 3])
def test_convolution_at_every_cut(num_inputs: int):
    weight, bias, x = draw(CHANNELS, TAPS), draw(CHANNELS), draw(12, CHANNELS)
    expected = F.conv1d(F.pad(x.T[None], (TAPS - 1, 0)), weight[:, None], bias, groups=CHANNELS)[0].T
    for first, second in itertools.combinations(range(1, 12), 2):
        memory = torch.full((3, num_inputs, CHANNELS), torch.nan, dtype=torch.float64)
        other = draw(3, CHANNELS)
        for start, end in itertools.pairwise((0, first, second, 12)):
            rows = rows_of([(1, 0, 3), (0, start, end - start)], padding=1)
            line = torch.cat([other, x[start:end], torch.full((1, CHANNELS), torch.nan, dtype=torch.float64)])
            out = causal_conv(line, weight, bias, memory, rows)
            torch.testing.assert_close(out[3:-1], expected[start:end], atol=1e-12, rtol=0)


class WrittenOnce(Tensor):
    """Memory of two indices whose every entry is written once at a time, but for the last row's, which is nobody's."""

    def __setitem__(self, at: tuple[Tensor, Tensor], value: Tensor) -> None:
        places = torch.stack([part.as_subclass(Tensor) for part in at], dim=1)
        places = places[places[:, 0] < len(self) - 1]
        assert len(places.unique(dim=0)) == len(places)
        super().__setitem__(at, value)


@pytest.mark.parametrize("num_inputs", [TAPS - 1, TAPS + 3])
def test_no_two_rows_of_a_step_are_kept_in_one_place(num_inputs: int):
    """The newest rows stay. Which of two writers wins is left open on a GPU; on a CPU it happens to be the last."""
    memory = torch.zeros(4, num_inputs, CHANNELS, dtype=torch.float64).as_subclass(WrittenOnce)
    counts, weight = (num_inputs + 1, num_inputs, 2 * num_inputs + 1), draw(CHANNELS, TAPS)
    rows = rows_of([(row, 5, count) for row, count in enumerate(counts)], padding=2)
    x = draw(sum(counts) + 2, CHANNELS)
    causal_conv(x, weight, None, memory, rows)
    for row, (count, text) in enumerate(zip(counts, x.split([*counts, 2]), strict=False)):
        for back in range(1, num_inputs + 1):
            assert torch.equal(memory[row, (5 + count - back) % num_inputs], text[-back])


def test_rejected_rows_leave_nothing_behind():
    """Of a step's rows any number may be kept; the next step starts behind them."""
    kept, length = 4, 14
    text, weight, line = inputs_of(length), draw(CHANNELS, TAPS), draw(length, CHANNELS)
    expected, _ = one_by_one(text)
    convolved = F.conv1d(F.pad(line.T[None], (TAPS - 1, 0)), weight[:, None], groups=CHANNELS)[0].T
    for accepted in itertools.product(range(1, kept + 1), repeat=3):
        memory = torch.full((2, kept, HEADS, KEY, VALUE), torch.nan, dtype=torch.float64)
        inputs = torch.full((2, TAPS - 1 + kept - 1, CHANNELS), torch.nan, dtype=torch.float64)
        start = 0
        for keep in accepted:
            rows = rows_of([(0, start, kept)])
            wrong, end = inputs_of(kept), min(start + keep, length)
            x = join([cut(text, start, end), cut(wrong, end - start, kept)])
            out = gated_scan(x, memory, rows)
            torch.testing.assert_close(out[: end - start], expected[start:end], atol=1e-12, rtol=0)
            rest = torch.cat([line[start:end], draw(kept - (end - start), CHANNELS)])
            out = causal_conv(rest, weight, None, inputs, rows)
            torch.testing.assert_close(out[: end - start], convolved[start:end], atol=1e-12, rtol=0)
            start = end


def test_a_row_is_the_same_bit_for_bit_whatever_stands_beside_it():
    text, kept = inputs_of(4), 4
    alone_memory = torch.zeros(2, kept, HEADS, KEY, VALUE, dtype=torch.float64)
    alone = gated_scan(text, alone_memory, rows_of([(0, 0, 4)]))
    others = [inputs_of(n) for n in (2, 90, 4)]
    memory = torch.zeros(6, kept, HEADS, KEY, VALUE, dtype=torch.float64)
    rows = rows_of([(1, 0, 2), (2, 0, 90), (3, 0, 4), (0, 0, 4)])
    packed = gated_scan(join([others[0], others[1], others[2], text]), memory, rows)
    assert torch.equal(packed[-4:], alone)
    assert torch.equal(memory[0], alone_memory[0])


@pytest.mark.parametrize("pieces", [[(0, 5, 3), (1, 0, 2)], [(0, 5, 70), (1, 0, 2)]], ids=["short", "long"])
def test_nothing_is_read_on_the_host(pieces: list[tuple[int, int, int]]):
    """What is recorded as a graph cannot wait for the device; fake tensors have no values to be read."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        lengths = [count for _, _, count in pieces]
        batch = packed_batch([[0] * n for n in lengths], [5, 0], [range(40)] * 2, 4, torch.device("cpu"))
        fake = type(batch)(*(mode.from_tensor(part) if isinstance(part, Tensor) else part for part in batch))
        rows, n = request_rows(fake), sum(lengths)
        inputs = torch.empty(n, KEY_HEADS, KEY), torch.empty(n, KEY_HEADS, KEY), torch.empty(n, HEADS, VALUE)
        x = ScanInputs(*inputs, torch.empty(n, HEADS), torch.empty(n, HEADS))
        assert gated_scan(x, torch.empty(3, 4, HEADS, KEY, VALUE), rows).shape == (n, HEADS, VALUE)
        line, weight, memory = torch.empty(n, CHANNELS), torch.empty(CHANNELS, TAPS), torch.empty(3, 6, CHANNELS)
        assert causal_conv(line, weight, None, memory, rows).shape == (n, CHANNELS)
