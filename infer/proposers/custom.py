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

from ..planes import Planes
from .base import Drafts, DraftStep, ObservedRows, Proposer, ProposerError, Released, Requirements
from .host import HostContexts, HostStep, upload_ids

if TYPE_CHECKING:
    from ..config import EngineConfig

STATES = "hidden_states"


class CustomProposer(Proposer):
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
        self._contexts: HostContexts | None = None
        self._states: dict[int, list[Tensor]] = {}

    def bind(self, planes: Planes, num_rows: int) -> None:
        self._contexts = HostContexts(num_rows, self.num_draft_tokens)

    def observe(self, rows: ObservedRows) -> None:
        if rows.states is None:
            return
        firsts, lasts = rows.batch.cu_seqlens.tolist(), rows.last_rows.tolist()
        for i, request_id in enumerate(rows.request_ids):
            # a later step reuses the buffer
            self._states.setdefault(request_id, []).append(rows.states[firsts[i] : lasts[i] + 1].clone())

    def propose(self, step: DraftStep) -> Drafts:
        assert self._contexts is not None
        host = self._contexts.update(step)
        if not host.request_ids:
            return upload_ids([], step, self.num_draft_tokens)
        given = self._keyword_arguments(host)
        try:
            drafts = self._inner.propose(self._sampled(host), host.num_known, self._contexts.tokens[host.rows], **given)
        except Exception as error:
            names = ", ".join(map(str, host.request_ids))
            self._fail(f"drafting for request{'s' if len(host.request_ids) > 1 else ''} {names}", error)
        return upload_ids(self._checked(drafts, host), step, self.num_draft_tokens)

    def release(self, request: Released) -> None:
        assert self._contexts is not None
        self._contexts.release(request.request_id)
        self._states.pop(request.request_id, None)
        released = getattr(self._inner, "release", None)
        if callable(released):
            try:
                released(request.request_id)
            except Exception as error:
                self._fail(f"releasing request {request.request_id}", error)

    def _sampled(self, host: HostStep) -> list[list[int]]:
        """The tokens that are new since each request was last drafted for; of a new one, what followed its prompt."""
        assert self._contexts is not None
        begins = np.maximum(host.num_before, host.prompt_lens)
        spans = zip(host.rows.tolist(), begins.tolist(), host.num_known.tolist(), strict=True)
        return [self._contexts.tokens[row, begin:end].tolist() for row, begin, end in spans]

    def _keyword_arguments(self, host: HostStep) -> dict[str, Any]:
        values: dict[str, Callable[[], Any]] = {
            "slot_mappings": lambda: None,
            "request_ids": lambda: list(host.request_ids),
            STATES: lambda: [torch.cat(self._states.pop(request_id)) for request_id in host.request_ids],
        }
        return {name: values[name]() for name in self._keywords}

    def _checked(self, drafts: Any, host: HostStep) -> list[list[int]]:
        """The user's answer as lists of ids; raises ProposerError naming the request whose draft is none."""
        if not isinstance(drafts, Sequence) or len(drafts) != len(host.request_ids):
            found = f"{len(drafts)}" if isinstance(drafts, Sequence) else type(drafts).__name__
            raise ProposerError(
                f"{self.name} must return a list for each of {len(host.request_ids)} requests, found {found}"
            )
        checked = []
        for request_id, draft, room in zip(host.request_ids, drafts, host.room.tolist(), strict=True):
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
