"""Options that several commands share, so that one word means one thing everywhere."""

from typing import Annotated, Literal

import typer

DeviceName = str
DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
VerificationName = Literal["standard", "block", "synthetic"]

Model = Annotated[str, typer.Option(help="The target: a folder or a hub id.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")]
Dtype = Annotated[DtypeName, typer.Option(help="Compute type; auto: bfloat16 on a GPU, float32 on a CPU.")]
MaxLength = Annotated[int | None, typer.Option(help="Longest prompt and output together; else the target's limit.")]
Seed = Annotated[int, typer.Option(help="Seed of everything drawn; the same seed gives the same output.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result in the output folder.")]
Eager = Annotated[bool, typer.Option("--eager", help="On a GPU: no CUDA graphs, every step waits for the last one.")]
AllowPackage = Annotated[list[str] | None, typer.Option(help="A package a head of yours may import its classes from.")]

Verification = Annotated[
    VerificationName,
    typer.Option(
        help="Which drafts are kept. standard: token by token; block: the longest prefix at once (both lossless); "
        "synthetic: by given rates, a load for benchmarks whose output means nothing."
    ),
]
AcceptanceRates = Annotated[
    str | None,
    typer.Option(
        help="For synthetic verification: the share of steps that keep the first 1, 2, ... drafts, as .8,.6,.5 or a "
        "JSON file."
    ),
]
AcceptanceLength = Annotated[
    float | None, typer.Option(help="For synthetic verification: the mean tokens a step, its bonus token included.")
]
