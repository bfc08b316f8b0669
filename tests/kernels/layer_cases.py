"""Triton kernels of a decoder layer against their twins, compiled on a GPU or interpreted, by `test_triton.py`."""

import math

import pytest
import torch
from torch import Tensor

from spectrain.kernels import fused, linear, reference

# The interpreter computes with numpy, which warns where a GPU just gives infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's bfloat16 products are wrong.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
ROWS = [1, 6, 16, 17, 32, 33, 64]
# [out, in]: qkv, o, down of an 8B Qwen3; qkv, o, down of SmolLM2; too few outputs; nothing a multiple of anything.
SERVED = [(6144, 4096), (4096, 4096), (4096, 12288), (960, 576), (576, 576), (576, 1536), (1024, 4096), (1003, 1000)]


@pytest.fixture(autouse=True)
def poison_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel forgets to write must show."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(math.nan))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    out = x.double() @ weight.double().T
    return out + (0 if bias is None else bias.double()) + (0 if residual is None else residual.double())


def assert_near(found: Tensor, expected: Tensor, depth: int) -> None:
    """Within one rounding of the result and the error of a float32 sum of `depth` products."""
    bound = torch.finfo(found.dtype).eps * expected.abs() + 2e-5 * depth**0.5
    assert bool(((found.double() - expected).abs() <= bound).all()), (found.double() - expected).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("with_all", [False, True], ids=["plain", "bias-residual"])
@pytest.mark.parametrize(("rows", "num_out", "num_in"), [(1, 40, 64), (5, 33, 100), (17, 16, 700), (64, 50, 320)])
def test_linear_is_the_product_rounded_once(
    rows: int, num_out: int, num_in: int, with_all: bool, dtype: torch.dtype
) -> None:
    x, weight = normal(rows, num_in, dtype=dtype), normal(num_out, num_in, seed=1, dtype=dtype)
    bias = normal(num_out, seed=2, dtype=dtype) if with_all else None
    residual = normal(rows, num_out, seed=3, dtype=dtype) if with_all else None
    expected = exact(x, weight, bias, residual)
    assert_near(linear.linear(x, weight, bias, residual), expected, num_in)
    wide = linear.linear(x, weight, bias, residual, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert_near(wide, expected, num_in)


@pytest.mark.parametrize("rows", [3, 40])
def test_few_outputs_are_summed_in_splits(rows: int) -> None:
    config = linear.config_for(20, 3000, torch.float32, rows)
    assert config.splits == 2
    x, weight, bias = normal(rows, 3000), normal(20, 3000, seed=1), normal(20, seed=2)
    residual = normal(rows, 20, seed=3)
    assert_near(linear.linear(x, weight, bias, residual), exact(x, weight, bias, residual), 3000)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "width", "num_in"), [(1, 24, 64), (6, 33, 100), (40, 17, 96)])
def test_gated_linear_equals_twin(rows: int, width: int, num_in: int, with_bias: bool) -> None:
    x, weight = normal(rows, num_in), normal(2 * width, num_in, seed=1)
    bias = normal(2 * width, seed=2) if with_bias else None
    found, expected = linear.gated_linear(x, weight, bias), reference.linear.gated_linear(x, weight, bias)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-5)


def test_gated_linear_rounds_like_the_layers_it_replaces() -> None:
    x, weight = normal(6, 64, dtype=HALF), normal(40, 64, seed=1, dtype=HALF)
    gate, up = linear.linear(x, weight).chunk(2, dim=-1)
    found = linear.gated_linear(x, weight)
    torch.testing.assert_close(found, torch.nn.functional.silu(gate) * up, atol=0, rtol=torch.finfo(HALF).eps)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies with numpy, whose bits depend on the shape")
@pytest.mark.parametrize(("num_out", "num_in"), SERVED, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["linear", "gated"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_row_is_the_same_bits_in_any_company(num_out: int, num_in: int, gated: bool, dtype: torch.dtype) -> None:
    x, weight = normal(64, num_in, dtype=dtype), normal((1 + gated) * num_out, num_in, seed=1, dtype=dtype)
    run = linear.gated_linear if gated else linear.linear
    together = run(x, weight)
    if not gated:
        assert_near(together, exact(x, weight), num_in)
    for rows in ROWS:
        assert torch.equal(run(x[64 - rows :], weight), together[64 - rows :]), f"{rows} rows"


def test_a_row_is_untouched_by_its_neighbours_nan() -> None:
    x, weight = normal(20, 64), normal(16, 64, seed=1)
    expected = linear.linear(x, weight)
    x[3] = math.nan
    found = linear.linear(x, weight)
    assert torch.isnan(found[3]).all()
    assert torch.equal(found[4:], expected[4:]) and torch.equal(found[:3], expected[:3])


def test_many_rows_take_the_library() -> None:
    x, weight, residual, bias = normal(65, 64), normal(16, 64, seed=1), normal(65, 16, seed=2), normal(16, seed=3)
    for own_bias in (None, bias):
        assert_near(linear.linear(x, weight, own_bias, residual), exact(x, weight, own_bias, residual), 64)
        assert_near(linear.linear(x, weight, own_bias), exact(x, weight, own_bias), 64)
    torch.testing.assert_close(
        linear.gated_linear(x, weight), reference.linear.gated_linear(x, weight), atol=1e-5, rtol=1e-5
    )


def test_no_rows() -> None:
    assert linear.linear(normal(0, 64), normal(16, 64)).shape == (0, 16)
    assert linear.gated_linear(normal(0, 64), normal(16, 64)).shape == (0, 8)
    assert fused.rms_norm(normal(0, 64), normal(64), 1e-6).shape == (0, 64)
    assert fused.silu_mul(normal(0, 64)).shape == (0, 32)


@pytest.mark.parametrize(
    ("weight", "bias", "residual"), [((16, 65), None, None), ((16, 64), (15,), None), ((16, 64), None, (4, 15))]
)
def test_misfits_are_refused(weight: tuple, bias: tuple | None, residual: tuple | None) -> None:
    with pytest.raises(ValueError, match="must"):
        linear.linear(
            normal(4, 64), normal(*weight), bias and normal(*bias), None if residual is None else normal(*residual)
        )


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 63), (5, 576), (2, 1000)])
def test_rms_norm_equals_twin(rows: int, width: int, dtype: torch.dtype, unit_offset: bool) -> None:
    x, weight = 0.01 * normal(rows, width, dtype=dtype), normal(width, seed=1, dtype=dtype)
    found = fused.rms_norm(x, weight, 1e-5, unit_offset=unit_offset)
    expected = reference.fused.rms_norm(x, weight, 1e-5, unit_offset=unit_offset)
    rounding = 2 * torch.finfo(dtype).eps  # the sum's order may move a value over one rounding
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_silu_mul_equals_twin(dtype: torch.dtype) -> None:
    gate_up = 4 * normal(3, 2 * 1030, dtype=dtype)
    rounding = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(fused.silu_mul(gate_up), reference.fused.silu_mul(gate_up), atol=1e-6, rtol=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize(("heads", "width"), [((9, 3), 64), ((4, 2), 12), ((2, 2), 80), ((32, 8), 128)], ids=str)
def test_rope_store_equals_twin(heads: tuple[int, int], width: int, normed: bool, dtype: torch.dtype) -> None:
    q_heads, kv_heads = heads
    rows, slots = 3, torch.tensor([9, 2, 14], device=DEVICE)
    qkv = normal(rows, (q_heads + 2 * kv_heads) * width, dtype=dtype)
    angle = normal(rows, width // 2, seed=1).repeat(1, 2)
    norms = [normal(width, seed=seed, dtype=dtype) if normed else None for seed in (2, 3)]
    rounding = 4 * torch.finfo(dtype).eps
    outputs = []
    for module in (fused, reference.fused):
        planes = [torch.full((4, 4, kv_heads, width), -7.0, device=DEVICE, dtype=dtype) for _ in range(2)]
        q = module.rope_store(qkv, angle.cos().to(dtype), angle.sin().to(dtype), *norms, 1e-6, *planes, slots)
        outputs.append([q, *planes])
    assert outputs[0][0].shape == (rows, q_heads, width)
    for found, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(found, expected, atol=rounding, rtol=rounding)
    assert torch.equal(outputs[0][2], outputs[1][2]), "values are copied"
    assert int((outputs[0][1] == -7).all(-1).all(-1).sum()) == 13
