"""The steps that turn a target's logits into the law a request samples from, each in place on rows of logits.

Every step reads nothing but its own row, so a row's result does not depend on its neighbours, and waits for nothing:
all of them can be captured in a CUDA graph. Logits are [rows, vocab] float32 throughout.
"""

import torch
from torch import Tensor

SMALLEST_TEMPERATURE = 1e-6
"""Dividing by less can overflow float32; the law is already that of the argmax."""
MASS_UNIT = 2.0**40
"""What the likeliest token weighs in `keep_top_p`; integer sums come out the same in whatever order they are added."""


def temperature_divisor(temperature: Tensor) -> Tensor:
    """What to divide each row by, [rows] float32; 1 where the temperature is 0."""
    return torch.where(temperature > 0, temperature.clamp(min=SMALLEST_TEMPERATURE), 1)


def add_at(logits: Tensor, ids: Tensor, values: Tensor) -> None:
    """Adds values [rows, n] float32 to the logits of ids [rows, n] int64; an id of -1 is padding."""
    logits.scatter_add_(1, ids.clamp(min=0), torch.where(ids >= 0, values, 0.0))


def forbid(logits: Tensor, ids: Tensor, where: Tensor) -> None:
    """Forbids ids [rows, n] int64 (-1 = padding) where the bool [rows, n] says so."""
    # adding -inf or 0 lets one token be named twice, once forbidden and once not, in any order
    add_at(logits, ids, torch.where(where, -torch.inf, 0.0))


def penalise(
    logits: Tensor,
    history: Tensor,
    num_known: Tensor,
    prompt_lens: Tensor,
    repetition: Tensor,
    presence_and_frequency: tuple[Tensor, Tensor] | None,
) -> None:
    """Penalises tokens that stand in history[:num_known].

    history [rows, width] integer; num_known and prompt_lens [rows] int64. repetition [rows] float32 divides a positive
    logit and multiplies a negative one, for tokens of the prompt too. (presence, frequency) [rows] float32 each count
    the output alone: the first is subtracted once, the second once an occurrence.
    """
    vocab = logits.shape[1]
    index = torch.arange(history.shape[1], device=logits.device)
    known = (index < num_known[:, None]) & (history >= 0) & (history < vocab)
    # what is not known is mapped to a token that is, so that every id below asks for the same thing each time it occurs
    ids = torch.where(known, history, history[:, :1].clamp(0, vocab - 1)).long()
    values = logits.gather(1, ids)
    values = torch.where(values > 0, values / repetition[:, None], values * repetition[:, None])
    if presence_and_frequency is not None:
        presence, frequency = presence_and_frequency
        output = known & (index >= prompt_lens[:, None])
        counts = torch.zeros_like(logits, dtype=torch.int32).scatter_add_(1, ids, output.int()).gather(1, ids)
        values = values - frequency[:, None] * counts - presence[:, None] * (counts > 0)
    logits.scatter_(1, ids, values)


def forbid_bad_words(logits: Tensor, words: Tensor, previous: Tensor) -> None:
    """Forbids the last token of every sequence whose other tokens come right before the row's next one.

    words [rows, n, length] int64 hold the sequences backwards, -1 behind their first token and in unused places;
    previous [rows, length - 1] int64 the tokens before the next one, newest first, -1 where the output has none.
    """
    last, before = words[..., 0], words[..., 1:]
    forbid(logits, last, ((before == previous[:, None]) | (before < 0)).all(dim=-1))


def keep_min_p(logits: Tensor, min_p: Tensor) -> None:
    """Forbids tokens less than min_p [rows] float32 times as likely as the likeliest; 0 = off."""
    floor = logits.amax(dim=-1) + min_p.log()
    logits.masked_fill_(logits < floor[:, None], -torch.inf)


def keep_top_k(logits: Tensor, top_k: Tensor, largest: int) -> None:
    """Forbids all but the top_k [rows] int64 best tokens, `largest` at most, and their ties; 0 = off."""
    best = logits.topk(min(largest, logits.shape[1]), dim=-1).values
    kth = best.gather(1, (top_k - 1).clamp(0, best.shape[1] - 1)[:, None])
    logits.masked_fill_((logits < kth) & (top_k > 0)[:, None], -torch.inf)


def keep_top_p(logits: Tensor, top_p: Tensor, candidates: int | None) -> None:
    """Keeps the fewest tokens (lowest ids on ties) whose mass reaches top_p [rows] float32; 1 = off.

    `candidates`: tokens a row has left at most, ties of the least likely aside; None = the whole vocabulary.
    """
    if candidates is None or candidates >= logits.shape[1]:
        best = logits.sort(dim=-1, descending=True).values
    else:
        best = logits.topk(candidates, dim=-1).values
    largest = best[:, :1]
    total = _mass(logits, largest).sum(dim=-1, keepdim=True)
    wanted = (total.double() * top_p[:, None].double()).ceil().long()
    masses = _mass(best, largest)
    reached = (masses.cumsum(dim=-1) - masses < wanted).sum(dim=-1, keepdim=True)  # tokens that are needed
    edge = best.gather(1, (reached - 1).clamp(min=0))
    above = torch.where(best > edge, masses, 0).sum(dim=-1, keepdim=True)
    each = _mass(edge, largest).clamp(min=1)
    ties_kept = (wanted - above + each - 1).div(each, rounding_mode="floor").clamp(min=1)
    at_edge = logits == edge
    beyond = (logits < edge) | (at_edge & (at_edge.cumsum(dim=-1, dtype=torch.int32) > ties_kept))
    # rounding can carry the mass of a row without top_p past its total, so it is exempt
    logits.masked_fill_(beyond & (top_p < 1)[:, None], -torch.inf)


def _mass(logits: Tensor, largest: Tensor) -> Tensor:
    """Unnormalised probabilities as whole numbers of 1 / MASS_UNIT of the likeliest's."""
    return ((logits - largest).exp().double() * MASS_UNIT).long()
