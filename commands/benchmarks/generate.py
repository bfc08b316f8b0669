"""A head, plain decoding and transformers' own `generate` on the same prompts: the parts of `bench generate`."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...infer.report import MethodResult


def transformers_speed(options: Any, outputs: Path) -> dict[str, dict[str, Any]]:
    """Speed of transformers' own `generate` on the same prompts, and on how many it says what plain decoding said."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..devices import device_of, dtype_of
    from ..methods import PLAIN

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


def row_of(result: "MethodResult", theirs: dict[str, Any]) -> dict[str, Any]:
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


def print_rows(rows: list[dict[str, Any]]) -> None:
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
