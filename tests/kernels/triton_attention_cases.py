"""The attention kernels against their twins and against themselves. Run like `triton_cases.py`.

Slots that no request owns hold NaN in every test, as do outputs and partial buffers before a kernel writes them.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrain.kernels import attention, reference
from spectrain.kernels.records import AttentionInputs

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("poison_outputs")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {
    "causal": {},
    "window": {"window": 7},
    "chunk-softcap": {"chunk": 50, "softcap": 2.0},
    "sinks": {"sinks": True, "window": 45},
    "both-ways": {"causal": False},
    "both-ways-window": {"causal": False, "window": 7},
}
WIDE = [(64, 64), (192, 128), (256, 256), (576, 512)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Pages:
    """Random keys and values over shuffled block tables, NaN elsewhere, and packed queries."""

    def __init__(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        heads: tuple[int, int] = (4, 2),
        widths: tuple[int, int] = (16, 16),
        dtype: torch.dtype = torch.float32,
        block_size: int = 5,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(seq_lens))
        blocks = [-(-n // block_size) for n in seq_lens]
        order = iter((torch.randperm(sum(blocks), generator=generator) + 1).tolist())
        tables = torch.zeros(len(seq_lens), max(blocks) + 3, dtype=torch.int32)
        planes = [torch.full((sum(blocks) + 1, block_size, heads[1], width), math.nan) for width in widths]
        for b, (count, seq_len) in enumerate(zip(blocks, seq_lens, strict=True)):
            tables[b, :count] = torch.tensor([next(order) for _ in range(count)])
            where = torch.arange(seq_len)
            slots = tables[b, where // block_size].long() * block_size + where % block_size
            for plane, width in zip(planes, widths, strict=True):
                plane.view(-1, heads[1], width)[slots] = torch.randn(seq_len, heads[1], width, generator=generator)
        self.q = torch.randn(sum(query_lens), heads[0], widths[0], generator=generator).to(DEVICE, dtype)
        self.k, self.v = (plane.to(DEVICE, dtype) for plane in planes)
        self.sinks = torch.randn(heads[0], generator=generator).to(DEVICE, dtype)
        self.query_lens, self.seq_lens, self.tables = query_lens, seq_lens, tables.to(DEVICE)

    def attend(self, implementation: Any = attention, max_seq_len: int = 1000, **options: Any) -> Tensor:
        return attend(implementation, self, self.q, self.query_lens, self.seq_lens, self.tables, max_seq_len, options)

    def attend_alone(self, row: int, request: int, seq_len: int, **options: Any) -> Tensor:
        """One row as a decode step of its own."""
        q, table = self.q[row : row + 1], self.tables[request : request + 1]
        return attend(attention, self, q, [1], [seq_len], table, 1000, options)[0]


def attend(
    implementation: Any,
    pages: Pages,
    q: Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    tables: Tensor,
    max_seq_len: int,
    options: dict[str, Any],
) -> Tensor:
    options = options | ({"sinks": pages.sinks.to(q.dtype)} if options.get("sinks") else {})
    cu_seqlens = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(DEVICE)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    bounds = {"max_query_len": max(query_lens), "max_seq_len": max_seq_len, "scale": q.shape[-1] ** -0.5}
    inputs = AttentionInputs(q, pages.k, pages.v, cu_seqlens, lengths, tables, **bounds)
    return implementation.paged_attention(inputs._replace(**options))


def set_mode(monkeypatch: pytest.MonkeyPatch, mode: str, first: int = 32, rest: int = 64) -> None:
    """Short pieces, long queries from 13 rows on, and one program a request (`whole`) or a piece (`split`)."""
    monkeypatch.setattr(attention, "PIECES", attention.Pieces(2, first, rest))
    monkeypatch.setattr(attention, "SHORT_QUERY", 12)
    monkeypatch.setattr(attention, "AHEAD", 2)
    monkeypatch.setattr(attention, "FILLING", 0 if mode == "whole" else 10**6)


@pytest.mark.parametrize("mode", ["whole", "split"])
@pytest.mark.parametrize(
    ("heads", "widths", "name"),
    [
        *(((4, 2), (16, 16), name) for name in OPTIONS),
        ((3, 1), (24, 12), "causal"),
        ((2, 2), (40, 64), "sinks"),
        ((5, 1), (8, 17), "window"),
    ],
    ids=str,
)
def test_equals_twin(
    heads: tuple[int, int], widths: tuple[int, int], name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mode(monkeypatch, mode)
    pages = Pages([1, 0, 5, 20, 1], [135, 0, 67, 40, 1], heads, widths)
    found, expected = pages.attend(**OPTIONS[name]), pages.attend(reference.attention, **OPTIONS[name])
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's bfloat16 products are wrong")
@pytest.mark.parametrize(
    ("widths", "dtype", "name"),
    [
        *(((128, 128), BF16, name) for name in OPTIONS),
        *((widths, BF16, "causal") for widths in WIDE),
        *(((128, 128), dtype, "causal") for dtype in (FP16, FP32)),
        ((576, 512), FP32, "causal"),
    ],
    ids=str,
)
def test_equals_twin_over_serving_widths(
    widths: tuple[int, int], dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages([1, 300, 6, 1], [2100, 300, 1129, 1], (8, 2), widths, dtype, block_size=16)
    found = {}
    for filling in (0, 10**6):
        monkeypatch.setattr(attention, "FILLING", filling)
        found[filling] = pages.attend(max_seq_len=4096, **OPTIONS[name])
    assert torch.equal(found[0], found[10**6])
    pages.q, pages.k, pages.v = pages.q.double(), pages.k.double(), pages.v.double()
    expected = pages.attend(reference.attention, max_seq_len=4096, **OPTIONS[name])
    tolerance = 2e-5 if dtype == FP32 else 2e-2
    torch.testing.assert_close(found[0].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", [name for name in OPTIONS if OPTIONS[name].get("causal", True)])
def test_bits_of_a_row_depend_on_its_request_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = OPTIONS[name]
    serving = DEVICE == "cuda"
    heads, widths = ((32, 8), (128, 128)) if serving else ((2, 1), (16, 16))
    dtype = torch.bfloat16 if serving else torch.float32
    query_lens, seq_lens = ([6, 1, 20, 0], [100, 131, 33, 0]) if serving else ([3, 1, 13, 0], [100, 67, 14, 0])
    first = query_lens[0]
    pages = Pages(query_lens, seq_lens, heads, widths, dtype)
    rows = {}
    for mode in ("whole", "split"):
        set_mode(monkeypatch, mode, *((64, 128) if serving else (32, 64)))
        rows[mode, "batch"] = pages.attend(**options)[: first + 1]
        alone = [pages.attend_alone(row, 0, 101 - first + row, **options) for row in range(first)]
        rows[mode, "alone"] = torch.stack([*alone, pages.attend_alone(first, 1, seq_lens[1], **options)])
    assert rows["whole", "batch"].isfinite().all()
    for where, found in rows.items():
        assert torch.equal(found, rows["whole", "batch"]), where


def test_bits_do_not_depend_on_the_bound_on_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    set_mode(monkeypatch, "split")
    pages = Pages([2, 1], [31, 29])
    assert torch.equal(pages.attend(max_seq_len=32), pages.attend(max_seq_len=100_000))


@pytest.mark.parametrize("mode", ["whole", "split"])
def test_rows_without_keys_or_request_disturb_nobody(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_mode(monkeypatch, mode)
    pages = Pages([0, 3, 0, 2, 1], [0, 70, 0, 40, 0], (2, 1))
    expected = pages.attend()
    assert expected[:5].isfinite().all() and (expected[5] == 0).all()
    pages.q = torch.cat([pages.q, torch.full_like(pages.q[:4], math.nan)])
    assert torch.equal(pages.attend()[:6], expected)


def test_more_requests_than_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    set_mode(monkeypatch, "split")
    pages = Pages([1, *[0] * 260, 1], [40, *[0] * 260, 33], (1, 1))
    torch.testing.assert_close(pages.attend(), pages.attend(reference.attention), atol=2e-6, rtol=1e-5)


def test_strided_queries_are_read_in_place() -> None:
    pages = Pages([3], [20])
    expected = pages.attend()
    pages.q = pages.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not pages.q.is_contiguous() and torch.equal(pages.attend(), expected)


def test_shapes_that_do_not_fit_are_refused() -> None:
    pages = Pages([1], [4], heads=(3, 2))
    with pytest.raises(ValueError, match="key heads divide query heads"):
        pages.attend()
    with pytest.raises(ValueError, match="contiguous plane"):
        attention.store_kv(pages.q, None, pages.k, None, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("num_keys", [0, 1, 31, 32, 33, 64, 65, 128, 129, 500])
def test_pieces_cover_the_keys(num_keys: int) -> None:
    pieces = attention.Pieces(2, 32, 64)
    starts = [0, 32, *range(64, 1000, 64)]
    assert pieces.up_to(num_keys) == sum(start < num_keys for start in starts)


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU records graphs")
def test_a_recorded_launch_follows_the_lengths_on_the_device() -> None:
    pages = Pages([6, 6], [1500, 700], (32, 8), (128, 128), torch.bfloat16, block_size=16)
    cu_seqlens = torch.tensor([0, 6, 12], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([1500, 700], dtype=torch.int32, device=DEVICE)

    def step() -> Tensor:
        return attention.paged_attention(
            AttentionInputs(pages.q, pages.k, pages.v, cu_seqlens, lengths, pages.tables, 6, 32_768, scale=0.1)
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seq_lens in ([1500, 700], [6, 513], [1025, 256]):
        lengths.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, step()), seq_lens


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_store_kv_equals_twin(strided: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(7, 3, 20, generator=generator).to(DEVICE), torch.randn(7, 3, 11, generator=generator).to(DEVICE)
    if strided:
        k, v = (rows.transpose(0, 1).contiguous().transpose(0, 1) for rows in (k, v))
    slots = torch.tensor([3, 0, 19, 8, 7, 12, 5], device=DEVICE)
    for values in (v, None):
        planes = [(torch.zeros(4, 5, 3, 20).to(DEVICE), torch.zeros(4, 5, 3, 11).to(DEVICE)) for _ in range(2)]
        attention.store_kv(k, values, *planes[0], slots)
        reference.attention.store_kv(k, values, *planes[1], slots)
        for ours, theirs in zip(*planes, strict=True):
            assert torch.equal(ours, theirs)
