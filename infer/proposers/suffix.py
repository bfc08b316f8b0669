"""Suffix decoding (Oliaro et al. 2411.04975): drafts what most often followed the end of the text before.

A suffix tree over each request's own text and one over the responses of earlier requests are searched for the longest
ends of the text; the more often a continuation followed, the longer the draft. The trees are arctic-inference's.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .base import ProposerError, Released
from .host import HostDrafts, HostProposer, HostStep, ragged


@dataclass(frozen=True, kw_only=True)
class SuffixSettings:
    """Sizes of the trees, and how far a match is trusted."""

    max_depth: int = 24  # tokens of a match and its draft together; the draft tokens a step where none are asked for
    max_cached_requests: int = 10_000  # responses kept, the oldest dropped first; 0: a request sees its own text only
    max_factor: float = 1.0  # draft tokens a matched token
    min_token_prob: float = 0.1  # a draft ends where its tokens are less likely than that

    def __post_init__(self) -> None:
        for name, least, most in (
            ("max_depth", 1, None),
            ("max_cached_requests", 0, 2**31 - 1),
            ("max_factor", 0, None),
            ("min_token_prob", 0, 1),
        ):
            value = getattr(self, name)
            if not value >= least or (most is not None and value > most):
                bounds = f"at least {least}" if most is None else f"{least} to {most}"
                raise ProposerError(f"suffix decoding needs {name} of {bounds}, found {value}")


class SuffixDraft(NamedTuple):
    """What the trees say about one request."""

    token_ids: list[int]
    probs: list[float]  # of each token and all before it, by how often they followed
    is_new: bool  # whether the request is drafted for the first time, or again after a preemption


PACKAGE = "arctic_inference.suffix_decoding"


class SuffixProposer(HostProposer):
    """Drafts from suffix trees. The responses of requests that ran serve later ones, until `forget`."""

    def __init__(
        self,
        num_draft_tokens: int,
        settings: SuffixSettings | None = None,
        responses: Sequence[Sequence[int] | np.ndarray] = (),
    ) -> None:
        """`responses`, oldest first, are cached from the start. Raises ProposerError without arctic-inference."""
        self.num_draft_tokens = num_draft_tokens
        self.settings = settings or SuffixSettings()
        self._responses = [np.ascontiguousarray(response, dtype=np.int32) for response in responses]
        self.cache: Any = self._filled()

    def propose(self, step: HostStep) -> HostDrafts:
        found = self.speculate(step)
        drafts = ragged([draft.token_ids for draft in found], self.num_draft_tokens)
        if not step.wants_confidence:
            return drafts
        return drafts._replace(confidence=confidence_of(found, self.num_draft_tokens))

    def speculate(self, step: HostStep) -> list[SuffixDraft]:
        """The draft of each request, empty where nothing is known; takes in what the step before emitted."""
        columns = (step.rows, step.num_known, step.num_before, step.prompt_lens, step.room)
        requests = zip(step.request_ids, *(column.tolist() for column in columns), strict=True)
        return [self._speculate(request_id, step.tokens[row], *numbers) for request_id, row, *numbers in requests]

    def release(self, request: Released) -> None:
        if request.request_id in self.cache.active_requests:
            self.cache.stop_request(request.request_id)

    def forget(self) -> None:
        self.cache = self._filled()

    def _speculate(
        self, request_id: int, text: np.ndarray, known: int, before: int, prompt_len: int, room: int
    ) -> SuffixDraft:
        is_new = request_id not in self.cache.active_requests
        if is_new:
            self.cache.start_request(request_id, text[:prompt_len])
            before = prompt_len  # one that was preempted begins anew
        self.cache.add_active_response(request_id, text[before:known])
        most = min(room, self.num_draft_tokens)
        if most <= 0:
            return SuffixDraft([], [], is_new)
        draft = self.cache.speculate(
            request_id,
            text[max(0, known - self.settings.max_depth) : known],
            max_spec_tokens=most,
            max_spec_factor=self.settings.max_factor,
            min_token_prob=self.settings.min_token_prob,
        )
        return SuffixDraft(list(draft.token_ids), list(draft.probs), is_new)

    def _filled(self) -> Any:
        cache = _new_cache(self.settings)
        if self.settings.max_cached_requests:
            for index, response in enumerate(self._responses[-self.settings.max_cached_requests :]):
                name = -1 - index  # running requests count from 0
                cache.start_request(name, response[:0])
                cache.add_active_response(name, response)
                cache.stop_request(name)
        return cache


def confidence_of(drafts: Sequence[SuffixDraft], width: int) -> np.ndarray:
    """Of each draft token given those before it, [n, width] float32; 0 where there is none."""
    out = np.zeros((len(drafts), width), dtype=np.float32)
    for i, draft in enumerate(drafts):
        probs = np.asarray(draft.probs, dtype=np.float32)
        out[i, : len(probs)] = probs / np.concatenate([[1.0], probs[:-1]])[: len(probs)]
    return out


def check_installed() -> None:
    """Raises ProposerError where arctic-inference is missing, naming the extra that brings it."""
    try:
        importlib.import_module(PACKAGE)
    except ImportError as error:
        raise ProposerError(
            f"suffix decoding needs the package arctic-inference, which cannot be imported ({error}); install it with "
            f"pip install 'spectrain[suffix]'"
        ) from error


def _new_cache(settings: SuffixSettings) -> Any:
    check_installed()
    return importlib.import_module(PACKAGE).SuffixDecodingCache(settings.max_depth, settings.max_cached_requests)
