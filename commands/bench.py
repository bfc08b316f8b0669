"""`spectrain bench`: speed as ratios within one run, and only after the outputs were checked.

What is measured, and how, stands in `benchmarks/`.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .bench_tables import heads, methods
from .benchmarks.options import (
    BatchSizes,
    Context,
    CountError,
    Drafts,
    Limit,
    OutFile,
    Prompts,
    Shape,
    Steps,
    TargetModel,
    check_counts,
    check_out,
    plain_settings,
)
from .options import Device, Dtype, Eager, Model, Overwrite
from .sampling_options import MaxNewTokens

if TYPE_CHECKING:
    from .benchmarks.record import Record
    from .benchmarks.targets import Source

app = typer.Typer(no_args_is_help=True)

Head = Annotated[Path, typer.Option(help="Head folder written by `spectrain fit`.")]
NumDraftTokens = Annotated[int | None, typer.Option(help="Draft tokens a step; the head's own default otherwise.")]
Out = Annotated[Path, typer.Option(help="Folder for bench.json and the reports it rests on.")]


@app.callback()
def bench() -> None:
    """Measure speed; no figure without a passing check in the same run."""


app.command("heads")(heads)
app.command("methods")(methods)


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
    check_counts({"max_new_tokens": max_new_tokens})
    from .benchmarks.generate import print_rows, row_of, transformers_speed
    from .benchmarks.record import BenchError
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
    theirs = transformers_speed(options, out / "outputs.jsonl")
    rows = [row_of(result, theirs[result.prompt_set]) for result in results]
    record = {"date": time.strftime("%Y-%m-%d"), **json.loads((out / "report.json").read_text())["environment"]}
    (out / "bench.json").write_text(json.dumps({**record, "generate": rows}, indent=2) + "\n")
    print_rows(rows)


@app.command("decode")
def decode(
    model: TargetModel = None,
    shape: Shape = None,
    batch_sizes: BatchSizes = "1,16,64",
    context: Context = 1024,
    steps: Steps = 40,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Also transformers' generate with its static cache, same prompts.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: OutFile = Path("bench-decode.json"),
    overwrite: Overwrite = False,
) -> None:
    """Plain decoding: the engine's step beside the memory floor, and host time that no GPU time hides.

    The floor is the bytes of weights a step reads over the bandwidth of a large copy, measured in the same run.
    Checked: the texts are those of the engine without graphs and fused layers, or part within rounding.
    """
    settings = dict(locals())
    check_out(out, overwrite, context=context, steps=steps)
    from .benchmarks import decode as benchmark
    from .benchmarks.record import numbers

    sizes = sorted(numbers(batch_sizes, "--batch-sizes"))
    source = _source(model, shape, device, dtype)
    work = benchmark.Work(sizes, context, steps, transformers)
    _run("decode", source, settings, out, lambda record: benchmark.run(record, source, work))


@app.command("verify")
def verify(
    model: TargetModel = None,
    shape: Shape = None,
    batch_sizes: BatchSizes = "1,16",
    context: Context = 1024,
    steps: Steps = 40,
    num_draft_tokens: Drafts = 5,
    acceptance_length: Annotated[float, typer.Option(help="Mean tokens a step that free drafts are kept for.")] = 3.5,
    rejection_batch: Annotated[int, typer.Option(help="Requests of the rejection pipeline; 0 leaves it out.")] = 64,
    vocab_size: Annotated[int, typer.Option(help="Vocabulary of the rejection pipeline.")] = 151_936,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: OutFile = Path("bench-verify.json"),
    overwrite: Overwrite = False,
) -> None:
    """Verification: k + 1 rows beside one, the speed-up of free drafts at a given acceptance, the rejection pipeline.

    The pipeline is measured in every mode against one read of its float32 logits and against its PyTorch twin.
    Checked: kernel = twin; greedy texts with drafts that are mostly right = plain texts; acceptance as asked for.
    """
    settings = dict(locals())
    check_out(out, overwrite, context=context, steps=steps, num_draft_tokens=num_draft_tokens, vocab_size=vocab_size)
    import torch

    from ..infer.synthetic import survival_of_length
    from .benchmarks import rejection
    from .benchmarks import verify as benchmark
    from .benchmarks.record import numbers

    if rejection_batch < 0:
        raise CountError(f"--rejection-batch must be 0 or more, found {rejection_batch}")
    survival_of_length(acceptance_length, num_draft_tokens)  # refuses what does not fit before anything runs
    sizes = sorted(numbers(batch_sizes, "--batch-sizes"))
    source = _source(model, shape, device, dtype)
    work = benchmark.Work(sizes, context, steps, num_draft_tokens, acceptance_length)

    def both(record: "Record") -> None:
        if rejection_batch:
            rejection.run(record, rejection_batch, num_draft_tokens, vocab_size, torch.float32)
        benchmark.run(record, source, work)

    _run("verify", source, settings, out, both)


@app.command("attention")
def attention(
    loads: Annotated[str, typer.Option(help="BATCHxCONTEXTxROWS between commas.")] = "1x32768x1,32x4096x6,64x1024x1",
    heads: Annotated[str, typer.Option(help="Query heads, key heads and head width.")] = "32,8,128",
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: OutFile = Path("bench-attention.json"),
    overwrite: Overwrite = False,
) -> None:
    """Paged attention of one layer: bytes of keys and values a second, as a share of the bandwidth of a large copy.

    Checked: each load against its PyTorch twin in float32.
    """
    settings = dict(locals())
    check_out(out, overwrite)
    from .benchmarks import attention as benchmark
    from .benchmarks.record import BenchError, Record, finish, numbers
    from .devices import device_of, dtype_of

    shape = numbers(heads, "--heads")
    if len(shape) != 3 or shape[0] % shape[1]:
        raise BenchError(f"--heads takes query heads, key heads that divide them, and a width; found {heads!r}")
    found = device_of(device)
    parsed = [benchmark.Load.parse(load) for load in loads.split(",")]
    kind = dtype_of(dtype, found)
    facts = {**plain_settings(settings), "dtype": str(kind).removeprefix("torch.")}
    record = Record("attention", found, facts, out)
    finish(record, lambda record: benchmark.run(record, benchmark.Heads(shape[0], shape[1], shape[2]), parsed, kind))


@app.command("policy")
def policy(
    model: TargetModel = None,
    shape: Shape = None,
    concurrency: Annotated[str, typer.Option(help="Running requests, as 4,16,64,256; a row each.")] = "4,16,64,256",
    context: Context = 512,
    num_draft_tokens: Drafts = 7,
    acceptance_rates: Annotated[
        list[str] | None,
        typer.Option(
            help="Share of steps that keep the first 1, 2, ... drafts, as .8,.6 or a JSON file; may be given "
            "several times. Otherwise those of a strong head and of one on chat."
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: OutFile = Path("bench-policy.json"),
    overwrite: Overwrite = False,
) -> None:
    """Adaptive drafting beside never and always drafting, with free drafts kept at given rates.

    Every policy is timed over the same stretch of its texts. Checked: drafts were kept as often as was asked for.
    """
    settings = dict(locals())
    check_out(out, overwrite, context=context, num_draft_tokens=num_draft_tokens)
    from ..infer.synthetic import check_survival, parse_rates
    from .benchmarks import policy as benchmark
    from .benchmarks.record import numbers

    rates = {text: tuple(parse_rates(text)) for text in acceptance_rates or ()} or benchmark.RATES
    for survival in rates.values():
        check_survival(survival, num_draft_tokens)
    source = _source(model, shape, device, dtype)
    work = benchmark.Work(sorted(numbers(concurrency, "--concurrency")), context, num_draft_tokens, rates)
    settings["acceptance_rates"] = {name: list(survival) for name, survival in rates.items()}
    _run("policy", source, settings, out, lambda record: benchmark.run(record, source, work))


@app.command("drafting")
def drafting(
    model: TargetModel = None,
    shape: Shape = None,
    requests: Annotated[int, typer.Option(help="Running requests.")] = 64,
    context: Context = 8192,
    steps: Steps = 40,
    num_draft_tokens: Drafts = 5,
    ngram_min: Annotated[int, typer.Option(help="Shortest n-gram looked up.")] = 2,
    ngram_max: Annotated[int, typer.Option(help="Longest n-gram looked up.")] = 4,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: OutFile = Path("bench-drafting.json"),
    overwrite: Overwrite = False,
) -> None:
    """Drafting without a head: n-gram drafts on the host and on the device beside one plain decoding step.

    Checked: both draft the same, and what a search of the whole text from scratch finds.
    """
    settings = dict(locals())
    check_out(out, overwrite, requests=requests, context=context, steps=steps, num_draft_tokens=num_draft_tokens)
    from ..infer.proposers.ngram_rule import NgramRule
    from .benchmarks import drafting as benchmark

    rule = NgramRule(min_n=ngram_min, max_n=ngram_max)
    source = _source(model, shape, device, dtype)
    work = benchmark.Work(requests, context, steps, num_draft_tokens, rule)
    _run("drafting", source, settings, out, lambda record: benchmark.run(record, source, work))


def _source(model: str | None, shape: str | None, device: str, dtype: str) -> "Source":
    from .benchmarks.targets import Source
    from .devices import device_of, dtype_of

    found = device_of(device)
    return Source(model=model, shape=shape, device=found, dtype=dtype_of(dtype, found))


def _run(name: str, source: "Source", settings: dict[str, Any], out: Path, measure: "Callable[[Record], None]") -> None:
    from .benchmarks.record import Record, finish

    facts = {"model": source.name, "dtype": str(source.dtype).removeprefix("torch.")}
    finish(Record(name, source.device, {**plain_settings(settings), **facts}, out), measure)
