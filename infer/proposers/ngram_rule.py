"""Which earlier text an n-gram draft continues: one rule for the host, for the device and for their tests.

With T known tokens, a draft is what followed an earlier occurrence of the last n of them: the longest n in [min_n,
max_n] that occurs earlier with at least one token behind it, and of its occurrences the earliest (as in vLLM) or the
latest. Prompt and output are searched alike; an occurrence may overlap the end of the text. Which one is taken decides
how many drafts are right, never what is emitted.
"""

from dataclasses import dataclass
from typing import Literal

from .base import ProposerError

Occurrence = Literal["earliest", "latest"]
DEFAULT_N = 5


@dataclass(frozen=True, kw_only=True)
class NgramRule:
    """Lengths to look for, longest first, and which occurrence is continued."""

    min_n: int = DEFAULT_N
    max_n: int = DEFAULT_N
    occurrence: Occurrence = "earliest"

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise ProposerError(
                f"n-grams need 1 <= min <= max, found min {self.min_n} and max {self.max_n}; change one of them"
            )

    @classmethod
    def between(cls, min_n: int | None, max_n: int | None, occurrence: Occurrence = "earliest") -> "NgramRule":
        """The rule with bounds that may be missing: one alone stands for both, none for 5."""
        low = min_n if min_n is not None else max_n if max_n is not None else DEFAULT_N
        return cls(min_n=low, max_n=low if max_n is None else max_n, occurrence=occurrence)
