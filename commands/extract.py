"""`spectrain extract`: conversations in, a shard folder out.

Options, processes and the terminal live here; what is computed and written lives in extract/.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..extract.conversations import BadRow, RowCounts
from ..extract.extraction import (
    TEXT_FOLDER,
    Alone,
    Extraction,
    ExtractionSettings,
    Workers,
    check_folder,
    clear_folder,
)
from ..extract.generation import GenerationSettings, TextWriter
from ..extract.manifest import Manifest, ShardEntry
from ..extract.plan import ExtractionError, Plan, plan_extraction
from ..extract.shards import TARGET_FOLDER
from ..heads.base import HeadConfig, TargetFacts
from ..infer.prompts import Prompt, load_prompts
from ..infer.target import Target
from ..recipes.loader import Recipe, load_recipe
from ..train.assembly import head_config
from .devices import device_of
from .options import Device, Model
from .outputs import check_folders

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def extract(
    model: Model,
    data: Annotated[list[Path], typer.Option(help="Conversations, JSONL or JSON; may be given several times.")],
    out: Annotated[Path, typer.Option(help="The shard folder to write.")],
    recipe: Annotated[str | None, typer.Option(help="Recipes whose layers are captured: NAME[,NAME].")] = None,
    layers: Annotated[str | None, typer.Option(help="Layer ids to capture, such as 2,15,27; id L is added.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest row in tokens; longer ones are cut.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Stop before the row that would pass this total.")] = None,
    limit: Annotated[int | None, typer.Option(help="Read at most this many rows.")] = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of one forward pass.")] = 4096,
    shard_tokens: Annotated[int, typer.Option(help="Tokens of one shard file.")] = 65536,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32, for computing and storing.")] = "bfloat16",
    resume: Annotated[bool, typer.Option("--resume", help="Go on after the last whole shard.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove an earlier extraction in --out.")] = False,
    generate: Annotated[
        int | None, typer.Option(help="Let the target answer the rows' prompts first, in at most this many tokens.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="With --generate; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="With --generate.")] = 1.0,
    seed: Annotated[int, typer.Option(help="With --generate; each row gets its own from it.")] = 0,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of the model's repository.")
    ] = False,
) -> None:
    """Run the target over conversations and store its hidden states as shards."""
    console = Console(stderr=True)
    if dtype not in DTYPES:
        raise ExtractionError(f"--dtype must be one of {', '.join(DTYPES)}, found {dtype!r}; give one of them")
    for option, value in (("--limit", limit), ("--max-tokens", max_tokens)):
        if value is not None and value < 1:
            raise ExtractionError(f"{option} must be at least 1, found {value}; give a larger number or leave it out")
    asked = _layer_request(recipe, layers)
    workers, chosen = _processes(device)
    if workers.rank != 0:
        console.quiet = True
    if workers.rank == 0:
        check_folders(out, out / TARGET_FOLDER, *(() if generate is None else (out / TEXT_FOLDER,)))
        check_folder(out, resume=resume, overwrite=overwrite)
    workers.wait()
    target = Target.load(model, device=chosen, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)
    layer_ids = asked.resolve(target.facts)
    target.capture(layer_ids)  # a wrong id is refused before the data is read
    length = _row_length(target, max_length)
    settings = ExtractionSettings(
        layer_ids=layer_ids, batch_tokens=batch_tokens, shard_tokens=shard_tokens, max_length=length
    )

    def clear() -> None:
        # as late as can be: what is refused before must not cost the extraction that lies there
        if overwrite:
            workers.wait()
            if workers.rank == 0:
                clear_folder(out)
            workers.wait()

    notes: dict[str, Any] = {} if recipe is None else {"recipes": recipe}
    if generate is not None:
        answers = GenerationSettings(
            max_new_tokens=generate, temperature=temperature, top_p=top_p, seed=seed, max_length=length
        )
        notes["generation"] = {"max_new_tokens": generate, "temperature": temperature, "top_p": top_p, "seed": seed}
        prompts = _prompts(target, data, answers, limit, console)
        clear()
        data = _write_text(target, prompts, out / TEXT_FOLDER, answers, workers, console)
        limit = None
    plan = plan_extraction(
        data,
        _tokenizer(target),
        shard_tokens=shard_tokens,
        max_length=length,
        vocab_size=target.vocab_size,
        stop_ids=target.eos_token_ids,
        limit=limit,
        max_tokens=max_tokens,
    )
    extraction = Extraction(target, plan, out, settings, workers=workers, notes=notes)
    _announce(extraction, plan, console)
    if workers.rank == 0:
        extraction.check_disk()
    if generate is None:
        clear()
    with _Bar(console, plan.tokens // workers.world_size) as bar:
        manifest, written = extraction.run(bar)
    _summarise(manifest, written, out, workers, console)
    if isinstance(workers, _Processes):
        workers.close()


@dataclass(frozen=True)
class _LayerRequest:
    """The layers asked for: ids, or recipes whose heads derive them from the target."""

    ids: tuple[int, ...] | None
    recipes: tuple[Recipe, ...]

    def resolve(self, facts: TargetFacts) -> tuple[int, ...]:
        if self.ids is not None:
            return self.ids
        return tuple(sorted({i for recipe in self.recipes for i in _head_config(recipe, facts).layer_ids}))


def _layer_request(recipe: str | None, layers: str | None) -> _LayerRequest:
    if recipe is not None and layers is not None:
        raise ExtractionError("expected --recipe or --layers, found both; give one")
    if layers is not None:
        try:
            return _LayerRequest(tuple(int(part) for part in layers.split(",")), ())
        except ValueError:
            raise ExtractionError(f"--layers takes numbers such as 2,15,27, found {layers!r}; correct it") from None
    if recipe is None:
        raise ExtractionError("expected --recipe NAME or --layers 2,15,27, found neither; give one")
    return _LayerRequest(None, tuple(load_recipe(name.strip()) for name in recipe.split(",") if name.strip()))


def _head_config(recipe: Recipe, facts: TargetFacts) -> HeadConfig:
    """Naming a recipe is trusting the package its head lives in."""
    package = str(recipe.section("head").get("config")).split(":")[0].split(".")[0]
    return head_config(recipe, facts, {package})


def _row_length(target: Target, asked: int | None) -> int:
    longest = target.max_length - 1
    if asked is None:
        return longest
    if asked < 1:
        raise ExtractionError(f"--max-length must be at least 1, found {asked}; give a larger number")
    return min(asked, longest)


def _tokenizer(target: Target) -> Any:
    if target.tokenizer is None:
        raise ExtractionError(f"{target.name} must come with a tokenizer, found none; save one into its folder")
    return target.tokenizer


class _Processes:
    """The processes of one launch, through accelerate."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.rank: int = state.process_index
        self.world_size: int = state.num_processes

    def wait(self) -> None:
        self._state.wait_for_everyone()

    def gather(self, entries: list[tuple[int, ShardEntry]]) -> list[tuple[int, ShardEntry]]:
        from accelerate.utils import gather_object

        return gather_object(entries)

    def close(self) -> None:
        """Leaves the group, which NCCL otherwise warns about at exit."""
        self._state.destroy_process_group()


def _processes(device: str) -> tuple[Workers, torch.device]:
    """This process's place among those launched; raises ExtractionError where those do not know each other."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched == 1:
        return Alone(), device_of(device)
    from accelerate import PartialState

    on_cpu = device_of(device).type == "cpu"
    # the slowest process may still be writing long after the first is done
    state = PartialState(cpu=on_cpu, timeout=timedelta(days=7))
    if state.num_processes != launched:
        raise ExtractionError(
            f"{launched} processes were launched but this one sees {state.num_processes}; launch with `accelerate "
            f"launch -m spectrain extract` or torchrun, and set ACCELERATE_USE_CPU=true on a CPU"
        )
    return _Processes(state), torch.device("cpu" if on_cpu else state.device or "cuda")


def _prompts(
    target: Target, data: Sequence[Path], settings: GenerationSettings, limit: int | None, console: Console
) -> list[Prompt]:
    """The prompts of the rows that leave room for an answer; raises ExtractionError where none does."""
    counts = RowCounts()

    def skip(source: str, reason: str) -> None:
        counts.drop(BadRow(-1, source, reason))

    prompts: list[Prompt] = []
    for prompt in load_prompts(data, _tokenizer(target), limit=limit, skip=skip):
        if len(prompt.token_ids) < settings.max_length:
            prompts.append(prompt)
        else:
            skip(prompt.source, f"the prompt leaves no room for an answer within {settings.max_length} tokens")
    counts.kept = len(prompts)
    _print_counts(counts, console, "prompts")
    if not prompts:
        raise ExtractionError(
            "expected at least one prompt that leaves room for an answer, found none; raise --max-length"
        )
    return prompts


def _write_text(
    target: Target,
    prompts: Sequence[Prompt],
    folder: Path,
    settings: GenerationSettings,
    workers: Workers,
    console: Console,
) -> list[Path]:
    writer = TextWriter(target, folder, settings)
    if workers.rank == 0:
        writer.begin(prompts)
    workers.wait()
    chunks = writer.chunks(prompts)
    with _Bar(console, None, "writing text") as bar:
        written = writer.write(chunks[workers.rank :: workers.world_size], bar.computed)
    workers.wait()
    console.print(f"{len(prompts)} answers in {folder} ({written} of {len(chunks)} files written now)", soft_wrap=True)
    return [path for path, _ in chunks]


class _Bar:
    """A progress bar: tokens a second, megabytes written, time left."""

    def __init__(self, console: Console, total: int | None, title: str = "extracting") -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            _Rate(),
            TextColumn("{task.fields[megabytes]:.0f} MB"),
            TimeRemainingColumn(),
            console=console,
            disable=console.quiet,
        )
        self._task = self._progress.add_task(title, total=total, megabytes=0.0)
        self._bytes = 0

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def skipped(self, tokens: int) -> None:
        task = self._progress.tasks[0]
        if task.total is not None:
            self._progress.update(self._task, total=max(task.total - tokens, 0))

    def computed(self, tokens: int) -> None:
        self._progress.advance(self._task, tokens)

    def written(self, num_bytes: int) -> None:
        self._bytes += num_bytes
        self._progress.update(self._task, megabytes=self._bytes / 1e6)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.completed:,.0f} tokens, {task.speed or 0:,.0f}/s")


def _announce(extraction: Extraction, plan: Plan, console: Console) -> None:
    _print_counts(plan.counts, console, "rows")
    need = extraction.need()
    layers = ", ".join(map(str, extraction.layer_ids))
    console.print(
        f"{plan.tokens:,} tokens ({plan.supervised_tokens:,} supervised) x {need.bytes_per_token:,} bytes "
        f"(layers {layers}, {str(extraction.target.dtype).removeprefix('torch.')}) = {need.total / 1e6:,.1f} MB in "
        f"{len(plan.shards)} shards",
        highlight=False,
        soft_wrap=True,
    )


def _print_counts(counts: RowCounts, console: Console, what: str) -> None:
    for line in counts.lines():
        console.print(line.replace(" rows:", f" {what}:", 1), highlight=False, markup=False, soft_wrap=True)


def _summarise(manifest: Manifest, written: int, out: Path, workers: Workers, console: Console) -> None:
    total = len(manifest.shards)
    share = "" if workers.world_size == 1 else f" by this process, one of {workers.world_size}"
    console.print(
        f"{out}: {written} shards written{share}, {total} in all, {manifest.documents:,} documents, "
        f"{manifest.tokens:,} tokens, {manifest.supervised_tokens:,} supervised",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
