"""Chat rendering, shared by eval and extract, and the prompts that eval decodes.

Rendering happens in `render` alone, and rendered text is tokenised in `encode_rendered` alone, without special tokens:
the template has printed its own. Loss masks are not made here.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from .rows import DataError, Message, RowError, messages_of, normalise_messages, read_rows


@dataclass(frozen=True)
class Prompt:
    """One prompt: `text` is what was tokenised, None where the row gave ids."""

    index: int
    text: str | None
    token_ids: tuple[int, ...]
    source: str  # "file:line", with "#turn" where a row gives several prompts
    messages: tuple[Message, ...] = ()  # what was rendered; empty where the row gave ids


class TemplateRefusal(ValueError):
    """The chat template raised for this conversation; the message is the template's own."""


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer carries a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: list[Any] | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """The conversation as the chat template prints it; raises TemplateRefusal where the template does."""
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()
        raise TemplateRefusal(reason[0] if reason else type(error).__name__) from error
    return text


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """Ids of text a chat template printed, special tokens included by the template only."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def template_hash(tokenizer: Any) -> str:
    """SHA-256 of the chat template, "none" without one; equal hashes render equal conversations equally."""
    if not has_template(tokenizer):
        return "none"
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of everything that turns text into ids: vocabulary, merges, added tokens, normaliser, post-processor."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        for call_time in ("truncation", "padding"):
            state.pop(call_time, None)
    else:
        state = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def load_prompts(
    paths: Iterable[Path | str],
    tokenizer: Any,
    *,
    raw: bool = False,
    all_turns: bool = False,
    limit: int | None = None,
    skip: Callable[[str, str], None] | None = None,
) -> list[Prompt]:
    """Reads prompt files: rows with `prompt`, `messages`, `turns`, `question`, `problem` or `prompt_token_ids`.

    Each is rendered with the generation prompt; a tokenizer without a template, or `raw`, takes the text itself with
    the tokenizer's own special tokens. `turns` gives its first turn, with `all_turns` one prompt a turn, each on its
    own. Trailing assistant messages are dropped. Raises DataError naming file and line; with `skip`, a row that gives
    no prompt is passed to it as (source, reason) instead.
    """
    prompts: list[Prompt] = []
    rows = (row for path in paths for row in read_rows(Path(path)))
    for source, value in rows:
        try:
            for source_turn, question in _questions(source, value, all_turns):
                if limit is not None and len(prompts) >= limit:
                    return prompts
                prompts.append(_prompt(len(prompts), source_turn, question, tokenizer, raw))
        except RowError as error:
            if skip is None:
                raise DataError(f"{source}: {error}; correct or remove the row") from error
            skip(source, str(error))
    if not prompts:
        raise DataError("expected at least one prompt, found none; give a file with usable rows")
    return prompts


@dataclass(frozen=True)
class _Question:
    messages: list[Message]
    tools: list[Any] | None
    token_ids: tuple[int, ...] | None = None


def _questions(source: str, value: Any, all_turns: bool) -> Iterator[tuple[str, _Question]]:
    if not isinstance(value, Mapping):
        raise RowError(f"expected an object with a prompt, found {type(value).__name__}")
    tools = value.get("tools") or None
    messages = messages_of(value)
    if messages is None and isinstance(value.get("prompt"), list):
        messages = normalise_messages(value["prompt"])
    if messages is not None:
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise RowError("no message but the assistant's own")
        yield source, _Question(messages, tools)
    elif "turns" in value:
        turns = value["turns"]
        if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
            raise RowError("turns are not a list of texts")
        for number, turn in enumerate(turns if all_turns else turns[:1]):
            yield f"{source}#{number}" if all_turns else source, _Question([_user(turn)], tools)
    elif "prompt_token_ids" in value:
        ids = value["prompt_token_ids"]
        if not (isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)):
            raise RowError("prompt_token_ids are not a list of token ids")
        yield source, _Question([], None, tuple(ids))
    else:
        key = next((key for key in ("prompt", "question", "problem") if isinstance(value.get(key), str)), None)
        if key is None:
            found = ", ".join(map(str, value)) or "nothing"
            raise RowError(f"expected one of prompt, messages, turns, question, problem, found {found}")
        yield source, _Question([_user(value[key])], tools)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _prompt(index: int, source: str, question: _Question, tokenizer: Any, raw: bool) -> Prompt:
    if question.token_ids is not None:
        return Prompt(index, None, question.token_ids, source)
    if raw or not has_template(tokenizer):
        text = "\n".join(message["content"] for message in question.messages)
        ids = tokenizer(text, verbose=False)["input_ids"]
    else:
        try:
            text = render(tokenizer, question.messages, tools=question.tools, add_generation_prompt=True)
        except TemplateRefusal as error:
            raise RowError(f"the chat template refused it: {error}") from error
        ids = encode_rendered(tokenizer, text)
    if not ids:
        raise RowError("the prompt holds no token")
    return Prompt(index, text, tuple(ids), source, tuple(question.messages))
