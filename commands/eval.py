"""`spectrain eval`: drafting methods, or plain decoding, measured on prompts and checked for losslessness."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from .acceptance import acceptance_rates
from .eval_folder import check_folder, write_folder
from .method_options import (
    DraftModel,
    DraftPolicy,
    DraftSampling,
    Method,
    NgramMatch,
    NgramMax,
    NgramMin,
    NumDraftTokens,
    SuffixCache,
    SuffixMaxCachedRequests,
    SuffixMaxDepth,
    SuffixMaxFactor,
    SuffixMinTokenProb,
    TensorParallelSize,
)
from .methods import DraftTokens, check_one_device, draft_tokens, load_heads, methods_of, with_draft_model
from .options import (
    AcceptanceLength,
    AcceptanceRates,
    AllowPackage,
    Device,
    Dtype,
    Eager,
    MaxLength,
    Model,
    Overwrite,
    Seed,
    Verification,
    VerificationName,
)
from .progress import progress_bars
from .prompt_sets import check_draft_length, read_prompts, set_names
from .sampling_options import (
    AllowedTokenIds,
    BadWords,
    Fp64Gumbel,
    FrequencyPenalty,
    IgnoreEos,
    LogitBias,
    Logprobs,
    MaxNewTokens,
    MinP,
    MinTokens,
    PresencePenalty,
    RepetitionPenalty,
    Stop,
    StopTokenIds,
    Temperature,
    TopK,
    TopP,
    bad_word_ids,
    sampling_params,
)

if TYPE_CHECKING:
    import numpy as np

    from ..heads.folder import LoadedHead
    from ..infer.engine import Engine
    from ..infer.evaluate import BuildEngine, Evaluation
    from ..infer.prompts import Prompt
    from ..infer.report import MethodResult
    from ..infer.sampling import SamplingParams
    from ..infer.target import Target


class EvalError(ValueError):
    """An option of eval that does not fit; the message says what would."""


class Options(NamedTuple):
    """Everything `spectrain eval` was asked, as it is saved in the report."""

    model: str
    prompts: list[Path]
    head: Path | None = None
    draft_model: Path | None = None
    method: str | None = None
    num_draft_tokens: int | None = None
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy"
    ngram_min: int | None = None
    ngram_max: int | None = None
    ngram_match: Literal["earliest", "latest"] | None = None
    suffix_max_depth: int | None = None
    suffix_max_cached_requests: int | None = None
    suffix_max_factor: float | None = None
    suffix_min_token_prob: float | None = None
    suffix_cache: Path | None = None
    verification: VerificationName = "standard"
    acceptance_rates: str | None = None
    acceptance_length: float | None = None
    draft_policy: Literal["fixed", "adaptive"] = "fixed"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[str] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int = 0
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    fp64_gumbel: bool = False
    seed: int = 0
    max_new_tokens: int = 256
    max_length: int | None = None
    limit: int | None = None
    batch_size: int = 1
    num_blocks: int | None = None
    raw: bool = False
    all_turns: bool = False
    ignore_eos: bool = False
    eager: bool = False
    device: str = "auto"
    dtype: str = "auto"
    out: Path = Path("eval")
    overwrite: bool = False
    allow_package: list[str] | None = None
    tensor_parallel_size: int | None = None
    draft_tensor_parallel_size: int | None = None


Head = Annotated[Path | None, typer.Option(help="Head folder written by `spectrain fit`, or a draft model's.")]
Prompts = Annotated[list[Path], typer.Option(help="JSONL files of prompts; one result a file.")]
Limit = Annotated[int | None, typer.Option(help="Prompts a file.")]
BatchSize = Annotated[int, typer.Option(help="Requests decoded together.")]
NumBlocks = Annotated[int | None, typer.Option(help="Cache blocks of 16 tokens; what the prompts need otherwise.")]
Raw = Annotated[bool, typer.Option("--raw", help="Skip the chat template.")]
AllTurns = Annotated[bool, typer.Option("--all-turns", help="Every turn of a `turns` row as a prompt of its own.")]
Out = Annotated[Path, typer.Option(help="Folder for report.json, report.html and outputs.jsonl.")]


def evaluate(
    model: Model,
    prompts: Prompts,
    head: Head = None,
    draft_model: DraftModel = None,
    method: Method = None,
    num_draft_tokens: NumDraftTokens = None,
    draft_sampling: DraftSampling = "greedy",
    ngram_min: NgramMin = None,
    ngram_max: NgramMax = None,
    ngram_match: NgramMatch = None,
    suffix_max_depth: SuffixMaxDepth = None,
    suffix_max_cached_requests: SuffixMaxCachedRequests = None,
    suffix_max_factor: SuffixMaxFactor = None,
    suffix_min_token_prob: SuffixMinTokenProb = None,
    suffix_cache: SuffixCache = None,
    verification: Verification = "standard",
    acceptance_rates: AcceptanceRates = None,
    acceptance_length: AcceptanceLength = None,
    draft_policy: DraftPolicy = "fixed",
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    logit_bias: LogitBias = None,
    bad_words: BadWords = None,
    allowed_token_ids: AllowedTokenIds = None,
    min_tokens: MinTokens = 0,
    stop: Stop = None,
    stop_token_ids: StopTokenIds = None,
    logprobs: Logprobs = None,
    fp64_gumbel: Fp64Gumbel = False,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 256,
    max_length: MaxLength = None,
    limit: Limit = None,
    batch_size: BatchSize = 1,
    num_blocks: NumBlocks = None,
    raw: Raw = False,
    all_turns: AllTurns = False,
    ignore_eos: IgnoreEos = False,
    eager: Eager = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Out = Path("eval"),
    overwrite: Overwrite = False,
    allow_package: AllowPackage = None,
    tensor_parallel_size: TensorParallelSize = None,
    draft_tensor_parallel_size: TensorParallelSize = None,
) -> None:
    """Decodes prompts plainly and with each method, through the same engine; reports speed and whether outputs agree.

    Exit code 1 if drafting changed the output. Synthetic verification changes it by design: nothing is checked then.
    """
    results = run(Options(**locals()))
    if any(result.lossless.tested and not result.lossless.passed for result in results):
        sys.exit(1)


def run(options: Options, *, quiet: bool = False) -> "list[MethodResult]":
    """Measures every method on every prompt file, writes the report folder and, unless `quiet`, prints the table."""
    check_folder(options.out, options.overwrite)
    check_one_device(options)
    options = with_draft_model(options)
    names = methods_of(options)
    _check_counts(options)
    params = sampling_params(options)
    from ..infer.evaluate import compare
    from ..infer.report import print_table
    from ..infer.target import Target
    from .devices import device_of, dtype_of
    from .methods import load_suffix_cache, save_suffix_cache

    device = device_of(options.device)
    target = Target.load(
        options.model, device=device, dtype=dtype_of(options.dtype, device), max_length=options.max_length
    )
    sets = set_names(options.prompts)
    reading = {"raw": options.raw, "all_turns": options.all_turns, "limit": options.limit}
    prompt_sets = {
        name: read_prompts(path, target, options.model, **reading)
        for name, path in zip(sets, options.prompts, strict=True)
    }
    params = _params_for(target, params, options)
    heads = load_heads(options, target, names)
    methods = {name: draft_tokens(name, options, heads[name].record if name in heads else {}) for name in names}
    check_draft_length(max(tokens.engine for tokens in methods.values()), target)
    responses = load_suffix_cache(options, target)
    measured = []
    for name, prompts in prompt_sets.items():
        builds = [
            _builder(m, tokens, options, target, heads.get(m), prompts, responses) for m, tokens in methods.items()
        ]
        works = [_work(m, tokens.engine, name, prompts, params, options, target) for m, tokens in methods.items()]
        with progress_bars(len(prompts)) as progress:
            measured += compare(works, builds, progress)
    results = [m.result for m in measured]
    write_folder(options.out, _settings(options, methods, target), target, measured)
    save_suffix_cache(options, target, responses, measured)
    if not quiet:
        print_table(results)
        print(f"report: {options.out / 'report.html'}")
    return results


def _work(
    method: str,
    k: int,
    prompt_set: str,
    prompts: "Sequence[Prompt]",
    params: "SamplingParams",
    options: Options,
    target: "Target",
) -> "Evaluation":
    from dataclasses import replace

    from ..infer.evaluate import Evaluation

    return Evaluation(
        method=method,
        prompt_set=prompt_set,
        prompts=[p.token_ids for p in prompts],
        params=[replace(params, seed=options.seed + p.index) for p in prompts],
        num_draft_tokens=k,
        batch_size=options.batch_size,
        dtype=target.dtype,
        seed=options.seed,
        law_by_position=options.verification != "block",
        synthetic=options.verification == "synthetic",
    )


def _check_counts(options: Options) -> None:
    for name, least in (("batch_size", 1), ("limit", 1), ("max_new_tokens", 0), ("num_blocks", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise EvalError(f"--{name.replace('_', '-')} must be at least {least}, found {value}; give a larger number")


def _params_for(target: "Target", params: "SamplingParams", options: Options) -> "SamplingParams":
    """The settings with everything that is said in the target's own tokens; raises ValueError for tokens it has not."""
    from dataclasses import replace

    if options.bad_words:
        params = replace(params, bad_words=bad_word_ids(options.bad_words, target.tokenizer))
    params.check_vocabulary(target.vocab_size, params.end_token_ids(target.eos_token_ids))
    return params


def _builder(
    method: str,
    tokens: DraftTokens,
    options: Options,
    target: "Target",
    loaded: "LoadedHead | None",
    prompts: "Sequence[Prompt]",
    responses: "Sequence[np.ndarray]",
) -> "BuildEngine":
    from ..kernels.records import VerifyMode
    from .methods import proposer_maker

    longest = max(len(p.token_ids) for p in prompts) + options.max_new_tokens
    proposer = proposer_maker(method, options, target, loaded, tokens, responses)
    rates = acceptance_rates(options.verification, tokens.engine, options.acceptance_rates, options.acceptance_length)

    def build(num_draft_tokens: int, batch_size: int) -> "Engine":
        from .engines import build_engine

        return build_engine(
            target,
            proposer,
            num_draft_tokens=num_draft_tokens,
            batch_size=batch_size,
            longest=longest,
            num_blocks=options.num_blocks,
            eager=options.eager,
            verify_mode=VerifyMode(options.verification),
            acceptance_rates=rates,
            draft_policy=options.draft_policy,
            fp64_gumbel=options.fp64_gumbel,
        )

    return build


def _settings(options: Options, methods: Mapping[str, DraftTokens], target: "Target") -> dict[str, Any]:
    """What was asked, with what it came to."""
    k = {name: tokens.engine for name, tokens in methods.items()}
    return options._asdict() | {
        "model": target.name,
        "device": str(target.device),
        "num_draft_tokens": k if len(k) > 1 else next(iter(k.values())),
        "dtype": str(target.dtype).removeprefix("torch."),
    }
