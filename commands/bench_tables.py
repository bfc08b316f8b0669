"""`spectrain bench heads` and `bench methods`: tables that compare ways to draft, of whole evaluations."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .benchmarks.options import (
    BatchSizes,
    Limit,
    OutFile,
    Prompts,
    check_counts,
    check_out,
    plain_settings,
)
from .eval_folder import check_folder
from .method_options import DraftModel
from .options import AllowPackage, Device, Dtype, Eager, MaxLength, Model, Overwrite, Seed
from .sampling_options import MaxNewTokens, Temperature

if TYPE_CHECKING:
    from ..infer.report import MethodResult


def heads(
    model: Model,
    shards: Annotated[list[Path], typer.Option(help="Shard folders written by extract; every head trains on them.")],
    prompts: Annotated[list[str], typer.Option(help="Prompt sets: name=FILE, FILE, or a folder of JSONL files.")],
    work: Annotated[Path, typer.Option(help="Folder of everything made; finished pieces in it are taken over.")],
    recipes: Annotated[
        str | None,
        typer.Option(help="Heads to compare, as eagle3,medusa or label=recipe; otherwise every recipe of a head."),
    ] = None,
    only: Annotated[str | None, typer.Option(help="Those of them to work on in this call; the table has all.")] = None,
    token_budget: Annotated[int, typer.Option(help="Tokens to train each head on.")] = 3_000_000,
    sequence_length: Annotated[int, typer.Option(help="Tokens a training row, the same for all heads.")] = 2048,
    rows_a_step: Annotated[int, typer.Option(help="Training rows an optimizer step.")] = 4,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="[LABEL:]KEY=VALUE", help="Override, as medusa:optimizer.lr=1e-3."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds of the heads named by --seeded.")] = 1,
    seeded: Annotated[str, typer.Option(help="Heads trained and measured once a seed, as eagle3,dflash.")] = "",
    num_draft_tokens: Annotated[str, typer.Option(help="Draft tokens a step, of every head.")] = "5",
    more_draft_tokens: Annotated[
        str, typer.Option(help="Further ones at the largest batch, of heads that draft all in one pass.")
    ] = "7,12",
    batch_sizes: BatchSizes = "1,16",
    temperatures: Annotated[str, typer.Option(help="As 0,1; above 0 drafts are drawn from the head's law.")] = "0,1",
    num_prompts: Annotated[int, typer.Option(help="Prompts a set.")] = 40,
    max_new_tokens: MaxNewTokens = 128,
    max_length: MaxLength = None,
    seed: Seed = 0,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds: begin nothing that is likely to end later; run again to go on.")
    ] = None,
    eager: Eager = False,
    device: Device = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="auto: bfloat16 on a GPU, float32 on a CPU.")
    ] = "auto",
    allow_package: AllowPackage = None,
) -> None:
    """Every head trained on the same tokens and measured in the engine: one table, as JSON and Markdown in --work.

    A killed or limited call loses nothing: the same command goes on. Checked: each measurement's text is the target's.
    """
    counts = {"token_budget": token_budget, "sequence_length": sequence_length, "rows_a_step": rows_a_step}
    counts |= {"seeds": seeds, "num_prompts": num_prompts, "max_new_tokens": max_new_tokens}
    check_counts(counts)
    from .benchmarks.heads import plan as plans
    from .benchmarks.heads import run as benchmark
    from .benchmarks.heads.table import markdown
    from .benchmarks.record import BenchError

    if time_limit is not None and not 0 < time_limit < float("inf"):
        raise BenchError(f"--time-limit takes a number of seconds above 0, found {time_limit:g}")

    ks = plans.parse_counts(num_draft_tokens, "--num-draft-tokens")
    more = plans.parse_counts(more_draft_tokens, "--more-draft-tokens") if more_draft_tokens else ()
    some = plans.names(seeded)
    found = plans.parse_heads(
        recipes, overrides or [], tuple(range(seed, seed + seeds)), some, max(ks), allow_package or []
    )
    plans.check_labels("--only", plans.names(only or ""), [head.label for head in found])
    plan = plans.Plan(
        model=model,
        shards=tuple(shards),
        prompts=plans.parse_prompts(prompts),
        work=work,
        heads=found,
        only=None if only is None else plans.names(only),
        token_budget=token_budget,
        sequence_length=sequence_length,
        rows_a_step=rows_a_step,
        num_draft_tokens=ks,
        more_draft_tokens=more,
        batch_sizes=plans.parse_counts(batch_sizes, "--batch-sizes"),
        temperatures=plans.parse_temperatures(temperatures),
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        seed=seed,
        eager=eager,
        device=device,
        dtype=dtype,
        packages=tuple(allow_package or ()),
        time_limit=time_limit,
    )
    record = benchmark.run(plan)
    if record.rows:
        print(markdown(record.as_json()))
        print(f"table: {work / 'table.json'}, {work / 'table.md'}")


def methods(
    model: Model,
    prompts: Prompts,
    method: Annotated[str, typer.Option(help="Methods as `eval --method` takes them, between commas.")] = (
        "ngram,ngram_gpu,suffix"
    ),
    head: Annotated[Path | None, typer.Option(help="Head folder, where one of the methods is a head's.")] = None,
    draft_model: DraftModel = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Draft tokens a step; else each method's own.")] = None,
    batch_sizes: BatchSizes = "1,8,64",
    limit: Limit = 40,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    max_length: MaxLength = None,
    seed: Seed = 0,
    eager: Eager = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: OutFile = Path("bench-methods.json"),
    overwrite: Overwrite = False,
) -> None:
    """Ways to draft beside plain decoding, by prompt set and by how many requests decode together.

    A set gives at least as many prompts as decode together, as far as it has them. Checked: what `eval` checks; its
    reports stand in a folder beside the record, one a batch size. Also written: the tables as Markdown.
    """
    settings = dict(locals())
    check_out(out, overwrite, beside=[".md"], limit=limit, max_new_tokens=max_new_tokens)
    from .benchmarks import methods as benchmark
    from .benchmarks.record import Record, finish, numbers
    from .devices import device_of
    from .eval import Options, run

    def reports(batch_size: int) -> Path:
        return out.with_suffix("") / f"batch-{batch_size}"

    def decode(batch_size: int) -> "list[MethodResult]":
        options = Options(
            model=model,
            prompts=prompts,
            head=head,
            draft_model=draft_model,
            method=method,
            num_draft_tokens=num_draft_tokens,
            temperature=temperature,
            seed=seed,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            limit=max(limit, batch_size),
            batch_size=batch_size,
            eager=eager,
            device=device,
            dtype=dtype,
            out=reports(batch_size),
            overwrite=overwrite,
        )
        return run(options, quiet=True)

    sizes = sorted(numbers(batch_sizes, "--batch-sizes"))
    for batch_size in sizes:
        check_folder(reports(batch_size), overwrite)
    work = benchmark.Work(sizes, decode)
    settings["prompts"] = [path.name for path in prompts]
    settings |= {n: path and path.name for n, path in (("head", head), ("draft_model", draft_model))}
    settings["model"] = model.rstrip("/").rpartition("/")[2]
    record = Record("methods", device_of(device), plain_settings(settings), out)
    finish(record, lambda record: benchmark.run(record, work), benchmark.markdown)
