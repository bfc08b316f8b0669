"""Unrolled attention against one softmax over the keys of all steps laid side by side."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spectrain.train import attention
from spectrain.train.attention import ParallelAttend, UnrolledAttend, choose_backend

DOCUMENTS = {
    "one": [[0] * 7, [1] * 7],
    "packed": [[0, 0, 0, 1, 1, 1, 1], [2, 3, 3, 3, 3, 3, 3]],
    "padded": [[0, 0, 1, 1, 1, -1, -1], [2, 2, 2, 2, 2, 2, -1]],
}


def visible(document_ids: Tensor, step: int) -> Tensor:
    """bool [batch, seq, (step + 1) * seq], straight from the rule."""
    batch, seq = document_ids.shape
    mask = torch.zeros(batch, seq, (step + 1) * seq, dtype=torch.bool)
    for b in range(batch):
        for t in range(seq):
            for s in range(t + 1):
                mask[b, t, s] = document_ids[b, s] == document_ids[b, t]
            for j in range(1, step + 1):
                mask[b, t, j * seq + t] = True
    return mask


def one_softmax(document_ids: Tensor) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    keys: dict[int, list[Tensor]] = {}
    values: dict[int, list[Tensor]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.setdefault(layer, []).append(k)
        values.setdefault(layer, []).append(v)
        group = q.shape[2] // k.shape[2]
        k_all = torch.cat(keys[layer], dim=1).repeat_interleave(group, dim=2)
        v_all = torch.cat(values[layer], dim=1).repeat_interleave(group, dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k_all) / q.shape[-1] ** 0.5
        mask = visible(document_ids, len(keys[layer]) - 1)[:, None]
        return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v_all)

    return attend


def inputs(steps: int, kv_heads: int, seq: int = 7, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        return torch.randn(2, seq, heads, 8, generator=generator).requires_grad_()

    return [(draw(4), draw(kv_heads), draw(kv_heads)) for _ in range(steps)]


def run(attend: Callable[..., Tensor], steps: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    outs = [attend(layer, *qkv) for qkv in steps for layer in (0, 1)]
    probe = torch.Generator().manual_seed(9)
    total = torch.stack([(out * torch.randn(out.shape, generator=probe)).sum() for out in outs]).sum()
    return [out.detach() for out in outs], list(torch.autograd.grad(total, [x for qkv in steps for x in qkv]))


@pytest.mark.parametrize("query_block", [3, 256])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_dense_equals_one_softmax_in_value_and_gradient(
    name: str, kv_heads: int, query_block: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention, "QUERY_BLOCK", query_block)
    document_ids = torch.tensor(DOCUMENTS[name], dtype=torch.int32)
    steps = inputs(4, kv_heads)
    outs, grads = run(UnrolledAttend(document_ids, "dense"), steps)
    expected_outs, expected_grads = run(one_softmax(document_ids), steps)
    for found, expected in zip(outs + grads, expected_outs + expected_grads, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        quiet = UnrolledAttend(document_ids, "dense")
        again = [quiet(layer, *qkv) for qkv in steps for layer in (0, 1)]
    for found, expected in zip(again, outs, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_visible_columns_equal_the_table_of_the_method():
    """Zero queries attend evenly, so values that are unit vectors spell out the columns each row sees."""
    rows, width = 5, 15
    attend = UnrolledAttend(torch.zeros(1, rows, dtype=torch.int32), "dense")
    table = {
        0: ["1....", "11...", "111..", "1111.", "11111"],
        1: ["1....1....", "11....1...", "111....1..", "1111....1.", "11111....1"],
        2: ["1....1....1....", "11....1....1...", "111....1....1..", "1111....1....1.", "11111....1....1"],
    }
    for step, expected in table.items():
        v = torch.eye(width)[step * rows : (step + 1) * rows].view(1, rows, 1, width)
        out = attend(0, torch.zeros(1, rows, 1, width), torch.randn(1, rows, 1, width), v)[0, :, 0]
        seen = ["".join("1" if x > 0 else "." for x in row[: (step + 1) * rows]) for row in out]
        assert seen == expected
        torch.testing.assert_close(out, (out > 0) / (out > 0).sum(-1, keepdim=True))


def test_flex_mask_and_log_sum_exp_agree_with_dense(monkeypatch: pytest.MonkeyPatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)  # its plain form runs on CPU
    document_ids = torch.tensor(DOCUMENTS["packed"], dtype=torch.int32)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flex, dense = UnrolledAttend(document_ids, "flex"), UnrolledAttend(document_ids, "dense")
        for qkv in inputs(3, kv_heads=2):
            plain = [x.detach() for x in qkv]
            torch.testing.assert_close(flex(0, *plain), dense(0, *plain), atol=1e-5, rtol=1e-5)


def test_flex_and_dense_agree_on_parallel_draft_rows(monkeypatch: pytest.MonkeyPatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)
    document_ids = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    line = (torch.tensor([0, 1, 1, 3, 7, 7, 7]), torch.tensor([1, 1, 2, 1, 1, 2, 3]))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12 + 7, heads, 8, generator=generator) for heads in (4, 2, 2))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = (ParallelAttend(document_ids, *line, 3, backend)(0, q, k, v) for backend in ("flex", "dense"))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_flex_equals_dense_on_cuda_for_parallel_draft_rows_in_value_and_gradient():
    document_ids = (torch.arange(200, device="cuda") // 50).to(torch.int32).repeat(2, 1)
    from_rows = torch.arange(0, 400, 3, device="cuda").repeat_interleave(3)
    steps = torch.arange(1, 4, device="cuda").repeat(len(from_rows) // 3)
    generator = torch.Generator().manual_seed(0)
    shapes = [(400 + len(steps), heads, 16) for heads in (4, 2, 2)]
    qkv = [torch.randn(shape, generator=generator).cuda().requires_grad_() for shape in shapes]
    results = []
    for backend in ("flex", "dense"):
        out = ParallelAttend(document_ids, from_rows, steps, 3, backend)(0, *qkv)
        results.append([out, *torch.autograd.grad(out.square().sum(), qkv)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # compiling reads .grad of inner tensors, which warns
@pytest.mark.parametrize("seq", [128, 200])
def test_flex_equals_dense_on_cuda_in_value_and_gradient(seq: int):
    document_ids = (torch.arange(seq, device="cuda") // 50).to(torch.int32).repeat(2, 1)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, seq, heads, 16) for heads in (4, 2, 2)]
    steps = [
        tuple(torch.randn(shape, generator=generator).cuda().requires_grad_() for shape in shapes) for _ in range(3)
    ]
    results = []
    for backend in ("flex", "dense"):
        attend = UnrolledAttend(document_ids, backend)
        outs = [attend(0, *qkv) for qkv in steps]
        total = torch.stack([(out * (i + 1)).square().sum() for i, out in enumerate(outs)]).sum()
        results.append(outs + list(torch.autograd.grad(total, [x for qkv in steps for x in qkv])))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_backend_choice():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_backend("auto", cpu) == "dense" and choose_backend("auto", cuda) == "flex"
    assert choose_backend("dense", cuda) == "dense"
    with pytest.raises(ValueError, match="needs a CUDA device, found cpu"):
        choose_backend("flex", cpu)


def test_low_precision_inputs_keep_their_dtype_and_float32_weights():
    document_ids = torch.zeros(2, 7, dtype=torch.int32)
    steps = inputs(3, kv_heads=2)
    attend, oracle = UnrolledAttend(document_ids, "dense"), one_softmax(document_ids)
    for qkv in steps:
        low = [x.detach().bfloat16() for x in qkv]
        out = attend(0, *low)
        assert out.dtype is torch.bfloat16
        torch.testing.assert_close(out.float(), oracle(0, *(x.float() for x in low)), atol=2e-2, rtol=2e-2)
