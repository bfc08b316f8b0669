"""Drafting with heads that keep nothing but the target's last state: one pass of rows a draft, no cache."""

from torch import Tensor

from ...heads.base import HeadError
from ...heads.per_step import PerStepHead
from ...heads.target_tensors import TargetTensors
from .base import DraftStep
from .drafting import DraftSampling
from .last_state import LastStateProposer


class PerStepProposer(LastStateProposer):
    """Drafts chains of at most one token a head."""

    head: PerStepHead

    def __init__(
        self,
        head: PerStepHead,
        target: TargetTensors,
        num_draft_tokens: int,
        draft_sampling: DraftSampling = "greedy",
    ) -> None:
        if num_draft_tokens > head.config.num_heads:
            raise HeadError(
                f"this head drafts at most {head.config.num_heads} tokens a step, one a head, but {num_draft_tokens} "
                f"were asked for; lower --num-draft-tokens or train more with head.num_heads"
            )
        super().__init__(head, target, num_draft_tokens, draft_sampling)

    def _advance(self, step: DraftStep, states: Tensor, newest: Tensor, k: int) -> tuple[Tensor, Tensor]:
        logits_states, states = self.head(states, newest, k)
        return self.head.logits(logits_states, self.target, k), states
