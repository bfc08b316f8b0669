"""One shard's rows through the engine: hidden states, the target's top tokens, and the checks on both.

Writes nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..heads.target_tensors import TargetTensors
from ..infer.config import EngineConfig
from ..infer.engine import Engine
from ..infer.parity import packed_batch
from ..infer.proposers.extract_hidden_states import ExtractHiddenStatesProposer
from ..infer.sampling import SamplingParams
from ..infer.target import Target
from .plan import ExtractionError, PlannedRow
from .shards import Document

BLOCK_SIZE = 16
MAX_BATCH_SIZE = 256
CHECKED_ROWS = 16
LOGITS_AT_ONCE = 2**26
"""Logits, over rows and vocabulary, held while top tokens are taken."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Root-mean-square difference of rebuilt logits over that of the logits; a norm left out is off by about 1."""


class StateExtractor:
    """Runs rows through one engine that holds nothing between shards."""

    def __init__(self, target: Target, layer_ids: tuple[int, ...], batch_tokens: int, max_length: int) -> None:
        """`layer_ids` must end in id L; rows must be shorter than `max_length`."""
        self.target, self.layer_ids = target, layer_ids
        self.tensors: TargetTensors = target.tensors()
        self._done: dict[int, Document] = {}
        self._rows: dict[int, PlannedRow] = {}
        self._on_document: Callable[[int], None] = _ignore
        proposer = ExtractHiddenStatesProposer(target, layer_ids, self._finish)
        # The size of the cache is a function of the arguments alone: free memory must not change the packing.
        blocks = -(-batch_tokens // BLOCK_SIZE) + -(-max_length // BLOCK_SIZE) + 2 * MAX_BATCH_SIZE + 2
        self.engine = Engine(
            target,
            proposer,
            EngineConfig(
                num_draft_tokens=1,
                num_blocks=blocks,
                block_size=BLOCK_SIZE,
                max_batch_tokens=batch_tokens,
                max_batch_size=MAX_BATCH_SIZE,
                max_length=max_length,
                prefix_cache=False,  # states must not depend on what was extracted before
                eager=True,  # prompts alone: nothing to record
            ),
        )

    def documents(self, rows: Sequence[PlannedRow], on_document: Callable[[int], None] | None = None) -> list[Document]:
        """The documents of one shard, in order; `on_document` hears the tokens of each as it finishes.

        Raises ExtractionError naming the row whose states are not finite or do not give the target's own logits.
        """
        self._on_document = on_document or _ignore
        params = SamplingParams(max_tokens=1, ignore_eos=True, seed=0)
        ids = [self.engine.add_request(row.token_ids.tolist(), params) for row in rows]
        self._rows = dict(zip(ids, rows, strict=True))
        while self.engine.has_unfinished():
            for output in self.engine.step():
                if output.error is not None:
                    raise self._not_finite(self._rows[output.request_id])
        documents = [self._done.pop(i) for i in ids]
        self._check_logits(documents[0], rows[0])
        return documents

    def _finish(self, request_id: int, states: Tensor) -> None:
        row = self._rows[request_id]
        if len(states) < len(row.token_ids):
            return  # it failed, and its output says so
        # to the host at once: a shard's states need not fit on the device
        self._done[request_id] = self._document(row, states)
        self._on_document(len(row.token_ids))

    def _document(self, row: PlannedRow, states: Tensor) -> Document:
        if not torch.isfinite(states).all():
            raise self._not_finite(row)
        mask = torch.from_numpy(row.loss_mask)
        return Document(
            token_ids=torch.from_numpy(row.token_ids),
            loss_mask=mask,
            target_argmax=self._argmax(states[:, -1], mask),
            hidden_states=states.cpu(),
            source_row=row.source_row,
        )

    def _argmax(self, final_states: Tensor, mask: Tensor) -> Tensor:
        argmax = torch.full((len(mask),), -1, dtype=torch.int32)
        rows = mask[1:].nonzero()[:, 0]
        wanted = final_states[rows.to(final_states.device)]
        at_once = max(1, LOGITS_AT_ONCE // self.target.vocab_size)
        tops = [self.tensors.logits(piece).argmax(-1) for piece in wanted.split(at_once)]
        argmax[rows] = torch.cat(tops).to("cpu", torch.int32) if len(rows) else argmax[rows]
        return argmax

    def _check_logits(self, document: Document, row: PlannedRow) -> None:
        """Compares logits rebuilt from stored states with the target's own over the first rows of a document."""
        length = min(CHECKED_ROWS, len(document.token_ids))
        ids, blocks = document.token_ids[:length].tolist(), range(1, 1 + -(-length // BLOCK_SIZE))
        own = self.target.forward(packed_batch([ids], [0], [list(blocks)], BLOCK_SIZE, self.target.device)).logits
        rebuilt = self.tensors.logits(document.hidden_states[:length, -1].to(self.target.device))
        error = ((rebuilt - own).square().mean() / own.square().mean().clamp(min=1e-12)).sqrt().item()
        bound = _TOLERANCE.get(self.target.dtype, 0.1)
        if not error <= bound:
            raise ExtractionError(
                f"{row.source}: logits rebuilt from the stored states must equal the target's own within {bound:g}, "
                f"found a relative difference of {error:.3g}; the target computes its logits in a way that is not "
                f"understood, please report its model type"
            )

    def _not_finite(self, row: PlannedRow) -> ExtractionError:
        return ExtractionError(
            f"{row.source}: hidden states must be finite, found NaN or infinity after {len(row.token_ids)} tokens in "
            f"{str(self.target.dtype).removeprefix('torch.')}; use --dtype float32 or remove the row"
        )


def _ignore(tokens: int) -> None:
    pass


def bytes_per_token(num_layer_ids: int, hidden_size: int, itemsize: int) -> int:
    """What one token takes in a shard: its states, id, mask bit and top token."""
    return num_layer_ids * hidden_size * itemsize + np.dtype(np.int32).itemsize * 2 + 1
