"""The work folder: what is finished, each piece in a file of its own, so that nothing finished is done or lost twice.

work.json                    what makes the pieces comparable
heads/NAME/                  the head folder of a run, as `fit` writes it
trained/NAME.json            what was learned about it in training
measured/NAME/k5-b1-t0-SET.json    one measurement; NAME is a run, such as eagle3-0
plain/CALL.json              plain decoding in one call of the command
table.json, table.md         all of it
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ....extract.shards import file_sha256
from ....train.assembly import first_difference
from ....train.checkpoint import write_json
from ..record import BenchError
from .plan import Plan, Run


class Load(NamedTuple):
    """What an engine is built for, and the temperature that decides how drafts are drawn; k = 0 decodes plainly."""

    num_draft_tokens: int
    batch_size: int
    temperature: float

    def name(self, prompt_set: str) -> str:
        """The measurement's file name."""
        return f"k{self.num_draft_tokens}-b{self.batch_size}-t{self.temperature:g}-{prompt_set}"


@dataclass(frozen=True)
class Work:
    """The files of one work folder."""

    folder: Path

    def head_folder(self, run: Run) -> Path:
        """Where `fit` writes the head of a run."""
        return self.folder / "heads" / run.name

    def trained(self, run: Run) -> dict[str, Any] | None:
        """What training a run gave; None where it is not finished."""
        return _read(self.folder / "trained" / f"{run.name}.json")

    def save_trained(self, run: Run, record: Mapping[str, Any]) -> None:
        """Says that a run is finished."""
        _write(self.folder / "trained" / f"{run.name}.json", record)

    def measured(self, run: Run, load: Load, prompt_set: str) -> dict[str, Any] | None:
        """One measurement; None where it was not made."""
        return _read(self.folder / "measured" / run.name / f"{load.name(prompt_set)}.json")

    def save_measured(self, run: Run, load: Load, prompt_set: str, record: Mapping[str, Any]) -> None:
        """Keeps one measurement, whose check has passed."""
        _write(self.folder / "measured" / run.name / f"{load.name(prompt_set)}.json", record)

    def plain(self, call: str) -> dict[str, Any] | None:
        """Plain decoding in one call of the command."""
        return _read(self.folder / "plain" / f"{call}.json")

    def save_plain(self, call: str, record: Mapping[str, Any]) -> None:
        """Keeps what plain decoding did in this call so far."""
        _write(self.folder / "plain" / f"{call}.json", record)

    def check_begun(self, facts: Mapping[str, Any]) -> None:
        """Refuses to mix what cannot be compared; the first call writes what holds for all.

        Raises BenchError naming what differs. Prompt sets may be added later.
        """
        path = self.folder / "work.json"
        begun = _read(path) or {"prompts": {}}
        known = {key: value for key, value in facts.items() if key in begun}
        known["prompts"] = {name: digest for name, digest in facts["prompts"].items() if name in begun["prompts"]}
        before = {key: begun[key] for key in known}
        before["prompts"] = {name: begun["prompts"][name] for name in known["prompts"]}
        difference = first_difference(before, known)
        if difference is not None:
            key, then, now = difference
            raise BenchError(
                f"{self.folder} was begun with {key} = {then}, this call says {now}; use the same or another --work"
            )
        prompts = {**begun["prompts"], **facts["prompts"]}
        _write(path, {**begun, **facts, "prompts": prompts})


def facts_of(plan: Plan, shards_hash: str) -> dict[str, Any]:
    """What every piece of a work folder has in common."""
    return {
        "shards": shards_hash[:16],
        "token_budget": plan.token_budget,
        "sequence_length": plan.sequence_length,
        "num_prompts": plan.num_prompts,
        "max_new_tokens": plan.max_new_tokens,
        "prompts": {name: file_sha256(path)[:16] for name, path in plan.prompts.items()},
    }


def weights_digest(folder: Path) -> str:
    """What tells a head's weights from those of another one."""
    return file_sha256(folder / "model.safetensors")[:16]


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchError(f"{path} is not valid JSON ({error}); delete it to do this piece again") from error


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, value)
