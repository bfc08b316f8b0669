"""Reads JSON, JSONL and `.jsonl.gz` files row by row and brings chat messages into one shape.

Knows nothing of tokenizers: rendering lives in prompts.py.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

Message = dict[str, Any]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


class DataError(ValueError):
    """A data file cannot be read; the message names file and line."""


class RowError(ValueError):
    """One row is unusable; the message is the reason alone, so that rows can be counted by it."""


class Row(NamedTuple):
    """One JSON value and where it was found."""

    source: str  # "file:line", or "file[index]" in a JSON array
    value: Any


def read_rows(path: Path) -> Iterator[Row]:
    """Yields the rows of one file; raises DataError for a missing, empty, truncated or non-UTF-8 one.

    A `.json` file may hold one row or an array of rows; any other name is read as one row a line.
    """
    if not path.is_file():
        raise DataError(f"expected a JSON, JSONL or .jsonl.gz file at {path}, found none; check the path")
    found = False
    for row in _array_rows(path) if _is_document(path) else _line_rows(path):
        found = True
        yield row
    if not found:
        raise DataError(f"expected at least one row in {path}, found an empty file")


def normalise_messages(value: Any) -> list[Message]:
    """OpenAI `messages` or ShareGPT `conversations` as role/content messages; raises RowError with the reason.

    Tool calls, reasoning and names are kept. Arguments written as JSON text become objects and a null content beside
    tool calls becomes empty, as serving engines hand them to the template.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise RowError("messages are not a list")
    if not value:
        raise RowError("no messages")
    return [_normalise_message(message) for message in value]


def messages_of(value: Any) -> list[Message] | None:
    """The normalised messages of a row, None where it has neither `messages` nor `conversations`."""
    for key in ("messages", "conversations", "conversation"):
        if isinstance(value, Mapping) and key in value:
            return normalise_messages(value[key])
    return None


def _open(path: Path) -> BufferedIOBase:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _is_document(path: Path) -> bool:
    if path.name.removesuffix(".gz").endswith(".json"):
        return True
    with _open(path) as file:
        try:
            return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{path} cannot be read: {error}; copy the file again") from error


def _array_rows(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        try:
            raw = file.read()
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{path} cannot be read: {error}; copy the file again") from error
    if not raw.strip():
        return
    text = _decode(raw, path, 1)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _line_rows(path)
            return
        raise DataError(
            f"{path}:{error.lineno} is not valid JSON ({error.msg}); the file may be truncated, restore it"
        ) from error
    if isinstance(value, list):
        yield from (Row(f"{path}[{index}]", row) for index, row in enumerate(value))
    else:
        yield Row(f"{path}:1", value)


def _line_rows(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        number = 0
        try:
            for raw in file:
                number += 1
                if raw.strip():
                    yield Row(f"{path}:{number}", _parse(_decode(raw, path, number), path, number))
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{path}:{number + 1} cannot be read: {error}; copy the file again") from error


def _decode(raw: bytes, path: Path, line: int) -> str:
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        at = line + raw[: error.start].count(b"\n")
        raise DataError(
            f"{path}:{at} is not UTF-8 (byte 0x{raw[error.start]:02x}); convert the file to UTF-8"
        ) from error


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{line} is not valid JSON ({error.msg} at column {error.colno}); the line may be truncated, "
            f"restore or remove it"
        ) from error


def _normalise_message(message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise RowError("a message is not an object")
    if "role" not in message and "from" in message:
        return _from_sharegpt(message)
    role = message.get("role")
    if role not in ROLES:
        raise RowError(f"unknown role {role!r}")
    calls = message.get("tool_calls")
    out = {key: value for key, value in message.items() if value is not None}
    if calls:
        out["tool_calls"] = [_normalise_call(call) for call in calls]
    out["content"] = _text(message.get("content"), empty_allowed=bool(calls))
    return out


def _from_sharegpt(message: Mapping[str, Any]) -> Message:
    role, value = message["from"], message.get("value")
    if role == "function_call":
        try:
            call = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            raise RowError("a function_call is not JSON") from None
        calls = call if isinstance(call, list) else [call]
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [_normalise_call({"type": "function", "function": call}) for call in calls],
        }
    if role not in SHAREGPT_ROLES:
        raise RowError(f"unknown role {role!r}")
    return {"role": SHAREGPT_ROLES[role], "content": _text(value, empty_allowed=False)}


def _text(content: Any, *, empty_allowed: bool) -> str:
    if content is None:
        if empty_allowed:
            return ""
        raise RowError("content is null")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RowError("content is not text")
    parts = [part if isinstance(part, str) else _text_part(part) for part in content]
    return "".join(parts)


def _text_part(part: Any) -> str:
    if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
        raise RowError("content holds something other than text")
    return part["text"]


def _normalise_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError("a tool call has no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except json.JSONDecodeError:
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
