"""How likely each draft is to survive verification, learned as the engine runs, and which drafts are verified for it.

Everything here runs on the device with fixed shapes and reads nothing on the host.

Whether slot j of a request is verified may use only what was known before the draft token at j was drawn: a choice that
looks at the token keeps the tokens it likes and so bends the output's law. `select` keeps to that: survival at j is a
product over positions up to j of what the draft law said *before* each draw, it never rises with j, and a slot's rank
therefore depends on its own request through positions up to j alone. Seen over the batch, the best slots are those that
a reader would verify one by one, always the likeliest next, knowing only what it has verified.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

UNKNOWN_CONFIDENCE = 0.7
"""Stands for the draft law's top probability where a proposer does not tell it: position alone then decides."""

UNKNOWN_LOG_ODDS = math.log(UNKNOWN_CONFIDENCE / (1 - UNKNOWN_CONFIDENCE))

MEMORY = 1000.0  # drafts a position remembers
PRIOR_STRENGTH = (1.0, 4.0)  # of bias and slope, as information; one draft adds at most a quarter


class SurvivalEstimator:
    """A logistic model a position: log-odds of acceptance, all earlier drafts accepted = bias + slope * log-odds of the
    draft law's top probability.

    Fitted online by an information filter: each draft adds its linearised likelihood, older ones fade. A position with
    little of its own believes the position before it; the first starts by believing the confidence as it is.
    """

    def __init__(self, num_draft_tokens: int, device: torch.device, memory: float = MEMORY) -> None:
        self.memory = memory
        self.coefficients = torch.tensor([[0.0, 1.0]], device=device).repeat(num_draft_tokens, 1)  # [k, 2]
        self.information = torch.zeros(num_draft_tokens, 2, 2, device=device)
        self.evidence = torch.zeros(num_draft_tokens, 2, device=device)
        self._first = self.coefficients[:1].clone()
        self._strength = torch.tensor(PRIOR_STRENGTH, device=device)

    def acceptance(self, log_odds: Tensor) -> Tensor:
        """Probability [batch, k] float32 of each draft's acceptance once all before it were accepted."""
        return torch.sigmoid(self.coefficients[:, 0] + self.coefficients[:, 1] * log_odds)

    def survival(self, log_odds: Tensor, num_drafts: Tensor) -> Tensor:
        """Probability [batch, k] float32 that each draft and all before it are accepted; -1 beyond num_drafts [batch].

        log_odds [batch, k] float32 as from `log_odds_of`. It never rises with the position.
        """
        # a parallel product may round a later entry above an earlier one
        survival = self.acceptance(log_odds).cumprod(dim=1).cummin(dim=1).values
        position = torch.arange(log_odds.shape[1], device=log_odds.device)
        return torch.where(position < num_drafts[:, None], survival, -1.0)

    def observe(self, log_odds: Tensor, num_verified: Tensor, num_emitted: Tensor) -> None:
        """Learns from one verification: request b verified num_verified[b] drafts and emitted num_emitted[b] tokens.

        A request that emitted nothing failed and teaches nothing; one without drafts, padding included, neither.
        """
        position = torch.arange(log_odds.shape[1], device=log_odds.device)
        accepted = num_emitted[:, None].long() - 1
        reached = ((position < num_verified[:, None]) & (position <= accepted)).float()
        probs = self.acceptance(log_odds)
        features = torch.stack([torch.ones_like(log_odds), log_odds], dim=2)  # [batch, k, 2]
        weight = reached * probs * (1 - probs)
        response = reached * ((position < accepted).float() - probs) + weight * (features * self.coefficients).sum(2)
        keep = (reached.sum(0) / -self.memory).exp()
        weighted = weight[:, :, None] * features
        self.information.mul_(keep[:, None, None]).add_((weighted[..., None] * features[:, :, None]).sum(0))
        self.evidence.mul_(keep[:, None]).add_((response[:, :, None] * features).sum(0))
        self._solve()

    def _solve(self) -> None:
        centre = torch.cat([self._first, self.coefficients[:-1]])
        right = self.evidence + self._strength * centre
        a = self.information[:, 0, 0] + self._strength[0]
        b = self.information[:, 0, 1]
        d = self.information[:, 1, 1] + self._strength[1]
        bias, slope = d * right[:, 0] - b * right[:, 1], a * right[:, 1] - b * right[:, 0]
        solved = torch.stack([bias, slope], dim=1) / (a * d - b * b)[:, None]
        # a falling slope would prefer the drafts the head doubts; it can only be noise
        self.coefficients[:, 0] = solved[:, 0].clamp(-8, 8)
        self.coefficients[:, 1] = solved[:, 1].clamp(0, 4)


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


def expected_accepted(survival: Tensor, num_requests: Tensor, widths: Sequence[int]) -> Tensor:
    """Accepted drafts a request [len(widths)] float32 to expect when `width - 1` slots a request are verified.

    survival [batch, k], negative where there is no draft; num_requests [] int64, padding not counted.
    """
    ranked = survival.clamp(min=0).flatten().sort(descending=True).values
    total = torch.nn.functional.pad(ranked.cumsum(0), (1, 0))
    requests = num_requests.clamp(min=1)
    slots = torch.stack([requests * (width - 1) for width in widths])
    return total[slots.clamp(max=ranked.shape[0])] / requests
