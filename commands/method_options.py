"""Options of the drafting methods themselves; how they are told apart stands in methods.py."""

from pathlib import Path
from typing import Annotated, Literal

import typer

DraftModel = Annotated[
    Path | None,
    typer.Option(help="Folder of a language model to draft with, of the target's tokenizer or of any other."),
]
TensorParallelSize = Annotated[int | None, typer.Option(help="Not supported: anything but 1 is refused.")]
Method = Annotated[
    str | None,
    typer.Option(
        help="`none` for plain decoding, `ngram`, `ngram_gpu`, `suffix`, `custom:module:Class`, `synthetic` for free "
        "drafts, `mtp` for layers of the target's own checkpoint, the head's own, or `suffix+` one of the last two; "
        "draft_model or pard where --head is an ordinary model. "
        "Several between commas are compared. Default: the head's."
    ),
]
NumDraftTokens = Annotated[
    int | None, typer.Option(help="Draft tokens a step; else the head's own default, 24 for suffix, 3 for others.")
]
NgramMin = Annotated[
    int | None, typer.Option(help="Shortest n-gram looked up; --ngram-max if only that is given, or 5.")
]
NgramMax = Annotated[
    int | None, typer.Option(help="Longest n-gram looked up; --ngram-min if only that is given, or 5.")
]
NgramMatch = Annotated[
    Literal["earliest", "latest"] | None,
    typer.Option(help="Which occurrence of an n-gram is continued; the earliest, as in vLLM, if not given."),
]
SuffixMaxDepth = Annotated[int | None, typer.Option(help="Tokens of a match and its draft together; 24.")]
SuffixMaxCachedRequests = Annotated[int | None, typer.Option(help="Earlier responses that are searched; 10000.")]
SuffixMaxFactor = Annotated[float | None, typer.Option(help="Suffix draft tokens a matched token; 1.")]
SuffixMinTokenProb = Annotated[float | None, typer.Option(help="Suffix drafts end below this frequency; 0.1.")]
SuffixCache = Annotated[
    Path | None, typer.Option(help="File of responses that suffix decoding starts from and that this run adds to.")
]
DraftSampling = Annotated[Literal["greedy", "probabilistic"], typer.Option(help="How drafts are drawn.")]
DraftPolicy = Annotated[
    Literal["fixed", "adaptive"], typer.Option(help="`adaptive` verifies the drafts that pay and rests where none do.")
]
