"""How many rows a step verifies and whether it drafts: what earns the most tokens a millisecond.

The policy runs on the host and is always behind the device: it knows what earlier drafts promised, never what the
drafts about to be verified promise. A step's size that followed their confidence would follow tokens already drawn, and
sampled output would leave the target's law (`survival.py`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from .costs import StepCosts
from .survival import UNKNOWN_CONFIDENCE

DraftPolicyName = Literal["fixed", "adaptive"]

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def draft_widths(num_draft_tokens: int) -> tuple[int, ...]:
    """Rows a request, on average over the batch, that a step may verify: from 1 to num_draft_tokens + 1."""
    return (*(width for width in WIDTHS if width <= num_draft_tokens), num_draft_tokens + 1)


class Choice(NamedTuple):
    """What a step does."""

    width: int  # rows a request, on average over the padded batch
    drafts: bool  # whether it drafts for the next one


@dataclass
class Promise:
    """What one step's drafts promised; usable once all of them were verified, dropped or are being verified."""

    waiting: set[int]  # requests whose drafts still wait
    accepted: list[float] | None = None  # accepted drafts a request, by width; None until landed, NaN: nothing to say


@dataclass
class DraftPolicy:
    """Chooses each step's size from what earlier steps promised and cost.

    Whatever does not pay is still tried now and then, for at most `probe_share` of the time: other widths while
    drafting, drafting while it rests.
    """

    widths: tuple[int, ...]
    costs: StepCosts
    memory: float = 16.0  # requests whose promises are averaged
    probe_share: float = 0.005
    corrects_costs: bool = True  # by what steps really take
    _accepted: list[float] = field(init=False)
    _promises: list[Promise] = field(init=False, default_factory=list)
    _surplus: dict[str, float] = field(init=False, default_factory=dict)  # ms a request beyond `costs`, by part
    _credit: float = field(init=False, default=0.0)
    _measured: dict[tuple[str, int, int], float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        survival = [UNKNOWN_CONFIDENCE**position for position in range(1, self.widths[-1])]
        self._accepted = [sum(survival[: width - 1]) for width in self.widths]

    def choose(self, request_ids: Iterable[int], padded: int, drafts_wait: bool) -> Choice:
        """The next step's choice for these requests, `padded` of them with padding; `drafts_wait`: some have drafts."""
        requests = set(request_ids)
        self._collect(len(requests))
        for promise in self._promises:
            promise.waiting -= requests
        plain, step = self._step_ms(requests, padded, 1, False), {}
        for width in self.widths[1:]:
            step[width] = self._step_ms(requests, padded, width, True)
        tokens = self._tokens(len(requests), padded)
        rates = {width: tokens[width] / step[width] for width in step}
        best = max(rates, key=rates.__getitem__)
        if rates[best] > len(requests) / plain:
            width = self._wider(best, step) if drafts_wait else 1
            return Choice(width, True)
        width = self._best_use(requests, padded, tokens, len(requests) / plain) if drafts_wait else 1
        self._credit += self.probe_share * plain
        # what a drafting step takes beyond what its tokens are worth
        probes = not drafts_wait and self._credit >= step[best] - plain * tokens[best] / len(requests)
        if probes:
            self._credit = 0.0
        return Choice(width, probes)

    def promise(self, request_ids: Iterable[int]) -> Promise:
        """Opens the record of a step that drafts for these requests; the step fills it in when it has landed."""
        promise = Promise(set(request_ids))
        self._promises = [*self._promises[-7:], promise]
        return promise

    def best_num_draft_tokens(self, batch: int) -> int:
        """Drafts a request to verify on average at a batch size, by the latest promises; 0: drafting does not pay."""
        accepted = np.interp(range(1, self.widths[-1] + 1), self.widths, self._accepted)
        return self.costs.best_num_draft_tokens(batch, np.diff(accepted).tolist())

    def forget(self, request_id: int, finished: bool) -> None:
        """A request left; one that comes back makes the promises it took part in unusable."""
        if not finished:
            self._promises = [promise for promise in self._promises if request_id not in promise.waiting]
        for promise in self._promises:
            promise.waiting.discard(request_id)

    def count_step(self, choice: Choice, num_requests: int, padded: int, verify_ms: float, propose_ms: float) -> None:
        """Learns what a step really took, which grows with the contexts of its requests."""
        if not self.corrects_costs:
            return
        for part, seen in (
            ("verify", verify_ms),
            ("draft" if choice.drafts else "rest", propose_ms),
        ):
            measured = self._part_ms(part, padded, choice.width)
            # one slow step says little
            surplus = min(max(seen - measured, -measured / 2), 2 * max(measured, verify_ms / 2)) / num_requests
            before = self._surplus.get(part, 0.0)
            self._surplus[part] = before + 0.05 * (surplus - before)

    def _collect(self, num_requests: int) -> None:
        share = 1 - math.exp(-max(num_requests, 1) / self.memory)
        ready = [promise for promise in self._promises if promise.accepted is not None and not promise.waiting]
        for promise in ready:
            assert promise.accepted is not None
            if math.isnan(promise.accepted[0]):
                continue
            self._accepted = [
                old + share * (new - old) for old, new in zip(self._accepted, promise.accepted, strict=True)
            ]
        self._promises = [promise for promise in self._promises if promise.accepted is None or promise.waiting]

    def _tokens(self, requests: int, padded: int) -> dict[int, float]:
        """Tokens a step is expected to emit, by width; slots that padding does not use go to the others."""
        accepted = self._accepted
        if padded > requests:
            slots = [padded * (width - 1) / requests + 1 for width in self.widths]
            accepted = np.interp(slots, self.widths, accepted).tolist()
        return {width: requests * (1 + gain) for width, gain in zip(self.widths, accepted, strict=True)}

    def _part_ms(self, part: str, padded: int, width: int) -> float:
        """What was measured for a part of a step: verify, draft or rest."""
        key = (part, padded, width)
        if key not in self._measured:
            costs = self.costs
            found = costs.verify(padded, width) if part == "verify" else costs.propose(padded, part == "draft")
            self._measured[key] = found
        return self._measured[key]

    def _step_ms(self, requests: set[int], padded: int, width: int, drafts: bool) -> float:
        parts = ("verify", "draft" if drafts else "rest")
        surplus = sum(self._surplus.get(part, 0.0) for part in parts)
        return max(sum(self._part_ms(part, padded, width) for part in parts) + surplus * len(requests), 1e-6)

    def _wider(self, width: int, step: dict[int, float]) -> int:
        """The width, or the next one where it is time to see whether more would pay."""
        self._credit += self.probe_share * step[width]
        wider = next((other for other in self.widths if other > width), width)
        if wider == width or self._credit < step[wider] - step[width]:
            return width
        self._credit = 0.0
        return wider

    def _best_use(self, requests: set[int], padded: int, tokens: dict[int, float], rate: float) -> int:
        """The best width for drafts that are paid for, where time is worth `rate` tokens a millisecond.

        Never 1, so that drafts made as a probe tell something.
        """

        def worth(width: int) -> float:
            return tokens[width] - rate * self._step_ms(requests, padded, width, False)

        return max(self.widths[1:], key=worth)
