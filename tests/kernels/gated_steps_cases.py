"""The gated scan in Triton against its twin, compiled on a GPU or interpreted, by `test_triton.py`."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.kernels import gated_steps, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 1, 1, 1), (3, 2, 5, 3), (4, 5, 16, 33), (2, 3, 128, 64), (1, 1, 100, 7)]  # heads, kept, key, value
KINDS = ["delta", "plain", "by key"]


class Case(NamedTuple):
    """Requests of 1, `kept`, too many and fewer rows, a new one among them, with padding rows behind."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
    memory: Tensor
    where: tuple[Tensor, Tensor, Tensor, Tensor]
    most: int


def case_of(heads: int, kept: int, key: int, value: int, kind: str) -> Case:
    generator = torch.Generator().manual_seed(heads + kept)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    counts = torch.tensor([1, kept, kept + 2, max(1, kept - 1), kept])
    starts = torch.tensor([7, 0, 5, 3, 1])
    state_rows = torch.tensor([4, 0, 1, 5, 2])
    first = counts.cumsum(0) - counts
    rows = int(counts.sum()) + 3
    key_heads = heads // 2 if heads % 2 == 0 else heads
    q, k = (F.normalize(draw(rows, key_heads, key), dim=-1) for _ in range(2))
    beta = draw(rows, heads).sigmoid().to(DEVICE) if kind == "delta" else None
    decay = -F.softplus(draw(rows, heads, key) if kind == "by key" else draw(rows, heads))
    inputs = [x.to(DEVICE) for x in (q, k, draw(rows, heads, value), decay)]
    for x in (*inputs, beta):
        if x is not None:
            x[-3:] = math.nan
    memory = draw(7, kept, heads, key, value)
    memory[0] = math.nan  # of the request that begins
    where = tuple(x.to(DEVICE) for x in (state_rows, starts, counts, first))
    return Case((inputs[0], inputs[1], inputs[2], inputs[3], beta), memory.to(DEVICE), where, kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_and_states_equal_the_twins(sizes: tuple[int, int, int, int], kind: str) -> None:
    case = case_of(*sizes, kind)
    found, expected = case.memory.clone(), case.memory.clone()
    out = gated_steps.gated_steps(*case.inputs, found, *case.where, most=case.most)
    twin = reference.gated_steps.gated_steps(*case.inputs, expected, *case.where, most=case.most)
    alone = [slice(a, a + n) for a, n in zip(case.where[3].tolist(), case.where[2].tolist(), strict=True)]
    for i in (0, 1, 3, 4):
        torch.testing.assert_close(out[alone[i]], twin[alone[i]], atol=1e-5, rtol=1e-5)
    # nobody's row, the last, is as may be; that of the request left alone is as it was
    torch.testing.assert_close(found[:-1], expected[:-1], atol=1e-5, rtol=1e-5, equal_nan=True)
    assert torch.equal(found[1], case.memory[1])
    assert torch.equal(found[3], case.memory[3])


def test_long_pieces_leave_their_last_states() -> None:
    """With room for all, every request is computed to its end, in a ring of states shorter than its rows."""
    case = case_of(2, 3, 5, 4, "by key")
    found, expected = case.memory.clone(), case.memory.clone()
    out = gated_steps.gated_steps(*case.inputs, found, *case.where, most=5)
    twin = reference.gated_steps.gated_steps(*case.inputs, expected, *case.where, most=5)
    torch.testing.assert_close(out[:-3], twin[:-3], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[:-1], expected[:-1], atol=1e-5, rtol=1e-5, equal_nan=True)
    assert not torch.equal(found[1], case.memory[1])


def test_a_request_is_the_same_bit_for_bit_alone() -> None:
    case = case_of(4, 4, 24, 40, "delta")
    memory = case.memory.clone()
    together = gated_steps.gated_steps(*case.inputs, memory, *case.where, most=case.most)
    for i in (0, 1, 3, 4):
        mine = [x[i : i + 1] for x in case.where]
        lone = case.memory.clone()
        out = gated_steps.gated_steps(*case.inputs, lone, *mine, most=4)
        rows = slice(int(mine[3]), int(mine[3] + mine[2]))
        assert torch.equal(out[rows], together[rows])
        assert torch.equal(lone[mine[0]].nan_to_num(), memory[mine[0]].nan_to_num())


def test_states_of_another_dtype_are_refused() -> None:
    case = case_of(1, 2, 4, 4, "plain")
    with pytest.raises(ValueError, match="inputs of their torch.float64"):
        gated_steps.gated_steps(*case.inputs, case.memory.double(), *case.where, most=4)
