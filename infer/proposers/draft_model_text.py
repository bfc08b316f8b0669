"""Drafting with a language model of another tokenizer: it reads the target's text, writes on, and that is translated.

It keeps a cache of its own, since its tokens are as many as they are: one contiguous stretch a row of the request
table. Text that grew may be cut otherwise near its end; the cache is used up to the first token that changed. Drafts
are the draft model's likeliest text as point masses: verification is exact whatever became of them on the way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...heads.draft_model import DraftModel, TokenRows
from ...heads.target_tensors import TargetTensors
from ..attention import PagedAttend
from ..batch import PackedBatch
from ..planes import Planes
from ..translation import Reading, Translation
from .base import Released
from .drafting import layer_planes
from .host import HostDrafts, HostProposer, HostStep, ragged

BLOCK_SIZE = 16
STEP_TOKENS = 4096  # rows of one forward at most
DRAFT_TOKENS_EACH = 2
"""Draft model's tokens for one of the target's: what its cache holds of a text and tries for a draft, at most."""


@dataclass
class _Text:
    """What the draft model knows of one request."""

    reading: Reading
    row: int  # of the request table
    cached: list[int] = field(default_factory=list)  # tokens whose keys and values are in the cache
    drafted: list[int] = field(default_factory=list)  # what it wrote behind the text in this step
    drafts: list[int] = field(default_factory=list)  # the same in the target's tokens


class _Span(NamedTuple):
    """Tokens of one table row to be computed, the last ones of those given."""

    row: int
    token_ids: Sequence[int]
    start: int


class TextDraftModelProposer(HostProposer):
    """Drafts through text; it needs nothing of the target but its tokens, on the host."""

    def __init__(
        self,
        head: DraftModel,
        target: TargetTensors,
        translation: Translation,
        num_draft_tokens: int,
        *,
        max_batch_size: int,
        max_length: int,
    ) -> None:
        """`max_length` is the target's longest text; of texts longer than the draft model's positions it drafts none.

        The cache is taken here, so that an engine built later leaves it alone.
        """
        self.head, self.target, self.translation = head.eval(), target, translation
        self.num_draft_tokens = num_draft_tokens
        most = DRAFT_TOKENS_EACH * (max_length + num_draft_tokens)
        self.max_tokens = min(head.config.max_position_embeddings, most)
        self._blocks_each = -(-self.max_tokens // BLOCK_SIZE)
        self._device = next(head.parameters()).device
        specs = layer_planes(head)
        self._names = [spec.name for spec in specs]
        num_rows = max_batch_size + 1
        self._planes = Planes(specs, 1 + num_rows * self._blocks_each, BLOCK_SIZE, self._device)
        blocks = 1 + torch.arange(num_rows * self._blocks_each, dtype=torch.int32, device=self._device)
        self._block_tables = blocks.view(num_rows, self._blocks_each)
        self._texts: dict[int, _Text] = {}

    def bind(self, planes: Planes, num_rows: int) -> None:
        self._texts.clear()

    def propose(self, step: HostStep) -> HostDrafts:
        texts = self._read_on(step)
        wanted = [min(most, self.num_draft_tokens) for most in step.room.tolist()]
        self._write(texts, wanted)
        drafts = [text.drafts[:most] for text, most in zip(texts, wanted, strict=True)]
        return ragged(drafts, self.num_draft_tokens)

    def release(self, request: Released) -> None:
        self._texts.pop(request.request_id, None)

    def _read_on(self, step: HostStep) -> list[_Text]:
        """The text of each request with what became known of it."""
        texts, columns = [], (step.rows, step.num_before, step.num_known)
        for request_id, row, before, known in zip(step.request_ids, *(c.tolist() for c in columns), strict=True):
            if not before:
                self._texts[request_id] = _Text(Reading(self.translation), row)
            text = self._texts[request_id]
            text.reading.extend(step.tokens[row, before:known].tolist())
            text.drafted, text.drafts = [], []
            texts.append(text)
        return texts

    def _write(self, texts: Sequence[_Text], wanted: Sequence[int]) -> None:
        """Has the draft model write on behind every text until it gave the drafts wanted, or cannot."""
        going = [(text, most) for text, most in zip(texts, wanted, strict=True) if most and self._fits(text)]
        spans = []
        for text, _ in going:
            ids = text.reading.token_ids
            # the last token is computed in any case, for what comes after it
            common = min(_common_length(text.cached, ids), len(ids) - 1)
            spans.append(_Span(text.row, ids, common))
            text.cached = list(ids)
        while going:
            logits = self.head.logits(self._forward(spans), self.target)
            self._append(logits, [text for text, _ in going])
            going = [(text, most) for text, most in going if self._goes_on(text, most)]
            spans = []
            for text, _ in going:
                text.cached = [*text.reading.token_ids, *text.drafted]
                spans.append(_Span(text.row, text.cached, len(text.cached) - 1))

    def _append(self, logits: Tensor, texts: Sequence[_Text]) -> None:
        """Adds the likeliest token to what is written behind each text, unless a draft ends there."""
        likeliest = logits.argmax(-1).tolist()
        for i, text in enumerate(texts):
            token, allowed = likeliest[i], text.reading.allowed(text.drafted)
            if allowed is not None:
                allowed = [a for a in allowed if a < logits.shape[1]]
                token = allowed[int(logits[i, allowed].argmax())] if allowed else None
            if token is not None and not text.reading.ends(token):
                text.drafted.append(token)

    def _goes_on(self, text: _Text, wanted: int) -> bool:
        """Takes what is written as drafts; whether there should be more of it."""
        written = len(text.cached) - len(text.reading.token_ids)
        if len(text.drafted) == written:
            return False
        text.drafts = text.reading.continued(text.drafted)
        tried = len(text.drafted) >= DRAFT_TOKENS_EACH * wanted
        return len(text.drafts) < wanted and not tried and self._fits(text)

    def _fits(self, text: _Text) -> bool:
        return 0 < len(text.reading.token_ids) + len(text.drafted) <= self.max_tokens

    def _forward(self, spans: Sequence[_Span]) -> Tensor:
        """The states [spans, hidden] after the last token of each span, in as many forwards as they need."""
        found = []
        for part, finished in _parts(spans):
            batch = self._batch(part)
            embeds = self.head.embed(batch.token_ids, self.target)
            attend = PagedAttend(self._planes, self._names, batch)
            found.append(self.head(TokenRows(embeds, batch.positions), attend)[batch.logits_rows[:finished]])
        return torch.cat(found)

    def _batch(self, spans: Sequence[_Span]) -> PackedBatch:
        counts = np.asarray([len(span.token_ids) - span.start for span in spans])
        rows = np.repeat([span.row for span in spans], counts)
        positions = np.concatenate([np.arange(span.start, len(span.token_ids)) for span in spans])
        slots = BLOCK_SIZE * (1 + rows * self._blocks_each) + positions
        tokens = np.concatenate([np.asarray(span.token_ids[span.start :]) for span in spans])
        ends = counts.cumsum()
        lengths = np.asarray([len(span.token_ids) for span in spans])
        of_tokens = torch.from_numpy(np.stack([tokens, positions, slots])).to(self._device)
        of_spans = torch.from_numpy(np.stack([ends, lengths, [span.row for span in spans]])).to(self._device)
        return PackedBatch(
            token_ids=of_tokens[0],
            positions=of_tokens[1],
            slot_mapping=of_tokens[2],
            cu_seqlens=torch.nn.functional.pad(of_spans[0], (1, 0)).int(),
            seq_lens=of_spans[1].int(),
            block_tables=self._block_tables[of_spans[2]],
            logits_rows=of_spans[0] - 1,
            max_query_len=int(counts.max()),
            max_seq_len=int(lengths.max()),
        )


def _parts(spans: Sequence[_Span]) -> Iterator[tuple[list[_Span], int]]:
    """The spans in order as parts of at most `STEP_TOKENS` tokens, and how many spans of a part end there."""
    part: list[_Span] = []
    space = STEP_TOKENS
    for span in spans:
        start = span.start
        while len(span.token_ids) - start > space:
            if space:
                part.append(_Span(span.row, span.token_ids[: start + space], start))
            yield part, len(part) - bool(space)
            start, space, part = start + space, STEP_TOKENS, []
        part.append(_Span(span.row, span.token_ids, start))
        space -= len(span.token_ids) - start
    yield part, len(part)


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
