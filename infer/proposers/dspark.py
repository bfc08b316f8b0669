"""DSpark drafting: DFlash's block, then a walk from left to right over it, each slot biased by the token before."""

import torch
from torch import Tensor

from ...heads.dspark import DSparkHead
from .base import DraftStep
from .dflash import BlockDrafts, DFlashProposer
from .drafting import top_prob
from .lattice import Path, Previous, law_over_vocabulary, top_candidates, walk


class DSparkProposer(DFlashProposer):
    """A draft's confidence is the head's own, where it has one."""

    head: DSparkHead

    def _draft(self, states: Tensor, step: DraftStep) -> BlockDrafts:
        config = self.head.config
        lattice = top_candidates(self.head.logits(states, self.target), config.num_candidates)

        def score(slot: int, previous: Previous) -> Tensor:
            candidates = None if lattice.token_ids is None else lattice.token_ids[:, slot]
            return self.head.pair_bias(previous.token_ids, candidates)

        path = walk(lattice, score, step, self.num_draft_tokens, self.probabilistic)
        laws = law_over_vocabulary(lattice, path.laws, config.vocab_size) if self.probabilistic else None
        return BlockDrafts(path.token_ids, laws, self._confidence(states, path) if step.wants_confidence else None)

    def _confidence(self, states: Tensor, path: Path) -> Tensor:
        if not self.head.config.confidence_head:
            return top_prob(path.laws)
        return torch.sigmoid(self.head.confidence(states, path.previous))
