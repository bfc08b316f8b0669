"""The host's copy of the request table's texts, for those who draft there: grown by what each step emitted."""

from collections.abc import Sequence

import numpy as np

from .proposers.host import HostStep, InnerDrafts


class HostTexts:
    """The known tokens of running requests, a row of the request table each."""

    def __init__(self, num_rows: int, width: int) -> None:
        # pages that no text reaches are never touched
        self.tokens = np.zeros((num_rows, width), dtype=np.int32)
        self.num_known, self.num_told, self.prompt_lens = (np.zeros(num_rows, dtype=np.int64) for _ in range(3))

    def admit(self, row: int, token_ids: Sequence[int] | np.ndarray, prompt_len: int) -> None:
        """Begins the row of a request that came, or came back."""
        self.tokens[row, : len(token_ids)] = token_ids
        self.num_known[row], self.num_told[row], self.prompt_lens[row] = len(token_ids), 0, prompt_len

    def append(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        """Appends the first counts[i] of token_ids [n, width] to the texts in `rows` [n]."""
        known = self.num_known[rows]
        self.tokens[rows[:, None], known[:, None] + np.arange(token_ids.shape[1])] = token_ids
        self.num_known[rows] = known + counts

    def step(
        self,
        request_ids: list[int],
        rows: np.ndarray,
        room: np.ndarray,
        *,
        wants_confidence: bool = False,
        inner: InnerDrafts | None = None,
    ) -> HostStep:
        """What to tell of the requests in `rows` [n]: all that is known of them, and what of it is new."""
        known, before = self.num_known[rows], self.num_told[rows]
        self.num_told[rows] = known
        return HostStep(
            request_ids, rows, self.tokens, known, before, self.prompt_lens[rows], room, wants_confidence, inner
        )
