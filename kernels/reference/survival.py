"""What adaptive drafting believes and learns: the twin of `survival.py`."""

import torch
from torch import Tensor

from ..records import SURVIVAL_PRIOR, SurvivalModel


def draft_survival(model: SurvivalModel, log_odds: Tensor, num_drafts: Tensor) -> Tensor:
    """Probability [batch, k] float32 that each draft and all before it are accepted; -1 beyond num_drafts [batch].

    It never rises with the position, and at one position it does not depend on later ones.
    """
    bias, slope = model.coefficients.unbind(1)
    # a product in parallel may round a later entry above an earlier one
    survival = torch.sigmoid(bias + slope * log_odds).cumprod(dim=1).cummin(dim=1).values
    position = torch.arange(log_odds.shape[1], device=log_odds.device)
    return torch.where(position < num_drafts[:, None], survival, -1.0)


def learn_survival(
    model: SurvivalModel, log_odds: Tensor, num_verified: Tensor, num_emitted: Tensor, memory: float
) -> None:
    """Learns in place from a step: request b verified num_verified[b] drafts and emitted num_emitted[b] tokens.

    log_odds [batch, k] float32. Drafts behind the first rejection teach nothing, nor does a request that emitted
    nothing. A position forgets by exp(-1 / memory) a draft.
    """
    position = torch.arange(log_odds.shape[1], device=log_odds.device)
    accepted = num_emitted[:, None].long() - 1
    reached = ((position < num_verified[:, None]) & (position <= accepted)).float()
    bias, slope = model.coefficients.unbind(1)
    logits = bias + slope * log_odds
    probs = logits.sigmoid()
    weight = reached * probs * (1 - probs)
    response = reached * ((position < accepted).float() - probs) + weight * logits
    keep = (-reached.sum(0) / memory).exp()[:, None]
    information = torch.stack([weight, weight * log_odds, weight * log_odds**2], dim=2).sum(0)
    evidence = torch.stack([response, response * log_odds], dim=2).sum(0)
    model.information.mul_(keep).add_(information)
    model.evidence.mul_(keep).add_(evidence)
    strength = model.evidence.new_tensor(SURVIVAL_PRIOR)
    centre = torch.cat([model.evidence.new_tensor([[0.0, 1.0]]), model.coefficients[:-1]])
    right_bias, right_slope = (model.evidence + strength * centre).unbind(1)
    a, b, d = model.information.unbind(1)
    a, d = a + strength[0], d + strength[1]
    solved = torch.stack([d * right_bias - b * right_slope, a * right_slope - b * right_bias], dim=1)
    solved = solved / (a * d - b * b)[:, None]
    # a falling slope would prefer the drafts the head doubts; it can only be noise
    model.coefficients.copy_(torch.stack([solved[:, 0].clamp(-8, 8), solved[:, 1].clamp(0, 4)], dim=1))
