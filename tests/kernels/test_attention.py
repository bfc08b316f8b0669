"""Paged attention in plain PyTorch against a dense float64 oracle written row by row."""

import math

import pytest
import torch
from torch import Tensor

from spectrain.kernels import dispatch
from spectrain.kernels.records import AttentionInputs


def dense_row(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    scale: float,
    options: dict[str, float],
    sinks: Tensor | None,
) -> Tensor:
    """One query [q_heads, width_k] over its request's keys [seq, kv_heads, width_k]."""
    first = 0
    if options.get("window"):
        first = max(0, position - int(options["window"]) + 1)
    if options.get("chunk"):
        first = max(first, position - position % int(options["chunk"]))
    last = position if options.get("causal", True) else len(keys) - 1
    per_key = query.shape[0] // keys.shape[1]
    rows = []
    for head in range(query.shape[0]):
        k, v = keys[first : last + 1, head // per_key], values[first : last + 1, head // per_key]
        scores = k.double() @ query[head].double() * scale
        if options.get("softcap"):
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        weights = scores.exp()
        rest = sinks[head].double().exp() if sinks is not None else 0.0
        rows.append((weights / (weights.sum() + rest)) @ v.double())
    return torch.stack(rows)


class Paged:
    """Requests of random keys and values laid out over shuffled blocks."""

    def __init__(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        heads: tuple[int, int],
        widths: tuple[int, int],
        block_size: int,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(seq_lens) + block_size)
        self.query_lens, self.seq_lens = query_lens, seq_lens
        self.keys = [torch.randn(n, heads[1], widths[0], generator=generator) for n in seq_lens]
        self.values = [torch.randn(n, heads[1], widths[1], generator=generator) for n in seq_lens]
        self.q = torch.randn(sum(query_lens), heads[0], widths[0], generator=generator)
        self.sinks = torch.randn(heads[0], generator=generator)
        blocks = [-(-n // block_size) for n in seq_lens]
        free = (torch.randperm(sum(blocks), generator=generator) + 1).tolist()
        self.tables = torch.zeros(len(seq_lens), max(blocks), dtype=torch.int32)
        shape = (sum(blocks) + 1, block_size, heads[1])
        self.k_plane, self.v_plane = (torch.full((*shape, width), math.nan) for width in widths)
        for b, count in enumerate(blocks):
            self.tables[b, :count] = torch.tensor([free.pop() for _ in range(count)])
            where = torch.arange(seq_lens[b])
            slots = self.tables[b, where // block_size].long() * block_size + where % block_size
            dispatch.store_kv(self.keys[b], self.values[b], self.k_plane, self.v_plane, slots)
        self.cu_seqlens = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
        self.scale = widths[0] ** -0.5

    def attend(self, dtype: torch.dtype = torch.float32, sinks: Tensor | None = None, **options: float) -> Tensor:
        inputs = AttentionInputs(
            *(self.q.to(dtype), self.k_plane.to(dtype), self.v_plane.to(dtype), self.cu_seqlens),
            *(torch.tensor(self.seq_lens, dtype=torch.int32), self.tables),
            max_query_len=max(self.query_lens),
            max_seq_len=max(self.seq_lens),
            scale=self.scale,
            sinks=sinks,
        )
        return dispatch.paged_attention(inputs._replace(**options))

    def oracle(self, sinks: Tensor | None = None, **options: float) -> Tensor:
        rows = []
        for b, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            for offset in range(query_len):
                query = self.q[len(rows)]
                position = seq_len - query_len + offset
                rows.append(dense_row(query, self.keys[b], self.values[b], position, self.scale, options, sinks))
        return torch.stack(rows)


MIXED = ([1, 23, 5, 1, 17, 1], [50, 23, 37, 1, 64, 16])  # decode, prefill, verification, first token, a later chunk


@pytest.mark.parametrize("block_size", [7, 16])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="causal"),
        pytest.param({"window": 9}, id="window"),
        pytest.param({"window": 1}, id="self"),
        pytest.param({"chunk": 10}, id="chunk"),
        pytest.param({"softcap": 1.5}, id="softcap"),
        pytest.param({"softcap": 5.0, "window": 4}, id="softcap-window"),
        pytest.param({"causal": False}, id="both-ways"),
        pytest.param({"causal": False, "window": 9}, id="both-ways-window"),
    ],
)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_equals_dense_attention(options: dict[str, float], with_sinks: bool, block_size: int) -> None:
    paged = Paged(*MIXED, heads=(6, 2), widths=(16, 16), block_size=block_size)
    sinks = paged.sinks if with_sinks else None
    torch.testing.assert_close(
        paged.attend(sinks=sinks, **options).double(), paged.oracle(sinks, **options), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (3, 3)], ids=["mha", "mqa", "odd"])
@pytest.mark.parametrize("widths", [(24, 16), (16, 24), (576, 512), (1, 1)], ids=str)
def test_head_layouts_and_unequal_widths(heads: tuple[int, int], widths: tuple[int, int]) -> None:
    paged = Paged([1, 18, 3], [9, 18, 20], heads, widths, block_size=5)
    torch.testing.assert_close(paged.attend().double(), paged.oracle(), atol=2e-6, rtol=0)


def test_bfloat16_accumulates_in_float32() -> None:
    """The error is that of rounding inputs and output once, which bfloat16 sums over 300 keys would exceed."""
    paged = Paged([1, 20], [300, 300], (4, 2), (24, 16), block_size=16)
    for tensors in ([paged.q], paged.keys, paged.values):
        for tensor in tensors:
            tensor.copy_(tensor.bfloat16())
    found, expected = paged.attend(torch.bfloat16), paged.oracle()
    assert found.dtype == torch.bfloat16
    assert float((found.double() - expected).abs().max()) <= 2.0**-8 * float(expected.abs().max())


def test_a_request_is_untouched_by_its_neighbours_nan() -> None:
    paged = Paged([1, 1, 2], [50, 3, 20], (2, 1), (8, 8), block_size=4)
    expected = paged.attend()
    paged.k_plane[paged.tables[0, 0].long()] = math.nan
    paged.v_plane[0] = math.nan
    found = paged.attend()
    assert torch.isnan(found[0]).all()
    torch.testing.assert_close(found[1:], expected[1:], atol=0, rtol=0)


def test_store_kv_writes_only_its_slots() -> None:
    k_plane, v_plane = torch.full((3, 4, 2, 5), -7.0), torch.full((3, 4, 2, 3), -7.0)
    k, v = torch.randn(2, 2, 5), torch.randn(2, 2, 3)
    dispatch.store_kv(k, v, k_plane, v_plane, torch.tensor([9, 2]))
    assert torch.equal(k_plane[2, 1], k[0]) and torch.equal(v_plane[0, 2], v[1])
    assert int((k_plane == -7).all(-1).all(-1).sum()) == 10
    dispatch.store_kv(k, None, k_plane, None, torch.tensor([0, 1]))
    assert torch.equal(k_plane[0, :2], k)
