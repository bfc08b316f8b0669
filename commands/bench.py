"""`spectrain bench`: speed beside other ways to decode, in one run, and only after the outputs were checked."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Device, Dtype, Eager, Model, Overwrite

if TYPE_CHECKING:
    from ..infer.report import MethodResult

app = typer.Typer(no_args_is_help=True)

Head = Annotated[Path, typer.Option(help="Head folder written by `spectrain fit`.")]
Prompts = Annotated[list[Path], typer.Option(help="JSONL files of prompts; one row of the table a file.")]
Limit = Annotated[int, typer.Option(help="Prompts a file.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate a prompt.")]
NumDraftTokens = Annotated[int | None, typer.Option(help="Draft tokens a step; the head's own default otherwise.")]
Out = Annotated[Path, typer.Option(help="Folder for bench.json and the reports it rests on.")]


class BenchError(ValueError):
    """Nothing may be measured: the outputs differ, or an option does not fit."""


@app.callback()
def bench() -> None:
    """Measure speed; no figure without a passing check in the same run."""


@app.command("generate")
def generate(
    model: Model,
    head: Head,
    prompts: Prompts,
    limit: Limit = 10,
    max_new_tokens: MaxNewTokens = 128,
    num_draft_tokens: NumDraftTokens = None,
    eager: Eager = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Out = Path("bench"),
    overwrite: Overwrite = False,
) -> None:
    """Tokens/s at batch 1, greedy: the head, plain decoding in the same engine, transformers' static cache."""
    from .eval import Options, run

    options = Options(
        model=model,
        prompts=prompts,
        head=head,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=max_new_tokens,
        limit=limit,
        batch_size=1,
        eager=eager,
        device=device,
        dtype=dtype,
        out=out,
        overwrite=overwrite,
    )
    results = run(options, quiet=True)
    failed = [f"{r.prompt_set}: {r.lossless.reason}" for r in results if not r.lossless.passed]
    if failed:
        raise BenchError(f"expected the same output with and without drafts, found {'; '.join(failed)}; see {out}")
    theirs = _transformers(options, out / "outputs.jsonl")
    rows = [_row(result, theirs[result.prompt_set]) for result in results]
    record = {"date": time.strftime("%Y-%m-%d"), **json.loads((out / "report.json").read_text())["environment"]}
    (out / "bench.json").write_text(json.dumps({**record, "generate": rows}, indent=2) + "\n")
    _print(rows)


def _transformers(options: Any, outputs: Path) -> dict[str, dict[str, Any]]:
    """Speed of transformers' own `generate` on the same prompts, and on how many it says what plain decoding said."""
    import torch
    from transformers import AutoModelForCausalLM

    from .devices import device_of, dtype_of
    from .eval import PLAIN

    device = device_of(options.device)
    dtype = dtype_of(options.dtype, device)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    model.to(device).eval()
    rows = [row for row in map(json.loads, outputs.read_text().splitlines()) if row["method"] == PLAIN]
    # one padded length for all prompts: a static cache of another size would be compiled again
    width = max(len(row["prompt_token_ids"]) for row in rows)

    def answer(row: dict[str, Any]) -> list[int]:
        ids = row["prompt_token_ids"]
        padding = width - len(ids)
        with torch.inference_mode():
            full = model.generate(
                input_ids=torch.tensor([[0] * padding + ids], device=device),
                attention_mask=torch.tensor([[0] * padding + [1] * len(ids)], device=device),
                max_new_tokens=options.max_new_tokens,
                do_sample=False,
                cache_implementation="static",
            )
        return full[0, width:].tolist()

    for row in rows[:2]:  # compiles
        answer(row)
    sets: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["prompt_set"] for row in rows):
        mine = [row for row in rows if row["prompt_set"] == name]
        begun = time.perf_counter()
        answers = [answer(row) for row in mine]
        seconds = time.perf_counter() - begun
        sets[name] = {
            "tokens_per_second": sum(map(len, answers)) / seconds,
            "equal": sum(a == row["token_ids"] for a, row in zip(answers, mine, strict=True)),
        }
    return sets


def _row(result: "MethodResult", theirs: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt_set": result.prompt_set,
        "num_prompts": result.num_prompts,
        "num_draft_tokens": result.num_draft_tokens,
        "acceptance_length": result.acceptance_length,
        "tokens_per_second": result.tokens_per_second,
        "plain_tokens_per_second": result.baseline_tokens_per_second,
        "transformers_tokens_per_second": theirs["tokens_per_second"],
        "speedup": result.speedup,
        "speedup_over_transformers": result.tokens_per_second / theirs["tokens_per_second"],
        "noise_floor": result.noise_floor,
        "prompts_equal_to_plain": result.lossless.equal,
        "prompts_equal_to_transformers": theirs["equal"],
    }


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("set", "prompts", "k", "length", "head tok/s", "plain tok/s", "transformers tok/s", "head/plain"):
        table.add_column(title, justify="left" if title == "set" else "right")
    for row in rows:
        table.add_row(
            row["prompt_set"],
            str(row["num_prompts"]),
            str(row["num_draft_tokens"]),
            f"{row['acceptance_length']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['transformers_tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}",
        )
    Console(highlight=False).print(table)
