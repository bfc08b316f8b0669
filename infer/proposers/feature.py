"""Drafting from the target's states: what heads share that run decoder layers over the target's rows as they come.

Row t pairs the state at t with the token at t + 1 and stands at position t, as in training. Draft rows write past the
observed rows into slots that the next observation overwrites, so a rejected draft leaves nothing behind.
"""

from abc import abstractmethod
from typing import NamedTuple

from torch import Tensor

from ...heads.base import DraftOutput, DraftRows
from ...heads.decoder import DecoderHead
from ...heads.target_tensors import TargetTensors
from ..batch import PackedBatch
from ..planes import Planes
from .base import Drafts, DraftStep, ObservedRows, Requirements
from .drafting import ChainRows, DraftSampling, drafts_within
from .layered import LayeredProposer


class FeatureProposer(LayeredProposer):
    """Drafts chains up to the positions the head was made for."""

    def __init__(
        self, head: DecoderHead, target: TargetTensors, num_draft_tokens: int, draft_sampling: DraftSampling = "greedy"
    ) -> None:
        super().__init__(head, target, num_draft_tokens, draft_sampling)
        self.requirements = Requirements(
            layer_ids=head.config.layer_ids,
            planes=self.layer_planes,
            next_token=1,
            lookahead=max(num_draft_tokens - 2, 0),
            draft_laws=self.probabilistic,
        )

    def propose(self, step: DraftStep) -> Drafts:
        room = drafts_within(step, self.head.config.max_position_embeddings + 1, self.num_draft_tokens)
        # on a GPU drafting must not wait for the room; on a CPU drafts that nobody has room for cost time
        tokens, laws = self._draft(step, room, self.num_draft_tokens if room.is_cuda else int(room.max()))
        return self._chain(step, tokens, laws, room)

    @abstractmethod
    def _draft(self, step: DraftStep, room: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """`count` draft tokens [batch] and the laws [batch, draft_vocab] they were drawn from."""

    def _empty_state(self, *shape: int) -> Tensor:
        """A buffer of hidden states [*shape, hidden] in the head's dtype, on its device."""
        return next(self.head.parameters()).new_zeros(*shape, self.head.config.hidden_size)

    def _forward(
        self, embeds: Tensor, states: Tensor, batch: PackedBatch, positions: Tensor | None = None, step: int = 0
    ) -> DraftOutput:
        """Rows stand at `positions` [num_tokens], which are the batch's own unless given."""
        rows = DraftRows(embeds, states, batch.positions if positions is None else positions, step)
        return self.head(rows, self._attend(batch))

    def _draw_all(self, states: Tensor, step: DraftStep) -> tuple[list[Tensor], list[Tensor]]:
        """As `_draft`, of drafts whose logits states [batch, count, hidden] do not depend on each other."""
        drafts, laws = self._draw(self.head.logits(states, self.target), step)
        return list(drafts.unbind(1)), list(laws.unbind(1))


class _Pending(NamedTuple):
    """What the next draft of each request starts from, by row of the request table."""

    logits_states: Tensor  # [num_rows, hidden]
    feedback: Tensor  # [num_rows, hidden]


class AutoregressiveProposer(FeatureProposer):
    """The head runs on the target's rows as they come, then k - 1 times on its own output."""

    def __init__(
        self, head: DecoderHead, target: TargetTensors, num_draft_tokens: int, draft_sampling: DraftSampling = "greedy"
    ) -> None:
        super().__init__(head, target, num_draft_tokens, draft_sampling)
        self._pending: _Pending | None = None

    def bind(self, planes: Planes, num_rows: int) -> None:
        super().bind(planes, num_rows)
        self._pending = _Pending(self._empty_state(num_rows), self._empty_state(num_rows))

    def observe(self, rows: ObservedRows) -> None:
        self._run(rows)

    def _run(self, rows: ObservedRows) -> tuple[Tensor, DraftOutput]:
        """The embeddings of every row and what the head makes of it, each request's last row kept."""
        assert rows.states is not None and self._pending is not None
        embeds = self.head.embed(rows.next_token_ids, self.target)
        states = self.head.combine(rows.states.to(embeds.dtype), self.target)
        output = self._forward(embeds, states, rows.batch)
        self._pending.logits_states[rows.slots] = output.logits_states[rows.last_rows]
        self._pending.feedback[rows.slots] = output.feedback[rows.last_rows]
        return embeds, output

    def _draft(self, step: DraftStep, room: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
        assert self._pending is not None
        output = DraftOutput(*(pending[step.slots] for pending in self._pending))
        rows = ChainRows(step, step.seq_lens - 2, room, count, self.planes.block_size)
        tokens, laws = [], []
        for k in range(count):
            if k:
                embeds = self.head.embed(tokens[-1], self.target)
                output = self._forward(embeds, output.feedback, rows.at(k, tokens[-1]))
            token, law = self._draw(self.head.logits(output.logits_states, self.target), step, k)
            tokens.append(token)
            laws.append(law)
        return tokens, laws
