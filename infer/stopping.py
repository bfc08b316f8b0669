"""Every rule that ends a request: end and stop tokens, stop strings, length, and the minimum before which none holds.

Tokens are taken one at a time, so that a block of accepted drafts is cut where plain decoding would have stopped.
"""

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from .sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
"""What a tokenizer gives for bytes that are no whole character."""
CONTEXT_TOKENS = 5
"""Prompt tokens decoded in front of the output: a tokenizer may drop the space before the first word it decodes."""


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # the output or the context is full
    ERROR = "error"  # the target's logits were not finite, or every token was forbidden
    CANCELLED = "cancelled"


class TextStream:
    """The text of tokens that arrive one by one; a character is given out once all its bytes are there."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", prompt_token_ids: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        # a window of tokens whose text is decoded anew each time: what came out whole, then what came since
        self._window = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._num_whole = len(self._window)
        self._given = len(self._text(self._window))

    def push(self, token_id: int) -> str:
        """The characters that this token settles."""
        self._window.append(token_id)
        text = self._text(self._window)
        settled = text.rstrip(UNFINISHED)
        added = settled[self._given :]
        self._given += len(added)
        newest = self._window[self._num_whole :]
        # the next window needs some text in front, or its first word would lose its space
        if len(settled) == len(text) and (context := self._text(newest)):
            self._window, self._num_whole, self._given = newest, len(newest), len(context)
        return added

    def flush(self) -> str:
        """What is left of a text that ends inside a character."""
        return self._text(self._window)[self._given :]

    def _text(self, token_ids: list[int]) -> str:
        text = self._decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class Stopper:
    """The stop rules of one request, and its text where stop strings ask for it.

    `end_ids` are the target's end tokens and the request's own; `max_length` is the context. Raises ValueError where
    there are stop strings and no tokenizer.
    """

    def __init__(
        self,
        params: SamplingParams,
        end_ids: frozenset[int],
        prompt_token_ids: Sequence[int],
        max_length: int,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
    ) -> None:
        if params.stop and tokenizer is None:
            raise ValueError(
                "stop strings need a tokenizer, found none; use stop_token_ids or add the tokenizer's files"
            )
        self.params, self.end_ids = params, end_ids
        self.max_tokens = min(params.max_tokens, max_length - len(prompt_token_ids))
        self.num_taken = 0
        self.text: str | None = None  # None without stop strings; cut before the one that ended it
        self._stream = TextStream(tokenizer, prompt_token_ids) if params.stop and tokenizer is not None else None
        if self._stream is not None:
            self.text = ""

    def take(self, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of the next tokens belong to the output, and why it ends with them, if it does.

        An end token belongs to it, and so does the token that completes a stop string.
        """
        for count, token in enumerate(token_ids, start=1):
            reason = self._take(token)
            if reason is not None:
                return count, reason
        return len(token_ids), None

    def _take(self, token: int) -> FinishReason | None:
        self.num_taken += 1
        # tokens up to the minimum cannot end it; an end token is not even sampled there
        if token in self.end_ids and self.num_taken > self.params.min_tokens:
            self._end_text(token if self.params.include_stop_str else None)
            return FinishReason.STOP
        if self._stream is not None and self._add_text(self._stream.push(token)):
            return FinishReason.STOP
        if self.num_taken >= self.max_tokens:
            self._end_text(None)
            return FinishReason.LENGTH
        return None

    def _add_text(self, added: str) -> bool:
        """Appends to the text; cuts it and returns True if a stop string is complete."""
        assert self.text is not None
        before, self.text = len(self.text), self.text + added
        if not added or self.num_taken <= self.params.min_tokens:
            return False
        found = []
        for string in self.params.stop:
            start = self.text.find(string, max(0, before - len(string) + 1))
            if start >= 0:
                found.append((start, start + len(string)))
        if not found:
            return False
        start, end = min(found)
        self.text = self.text[: end if self.params.include_stop_str else start]
        return True

    def _end_text(self, last: int | None) -> None:
        if self._stream is not None and self.text is not None:
            if last is not None:
                self.text += self._stream.push(last)
            self.text += self._stream.flush()
