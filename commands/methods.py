"""What `--method` may say: the drafting methods by name, the options each of them takes, and their proposers."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .heads import MODEL_METHODS, head_proposer, is_assistant, is_model, load_targets_own, load_trained
from .outputs import check_files

if TYPE_CHECKING:
    import numpy as np

    from ..heads.folder import LoadedHead
    from ..infer.config import EngineConfig
    from ..infer.evaluate import Measured
    from ..infer.proposers.base import Proposer
    from ..infer.proposers.ngram_rule import NgramRule
    from ..infer.proposers.suffix import SuffixProposer, SuffixSettings
    from ..infer.target import Target
    from .eval import Options

PLAIN = "none"
SYNTHETIC = "synthetic"
NGRAM = ("ngram", "ngram_gpu")
SUFFIX = "suffix"
MTP = "mtp"
CUSTOM = "custom:"
WITH_SUFFIX = SUFFIX + "+"  # and a head's name
DEFAULT_NUM_DRAFT_TOKENS = 3
SUFFIX_SETTINGS = ("max_depth", "max_cached_requests", "max_factor", "min_token_prob")


class MethodError(ValueError):
    """A method that is not there, lacks what it needs or was given another's options; the message says what would."""


def with_draft_model(options: "Options") -> "Options":
    """The options with --draft-model as the head of method draft_model, which it asks for if nothing else is."""
    folder = options.draft_model
    if folder is None:
        return options
    if options.head is not None:
        raise MethodError(f"one of --head and --draft-model drafts, found {options.head} and {folder}; drop one")
    if not (folder / "config.json").is_file():
        raise MethodError(f"--draft-model must be a model's folder, found no config.json in {folder}; check the path")
    return options._replace(head=folder, method=options.method or "draft_model")


def check_one_device(options: "Options") -> None:
    """Raises MethodError for tensor parallelism, which the engine does not have, of the target or the draft model."""
    asked = {"tensor": options.tensor_parallel_size, "draft-tensor": options.draft_tensor_parallel_size}
    for name, size in asked.items():
        if size not in (None, 1):
            raise MethodError(
                f"tensor parallelism is not supported: target and draft model each run on one device, found "
                f"--{name}-parallel-size {size}; drop it"
            )


def methods_of(options: "Options") -> list[str]:
    """The methods asked for, in order, each with what it needs; raises MethodError otherwise."""
    names = [] if options.method is None else [name.strip() for name in options.method.split(",")]
    if "" in names:
        raise MethodError(f"--method takes names between commas, found {options.method!r}; drop the empty one")
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise MethodError(f"--method names {doubled!r} twice; name each method once")
    with_head = [name for name in names if needs_head(name)]
    if options.head is None:
        _refuse_without_head(names, [name for name in with_head if not may_be_targets(name)])
    elif not names:
        names = [head_method(options, names)]
    elif with_head:
        own = head_method(options, names)
        foreign = (name for name in with_head if name.removeprefix(WITH_SUFFIX) != own)
        other = next((name for name in foreign if not may_be_targets(name)), None)
        if other is not None:
            raise MethodError(f"{options.head} is a head for {own}, found --method {other}; drop --method")
    elif names != [PLAIN]:
        given = "--head" if options.draft_model is None else "--draft-model"
        raise MethodError(f"{', '.join(names)} drafts need no head, found {given}; drop {given}, or --method")
    _check_options(options, names)
    if any(uses_suffix(name) for name in names):
        from ..infer.proposers.suffix import check_installed

        check_installed()
    for name in names:
        if name.startswith(CUSTOM):
            from ..infer.proposers.custom import load_class

            load_class(name.removeprefix(CUSTOM))
    return names


def needs_head(name: str) -> bool:
    """Whether a method drafts with a head; what is not known here is a head's name."""
    return name not in (PLAIN, SYNTHETIC, SUFFIX, *NGRAM) and not name.startswith(CUSTOM)


def may_be_targets(name: str) -> bool:
    """Whether a method can draft with layers in the target's own checkpoint, where no head of it is given."""
    return name.removeprefix(WITH_SUFFIX) == MTP


def uses_suffix(name: str) -> bool:
    """Whether a method has suffix trees."""
    return name == SUFFIX or name.startswith(WITH_SUFFIX)


def model_method(folder: Path, names: Sequence[str]) -> str | None:
    """The first of the methods for which a folder is a model or an assistant to draft with; None where it is a head."""
    if is_assistant(folder):
        return MTP
    own = (name.removeprefix(WITH_SUFFIX) for name in names)
    return next((name for name in own if is_model(folder, name)), None)


def head_method(options: "Options", names: Sequence[str]) -> str:
    """The name of the method that a head folder is for; of an ordinary model's, what was asked for."""
    from ..heads.folder import read_record
    from ..heads.resolve import resolve

    assert options.head is not None
    model = model_method(options.head, names)
    if model is not None:
        return model
    if not names and is_model(options.head, MODEL_METHODS[0]):
        raise MethodError(
            f"{options.head} holds a config.json and no head written by `spectrain fit`; a language model drafts by "
            f"--draft-model {options.head}"
        )
    config = resolve(read_record(options.head)["config_class"], options.allow_package or ())
    return config.proposer.split(":")[0].split(".")[-1]


def load_heads(options: "Options", target: "Target", names: Sequence[str]) -> "dict[str, LoadedHead]":
    """The head of each method that drafts with one: that of --head, or the target's own."""
    given = None if options.head is None else head_method(options, names)
    with_head = {name: name.removeprefix(WITH_SUFFIX) for name in names if needs_head(name)}
    loaded: dict[str, LoadedHead] = {}
    for own in set(with_head.values()):
        loaded[own] = _load_given(options, target, names) if own == given else load_targets_own(target, options.model)
    return {name: loaded[own] for name, own in with_head.items()}


def _load_given(options: "Options", target: "Target", names: Sequence[str]) -> "LoadedHead":
    assert options.head is not None
    method = model_method(options.head, names)
    if method is not None:
        from .draft_models import load_model

        return load_model(options.head, method, target, options.model, options.draft_sampling)
    return load_trained(options.head, target, options.model, options.allow_package or ())


class DraftTokens(NamedTuple):
    """Draft tokens a step of one method: the engine's, and of them those a head makes."""

    engine: int
    head: int


def draft_tokens(name: str, options: "Options", record: Mapping[str, Any]) -> DraftTokens:
    """As asked for; else the head's own default, or a suffix tree's depth."""
    if name == PLAIN:
        return DraftTokens(0, 0)
    given = options.num_draft_tokens
    if given is not None and given < 1:
        raise MethodError(f"--num-draft-tokens must be at least 1, found {given}; use --method none for plain decoding")
    served = record.get("serving", {}).get("num_draft_tokens") if needs_head(name) else None
    own = given or served or DEFAULT_NUM_DRAFT_TOKENS
    if not uses_suffix(name):
        return DraftTokens(own, own)
    deep = given or _suffix_settings(options).max_depth
    return DraftTokens(deep, 0) if name == SUFFIX else DraftTokens(max(deep, own), own)


def proposer_maker(
    name: str,
    options: "Options",
    target: "Target",
    loaded: "LoadedHead | None",
    tokens: DraftTokens,
    responses: "Sequence[np.ndarray]" = (),
) -> "Callable[[EngineConfig], Proposer]":
    """What makes the method's proposer for an engine; its draft tokens may be fewer than `tokens`, 0 for none."""

    def of_head(loaded: "LoadedHead", k: int, config: "EngineConfig") -> "Proposer":
        from .draft_models import TextDraftModel, text_proposer

        if isinstance(loaded, TextDraftModel):
            return text_proposer(loaded, target, k, config)
        return head_proposer(target, loaded, k, options.draft_sampling, options.allow_package or ())

    def make(config: "EngineConfig") -> "Proposer":
        k = config.num_draft_tokens
        if not k:
            from ..infer.proposers.none import NoneProposer

            return NoneProposer()
        if name == SYNTHETIC:
            from ..infer.proposers.synthetic import SyntheticProposer

            return SyntheticProposer(k, target.vocab_size)
        if name in NGRAM:
            return _ngram(name, options, k)
        if name == SUFFIX:
            return _suffix(options, k, responses)
        if name.startswith(CUSTOM):
            from ..infer.proposers.custom import CustomProposer

            return CustomProposer(name.removeprefix(CUSTOM), config, target.vocab_size)
        assert loaded is not None
        head = of_head(loaded, min(k, tokens.head), config)
        if not name.startswith(WITH_SUFFIX):
            return head
        from ..infer.proposers.hybrid import HybridProposer

        return HybridProposer(_suffix(options, k, responses), head)

    return make


def load_suffix_cache(options: "Options", target: "Target") -> "list[np.ndarray]":
    """The responses of --suffix-cache; none where the file is yet to be written."""
    path = options.suffix_cache
    if path is None or not path.exists():
        return []
    from ..infer.prompts import tokenizer_hash
    from ..infer.proposers.suffix_responses import load_responses

    return load_responses(path, tokenizer_hash(target.tokenizer), target.vocab_size)


def save_suffix_cache(
    options: "Options", target: "Target", earlier: "Sequence[np.ndarray]", measured: "Sequence[Measured]"
) -> None:
    """Adds what one suffix method wrote, which is what all of them did, to the file of --suffix-cache.

    The newest responses that a cache may hold are kept.
    """
    if options.suffix_cache is None:
        return
    from ..infer.prompts import tokenizer_hash
    from ..infer.proposers.suffix_responses import save_responses

    method = next((m.result.method for m in measured if uses_suffix(m.result.method)), None)
    fresh = [output.token_ids for m in measured if m.result.method == method for output in m.outputs]
    kept = _suffix_settings(options).max_cached_requests
    save_responses(options.suffix_cache, [*earlier, *fresh][-kept:] if kept else (), tokenizer_hash(target.tokenizer))


def _refuse_without_head(names: Sequence[str], with_head: Sequence[str]) -> None:
    if names and not with_head:
        return
    first = with_head[0] if with_head else ""
    own = first.removeprefix(WITH_SUFFIX)
    if first != own and not (own and needs_head(own)):
        raise MethodError(f"suffix+ joins the name of a head that drafts, found --method {first}; give one behind it")
    if own in MODEL_METHODS:
        raise MethodError(
            f"expected a language model for --method {first}, found no --draft-model; give --draft-model DIR, or "
            f"--head DIR written by `spectrain fit`"
        )
    near = get_close_matches(first.lower(), (PLAIN, SYNTHETIC, SUFFIX, *NGRAM, MTP, *MODEL_METHODS), 1)
    raise MethodError(
        f"expected a draft head{f' for --method {first}' if first else ''}, found no --head; give --head DIR written "
        f"by `spectrain fit`, --draft-model DIR for a language model, or a method that needs neither"
        f"{f' (is it {near[0]}?)' if near else ''}: --method none to measure plain decoding, ngram, ngram_gpu, suffix, "
        f"mtp where the target has such layers, custom:module:Class, synthetic"
    )


def _check_options(options: "Options", names: Sequence[str]) -> None:
    """Refuses options of methods that were not asked for: they would change nothing."""
    groups: tuple[tuple[str, tuple[str, ...], bool], ...] = (
        ("ngram and ngram_gpu", ("ngram_min", "ngram_max", "ngram_match"), any(name in NGRAM for name in names)),
        (
            "suffix",
            (*(f"suffix_{name}" for name in SUFFIX_SETTINGS), "suffix_cache"),
            any(uses_suffix(name) for name in names),
        ),
    )
    for methods, fields, used in groups:
        given = next((field for field in fields if getattr(options, field) is not None), None)
        if given is not None and not used:
            raise MethodError(
                f"--{given.replace('_', '-')} is for {methods}, found --method {', '.join(names)}; drop it, or name "
                f"the method"
            )
    if options.draft_sampling != "greedy" and not any(needs_head(name) for name in names):
        raise MethodError(
            f"--draft-sampling {options.draft_sampling} is for heads, found --method {', '.join(names)}, whose drafts "
            f"come from no law; drop it"
        )
    if any(name in NGRAM for name in names):
        _ngram_rule(options)
    if any(uses_suffix(name) for name in names):
        _suffix_settings(options)
    if options.suffix_cache is not None:
        check_files(options.suffix_cache, option="--suffix-cache")


def _ngram_rule(options: "Options") -> "NgramRule":
    from ..infer.proposers.ngram_rule import NgramRule

    return NgramRule.between(options.ngram_min, options.ngram_max, options.ngram_match or "earliest")


def _ngram(name: str, options: "Options", k: int) -> "Proposer":
    if name == "ngram":
        from ..infer.proposers.ngram import NgramProposer

        return NgramProposer(k, _ngram_rule(options))
    from ..infer.proposers.ngram_gpu import NgramGpuProposer

    return NgramGpuProposer(k, _ngram_rule(options))


def _suffix_settings(options: "Options") -> "SuffixSettings":
    from ..infer.proposers.suffix import SuffixSettings

    given = {name: getattr(options, f"suffix_{name}") for name in SUFFIX_SETTINGS}
    return SuffixSettings(**{name: value for name, value in given.items() if value is not None})


def _suffix(options: "Options", k: int, responses: "Sequence[np.ndarray]") -> "SuffixProposer":
    from ..infer.proposers.suffix import SuffixProposer

    return SuffixProposer(k, _suffix_settings(options), responses)
