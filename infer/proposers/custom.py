"""Drafts from a user's own class: lists of ids in, lists of ids out, and hidden states of the target if it asks.

The contract is vLLM's `custom_class`, so that a class written for either runs in both, plus `layer_ids`; see
docs/custom-proposers.md. Whatever it drafts is verified as a point mass, which is lossless for any way of choosing.
"""

import importlib
import inspect
import operator
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from .base import ObservedRows, ProposerError, Released, Requirements
from .host import HostDrafts, HostProposer, HostStep, ragged

if TYPE_CHECKING:
    from ..config import EngineConfig

STATES = "hidden_states"


class CustomProposer(HostProposer):
    """Runs `module:Class`. Raises ProposerError for a class that is not there or does not fit, and for its faults."""

    def __init__(self, path: str, config: "EngineConfig", vocab_size: int) -> None:
        """The class is constructed with the engine's config."""
        self.name, self.vocab_size = path, vocab_size
        self.num_draft_tokens = config.num_draft_tokens
        made = load_class(path)
        try:
            self._inner: Any = made(config)
        except Exception as error:
            self._fail("while it was constructed", error)
        if not callable(getattr(self._inner, "propose", None)):
            raise ProposerError(f"{path} needs a method `propose`, found none; see docs/custom-proposers.md")
        layer_ids = _layer_ids(path, getattr(self._inner, "layer_ids", ()))
        takes = inspect.signature(self._inner.propose).parameters
        rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
        self._keywords = [name for name in ("slot_mappings", "request_ids") if rest or name in takes]
        if layer_ids and (rest or STATES in takes):
            self._keywords.append(STATES)
        elif layer_ids or STATES in takes:
            raise ProposerError(
                f"{path} gets hidden states if it names `layer_ids` and `propose` takes `{STATES}`, found one without "
                f"the other; add or drop it"
            )
        self.requirements = Requirements(layer_ids=layer_ids, observes=bool(layer_ids), on_host=True)
        self._states: dict[int, list[Tensor]] = {}

    def observe(self, rows: ObservedRows) -> None:
        if rows.states is None:
            return
        firsts, lasts = rows.batch.cu_seqlens.tolist(), rows.last_rows.tolist()
        for i, request_id in enumerate(rows.request_ids):
            # a later step reuses the buffer
            self._states.setdefault(request_id, []).append(rows.states[firsts[i] : lasts[i] + 1].clone())

    def propose(self, step: HostStep) -> HostDrafts:
        given = self._keyword_arguments(step)
        try:
            drafts = self._inner.propose(_sampled(step), step.num_known, step.tokens[step.rows], **given)
        except Exception as error:
            names = ", ".join(map(str, step.request_ids))
            self._fail(f"drafting for request{'s' if len(step.request_ids) > 1 else ''} {names}", error)
        return ragged(self._checked(drafts, step), self.num_draft_tokens)

    def release(self, request: Released) -> None:
        self._states.pop(request.request_id, None)
        released = getattr(self._inner, "release", None)
        if callable(released):
            try:
                released(request.request_id)
            except Exception as error:
                self._fail(f"releasing request {request.request_id}", error)

    def _keyword_arguments(self, step: HostStep) -> dict[str, Any]:
        values: dict[str, Callable[[], Any]] = {
            "slot_mappings": lambda: None,
            "request_ids": lambda: list(step.request_ids),
            STATES: lambda: [torch.cat(self._states.pop(request_id)) for request_id in step.request_ids],
        }
        return {name: values[name]() for name in self._keywords}

    def _checked(self, drafts: Any, step: HostStep) -> list[list[int]]:
        """The user's answer as lists of ids; raises ProposerError naming the request whose draft is none."""
        if not isinstance(drafts, Sequence) or len(drafts) != len(step.request_ids):
            found = f"{len(drafts)}" if isinstance(drafts, Sequence) else type(drafts).__name__
            raise ProposerError(
                f"{self.name} must return a list for each of {len(step.request_ids)} requests, found {found}"
            )
        checked = []
        for request_id, draft, room in zip(step.request_ids, drafts, step.room.tolist(), strict=True):
            try:
                ids = [operator.index(token) for token in draft]
            except TypeError:
                raise ProposerError(
                    f"{self.name} must return token ids for request {request_id}, found {draft!r}"
                ) from None
            if len(ids) > self.num_draft_tokens:
                raise ProposerError(
                    f"{self.name} may draft {self.num_draft_tokens} tokens, found {len(ids)} for request {request_id}"
                )
            wrong = [token for token in ids if not 0 <= token < self.vocab_size]
            if wrong:
                raise ProposerError(
                    f"{self.name} must draft ids in 0..{self.vocab_size - 1}, found {wrong[0]} for request {request_id}"
                )
            checked.append(ids[:room])
        return checked

    def _fail(self, when: str, error: Exception) -> NoReturn:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
        raise ProposerError(f"{self.name} failed {when}: {type(error).__name__}: {error} ({place})") from error


def _sampled(step: HostStep) -> list[list[int]]:
    """The tokens that are new since each request was last drafted for; of a new one, what followed its prompt."""
    begins = np.maximum(step.num_before, step.prompt_lens)
    spans = zip(step.rows.tolist(), begins.tolist(), step.num_known.tolist(), strict=True)
    return [step.tokens[row, begin:end].tolist() for row, begin, end in spans]


def _layer_ids(path: str, found: Any) -> tuple[int, ...]:
    """What a class asks for; the engine gives layers in ascending order, so that another one is a mistake."""
    try:
        layer_ids = tuple(operator.index(layer) for layer in found)
    except TypeError:
        layer_ids = None
    if layer_ids is None or list(layer_ids) != sorted(set(layer_ids)):
        raise ProposerError(f"{path} must name `layer_ids` as ascending numbers of layers, found {found!r}; change it")
    return layer_ids


def load_class(path: str) -> Any:
    """The class that `module:Class` names; raises ProposerError if it cannot be imported."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ProposerError(f"a custom method is named custom:module:Class, found custom:{path}")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ProposerError(
            f"custom:{path} cannot be imported: {error}; install the package, or put its folder on PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise ProposerError(f"custom:{path} names no class of {module}: {error}; check the spelling") from error
    except Exception as error:
        raise ProposerError(f"custom:{path} failed while it was imported: {type(error).__name__}: {error}") from error
