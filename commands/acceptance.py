"""The acceptance rates of synthetic verification, from the options that name them."""

from .options import VerificationName


class AcceptanceError(ValueError):
    """Rates that were not asked for, are missing, or do not fit the drafts; the message says what would."""


def acceptance_rates(
    verification: VerificationName, num_draft_tokens: int, rates: str | None, length: float | None
) -> tuple[float, ...] | None:
    """The share of steps that keep the first 1, 2, ... drafts; None where verification is not synthetic.

    Raises ValueError for rates without synthetic verification, the reverse, and rates that do not fit the drafts.
    """
    if verification != "synthetic":
        if rates is not None or length is not None:
            raise AcceptanceError(
                f"acceptance rates are for --verification synthetic, found --verification {verification}; drop them"
            )
        return None
    if (rates is None) == (length is None):
        found = "neither" if rates is None else "both"
        raise AcceptanceError(
            f"--verification synthetic takes --acceptance-rates or --acceptance-length, found {found}; give one"
        )
    if not num_draft_tokens:
        raise AcceptanceError(
            "--verification synthetic keeps drafts, found --method none; give --method synthetic or a head"
        )
    from ..infer.synthetic import check_survival, parse_rates, survival_of_length

    survival = survival_of_length(length, num_draft_tokens) if length is not None else parse_rates(rates or "")
    check_survival(survival, num_draft_tokens)
    return tuple(survival)
