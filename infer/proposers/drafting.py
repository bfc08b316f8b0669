"""From draft logits to drafts: how a token is drawn, and how the steps of a chain become one record."""

from typing import Literal

import torch
from torch import Tensor

from ...kernels.dispatch import sample
from ...kernels.records import Stream
from .base import Drafts, DraftStep

DraftSampling = Literal["greedy", "probabilistic"]


def draw(
    logits: Tensor, step: DraftStep, k: int, token_map: Tensor | None, probabilistic: bool
) -> tuple[Tensor, Tensor]:
    """Draft k of each request from logits [batch, draft_vocab]: target ids [batch] int64, and the law they come from.

    The law [batch, draft_vocab] means nothing where drafts are not probabilistic.
    """
    if not probabilistic:
        drafts, law = logits.argmax(-1), logits
    else:
        tempered = logits / torch.where(step.temperature > 0, step.temperature, 1.0)[:, None]
        law = tempered.log_softmax(-1)
        drafts = sample(law, step.temperature, step.seeds, step.seq_lens + k, Stream.DRAFT)
    return (drafts if token_map is None else token_map[drafts]), law


def chain(
    step: DraftStep, tokens: list[Tensor], laws: list[Tensor] | None, lengths: Tensor, token_map: Tensor | None
) -> Drafts:
    """Drafts of the tokens [batch] and laws [batch, draft_vocab] of each step; None: the drafts are point masses."""
    if not tokens:
        return Drafts(step.last_token_ids[:, None][:, :0], lengths, None, token_map)
    stacked = None if laws is None else torch.stack(laws, dim=1)
    return Drafts(torch.stack(tokens, dim=1), lengths, stacked, token_map)
