"""Parity checks: packed requests on our cache give what each gives alone in the library's attention, and a layer whose
code was replaced gives what it gave before.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .batch import PackedBatch
from .planes import slots_of
from .probe import TargetError

LENGTHS = (7, 9)
CUTS = (5, 6)
BLOCK_SIZE = 4
BLOCK_TABLES = ((3, 1), (5, 2, 4))
NUM_BLOCKS = 6
NUM_DRAFT_TOKENS = 3
"""Recurrent layers compute the first chunks as pieces of a prompt, the second like drafts, one by one."""


def packed_batch(
    token_ids: Sequence[Sequence[int]],
    starts: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
    state_rows: Sequence[int] | None = None,
) -> PackedBatch:
    """A batch in which piece b continues request b at position `starts[b]`; the logits of every row are asked for.

    Recurrent states are those of row b, or of `state_rows[b]`.
    """
    lengths = [len(piece) for piece in token_ids]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    positions = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    slots = [slots_of(table, p, block_size) for table, p in zip(block_tables, positions, strict=True)]
    widest = max(map(len, block_tables))
    tables = [[*table, *[0] * (widest - len(table))] for table in block_tables]
    return PackedBatch(
        token_ids=torch.tensor([token for piece in token_ids for token in piece], device=device),
        positions=torch.cat(positions).to(device),
        slot_mapping=torch.cat(slots).to(device),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        logits_rows=torch.arange(sum(lengths), device=device),
        max_query_len=max(lengths),
        max_seq_len=max(ends),
        state_rows=torch.tensor(range(len(lengths)) if state_rows is None else state_rows, device=device),
    )


def check_parity(
    name: str,
    run: Callable[[PackedBatch], Tensor],
    documents: Sequence[Tensor],
    alone: Sequence[Tensor],
    dtype: torch.dtype,
) -> None:
    """Compares `run` over the documents, in two chunks each, with their lone logits [seq, vocab]; raises TargetError.

    Wide dtypes are held to their worst row. In half precision a router may pick another expert over one rounding, so
    there the median row of each document counts; a leak between documents moves nearly all of them.
    """
    device, ids = documents[0].device, [document.tolist() for document in documents]
    steps = [
        ([d[:cut] for d, cut in zip(ids, CUTS, strict=True)], [0] * len(ids)),
        ([d[cut:] for d, cut in zip(ids, CUTS, strict=True)], list(CUTS)),
    ]
    rows: list[list[Tensor]] = [[] for _ in ids]
    for tokens, starts in steps:
        logits = run(packed_batch(tokens, starts, BLOCK_TABLES, BLOCK_SIZE, device))
        for parts, part in zip(rows, logits.split([len(piece) for piece in tokens]), strict=True):
            parts.append(part)
    half = dtype.itemsize < 4
    bound = 0.1 if half else 1e-3
    for parts, expected in zip(rows, alone, strict=True):
        errors = (torch.cat(parts) - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
        error = (errors.median() if half else errors.max()).item()
        if not error <= bound:
            raise TargetError(
                f"{name} is refused: packed with another request its logits are off by {error:.2g} relative to a lone "
                f"forward, expected at most {bound:g}; a layer does more than it shows, use another target"
            )


class LayerCall(NamedTuple):
    """What one decoder layer was given and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor  # [1, num_tokens, hidden]
    output: Tensor


def far_batch(token_ids: Sequence[Sequence[int]], max_length: int, device: torch.device) -> PackedBatch:
    """Whole documents whose last one stands at the end of the context: scales that grow with the position show."""
    batch = packed_batch(token_ids, [0] * len(token_ids), BLOCK_TABLES, BLOCK_SIZE, device)
    positions, last = batch.positions.clone(), len(token_ids[-1])
    positions[-last:] += max(0, max_length - last)
    return batch._replace(positions=positions)


def record_layers(layers: nn.ModuleList, run: Callable[[], Tensor]) -> list[LayerCall]:
    """The call of each layer during `run()`, with the model's own code."""
    calls: list[LayerCall] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        calls.append(
            LayerCall(args, kwargs, hidden.clone(), output[0] if isinstance(output, tuple) else output.clone())
        )

    handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in layers]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def compare_layers(name: str, layers: nn.ModuleList, calls: Sequence[LayerCall], run: Callable[[], Tensor]) -> None:
    """Gives each layer, during `run()`, the input it was recorded with and compares its output; raises TargetError.

    What a layer adds to its input may be off by the rounding of its steps, the sum by one more. The worst row counts,
    in half precision the median one.
    """
    outputs: list[Any] = []

    def force(index: int) -> Callable[..., Any]:
        return lambda module, args, kwargs: (calls[index].args, calls[index].kwargs)

    handles = [layer.register_forward_pre_hook(force(i), with_kwargs=True) for i, layer in enumerate(layers)]
    handles += [layer.register_forward_hook(lambda module, args, output: outputs.append(output)) for layer in layers]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    eps = torch.finfo(calls[0].output.dtype).eps
    for index, (call, output) in enumerate(zip(calls, outputs, strict=True)):
        added = (call.output - call.hidden).double().norm(dim=-1)
        bound = max(8 * eps, 1e-4) * added + max(eps, 1e-6) * call.output.double().norm(dim=-1)
        excess = (output.double() - call.output.double()).norm(dim=-1) / bound
        worst = (excess.median() if call.output.element_size() < 4 else excess.max()).item()
        if not worst <= 1:
            raise TargetError(
                f"{name} cannot run fused: its layer {index} is off by {worst:.3g} times what rounding explains, so it "
                f"computes something else than layers made of the same parts"
            )
