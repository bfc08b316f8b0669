"""Drafting on the host, between two steps on the device.

What the host needs is copied while the device still runs what it has; from then on the device waits, so little is done
before the next step is launched: the texts grow, the proposer drafts, and one small copy and one recorded call put the
drafts where the next step finds them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .flight import Flight, Undrafted
from .graphs import call
from .proposers.base import Drafts
from .proposers.host import HostDrafts, HostProposer, InnerDrafts
from .stages import Stages
from .texts import HostTexts


class HostDrafting:
    """Tells a proposer on the host what steps emitted, and has its drafts taken."""

    def __init__(self, proposer: HostProposer, stages: Stages) -> None:
        self.proposer, self.stages, self.table = proposer, stages, stages.table
        self.texts = HostTexts(*self.table.tokens.shape)
        self._kept: dict[tuple[str, int | str], Tensor] = {}  # what recorded calls read, by name and their key
        self._nameable: np.ndarray | None = None
        drafter = stages.drafter
        self.inner_on_host = drafter is not None and drafter.requirements.on_host  # and so drafts when the host does

    def draft(self, flight: Flight, step: Undrafted) -> Tensor | None:
        """Takes in what a step emitted and, where it drafts, has its requests draft; `Stages.take`.

        Waits for the step.
        """
        alive = flight.alive
        ids = [request.request_id for request in alive.values()]
        rows = np.array([request.slot for request in alive.values()], dtype=np.int64)
        places = step.places_of(alive)
        told, brief = flight.read()  # from here on the device waits
        told = told[places]
        self.texts.append(rows, told[:, :-3], told[:, -3])
        flight.waiting = {}
        if not (flight.drafts and alive):
            return None
        if self.inner_on_host:
            step, brief = self._briefed(step, ids, places)
            places = np.arange(len(ids))
        else:
            brief = brief[places]
        room, inner = brief[:, 0], self._inner(step.inner, brief)
        made = self.proposer.propose(
            self.texts.step(ids, rows, room, wants_confidence=self.stages.estimator is not None, inner=inner)
        )
        lengths = self._fitting(made, room)
        promised = self.take(step, made._replace(lengths=lengths), places)
        flight.waiting = dict(zip(ids, lengths.tolist(), strict=True))
        return promised

    def _briefed(self, step: Undrafted, ids: list[int], places: np.ndarray) -> tuple[Undrafted, np.ndarray]:
        """What the one within drafts now, which goes by the ids and is not recorded: a step of these requests alone."""
        drafting = step.drafting[self.table.upload(places)]
        inner, brief = self.stages.brief(drafting, ids)
        return step._replace(graphs=None, drafting=drafting, inner=inner), brief.cpu().numpy()

    def take(self, step: Undrafted, drafts: HostDrafts, places: Sequence[int] | np.ndarray) -> Tensor | None:
        """Puts drafts of the requests at `places` where the next step finds them; `Stages.take`."""
        k, width = self.stages.num_draft_tokens, drafts.token_ids.shape[1]
        chosen = np.zeros((len(step.drafting), k + 2), dtype=np.int64)
        chosen[places, :width], chosen[places, k] = drafts.token_ids, drafts.lengths
        if drafts.of_inner is not None:
            chosen[places, k + 1] = drafts.of_inner
        confidence = None
        if self.stages.estimator is not None:
            confidence = np.full((len(step.drafting), k), np.nan, dtype=np.float32)  # not told
            if drafts.confidence is not None:
                confidence[places, :width] = drafts.confidence
        kept = self._keep("chosen", step, chosen)
        sure = None if confidence is None else self._keep("confidence", step, confidence)
        return call(step.graphs, ("take", step.key), self.stages.take, step.drafting, kept, sure, step.inner)

    def _keep(self, name: str, step: Undrafted, values: np.ndarray) -> Tensor:
        """The values on the device, where a recorded call reads them."""
        if step.graphs is None:
            return self.table.upload(values, values.dtype)
        key = name, step.key
        if key not in self._kept:
            self._kept[key] = self.table.upload(values, values.dtype)
        return self._kept[key].copy_(torch.from_numpy(values), non_blocking=True)

    def _inner(self, drafts: Drafts | None, brief: np.ndarray) -> InnerDrafts | None:
        if drafts is None:
            return None
        count, drawn = drafts.token_ids.shape[1], drafts.log_probs is not None
        columns = self.stages.columns_of(drafts.token_map) if drawn else None
        if self._nameable is None and columns is not None:
            self._nameable = columns.cpu().numpy() >= 0
        sure = np.ascontiguousarray(brief[:, 2 + count :]).view(np.float64)
        return InnerDrafts(brief[:, 2 : 2 + count], brief[:, 1], sure, drawn, self._nameable)

    def _fitting(self, drafts: HostDrafts, room: np.ndarray) -> np.ndarray:
        """How many drafts of each request [n] the next step will find: what `Stages.take` leaves of them."""
        wrong = drafts.token_ids.view(np.uint64) >= self.stages.target.vocab_size  # those below 0 too
        lengths = np.minimum(drafts.lengths, room)
        return np.where(wrong.any(axis=1), np.minimum(lengths, wrong.argmax(axis=1)), lengths)
