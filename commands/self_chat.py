"""Conversations a chat model writes alone: its own user header makes it ask, then it answers.

Nothing of the template's markup is known here: the header is what the template prints before a user's content.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..infer.engine import Engine
from ..infer.prompts import TemplateRefusal, encode_rendered, has_template, render
from ..infer.proposers.none import NoneProposer
from ..infer.request import FinishReason, RequestOutput
from ..infer.sampling import SamplingParams
from ..infer.target import Target
from .engines import build_engine
from .outputs import check_files

SENTINEL = "sentinel-7f3a9c"
SHORTEST_TOKENS = 3
REPETITION_GRAM = 4
REPETITION_FROM = 40  # tokens; shorter texts repeat by nature
DISTINCT_SHARE = 0.5
LOWEST_YIELD = 0.02
CHUNK_BATCHES = 4


class SelfChatError(ValueError):
    """The model or the output file does not allow it; the message says why."""


@dataclass(frozen=True, kw_only=True)
class SelfChat:
    """What to write. A run that continues must agree in everything but `num` and `batch_size`."""

    num: int
    max_new_tokens: int
    temperature: float
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("num", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise SelfChatError(f"{name} must be at least 1, found {getattr(self, name)}")


@dataclass
class Counts:
    """How far a run has come: attempts 0..next_index-1 are decided."""

    next_index: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


class Headers(NamedTuple):
    """What the chat template prints around a first user message."""

    before: list[int]  # ids up to the content
    end_ids: tuple[int, ...]  # ids that end the turn


def write_conversations(target: Target, settings: SelfChat, out: Path) -> Counts:
    """Appends conversations to `out` until `num` are kept; a run that was stopped continues where it was.

    Each attempt has a seed of its own, so an interrupted run ends with the rows of an unbroken one. Raises
    SelfChatError where the model has no template or hardly anything is usable.
    """
    headers = user_headers(target)
    counts, seen = _resume(out, settings, target)
    longest = len(headers.before) + 2 * settings.max_new_tokens + 64
    engine = build_engine(target, NoneProposer(), num_draft_tokens=0, batch_size=settings.batch_size, longest=longest)
    chunk = settings.batch_size * CHUNK_BATCHES
    with _bar(settings.num, counts.kept) as advance:
        while counts.kept < settings.num:
            rows = _chunk(engine, headers, settings, range(counts.next_index, counts.next_index + chunk))
            _append(out, rows, counts, seen, settings.num)
            _save_progress(out, settings, target, counts)
            advance(counts.kept)
            if counts.kept < LOWEST_YIELD * counts.next_index:
                raise SelfChatError(
                    f"expected usable conversations, found {counts.kept} in {counts.next_index} attempts "
                    f"({counts.dropped}); this model does not write both sides of a chat: give real conversations"
                )
    return counts


def check_out(out: Path) -> None:
    """Raises OutputError where `out` or the progress beside it cannot be written, SelfChatError for another's file."""
    check_files(out)
    check_files(_progress_path(out))
    if out.exists() and not _progress_path(out).is_file():
        raise SelfChatError(f"{out} exists and was not begun by self-chat; give another --out")


def user_headers(target: Target) -> Headers:
    """Derives the user header and the end of a user turn from the chat template by printing a sentinel."""
    tokenizer = target.tokenizer
    if tokenizer is None or not has_template(tokenizer):
        raise SelfChatError(f"self-chat needs a chat template, found none for {target.name}; use an instruct model")
    try:
        text = render(tokenizer, [{"role": "user", "content": SENTINEL}])
    except TemplateRefusal as error:
        raise SelfChatError(f"the chat template of {target.name} refused a user message: {error}") from error
    before, found, after = text.partition(SENTINEL)
    if not found:
        raise SelfChatError(f"the chat template of {target.name} does not print a user's content; use another model")
    tail = encode_rendered(tokenizer, after)
    special = set(tokenizer.all_special_ids)
    closing = [token for token in tail[:1] if token in special]
    return Headers(encode_rendered(tokenizer, before), tuple(sorted({*target.eos_token_ids, *closing})))


def fault_of(token_ids: Sequence[int], finish: FinishReason, special_ids: frozenset[int]) -> str | None:
    """Why a turn (its ids without the closing token) is unusable; None if it is fine."""
    if finish is not FinishReason.STOP:
        return "unclosed"
    if len(token_ids) < SHORTEST_TOKENS:
        return "too short"
    if special_ids.intersection(token_ids):
        return "markup inside"
    grams = [tuple(token_ids[i : i + REPETITION_GRAM]) for i in range(len(token_ids) - REPETITION_GRAM + 1)]
    if len(token_ids) >= REPETITION_FROM and len(set(grams)) < DISTINCT_SHARE * len(grams):
        return "repetitive"
    return None


def _chunk(engine: Engine, headers: Headers, settings: SelfChat, indices: range) -> list[dict[str, Any]]:
    """One record an attempt: `index` and either `messages` or the `fault`."""
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    special = frozenset(tokenizer.all_special_ids)

    def turns(prompts: list[list[int]], stage: int, attempts: Sequence[int]) -> list[tuple[str, str | None]]:
        params = [
            SamplingParams(
                temperature=settings.temperature,
                max_tokens=settings.max_new_tokens,
                seed=(settings.seed * 1_000_003 + 2 * index + stage) % 2**62,
                stop_token_ids=headers.end_ids,
            )
            for index in attempts
        ]
        return [_turn(output, tokenizer, headers, special) for output in engine.generate(prompts, params)]

    asked = turns([headers.before] * len(indices), 0, indices)
    faults: dict[int, str] = {i: fault for i, (_, fault) in zip(indices, asked, strict=True) if fault}
    questions = {i: text for i, (text, fault) in zip(indices, asked, strict=True) if not fault}
    prompts = [
        encode_rendered(tokenizer, render(tokenizer, [_message("user", text)], add_generation_prompt=True))
        for text in questions.values()
    ]
    answers = dict(zip(questions, turns(prompts, 1, list(questions)), strict=True)) if questions else {}
    rows: list[dict[str, Any]] = []
    for i in indices:
        fault = faults.get(i) or answers[i][1]
        if fault:
            rows.append({"index": i, "fault": fault})
        else:
            rows.append(
                {"index": i, "messages": [_message("user", questions[i]), _message("assistant", answers[i][0])]}
            )
    return rows


def _turn(
    output: RequestOutput, tokenizer: Any, headers: Headers, special_ids: frozenset[int]
) -> tuple[str, str | None]:
    ids = list(output.token_ids)
    if ids and ids[-1] in headers.end_ids:
        ids.pop()
    text = tokenizer.decode(ids, skip_special_tokens=True).strip()
    fault = fault_of(ids, output.finish_reason, special_ids)
    return text, fault or (None if text else "too short")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _append(out: Path, rows: Sequence[dict[str, Any]], counts: Counts, seen: set[str], num: int) -> None:
    """Decides the rows in order until `num` are kept; writes the usable ones and counts the rest by reason."""
    with open(out, "a", encoding="utf-8") as file:
        for row in rows:
            if counts.kept == num:
                break
            fault = row.get("fault")
            if not fault and _key(row) in seen:
                fault = "duplicate"
            if fault:
                counts.dropped[fault] = counts.dropped.get(fault, 0) + 1
            else:
                seen.add(_key(row))
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                counts.kept += 1
            counts.next_index = row["index"] + 1
        file.flush()
        os.fsync(file.fileno())


def _key(row: dict[str, Any]) -> str:
    """Two questions that differ in case and spacing alone are one."""
    return " ".join(row["messages"][0]["content"].lower().split())


def _progress_path(out: Path) -> Path:
    return out.with_name(out.name + ".progress")


def _identity(settings: SelfChat, target: Target) -> dict[str, Any]:
    own = {key: value for key, value in asdict(settings).items() if key not in {"num", "batch_size"}}
    return {**own, "model": target.name}


def _save_progress(out: Path, settings: SelfChat, target: Target, counts: Counts) -> None:
    path = _progress_path(out)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps({"settings": _identity(settings, target), **asdict(counts)}) + "\n")
    os.replace(temporary, path)


def _resume(out: Path, settings: SelfChat, target: Target) -> tuple[Counts, set[str]]:
    """What earlier runs decided; rows written after the last saved progress are taken back."""
    check_out(out)
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        return Counts(), set()
    path = _progress_path(out)
    saved = json.loads(path.read_text())
    begun, asked = saved.pop("settings"), _identity(settings, target)
    other = sorted(key for key in begun.keys() | asked.keys() if begun.get(key) != asked.get(key))
    if other:
        pairs = "; ".join(f"{key} was {begun.get(key)}, asked for is {asked.get(key)}" for key in other)
        raise SelfChatError(f"{out} was begun with other settings ({pairs}); repeat those or give another --out")
    counts = Counts(**saved)
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True)[: counts.kept]
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text("".join(lines), encoding="utf-8")
    os.replace(temporary, out)
    rows = [json.loads(line) for line in lines]
    return counts, {_key(row) for row in rows}


@contextmanager
def _bar(total: int, done: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("conversations"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bars:
        task = bars.add_task("", total=total, completed=done)
        yield lambda kept: bars.update(task, completed=kept)
