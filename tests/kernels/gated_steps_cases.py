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


class Case(NamedTuple):
    """Requests of 1, `kept`, too many and fewer rows, a new one among them, with padding rows behind."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
    memory: Tensor
    where: tuple[Tensor, Tensor, Tensor, Tensor]
    longest: int


def case_of(heads: int, kept: int, key: int, value: int, delta: bool) -> Case:
    generator = torch.Generator().manual_seed(heads + kept)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    counts = torch.tensor([1, kept, kept + 2, max(1, kept - 1), kept])
    starts = torch.tensor([7, 0, 5, 3, 1])
    state_rows = torch.tensor([4, 0, 1, 5, 2])
    first = counts.cumsum(0) - counts
    rows = int(counts.sum()) + 3
    q, k = F.normalize(draw(rows, heads, key), dim=-1), F.normalize(draw(rows, heads, key), dim=-1)
    beta = draw(rows, heads).sigmoid().to(DEVICE) if delta else None
    inputs = [x.to(DEVICE) for x in (q, k, draw(rows, heads, value), -F.softplus(draw(rows, heads)))]
    for x in (*inputs, beta):
        if x is not None:
            x[-3:] = math.nan
    memory = draw(7, kept, heads, key, value)
    memory[0] = math.nan  # of the request that begins
    where = tuple(x.to(DEVICE) for x in (state_rows, starts, counts, first))
    return Case((inputs[0], inputs[1], inputs[2], inputs[3], beta), memory.to(DEVICE), where, kept + 2)


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "plain"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_and_states_equal_the_twins(sizes: tuple[int, int, int, int], delta: bool) -> None:
    case = case_of(*sizes, delta)
    found, expected = case.memory.clone(), case.memory.clone()
    out = gated_steps.gated_steps(*case.inputs, found, *case.where, longest=case.longest)
    twin = reference.gated_steps(*case.inputs, expected, *case.where, longest=case.longest)
    alone = [slice(a, a + n) for a, n in zip(case.where[3].tolist(), case.where[2].tolist(), strict=True)]
    for i in (0, 1, 3, 4):
        torch.testing.assert_close(out[alone[i]], twin[alone[i]], atol=1e-5, rtol=1e-5)
    # nobody's row, the last, is as may be; that of the request left alone is as it was
    torch.testing.assert_close(found[:-1], expected[:-1], atol=1e-5, rtol=1e-5, equal_nan=True)
    assert torch.equal(found[1], case.memory[1])
    assert torch.equal(found[3], case.memory[3])


def test_a_request_is_the_same_bit_for_bit_alone() -> None:
    case = case_of(3, 4, 24, 40, True)
    memory = case.memory.clone()
    together = gated_steps.gated_steps(*case.inputs, memory, *case.where, longest=case.longest)
    for i in (0, 1, 3, 4):
        mine = [x[i : i + 1] for x in case.where]
        lone = case.memory.clone()
        out = gated_steps.gated_steps(*case.inputs, lone, *mine, longest=4)
        rows = slice(int(mine[3]), int(mine[3] + mine[2]))
        assert torch.equal(out[rows], together[rows])
        assert torch.equal(lone[mine[0]].nan_to_num(), memory[mine[0]].nan_to_num())


def test_states_of_another_dtype_are_refused() -> None:
    case = case_of(1, 2, 4, 4, False)
    with pytest.raises(ValueError, match="inputs of their torch.float64"):
        gated_steps.gated_steps(*case.inputs, case.memory.double(), *case.where, longest=4)
