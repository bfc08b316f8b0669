"""The folder `spectrain eval` leaves: a report to read, the same as JSON, and every output."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .methods import PLAIN
from .outputs import check_folders

if TYPE_CHECKING:
    from ..infer.evaluate import Measured
    from ..infer.request import RequestOutput
    from ..infer.target import Target

FILES = ("report.json", "report.html", "outputs.jsonl")


class EvalFolderError(ValueError):
    """A folder that holds a report already; the message says what to do."""


def check_folder(out: Path, overwrite: bool) -> None:
    """Raises OutputError where no report can be written, EvalFolderError where one would be lost."""
    check_folders(out)
    present = [name for name in FILES if (out / name).exists()]
    if present and not overwrite:
        raise EvalFolderError(f"{out} already holds {present[0]}; pass --overwrite or another --out")


def write_folder(out: Path, settings: dict[str, Any], target: "Target", measured: "Sequence[Measured]") -> None:
    """Writes what was measured; an earlier report is replaced when the new one is whole."""
    from ..infer.report import report_json, write_json
    from ..infer.report_page import page
    from .devices import environment

    results = [m.result for m in measured]
    settings = {name: _plain(value) for name, value in settings.items()}
    facts = environment(target.device)
    out.mkdir(parents=True, exist_ok=True)
    new = {name: out / f"{name}.tmp" for name in FILES}
    try:
        write_json(new["report.json"], report_json(results, settings, facts))
        new["report.html"].write_text(page(results, settings, facts), encoding="utf-8")
        write_outputs(new["outputs.jsonl"], target, measured)
        for name, path in new.items():
            os.replace(path, out / name)
    finally:
        for path in new.values():
            path.unlink(missing_ok=True)


def write_outputs(path: Path, target: "Target", measured: "Sequence[Measured]") -> None:
    """One line an output of each method and of plain decoding."""
    with open(path, "w", encoding="utf-8") as file:
        written: set[tuple[str, str]] = set()
        for m in measured:
            for method, outputs in {m.result.method: m.outputs, PLAIN: m.plain_outputs}.items():
                if (m.result.prompt_set, method) in written:
                    continue
                written.add((m.result.prompt_set, method))
                for index, output in enumerate(outputs):
                    row = {"index": index, "method": method, "prompt_set": m.result.prompt_set}
                    file.write(json.dumps(row | _output(output, target), ensure_ascii=False) + "\n")


def _output(output: "RequestOutput", target: "Target") -> dict[str, Any]:
    text = output.text
    if text is None and target.tokenizer is not None:
        text = target.tokenizer.decode(output.token_ids)
    row = {"prompt_token_ids": output.prompt_token_ids, "token_ids": output.token_ids, "text": text}
    return row if output.logprobs is None else row | {"logprobs": output.logprobs}


def _plain(value: Any) -> Any:
    """A setting as JSON: paths by name alone, so that a shared report tells nothing of the machine."""
    if isinstance(value, Path):
        return value.name
    return [_plain(item) for item in value] if isinstance(value, list) else value
