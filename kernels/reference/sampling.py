"""How tokens are drawn: the twin of `sampling.py`, and what verification draws its last token with."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..noise import BLOCK_COUNTERS, gumbels, noise_keys
from ..records import VOCAB_BLOCK, Stream


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    stream: Stream,
    *,
    fp64_gumbel: bool = False,
) -> Tensor:
    """One token id [batch] int64 per row of logits [batch, vocab] that the temperature was applied to already.

    Rows of temperature [batch] 0 give their argmax, others a draw keyed by (seed, position, stream). A row of NaN
    gives some id in range.
    """
    token_ids = logits.argmax(dim=-1)
    rows = (temperature > 0).nonzero()[:, 0]
    if rows.numel():
        scores = logits[rows].float()
        keys = noise_keys(seeds[rows], positions[rows], stream)
        token_ids[rows] = draw(scores, block_stats(scores).log_masses(), keys, fp64_gumbel)
    return token_ids


def argmax(logits: Tensor) -> Tensor:
    """The lowest id of the maximum [batch] int64 of each row of logits [batch, vocab]."""
    return logits.argmax(dim=-1)


class BlockStats(NamedTuple):
    """Per row and block of the vocabulary, each [num_rows, num_blocks] float32."""

    maximum: Tensor
    total: Tensor  # sum of exp(logit - maximum)

    def log_masses(self) -> Tensor:
        return self.maximum + self.total.log()


def block_stats(logits: Tensor) -> BlockStats:
    maxima, totals = [], []
    # block by block: torch splits the sum of one long row over threads, but not that of several rows, and a request's
    # tokens must not depend on its batch mates
    for block in logits.split(VOCAB_BLOCK, dim=-1):
        maximum = block.amax(dim=-1)
        base = maximum.masked_fill(maximum == -torch.inf, 0)
        maxima.append(maximum)
        totals.append((block - base[:, None]).exp_().sum(dim=-1))
    return BlockStats(torch.stack(maxima, dim=-1), torch.stack(totals, dim=-1))


def draw(scores: Tensor, log_masses: Tensor, keys: Tensor, fp64: bool) -> Tensor:
    """A block by its mass [batch, num_blocks], then an id by its score [batch, vocab] in the block."""
    dtype = torch.float64 if fp64 else torch.float32
    counters = BLOCK_COUNTERS + torch.arange(log_masses.shape[1], device=keys.device)
    block = gumbels(keys[:, None], counters, dtype).add_(log_masses).argmax(dim=-1)
    last = scores.shape[1] - 1
    tokens = block[:, None] * VOCAB_BLOCK + torch.arange(min(VOCAB_BLOCK, last + 1), device=keys.device)
    race = gumbels(keys[:, None], tokens, dtype).add_(scores.gather(1, tokens.clamp(max=last)))
    best = race.masked_fill_(tokens > last, -torch.inf).argmax(dim=-1, keepdim=True)
    return tokens.gather(1, best)[:, 0].clamp_(max=last)
