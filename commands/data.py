"""`spectrain data`: conversations to train on that the target itself wrote, and prompts to measure with."""

from pathlib import Path
from typing import Annotated

import typer

from .options import Device, Dtype, MaxLength, Model, Overwrite, Seed
from .outputs import check_new_files

app = typer.Typer(no_args_is_help=True)

Num = Annotated[int, typer.Option(help="Conversations to keep.")]
Out = Annotated[Path, typer.Option(help="JSONL file to write; a stopped run continues in it.")]
MaxNewTokens = Annotated[int, typer.Option(help="Longest turn; a conversation that does not close in it is dropped.")]
Temperature = Annotated[float, typer.Option(help="0 would write the same conversation again and again.")]
BatchSize = Annotated[int, typer.Option(help="Conversations written together.")]


@app.callback()
def data() -> None:
    """Make conversations to train on that the target itself wrote, and prompts to measure with."""


@app.command("self-chat")
def self_chat(
    model: Model,
    out: Out,
    num: Num = 1000,
    max_new_tokens: MaxNewTokens = 384,
    temperature: Temperature = 1.0,
    batch_size: BatchSize = 64,
    seed: Seed = 0,
    max_length: MaxLength = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Let the model write a user's message from its chat header alone, then answer it.

    Unclosed, duplicate and degenerate conversations are dropped and counted.
    """
    from .devices import device_of, dtype_of
    from .self_chat import SelfChat, check_out, write_conversations

    settings = SelfChat(
        num=num, max_new_tokens=max_new_tokens, temperature=temperature, batch_size=batch_size, seed=seed
    )
    check_out(out)
    where = device_of(device)
    from ..infer.target import Target

    target = Target.load(model, device=where, dtype=dtype_of(dtype, where), max_length=max_length)
    counts = write_conversations(target, settings, out)
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.dropped.items())) or "none"
    print(f"{counts.kept} conversations in {out}; dropped: {dropped}")


@app.command("code-edits")
def code_edits(
    source: Annotated[
        Path, typer.Option(help="HumanEval.jsonl.gz, or rows of prompt, canonical_solution, entry_point.")
    ],
    out: Annotated[Path, typer.Option(help="JSONL file of prompts to write.")],
    overwrite: Overwrite = False,
) -> None:
    """Prompts that ask for a small change to a whole function: answers repeat most of the prompt."""
    from .code_edits import write_code_edits

    check_new_files(out, overwrite=overwrite)
    print(f"{write_code_edits(source, out)} prompts in {out}")
