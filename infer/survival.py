"""How likely each draft is to survive verification, learned as the engine runs, and which drafts are verified for it.

Everything here runs on the device with fixed shapes and reads nothing on the host.

Whether slot j of a request is verified may use only what was known before the draft token at j was drawn: a choice that
looks at the token keeps the tokens it likes and so bends the output's law. `select` keeps to that: survival at j is a
product over positions up to j of what the draft law said *before* each draw, it never rises with j, and a slot's rank
therefore depends on its own request through positions up to j alone. Seen over the batch, the best slots are those that
a reader would verify one by one, always the likeliest next, knowing only what it has verified.
"""

import math

import torch
from torch import Tensor

from ..kernels import dispatch
from ..kernels.records import SurvivalModel

UNKNOWN_CONFIDENCE = 0.7
"""Stands for the draft law's top probability where a proposer does not tell it: position alone then decides."""

UNKNOWN_LOG_ODDS = math.log(UNKNOWN_CONFIDENCE / (1 - UNKNOWN_CONFIDENCE))

MEMORY = 1000.0  # drafts a position remembers


class SurvivalEstimator:
    """Learns, per position and online, how the draft law's top probability tells acceptance (`SurvivalModel`)."""

    def __init__(self, num_draft_tokens: int, device: torch.device, memory: float = MEMORY) -> None:
        self.memory = memory
        self.model = SurvivalModel(
            coefficients=torch.tensor([[0.0, 1.0]], device=device).repeat(num_draft_tokens, 1),
            information=torch.zeros(num_draft_tokens, 3, device=device),
            evidence=torch.zeros(num_draft_tokens, 2, device=device),
        )

    def survival(self, log_odds: Tensor, num_drafts: Tensor) -> Tensor:
        """Probability [batch, k] float32 that each draft and all before it are accepted; -1 beyond num_drafts [batch].

        log_odds [batch, k] float32 as from `log_odds_of`. It never rises with the position.
        """
        return dispatch.draft_survival(self.model, log_odds, num_drafts)

    def observe(self, log_odds: Tensor, num_verified: Tensor, num_emitted: Tensor) -> None:
        """Learns from one verification: request b verified num_verified[b] drafts and emitted num_emitted[b] tokens.

        A request that emitted nothing failed and teaches nothing; one without drafts, padding included, neither.
        """
        dispatch.learn_survival(self.model, log_odds, num_verified, num_emitted, self.memory)


def log_odds_of(confidence: Tensor) -> Tensor:
    """Log-odds float32 of probabilities, kept finite; what is not a number counts as unknown."""
    known = confidence.float().nan_to_num(nan=UNKNOWN_CONFIDENCE)
    return torch.logit(known, eps=1e-3)


def select(survival: Tensor, num_slots: int) -> Tensor:
    """How many drafts [batch] int64 of each request are verified when `num_slots` are, over the whole batch.

    survival [batch, k], negative where there is no draft. The likeliest survivors are taken, ties by position, then by
    request; fewer than `num_slots` only where there are fewer drafts.
    """
    batch = survival.shape[0]
    ranked, order = survival.t().reshape(-1).sort(descending=True, stable=True)
    taken = (ranked[:num_slots] >= 0).long()
    return torch.zeros(batch, dtype=torch.int64, device=survival.device).scatter_add(
        0, order[:num_slots] % batch, taken
    )


def expected_accepted(survival: Tensor, counted: Tensor, widths: Tensor) -> Tensor:
    """Accepted drafts a request [n] float32 to expect when `width - 1` slots a request are verified.

    survival [batch, k], negative where there is no draft; counted [batch] bool: requests that count, which padding and
    those that end soon should not; widths [n] int64. Where none count, all are NaN.
    """
    ranked = torch.where(counted[:, None], survival.clamp(min=0), 0.0).flatten().sort(descending=True).values
    total = torch.nn.functional.pad(ranked.cumsum(0), (1, 0))
    requests = counted.sum()
    return total[(requests * (widths - 1)).clamp(max=ranked.shape[0])] / requests
