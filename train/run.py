"""One `fit` from recipe and shards to a head folder: fresh, resumed, or done again."""

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import __version__
from ..extract.shards import ShardSet
from ..heads.base import DraftHead, Elsewhere
from ..heads.folder import save_head
from ..recipes.loader import Recipe
from . import checkpoint, launch
from .assembly import Assembly, assemble, continued_head, coverage, first_difference, new_head
from .attention import AttentionSettings, choose_backend
from .checkpoint import CheckpointError, CheckpointFolder, Found, RunState
from .data import RowReader, TrainingRows, split_documents
from .evaluation import Validator
from .log import plot
from .step import HeadWithObjective, Stepper
from .trainer import Progress, Trainer, TrainResult

DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


class Listener(Protocol):
    """Where a run says what it does; called on the main process only."""

    def note(self, text: str) -> None:
        """One line about a decision."""
        ...

    def progress(self, progress: Progress) -> None:
        """One log step or evaluation."""
        ...

    def finished(self, report: "FitReport") -> None:
        """The head folder is written."""
        ...


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """What a user asked for."""

    recipe: Recipe
    shards: tuple[Path, ...]
    out: Path
    start_from: Path | None = None  # a head folder; None: a fresh head
    resume: bool = False
    overwrite: bool = False
    device: str = "auto"
    dtype: str = "auto"
    allowed_packages: tuple[str, ...] = ()
    model: str | None = None  # what a head starts from whose recipe asks for a model
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class FitReport:
    """A finished run."""

    out: Path
    result: TrainResult
    exported_step: int
    coverage: float
    elsewhere: Elsewhere


def fit(request: FitRequest, listener: Listener) -> FitReport:
    """Trains a head and writes its folder; raises a ValueError subclass with one line for every bad input."""
    if request.dtype not in ("auto", *DTYPES):
        raise ValueError(f"--dtype must be auto, float32 or bfloat16 (of the computation), found {request.dtype!r}")
    shards = ShardSet.open(request.shards)
    assembly = assemble(request.recipe, shards, request.allowed_packages, request.model)
    accelerator = launch.start(request.device)
    speaker = listener if accelerator.is_main_process else _Silent()
    speaker.note(launch.describe(accelerator))
    if isinstance(assembly.objective_settings, AttentionSettings):
        choose_backend(assembly.objective_settings.attention, accelerator.device)  # refused now, not in the first step
    mask_token_id = getattr(assembly.config, "mask_token_id", None)
    if mask_token_id is not None and request.recipe.section("head").get("mask_token_id") is None:
        speaker.note(f"the mask token is id {mask_token_id}")

    run = request.out / "run"
    checkpoints = CheckpointFolder(run / "checkpoints")
    launch.run_on_main(accelerator, lambda: _check_folder(request))
    found = _found(request, checkpoints, assembly, shards, speaker)
    if found:
        head = assembly.network()
        checkpoint.load_head_tensors(found.folder, head)
    elif request.start_from is not None:
        head = continued_head(assembly, request.start_from)
    else:
        head = new_head(assembly, shards)
    autocast = DTYPES["bfloat16" if accelerator.device.type == "cuda" else "float32"]
    if request.dtype != "auto":
        autocast = DTYPES[request.dtype]
    head.to(accelerator.device)
    target = shards.target_tensors().to(accelerator.device, autocast or torch.float32)
    module = HeadWithObjective(head, assembly.objective, autocast)
    stepper = Stepper(accelerator, module, target, assembly.optimizer, assembly.data.micro_batch_size)
    trainer = _trainer(assembly, shards, stepper, run, found, speaker)
    trainer.check_rows()
    # only now: what is refused until here must not cost the head that lies there
    launch.run_on_main(accelerator, lambda: _prepare_folder(request, checkpoints))
    launch.run_on_main(
        accelerator, lambda: (run / "recipe.yaml").write_text(assembly.recipe.to_yaml(), encoding="utf-8")
    )
    if found:
        checkpoint.load(found.folder, stepper, head, found.state)
    result = trainer.train()
    best = result.best.step if result.best is not None else result.step
    covered = coverage(head, shards)
    launch.run_on_main(accelerator, lambda: _export(request, assembly, shards, checkpoints.path(best), result, covered))
    report = FitReport(request.out, result, best, covered, head.config.elsewhere())
    speaker.finished(report)
    accelerator.end_training()
    return report


class _Silent:
    def note(self, text: str) -> None:
        """Says nothing: another process speaks."""

    def progress(self, progress: Progress) -> None:
        """Says nothing."""

    def finished(self, report: "FitReport") -> None:
        """Says nothing."""


def _check_folder(request: FitRequest) -> None:
    """Refuses a folder that holds something nobody said what to do with; touches nothing."""
    out = request.out
    if request.resume and request.overwrite:
        raise CheckpointError("expected --resume or --overwrite, found both; give one")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not (request.resume or request.overwrite):
        raise CheckpointError(f"{out} is not empty; pass --resume to continue its run, --overwrite to start again")
    foreign = [path.name for path in out.iterdir() if path.name not in (*HEAD_FILES, "run")]
    if request.overwrite and foreign:
        raise CheckpointError(f"{out} holds {foreign[0]}, which no fit wrote, so --overwrite leaves it alone; move it")


def _prepare_folder(request: FitRequest, checkpoints: CheckpointFolder) -> None:
    if request.overwrite:
        for name in HEAD_FILES:
            (request.out / name).unlink(missing_ok=True)
        shutil.rmtree(request.out / "run", ignore_errors=True)
    checkpoints.folder.mkdir(parents=True, exist_ok=True)
    checkpoints.remove_leftovers()


HEAD_FILES = ("config.json", "model.safetensors", "spectrain.json")


def _found(
    request: FitRequest, checkpoints: CheckpointFolder, assembly: Assembly, shards: ShardSet, speaker: Listener
) -> Found | None:
    found = checkpoints.newest() if request.resume else None
    if found is None:
        if request.resume:
            speaker.note(f"no whole checkpoint in {checkpoints.folder}: starting from the beginning")
        return None
    for path in found.broken:
        speaker.note(f"warning: {path} is incomplete and passed over")
    if found.state.data_hash != shards.content_hash():
        raise CheckpointError(
            f"{found.folder} was trained on other shards than {', '.join(map(str, shards.folders))}; resume with the "
            f"same ones in the same order, or start again with --overwrite"
        )
    difference = first_difference(found.state.identity, assembly.identity(shards))
    if difference is not None:
        key, before, after = difference
        raise CheckpointError(
            f"{found.folder} was trained with {key} = {before}, this recipe says {after}; resume with the same recipe "
            f"or start again with --overwrite"
        )
    speaker.note(f"resuming at optimizer step {found.state.step} from {found.folder}")
    return found


def _trainer(
    assembly: Assembly, shards: ShardSet, stepper: Stepper, run: Path, found: Found | None, speaker: Listener
) -> Trainer:
    data, accelerator, config = assembly.data, stepper.accelerator, assembly.config
    rank, world = accelerator.process_index, accelerator.num_processes
    reader = RowReader(shards, config.layer_ids, config.requires_final_state, data.sequence_length)
    split = split_documents(shards.num_documents, data)
    rows = TrainingRows(reader, split.train, data, rank, world)
    validator = Validator(reader, split.validation, data, rank, world) if len(split.validation) else None
    planned = rows.steps_per_epoch * assembly.stopping.epochs
    total = min(planned, assembly.stopping.max_steps or planned)
    state = (
        found.state
        if found
        else RunState(step=0, position=0, skipped=0, total_steps=total, data_hash="", identity={}, world=world)
    )
    state = replace(
        state, total_steps=total, world=world, data_hash=shards.content_hash(), identity=assembly.identity(shards)
    )
    too_long = (reader.lengths > data.sequence_length).sum().item()
    speaker.note(
        f"{len(split.train)} documents in {len(rows.rows)} rows of {data.sequence_length} tokens, {total} optimizer "
        f"steps of {data.batch_size} rows; {len(split.validation)} documents held out"
    )
    if too_long:
        speaker.note(f"{too_long} documents are longer than data.sequence_length and are cut to it")
    if validator is None:
        speaker.note("no document is held out, so the last checkpoint is the best one")
    if found and found.state.total_steps != total:
        speaker.note(f"the schedule is now stretched over {total} steps, before over {found.state.total_steps}")
    return Trainer(
        stepper=stepper,
        rows=rows,
        validator=validator,
        optimizer=assembly.optimizer,
        stopping=assembly.stopping,
        run_folder=run,
        state=state,
        listen=speaker.progress,
    )


def _export(
    request: FitRequest, assembly: Assembly, shards: ShardSet, source: Path, result: TrainResult, covered: float
) -> None:
    """Writes the head folder from the float32 masters of `source`, then the plots."""
    head: DraftHead = assembly.network()
    checkpoint.load_head_tensors(source, head)
    best = result.best
    save_head(
        request.out,
        head,
        {
            "recipe": assembly.recipe.to_dict(),
            "serving": asdict(assembly.serving),
            "objective": asdict(assembly.objective_settings),
            "shards": _provenance(shards),
            "started_from": None if assembly.model is None else without_paths([assembly.model.name])[0],
            "draft_vocabulary": {"size": assembly.config.draft_vocab_size, "coverage": covered},
            "metrics": {
                "steps": result.step,
                "skipped_batches": result.skipped,
                "exported_step": result.step if best is None else best.step,
                "validation": None if best is None else asdict(best),
            },
            "versions": versions(),
            "command": without_paths(request.command),
            "git_sha": git_sha(Path(__file__).parent),
        },
    )
    plot(request.out / "run")


def _provenance(shards: ShardSet) -> dict[str, Any]:
    manifest = shards.manifest
    return {
        "target": {**asdict(manifest.target), "name": without_paths([manifest.target.name])[0]},
        "tokenizer_hash": manifest.tokenizer_hash,
        "template_hash": manifest.template_hash,
        "on_policy": all(m.on_policy for m in shards.manifests),
        "layer_ids": list(manifest.layer_ids),
        "dtype": manifest.dtype,
        "tokens": shards.tokens,
        "supervised_tokens": shards.supervised_tokens,
        "content_hash": shards.content_hash(),
    }


def versions() -> dict[str, str]:
    """Versions of what computed the head."""
    found = {"spectrain": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "accelerate", "safetensors", "numpy"):
        found[package] = importlib.metadata.version(package)
    return found


def git_sha(folder: Path) -> str | None:
    """The commit of the repository `folder` lies in; None outside of one or without git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def without_paths(arguments: Sequence[str]) -> list[str]:
    """Arguments with local paths reduced to their last name, so that a published head tells nothing of its machine.

    Paths behind an equals sign included, as in `--out=/data/head`.
    """
    return ["=".join(_without_path(part) for part in text.split("=")) for text in arguments]


def _without_path(text: str) -> str:
    return Path(text).name if Path(text).is_absolute() or text.startswith(("./", "../", "~")) else text
