"""Which tokens of a conversation the target would have written: ids and loss mask from one whole rendering.

The chat template renders the conversation once and that text is tokenised once; everything else works on character
spans of that text. Where the template marks what the assistant generates, its marks are the spans. Elsewhere the span
of a turn lies between the rendering that asks for it and the rendering that ends with it; a template that rewrites
earlier turns breaks that prefix rule, and then the turn is found by what changes when its answer is replaced.

No conversation is rendered turn by turn and glued together, and no span is guessed: a turn that cannot be placed is
left unsupervised and counted.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from ..infer.prompts import TemplateRefusal, has_template, render
from ..infer.rows import Message, RowError
from .conversations import Conversation

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_STAND_INS = tuple(map(chr, range(0xE000, 0xE010)))


@dataclass(frozen=True)
class MaskedTokens:
    """Ids and mask of one conversation, unshifted: `loss_mask[t]` says whether the target wrote token t."""

    token_ids: np.ndarray  # [tokens] int32
    loss_mask: np.ndarray  # [tokens] bool
    skipped_turns: tuple[str, ...]  # a reason for each assistant turn left unsupervised


class Span(NamedTuple):
    """Characters start:end of the whole rendering."""

    start: int
    end: int


class ChatMasker:
    """Turns conversations into ids and masks for one tokenizer and its template.

    `stop_ids` end a turn: what a template prints after the first of them (a line break, a second end token) is never
    asked of the target.
    """

    def __init__(self, tokenizer: Any, stop_ids: Iterable[int] = ()) -> None:
        if not has_template(tokenizer):
            raise ValueError(
                "extracting conversations needs a tokenizer with a chat template, found none; use an instruction-tuned "
                "model or add chat_template.jinja to its folder"
            )
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"loss masks need a fast tokenizer (one that reports character offsets), found "
                f"{type(tokenizer).__name__}; convert it to tokenizer.json"
            )
        self.tokenizer = tokenizer
        end = getattr(tokenizer, "eos_token_id", None)
        self.stop_ids = frozenset(stop_ids) | (frozenset() if end is None else {end})
        self._stops = sorted(self.stop_ids)
        self._specials = sorted(self.stop_ids | frozenset(tokenizer.all_special_ids))

    def __call__(self, conversation: Conversation, max_length: int | None = None) -> MaskedTokens:
        """Ids and mask, cut to `max_length` tokens; raises RowError with the reason where nothing can be learned."""
        full = self._render(conversation.messages, conversation)
        encoded = self.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        cores = _cores(full, encoded["offset_mapping"])
        mask = np.zeros(len(ids), dtype=bool)
        skipped: list[str] = []
        for span in self._spans(conversation, full, skipped):
            self._supervise(mask, ids, cores, span, full)
        return checked(MaskedTokens(ids, mask, tuple(skipped)), max_length)

    def _render(self, messages: Sequence[Message], conversation: Conversation, generation: bool = False) -> str:
        try:
            return render(self.tokenizer, messages, tools=conversation.tools, add_generation_prompt=generation)
        except TemplateRefusal as error:
            raise RowError(f"the chat template refused it: {error}") from error

    def _try_render(self, messages: Sequence[Message], conversation: Conversation, generation: bool = False) -> str:
        """The rendering, or "" where the template refuses this piece of a conversation."""
        try:
            return self._render(messages, conversation, generation)
        except RowError:
            return ""

    def _spans(self, conversation: Conversation, full: str, skipped: list[str]) -> Iterator[Span]:
        turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        marked = self._marked_spans(conversation, full)
        if marked:
            header = self._generation_prompt(conversation, turns[0])[1]
            yield from (Span(self._after_overlap(full, span, header), span.end) for span in marked)
            return
        floor = 0
        for turn in turns:
            message = conversation.messages[turn]
            span = self._turn_span(conversation, turn, full, floor)
            if span is None:
                skipped.append("its place in the rendered conversation could not be found")
                continue
            floor = span.end
            if not (message["content"].strip() or message.get("tool_calls")):
                skipped.append("empty answer")
                continue
            yield span

    def _marked_spans(self, conversation: Conversation, full: str) -> list[Span]:
        template = self.tokenizer.get_chat_template(tools=conversation.tools)
        if not _GENERATION_MARK.search(template):
            return []
        texts, spans = render_jinja_template(
            conversations=[conversation.messages],
            tools=conversation.tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        if texts[0] != full:
            return []
        return [Span(int(start), int(end)) for start, end in spans[0]]

    def _generation_prompt(self, conversation: Conversation, turn: int) -> tuple[str, str]:
        """What the template prints before a turn, and what its generation prompt adds to that."""
        history = conversation.messages[: max(turn, 1)]
        asked = self._try_render(history, conversation, generation=True)
        common = _common_prefix(asked, self._try_render(history, conversation))
        return asked[:common], asked[common:]

    def _turn_span(self, conversation: Conversation, turn: int, full: str, floor: int) -> Span | None:
        messages = conversation.messages
        asked = self._try_render(messages[:turn], conversation, generation=True) if turn > 0 else ""
        start = len(asked) if asked and full.startswith(asked) else None
        header = ""
        if start is None:
            before, header = self._generation_prompt(conversation, turn)
            if turn > 0 and before and full.startswith(before):
                start = len(before) + self._supplied(header, full[len(before) :])
        if start is not None:
            ended = self._try_render(messages[: turn + 1], conversation)
            if len(ended) > start and full.startswith(ended):
                return Span(start, len(ended))
            header = header or self._generation_prompt(conversation, turn)[1]
        found = self._find_by_stand_in(conversation, turn, full, header)
        if found is None:
            return None
        if start is None:
            floor = max(floor, self._end_of_message(conversation, turn - 1, full)) if turn > 0 else floor
            start = self._after_header(full, header, floor, found.start)
        return Span(start, found.end) if start < found.end else None

    def _find_by_stand_in(self, conversation: Conversation, turn: int, full: str, header: str) -> Span | None:
        messages = conversation.messages
        mark = _unused_mark(full)
        for stand_in in _stand_ins(messages[turn], mark):
            whole = self._try_render([*messages[:turn], stand_in, *messages[turn + 1 :]], conversation)
            alone = self._try_render([*messages[:turn], stand_in], conversation)
            if mark not in whole or mark not in alone:
                continue
            start = _common_prefix(full, whole)
            end = len(full) - _common_suffix(full[start:], whole[start:])
            header_text = header.strip()
            if header_text and header_text in full[start:end]:
                continue
            closing = alone[alone.rindex(mark) + 1 :]
            return Span(start, end + _common_prefix(closing, full[end:]))
        return None

    def _end_of_message(self, conversation: Conversation, index: int, full: str) -> int:
        """Where the content of a message ends in the whole rendering, 0 where that cannot be told."""
        messages = conversation.messages
        mark = _unused_mark(full)
        changed = {**messages[index], "content": mark}
        whole = self._try_render([*messages[:index], changed, *messages[index + 1 :]], conversation)
        return len(full) - _common_suffix(full, whole) if mark in whole else 0

    def _supplied(self, header: str, text: str) -> int:
        """How many characters of `text` the generation prompt supplies, in whole tokens of the generation prompt."""
        common = _common_prefix(header, text)
        if common == len(header):
            return common
        encoded = self.tokenizer(header, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return max((end for _, end in encoded["offset_mapping"] if end <= common), default=0)

    def _after_header(self, full: str, header: str, floor: int, before: int) -> int:
        """Where the answer starts: after as much of the generation prompt as this rendering printed before it."""
        for length in range(len(header), 0, -1):
            piece = header[:length]
            at = full.rfind(piece, floor, max(before, floor)) if piece.strip() else -1
            if at >= 0:
                return at + self._supplied(header, full[at:])
        return before

    def _after_overlap(self, full: str, span: Span, header: str) -> int:
        """Where a marked span starts once what the generation prompt supplies is taken off."""
        for length in range(len(header), 0, -1):
            if full.endswith(header[:length], 0, span.start):
                return max(span.start, span.start - length + self._supplied(header, full[span.start - length :]))
        return span.start

    def _supervise(self, mask: np.ndarray, ids: np.ndarray, cores: np.ndarray, span: Span, full: str) -> None:
        inside = np.flatnonzero((cores[:, 1] > span.start) & (cores[:, 1] <= span.end))
        stops = np.flatnonzero(np.isin(ids[inside], self._stops))
        specials = np.flatnonzero(np.isin(ids[inside], self._specials))
        if len(stops):
            inside = inside[: stops[0] + 1]
        elif len(specials) and not full[cores[inside[specials[-1]], 1] : span.end].strip():
            inside = inside[: specials[-1] + 1]
        mask[inside] = True


def exact_tokens(conversation: Conversation, max_length: int | None) -> MaskedTokens:
    """Ids and mask of a row whose answer is known as ids; raises RowError where nothing of it survives the cut."""
    assert conversation.exact is not None
    prompt, answer = conversation.exact.prompt_token_ids, conversation.exact.token_ids
    ids = np.asarray([*prompt, *answer], dtype=np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    return checked(MaskedTokens(ids, mask, ()), max_length)


def checked(tokens: MaskedTokens, max_length: int | None) -> MaskedTokens:
    """Cuts to `max_length`; raises RowError for a mask that is all false or all true, cut or not."""
    if not tokens.loss_mask.any():
        raise RowError(
            f"no supervised token ({tokens.skipped_turns[0]})" if tokens.skipped_turns else "no supervised token"
        )
    if tokens.loss_mask.all():
        raise RowError("every token is supervised: the rendering holds no prompt")
    cut = MaskedTokens(tokens.token_ids[:max_length], tokens.loss_mask[:max_length], tokens.skipped_turns)
    if not cut.loss_mask.any():
        raise RowError("no supervised token within --max-length")
    return cut


def _cores(full: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """The characters each token stands for [tokens, 2], without white space around them unless it is all there is.

    Tokenizers differ in whether a token's offsets hold the space before it; what no token claims belongs to the next.
    """
    starts, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    count = len(full)
    blank = np.fromiter(map(str.isspace, full), dtype=bool, count=count)
    here = np.arange(count)
    next_ink = np.append(np.minimum.accumulate(np.where(blank, count, here)[::-1])[::-1], count)
    ink_before = np.append(0, np.maximum.accumulate(np.where(blank, 0, here + 1)))
    core_starts, core_ends = next_ink[starts], ink_before[ends]
    no_ink = core_starts >= core_ends
    claimed = np.append(0, np.maximum.accumulate(ends)[:-1])
    core_starts = np.where(no_ink, np.minimum(starts, claimed), core_starts)
    return np.stack([core_starts, np.where(no_ink, ends, core_ends)], axis=1)


def _stand_ins(message: Message, mark: str) -> Iterator[Message]:
    """The message with another answer: as plain text, then with its tool calls kept in shape."""
    yield {"role": message["role"], "content": mark}
    calls = message.get("tool_calls")
    if calls:
        changed = [{**call, "function": {**call["function"], "arguments": {mark: mark}}} for call in calls]
        yield {**message, "content": mark, "tool_calls": changed}
        yield {**message, "content": "", "tool_calls": changed}


def _unused_mark(text: str) -> str:
    return next(mark for mark in _STAND_INS if mark not in text)


def _common_prefix(a: str, b: str) -> int:
    return len(os.path.commonprefix([a, b]))


def _common_suffix(a: str, b: str) -> int:
    return _common_prefix(a[::-1], b[::-1])
