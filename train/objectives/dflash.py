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
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...heads.base import DraftHead
from ...heads.dflash import BlockRows, DFlashConfig, DFlashHead
from ...heads.target_tensors import TargetTensors
from .. import alignment
from ..attention import AttentionSettings, BlockAttend, choose_backend
from ..batch import TrainBatch
from ..draws import rank_in_documents
from ..losses import LossKind, LossRows, LossSettings, RowLosses, label_probs, soft_linear_loss
from .base import LossOutput
from .rollout import SupervisedRows, soft_labels
from .supervision import SupervisedObjective, Supervision, step_metrics, supervise

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


class DraftLogits(NamedTuple):
    """Draft logits as a product: states times the columns `frozen` and `weight` side by side."""

    states: Tensor  # [num_rows, width]
    weight: Tensor  # [vocab, last columns]; trained where it asks for it
    frozen: Tensor | None  # [vocab, first columns]; None: there are no others

    def whole_weight(self) -> Tensor:
        """Both side by side, [vocab, width]."""
        return self.weight if self.frozen is None else torch.cat([self.frozen, self.weight.to(self.frozen.dtype)], 1)


class ScoredDrafts(NamedTuple):
    """The supervised drafts of a batch once their laws' loss is known."""

    found: SupervisedRows
    states: Tensor  # [num_rows, hidden]; the slots' own
    weights: Tensor  # [num_rows]
    losses: RowLosses


class DFlashObjective(SupervisedObjective):
    """Needs `final_states` (raw, id L) for the soft labels, with `ce` only for metrics, and `document_seeds`."""

    def __init__(self, config: DFlashConfig, settings: DFlashSettings) -> None:
        self.config, self.settings = config, settings

    @property
    def num_terms(self) -> int:
        return self.config.num_drafts

    def __call__(self, head: DraftHead, target: TargetTensors, batch: TrainBatch) -> LossOutput:
        """The loss; metrics per draft k: `loss_k`, `entropy_k`, `alpha_k`, `agree_k`, `accept_k` over the drawn blocks.

        Raises ValueError without `final_states`. A batch without supervised rows gives 0, and zero gradients for every
        trainable parameter.
        """
        supervision = self.supervise(head, batch)
        found = SupervisedRows.of(supervision)
        drafts, rows = found.steps, found.rows
        starts, blocks = rows.unique(return_inverse=True)
        states = self.draft(head, target, batch, starts)[blocks, drafts + self.config.first_draft_slot]
        soft = soft_labels(target, batch, found, states.dtype)
        labels = supervision.labels[drafts, rows]
        logits = self.draft_logits(head, target, batch, found, states)
        denominators = batch.denominators.to(drafts.device)
        if self.settings.slot_weights == "dpace":
            probs = label_probs(logits.states, logits.whole_weight(), labels, self.settings.chunk_elements)
            weights = self._confidence_weights(probs, blocks, drafts, len(starts)) / denominators.sum()
        else:
            decay = torch.exp(-torch.arange(self.num_terms, device=drafts.device) / self.settings.slot_decay)
            weights = (decay / (decay * denominators).sum())[drafts]
        losses = soft_linear_loss(
            LossRows(states=logits.states, weights=weights, terms=drafts, targets=soft.of_row, labels=labels),
            logits.weight,
            target,
            soft.normed,
            None,
            self.settings,
            logits.frozen,
        )
        output = LossOutput(losses.total, step_metrics(supervision, losses, drafts, rows))
        return self.finish(head, batch, ScoredDrafts(found, states, weights, losses), output)

    def draft_logits(
        self, head: DraftHead, target: TargetTensors, batch: TrainBatch, found: SupervisedRows, states: Tensor
    ) -> DraftLogits:
        """The factors of the logits of each supervised draft, whose slot's states are `states` [num_rows, hidden]."""
        return DraftLogits(states, head.output_weight(target), None)

    def finish(self, head: DraftHead, batch: TrainBatch, drafts: ScoredDrafts, output: LossOutput) -> LossOutput:
        """The output with whatever a kindred objective adds."""
        return output

    def draft(self, head: DraftHead, target: TargetTensors, batch: TrainBatch, rows: Tensor) -> Tensor:
        """The logits states [num_blocks, block, hidden] of the blocks behind `rows` [num_blocks] int64, ascending."""
        assert isinstance(head, DFlashHead)
        backend = choose_backend(self.settings.attention, batch.token_ids.device)
        attend = BlockAttend(
            batch.document_ids,
            rows,
            self.config.block_size,
            head.context(batch.aux_states.to(head.dtype), batch.positions, target),
            backend,
            causal=self.config.causal,
            window=self.config.sliding_window or 0,
        )
        ids = head.block_ids(alignment.input_tokens(batch, 0).flatten()[rows], self.config.block_size)
        first = batch.positions.flatten()[rows, None] + 1
        positions = first + torch.arange(self.config.block_size, device=first.device)
        return head(BlockRows(head.embed(ids, target).to(head.dtype), positions), attend)

    def supervise(self, head: DraftHead, batch: TrainBatch) -> Supervision:
        """The grids of all rows, cut to those that are drawn."""
        whole = supervise(head, batch, self.num_terms, self.settings.loss)
        eligible = whole.valid[0].view_as(batch.token_ids)
        drawn = eligible & (rank_in_documents(eligible, batch, ANCHOR_STREAM).ranks < self.settings.anchors)
        return whole.among(drawn.flatten())

    def _confidence_weights(self, probs: Tensor, blocks: Tensor, drafts: Tensor, num_blocks: int) -> Tensor:
        """D-PACE's weights [num_rows] of label probabilities [num_rows]."""
        floor = self.settings.dpace_floor
        reached = torch.ones(num_blocks, self.num_terms, device=probs.device)
        reached[blocks, drafts] = floor + (1 - floor) * probs
        supervised = torch.zeros_like(reached)
        supervised[blocks, drafts] = 1
        chances = reached.cumprod(dim=1) * supervised
        return chances.flip(1).cumsum(dim=1).flip(1)[blocks, drafts]
