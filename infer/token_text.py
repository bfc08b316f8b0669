"""A tokenizer seen as text: the bytes each token adds, and the tokens of text that stands behind other text."""

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from .proposers.base import ProposerError

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_PROBE = "some Words of text"
_SETTLED_WORDS = 4  # words from the end of a text that a longer text may still cut otherwise


class TokenizedText(NamedTuple):
    """Tokens of a text, and where it can be cut so that both sides keep their tokens however it goes on."""

    token_ids: list[int]
    num_settled: int  # tokens before the cut
    settled_chars: int  # characters of the text that they stand for


class TokenText:
    """What a tokenizer makes of text, without what it does at a text's beginning or end.

    Raises ProposerError for tokenizers whose tokens, joined, are not the text: all but byte-level and metaspace ones.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ProposerError(
                f"drafting through text needs a fast tokenizer, found {type(tokenizer).__name__} in {name}; convert it "
                f"to tokenizer.json"
            )
        state = json.loads(backend.to_str())
        added = state["added_tokens"]
        self.added: dict[int, str] = {token["id"]: token["content"] for token in added}
        self.specials = {token["id"]: token["content"] for token in added if token["special"]}
        self.roles: dict[str, str] = {
            role: str(token) for role in ROLES if (token := getattr(tokenizer, role, None)) is not None
        }
        self.first_ids = _first_ids(tokenizer)
        self._pieces = _pieces(state, backend.get_vocab(with_added_tokens=False), name)
        self._pieces |= {i: content.encode() for i, content in self.added.items()}
        self._longest_added = max(map(len, self.added.values()), default=0)
        self.adds_space = _remove_added_space(state)
        state |= {"post_processor": None, "truncation": None, "padding": None}
        self._backend = Tokenizer.from_str(json.dumps(state))
        self._splits = len(set(self._backend.encode(_PROBE, add_special_tokens=False).word_ids)) > 1
        self._check(name)

    @property
    def num_ids(self) -> int:
        """One more than the largest id of a token."""
        return max(self._pieces) + 1

    def piece(self, token_id: int) -> bytes:
        """What a token adds to the text; of an id that stands for no token, the replacement character."""
        return self._pieces.get(token_id, "\ufffd".encode())

    def text(self, token_ids: Sequence[int]) -> bytes:
        """What tokens add together."""
        return b"".join(map(self.piece, token_ids))

    def is_text(self, token_id: int) -> bool:
        """Whether an id is a token that is not special."""
        return token_id in self._pieces and token_id not in self.specials

    def begins_word(self, token_ids: Sequence[int], index: int) -> bool:
        """Whether a token that is not the first begins with a space behind something else; special tokens do too."""
        if token_ids[index] in self.specials:
            return True
        return self.piece(token_ids[index])[:1] == b" " and self.piece(token_ids[index - 1])[-1:] != b" "

    def encode(self, text: str) -> list[int]:
        """The tokens of text wherever it stands; special tokens are recognised by their content."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_settled(self, text: str) -> TokenizedText:
        """The same, with the last place where the text can be cut."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids, words, offsets = encoding.ids, encoding.word_ids, encoding.offsets
        # an added token may yet become whole; what stands before it is then cut as if the text ended there
        latest, passed = len(text) - self._longest_added - 1, 0
        for i in range(len(ids) - 1, 0, -1):
            if words[i] == words[i - 1] if self._splits else not self.begins_word(ids, i):
                continue
            passed += 1
            if passed > _SETTLED_WORDS and offsets[i][0] <= latest:
                return TokenizedText(ids, i, offsets[i][0])
        return TokenizedText(ids, 0, 0)

    def beginning_with(self, wanted: bytes) -> list[int]:
        """The tokens that begin with some bytes, or that such bytes begin with."""
        pieces, ids = self._sorted
        first = bisect_left(pieces, wanted)
        end = first
        while end < len(pieces) and pieces[end].startswith(wanted):
            end += 1
        return [*ids[first:end], *self._beginnings(wanted)]

    def _beginnings(self, wanted: bytes) -> Iterator[int]:
        pieces, ids = self._sorted
        for length in range(1, len(wanted)):
            at = bisect_left(pieces, wanted[:length])
            while at < len(pieces) and pieces[at] == wanted[:length]:
                yield ids[at]
                at += 1

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        """The pieces of tokens of text in order, and their ids."""
        both = sorted((piece, i) for i, piece in self._pieces.items() if piece and i not in self.specials)
        return [piece for piece, _ in both], [i for _, i in both]

    def _check(self, name: str) -> None:
        ids = self.encode(_PROBE)
        unknown = {i for i, content in self.specials.items() if content == self.roles.get("unk_token")}
        if self.text(ids) != _PROBE.encode() and not unknown.intersection(ids):
            raise ProposerError(
                f"drafting through text needs tokenizers that keep it as it is, found that of {name} to make "
                f"{self.text(ids).decode(errors='replace')!r} of {_PROBE!r}; give another draft model"
            )


def _first_ids(tokenizer: Any) -> list[int]:
    """What a tokenizer puts before every text."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def _pieces(state: dict[str, Any], vocabulary: dict[str, int], name: str) -> dict[int, bytes]:
    """The bytes of every token by id, read as the tokenizer's own decoder reads them."""
    parts = list(_parts(state["decoder"], "decoders"))
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        table = _byte_characters()
        return {i: _from_characters(token, table) for token, i in vocabulary.items()}
    spaces = [part["replacement"] for part in parts if part["type"] == "Metaspace"]
    spaces += [
        part["pattern"]["String"]
        for part in parts
        if part["type"] == "Replace" and part["content"] == " " and "String" in part["pattern"]
    ]
    if not spaces:
        raise ProposerError(
            f"drafting through text needs byte-level or metaspace tokenizers, found one in {name} that decodes with "
            f"{', '.join(sorted(kinds)) or 'nothing'}; give another draft model"
        )
    return {
        i: bytes([int(token[3:5], 16)])
        if "ByteFallback" in kinds and _is_byte(token)
        else token.replace(spaces[0], " ").encode()
        for token, i in vocabulary.items()
    }


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level vocabularies are written in: a visible one of Latin-1 is its own byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _from_characters(token: str, table: dict[str, int]) -> bytes:
    return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()


def _parts(component: dict[str, Any] | None, members: str) -> Iterator[dict[str, Any]]:
    """The members of a sequence, nested or not; a component that is none is its own only member."""
    if component is None:
        return
    if component["type"] != "Sequence":
        yield component
        return
    for member in component[members]:
        yield from _parts(member, members)


def _remove_added_space(state: dict[str, Any]) -> bool:
    """Takes the space that some tokenizers put before a text out of a tokenizer's state; whether there was one."""
    there = False
    splitters = list(_parts(state["pre_tokenizer"], "pretokenizers"))
    for part in splitters:
        if part["type"] == "Metaspace":
            there |= part.get("prepend_scheme", "always") != "never"
            part["prepend_scheme"] = "never"
        elif part["type"] == "ByteLevel":
            there |= part["add_prefix_space"]
            part["add_prefix_space"] = False
    normalizers = list(_parts(state["normalizer"], "normalizers"))
    kept = [part for part in normalizers if part["type"] != "Prepend"]
    if len(kept) < len(normalizers):
        state["normalizer"] = {"type": "Sequence", "normalizers": kept}
        there = True
    return there
