"""DFlash (arXiv 2602.06036): blocks behind randomly drawn rows, all of a block's slots trained in one forward.

The row t of a block is the last one before its anchor x_{t+1}: the context of the block is what the target had computed
when it sampled the anchor. Draft k of the block stands for x_{t+2+k}, and counts while every token from the anchor to
it is supervised. With w_k = exp(-k / slot_decay):

    L = sum over drafts of w_k * loss(t, k) / sum_k w_k * denominators[k]

D-PACE (arXiv 2605.18810) weighs by the drafter's own confidence instead, taken without gradient: with s_k = a +
(1 - a) q_k(label) and c_k = s_0 ... s_k, w_k is the sum of c_j over the block's supervised j >= k. These weights are
known after the forward only, so the sum is divided by the number of drafts.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...heads.dflash import BlockRows, DFlashConfig, DFlashHead
from ...heads.target_tensors import TargetTensors
from .. import alignment
from ..attention import AttentionSettings, BlockAttend, choose_backend
from ..batch import TrainBatch
from ..draws import rank_in_documents
from ..losses import LossKind, LossRows, LossSettings, label_probs, soft_linear_loss
from .base import LossOutput, Objective
from .supervision import Supervision, step_metrics, supervise

ANCHOR_STREAM = 103


@dataclass(frozen=True, kw_only=True)
class DFlashSettings(LossSettings, AttentionSettings):
    """A recipe's `objective` section."""

    loss: LossKind = "ce"
    anchors: int = 512
    """Blocks of a document at most, drawn anew every epoch."""
    slot_weights: Literal["decay", "dpace"] = "decay"
    slot_decay: float = 7.0
    dpace_floor: float = 0.5

    def __post_init__(self) -> None:
        LossSettings.__post_init__(self)
        AttentionSettings.__post_init__(self)
        if self.anchors < 1:
            raise ValueError(f"objective.anchors must be 1 or more, found {self.anchors}")
        if self.slot_weights not in ("decay", "dpace"):
            raise ValueError(f"objective.slot_weights must be decay or dpace, found {self.slot_weights!r}")
        if not self.slot_decay > 0:
            raise ValueError(f"objective.slot_decay must be above 0, found {self.slot_decay}")
        if not 0 <= self.dpace_floor <= 1:
            raise ValueError(f"objective.dpace_floor must lie between 0 and 1, found {self.dpace_floor}")


class DFlashObjective(Objective):
    """Needs `final_states` (raw, id L) for the soft labels, with `ce` only for metrics, and `document_seeds`."""

    def __init__(self, config: DFlashConfig, settings: DFlashSettings) -> None:
        self.config, self.settings = config, settings

    @property
    def num_terms(self) -> int:
        return self.config.num_drafts

    def count(self, head: DFlashHead, batch: TrainBatch) -> Tensor:
        return self._supervise(head, batch).weights.sum(dim=1, dtype=torch.float32)

    def __call__(self, head: DFlashHead, target: TargetTensors, batch: TrainBatch) -> LossOutput:
        """The loss; metrics per draft k: `loss_k`, `entropy_k`, `alpha_k`, `agree_k`, `accept_k` over the drawn blocks.

        Raises ValueError without `final_states`. A batch without supervised rows gives 0, and zero gradients for every
        trainable parameter.
        """
        if batch.final_states is None:
            raise ValueError(
                "dflash needs the target's last state for its soft labels, found shards without id L; extract again"
            )
        supervision = self._supervise(head, batch)
        drafts, rows = supervision.weights.nonzero(as_tuple=True)
        starts, blocks = rows.unique(return_inverse=True)
        states = self.draft(head, target, batch, starts)[blocks, drafts + self.config.first_draft_slot]
        label_rows, targets = alignment.soft_label_rows(rows, drafts).unique(return_inverse=True)
        labels = supervision.labels[drafts, rows]
        weight = head.output_weight(target)
        denominators = batch.denominators.to(drafts.device)
        if self.settings.slot_weights == "dpace":
            probs = label_probs(states, weight, labels, self.settings.chunk_elements)
            weights = self._confidence_weights(probs, blocks, drafts, len(starts)) / denominators.sum()
        else:
            decay = torch.exp(-torch.arange(self.num_terms, device=drafts.device) / self.settings.slot_decay)
            weights = (decay / (decay * denominators).sum())[drafts]
        losses = soft_linear_loss(
            LossRows(states=states, weights=weights, terms=drafts, targets=targets, labels=labels),
            weight,
            target,
            target.norm(batch.final_states.flatten(0, 1)[label_rows].to(states.dtype)),
            None,
            self.settings,
        )
        return LossOutput(losses.total, step_metrics(supervision, losses, drafts, rows))

    def draft(self, head: DFlashHead, target: TargetTensors, batch: TrainBatch, rows: Tensor) -> Tensor:
        """The logits states [num_blocks, block, hidden] of the blocks behind `rows` [num_blocks] int64, ascending."""
        backend = choose_backend(self.settings.attention, batch.token_ids.device)
        attend = BlockAttend(
            batch.document_ids,
            rows,
            self.config.block_size,
            head.context(batch.aux_states.to(head.dtype), batch.positions),
            backend,
            causal=self.config.causal,
            window=self.config.sliding_window or 0,
        )
        ids = head.block_ids(alignment.input_tokens(batch, 0).flatten()[rows], self.config.block_size)
        first = batch.positions.flatten()[rows, None] + 1
        positions = first + torch.arange(self.config.block_size, device=first.device)
        return head(BlockRows(head.embed(ids, target).to(head.dtype), positions), attend)

    def _supervise(self, head: DFlashHead, batch: TrainBatch) -> Supervision:
        """The grids of all rows, cut to those that are drawn."""
        whole = supervise(head, batch, self.num_terms, self.settings.loss)
        eligible = whole.valid[0].view_as(batch.token_ids)
        drawn = eligible & (rank_in_documents(eligible, batch, ANCHOR_STREAM).ranks < self.settings.anchors)
        return whole._replace(valid=whole.valid & drawn.flatten(), weights=whole.weights & drawn.flatten())

    def _confidence_weights(self, probs: Tensor, blocks: Tensor, drafts: Tensor, num_blocks: int) -> Tensor:
        """D-PACE's weights [num_rows] of label probabilities [num_rows]."""
        floor = self.settings.dpace_floor
        reached = torch.ones(num_blocks, self.num_terms, device=probs.device)
        reached[blocks, drafts] = floor + (1 - floor) * probs
        supervised = torch.zeros_like(reached)
        supervised[blocks, drafts] = 1
        chances = reached.cumprod(dim=1) * supervised
        return chances.flip(1).cumsum(dim=1).flip(1)[blocks, drafts]
