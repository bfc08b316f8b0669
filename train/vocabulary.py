"""The draft vocabulary: which target ids a head can propose, and which id stands for a token not known yet.

Counted over supervised tokens only, because a drafter never has to propose prompt tokens. Built once when a head is
created; a resumed or warm-started head keeps the map it was trained with.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BYTE = re.compile(r"^<0x[0-9A-Fa-f]{2}>$")
_MARKER = re.compile(r"think|reason|tool|function", re.IGNORECASE)


class VocabularyError(ValueError):
    """A draft vocabulary cannot be built as asked."""


class DraftVocabulary(NamedTuple):
    """Ascending target ids, and how much of the supervised text they cover."""

    token_ids: Tensor  # [draft_vocab] int64
    coverage: float


def select_draft_vocabulary(counts: Tensor, size: int, forced: Iterable[int] = ()) -> DraftVocabulary:
    """The `size` most frequent ids of `counts` [vocab] int64, ties by id, with every forced id among them.

    Where fewer ids occur than asked, unseen ones of the lowest id fill up. Raises VocabularyError when the forced ids
    alone exceed the size, or nothing was counted.
    """
    vocab = len(counts)
    if not 1 <= size <= vocab:
        raise VocabularyError(f"the draft vocabulary must hold between 1 and {vocab} ids, found {size}")
    total = int(counts.sum())
    if total == 0:
        raise VocabularyError("expected supervised tokens to count, found none in these shards; check the loss masks")
    required = torch.tensor(sorted({i for i in forced if 0 <= i < vocab}), dtype=torch.int64)
    if len(required) > size:
        raise VocabularyError(
            f"{len(required)} special tokens must be draftable but the draft vocabulary holds {size}; raise "
            f"head.draft_vocab_size"
        )
    is_required = torch.zeros(vocab, dtype=torch.bool)
    is_required[required] = True
    ranked = counts.argsort(descending=True, stable=True)
    chosen = torch.cat([required, ranked[~is_required[ranked]][: size - len(required)]])
    token_ids = chosen.sort().values
    return DraftVocabulary(token_ids, int(counts[token_ids].sum()) / total)


def forced_token_ids(tokenizer: Any, end_ids: Iterable[int], counts: Tensor) -> set[int]:
    """Ids that are kept whatever their frequency.

    Begin and end tokens, template specials that occur in `counts`, byte fallback, and the markers of tools and
    thinking. `tokenizer` is a transformers one, or None where the target has none.
    """
    forced = set(end_ids)
    if tokenizer is None:
        return forced
    forced |= {i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None}
    specials = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    forced |= {i for i in specials if i < len(counts) and counts[i] > 0}
    forced |= {i for i, token in tokenizer.added_tokens_decoder.items() if _MARKER.search(str(token))}
    forced |= {i for token, i in tokenizer.get_vocab().items() if _BYTE.match(token)}
    return forced


def spare_token_id(tokenizer: Any, end_ids: Iterable[int], counts: Tensor) -> int:
    """An id to stand for tokens that are not known yet: one that drafted text, `counts` [vocab] int64, never uses.

    In this order: the tokenizer's mask token, the first row beyond the tokenizer, a special token that neither text nor
    template uses, any other unused id; of several the last. Raises VocabularyError where none is left.
    """
    vocab = len(counts)
    used = {int(i) for i in counts.nonzero()} | set(end_ids)
    candidates: list[int] = []
    if tokenizer is not None:
        template = str(getattr(tokenizer, "chat_template", None) or "")
        added = tokenizer.added_tokens_decoder
        used |= {i for i, token in added.items() if str(token) in template}
        candidates += [] if tokenizer.mask_token_id is None else [tokenizer.mask_token_id]
        candidates += [len(tokenizer), *sorted((i for i, token in added.items() if token.special), reverse=True)]
    candidates += range(vocab - 1, -1, -1)
    spare = next((i for i in candidates if i < vocab and i not in used), None)
    if spare is None:
        raise VocabularyError("expected an id that no text uses for the mask token, found none; set head.mask_token_id")
    return spare
