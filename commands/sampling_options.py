"""Options of how requests are sampled and when they end, in the words of vLLM, and the settings they make."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..infer.sampling import SamplingParams
    from .eval import Options

Temperature = Annotated[float, typer.Option(help="0 decodes greedily.")]
TopK = Annotated[int, typer.Option(help="0 keeps every token.")]
TopP = Annotated[float, typer.Option(help="1 keeps every token.")]
MinP = Annotated[float, typer.Option(help="Keep tokens this fraction as likely as the likeliest; 0 keeps every token.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Of tokens in prompt and output; 1 is off.")]
PresencePenalty = Annotated[float, typer.Option(help="Of tokens in the output, once each; 0 is off.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Of tokens in the output, for each time; 0 is off.")]
LogitBias = Annotated[
    list[str] | None, typer.Option(help="What to add to the logits of token ids, as ID=BIAS; one or more.")
]
BadWords = Annotated[
    list[str] | None, typer.Option(help="Words the output must not hold, with or without a space before them.")
]
AllowedTokenIds = Annotated[list[int] | None, typer.Option(help="The only token ids the output may hold.")]
MinTokens = Annotated[int, typer.Option(help="Tokens before which nothing ends an output.")]
Stop = Annotated[list[str] | None, typer.Option(help="Strings that end the output; one or more.")]
StopTokenIds = Annotated[list[int] | None, typer.Option(help="Token ids that end the output, beside the target's own.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Generate past end tokens.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate a prompt.")]
Logprobs = Annotated[
    int | None,
    typer.Option(help="Save log-probabilities of each output token and of this many best ones in outputs.jsonl."),
]
Fp64Gumbel = Annotated[
    bool, typer.Option("--fp64-gumbel", help="Draw tokens with noise in float64: exact far into the tail, slower.")
]

SAME = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "ignore_eos", "logprobs"),
)
"""Options that are settings as they stand."""


class SamplingOptionError(ValueError):
    """An option of sampling that does not fit; the message says what would."""


def sampling_params(options: "Options") -> "SamplingParams":
    """What options ask for, but bad words, which need a tokenizer; raises ValueError for impossible settings."""
    from ..infer.sampling import SamplingParams

    if not all(word.strip() for word in options.bad_words or ()):
        raise SamplingOptionError("--bad-words takes words, found an empty one; drop it")
    given: dict[str, Any] = {name: getattr(options, name) for name in SAME}
    return SamplingParams(
        max_tokens=options.max_new_tokens,
        stop=tuple(options.stop or ()),
        stop_token_ids=tuple(options.stop_token_ids or ()),
        allowed_token_ids=None if options.allowed_token_ids is None else tuple(options.allowed_token_ids),
        logit_bias=_logit_bias(options.logit_bias or ()),
        **given,
    )


def bad_word_ids(words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The token ids of words as they may stand in a text: at its beginning, and behind a space."""
    from ..infer.prompts import encode_rendered

    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            token_ids = tuple(encode_rendered(tokenizer, text))
            if not token_ids or tokenizer.unk_token_id in token_ids:
                raise SamplingOptionError(
                    f"--bad-words must be words of the target's tokenizer, found {word!r}; drop it"
                )
            found[token_ids] = None
    return tuple(found)


def _logit_bias(entries: Sequence[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for entry in entries:
        token, _, bias = entry.partition("=")
        try:
            token_id, value = int(token), float(bias)
        except ValueError:
            raise SamplingOptionError(f"--logit-bias takes ID=BIAS, as 42=-3.5, found {entry!r}; correct it") from None
        if token_id in biases:
            raise SamplingOptionError(f"--logit-bias names token {token_id} twice; give it once")
        biases[token_id] = value
    return biases
