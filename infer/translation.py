"""Between two tokenizers through text: what a draft model reads of the target's tokens, and what it writes in them.

Nothing here need be right for the output to be the target's own, since every draft is verified; what is wrong costs
acceptance. The draft model reads the text that the target's tokens spell as its own tokenizer cuts it; what it adds is
cut as the target's tokenizer cuts it behind the tokens that stand there.
"""

import codecs
from collections.abc import Iterable, Sequence

from .token_text import TokenText

KNOWN_TOKENS = 16
"""Tokens before a draft that may decide about how its text is cut."""

_UNSETTLED_TOKENS = 32  # a text is cut where it can be once so many tokens would be looked at again


class Translation:
    """A target's tokenizer and a draft model's. Special tokens go by content, else by role, else as plain text."""

    def __init__(self, target: TokenText, draft: TokenText) -> None:
        self.target, self.draft = target, draft
        self._to_draft = {i: _counterpart(content, target, draft) or content for i, content in target.specials.items()}
        pairs = ((i, _counterpart(content, draft, target)) for i, content in draft.specials.items())
        self._to_target = {i: content for i, content in pairs if content is not None}

    def special(self, token_id: int) -> str | None:
        """What the draft model reads for a special token of the target; None for other tokens."""
        return self._to_draft.get(token_id)

    def writes(self, token_id: int) -> str | None:
        """What a special token of the draft model stands for in the target's text; None where that is nothing."""
        return self._to_target.get(token_id)


class Reading:
    """A growing text of the target's tokens in the tokens of the draft model, `token_ids`."""

    def __init__(self, translation: Translation) -> None:
        self._between = translation
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.token_ids: list[int] = list(translation.draft.first_ids)
        self._num_settled = len(self.token_ids)
        self._unsettled = ""  # the text of the tokens behind them
        self._begun = False  # whether anything but special tokens was read
        self._recent: list[int] = []  # the target's last tokens

    @property
    def pending(self) -> bytes:
        """The beginning of a character that the text ends within; the draft model has not read it."""
        return self._decoder.getstate()[0]

    def extend(self, target_ids: Iterable[int]) -> None:
        """Reads on. What was read before may be cut otherwise afterwards, near its end."""
        ids = list(target_ids)
        text = "".join(map(self._read, ids))
        self._recent = [*self._recent, *ids][-KNOWN_TOKENS:]
        if not text:
            return
        self._unsettled += text
        found = self._between.draft.encode_settled(self._unsettled)
        del self.token_ids[self._num_settled :]
        self.token_ids += found.token_ids
        if len(found.token_ids) > _UNSETTLED_TOKENS:
            self._num_settled += found.num_settled
            self._unsettled = self._unsettled[found.settled_chars :]

    def allowed(self, drafted: Sequence[int]) -> list[int] | None:
        """Tokens one of which must be drafted next, to end the character that the text ends within; None for any."""
        missing = self.pending[len(self._between.draft.text(drafted)) :] if self.pending else b""
        return self._between.draft.beginning_with(missing) if missing else None

    def ends(self, token_id: int) -> bool:
        """Whether a draft ends before a token of the draft model, since it stands for no text of the target."""
        return not self._between.draft.is_text(token_id) and self._between.writes(token_id) is None

    def continued(self, drafted: Sequence[int]) -> list[int]:
        """The target's tokens for what draft tokens add to the text, but for the character it ends within."""
        text, pending = _whole_characters(self._written(drafted)), self.pending
        known = self._recent[self._window() :]
        before = self._between.target.text(known).removesuffix(pending)
        try:
            found = self._between.target.encode(before.decode() + text)
        except UnicodeDecodeError:
            found = []
        if found[: len(known)] == known:
            return found[len(known) :]
        # another character than the one begun, or known tokens that are not those of their text
        return [] if pending else self._between.target.encode(text)

    def _read(self, token_id: int) -> str:
        special = self._between.special(token_id)
        target, draft = self._between.target, self._between.draft
        if special is not None:
            cut = self._decoder.decode(b"", final=True)
            first = not self._begun and draft.first_ids and special == draft.specials.get(draft.first_ids[0])
            return cut if first else cut + special
        piece = target.piece(token_id)
        if self._begun:
            return self._decoder.decode(piece)
        self._begun = True
        return (" " if draft.adds_space else "") + self._decoder.decode(_without_space(piece, target))

    def _written(self, drafted: Sequence[int]) -> bytes:
        draft, parts = self._between.draft, []
        for token_id in drafted:
            special = self._between.writes(token_id)
            parts.append(draft.piece(token_id) if special is None else special.encode())
        added = b"".join(parts)
        if self._begun:
            return added
        return (b" " if self._between.target.adds_space else b"") + _without_space(added, draft)

    def _window(self) -> int:
        """Where the known tokens begin that are looked at: at a word, some way before the end, else at a character."""
        recent, target = self._recent, self._between.target
        half = len(recent) // 2
        words = (i for i in (*range(half, 0, -1), *range(half + 1, len(recent))) if target.begins_word(recent, i))
        characters = (i for i, token_id in enumerate(recent) if not _is_inside(target.piece(token_id)))
        return next(words, next(characters, 0))


def _counterpart(content: str, ours: TokenText, theirs: TokenText) -> str | None:
    """What another tokenizer has for a special token: a token of the same content, or else of the same role."""
    if content in theirs.added.values():
        return content
    roles = (role for role, token in ours.roles.items() if token == content and role in theirs.roles)
    return next((theirs.roles[role] for role in roles), None)


def _is_inside(piece: bytes) -> bool:
    """Whether a piece begins within a character, by UTF-8's mark of bytes that are not the first."""
    return bool(piece) and piece[0] & 0xC0 == 0x80


def _without_space(piece: bytes, tokenizer: TokenText) -> bytes:
    return piece.removeprefix(b" ") if tokenizer.adds_space else piece


def _whole_characters(text: bytes) -> str:
    """Text up to the first byte that begins no whole character."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()
