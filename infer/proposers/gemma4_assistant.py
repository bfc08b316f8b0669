"""Drafting with a Gemma 4 assistant: its queries read the target's own planes, and nothing is written.

All drafts of a step see the rows before the newest token, from the position of that token, as in transformers; vLLM
stands one position before. A sliding layer sees the last rows of its window among them.
"""

from torch import Tensor

from ...heads.base import DraftRows
from ...heads.gemma4_assistant import SLIDING, Gemma4Assistant
from ..attention import attend
from ..planes import Plane, Planes, target_plane
from .base import DraftStep, ProposerError
from .drafting import ChainRows, drafts_within
from .last_state import LastStateProposer


class Gemma4AssistantProposer(LastStateProposer):
    """Drafts chains up to the positions the assistant was made for."""

    head: Gemma4Assistant

    _planes: list[Plane]  # of the target, one a layer of the assistant
    _block_size: int

    def bind(self, planes: Planes, num_rows: int) -> None:
        super().bind(planes, num_rows)
        config = self.head.config
        self._planes = [planes[target_plane(layer.target_layer)] for layer in config.layers]
        self._block_size = planes.block_size
        for layer, plane in zip(config.layers, self._planes, strict=True):
            heads, width = plane.k.shape[2:]
            if width != layer.head_dim or config.num_heads % heads:
                raise ProposerError(
                    f"the assistant has {config.num_heads} heads of width {layer.head_dim} for the keys of target "
                    f"layer {layer.target_layer}, found {heads} of width {width} there; give the target it was made for"
                )

    def _room(self, step: DraftStep) -> Tensor:
        return drafts_within(step, self.head.config.max_position_embeddings, self.num_draft_tokens)

    def _advance(self, step: DraftStep, states: Tensor, newest: Tensor, k: int) -> tuple[Tensor, Tensor]:
        # the newest token has no row yet
        batch = ChainRows(step, step.seq_lens - 2, step.room, 1, self._block_size).at(0, newest)
        layers = self.head.config.layers

        def read(index: int, q: Tensor) -> Tensor:
            window = self.head.config.sliding_window if layers[index].kind == SLIDING else 0
            return attend(self._planes[index], batch, q, scale=1.0, window=window)

        rows = DraftRows(self.head.embed(newest, self.target).to(states.dtype), states, step.seq_lens - 1)
        output = self.head(rows, read)
        return self.head.logits(output.logits_states, self.target), output.feedback
