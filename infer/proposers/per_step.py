"""Drafting with heads that keep nothing but the target's last state: one pass of rows a draft, no cache.

The drafts of a request start from the normed state of its last final row and the token sampled there.
"""

import torch
from torch import Tensor

from ...heads.base import HeadError
from ...heads.per_step import PerStepHead
from ...heads.target_tensors import TargetTensors
from ..fused_heads import fuse_head
from ..planes import Planes
from .base import Drafts, DraftStep, ObservedRows, Proposer, Released, Requirements
from .drafting import DraftSampling, chain, draw


class PerStepProposer(Proposer):
    """Drafts chains of at most one token a head; greedy drafts are point masses, probabilistic ones carry their law."""

    def __init__(
        self,
        head: PerStepHead,
        target: TargetTensors,
        num_draft_tokens: int,
        draft_sampling: DraftSampling = "greedy",
    ) -> None:
        config = head.config
        if num_draft_tokens > config.num_heads:
            raise HeadError(
                f"this head drafts at most {config.num_heads} tokens a step, one a head, but {num_draft_tokens} were "
                f"asked for; lower --num-draft-tokens or train more with head.num_heads"
            )
        self.head, self.target = head.eval(), target
        fuse_head(head)
        self.num_draft_tokens = num_draft_tokens
        self.probabilistic = draft_sampling == "probabilistic"
        self.token_map = head.draft_to_target()
        self.requirements = Requirements(layer_ids=(config.target.num_layers,), draft_laws=self.probabilistic)
        self._states: Tensor | None = None  # [num_rows, hidden]; the normed last state, by row of the request table

    def bind(self, planes: Planes, num_rows: int) -> None:
        weight = self.head.output_weight(self.target)
        hidden = self.head.config.target.hidden_size
        self._states = torch.zeros(num_rows, hidden, dtype=weight.dtype, device=weight.device)

    def observe(self, rows: ObservedRows) -> None:
        assert rows.states is not None and self._states is not None
        last = rows.states[rows.last_rows, 0].to(self._states.dtype)
        self._states[rows.slots] = self.target.norm(last)

    def propose(self, step: DraftStep) -> Drafts:
        assert self._states is not None
        room = step.room.clamp(max=self.num_draft_tokens)
        states, newest = self._states[step.slots], step.last_token_ids
        tokens, laws = [], []
        # on a GPU the loop must not wait for the room; on a CPU drafts that nobody has room for cost time
        for k in range(self.num_draft_tokens if room.is_cuda else int(room.max())):
            logits_states, states = self.head(states, newest, k)
            newest, law = self._draw(self.head.logits(logits_states, self.target, k), step, k)
            tokens.append(newest)
            laws.append(law)
        return chain(step, tokens, laws, room, self.token_map, self.probabilistic)

    def release(self, request: Released) -> None:
        """Nothing is kept by request: a table row is written again before it is read for another one."""

    def _draw(self, logits: Tensor, step: DraftStep, k: int) -> tuple[Tensor, Tensor]:
        return draw(logits, step, k, self.num_draft_tokens, self.token_map, self.probabilistic)
