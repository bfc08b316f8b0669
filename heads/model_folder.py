"""A causal language model on disk: its config, and its tensors one at a time, so that it need not fit in memory."""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .base import HeadError, TargetFacts

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "backbone.", "")
_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


class Checkpoint:
    """What lies in the folder, or under the hub id, of a model. Raises HeadError where it cannot be read."""

    def __init__(self, model: str | Path) -> None:
        self.path = _folder_of(model)
        self.name = self.path.name if Path(model).is_dir() else str(model)
        try:
            self.whole: dict[str, Any] = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
            self.values: dict[str, Any] = self.whole.get("text_config") or self.whole  # of the language model in it
            self.model_types: tuple[str, ...] = (self.whole["model_type"], self.values.get("model_type", ""))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise HeadError(f"no usable model config in {self.name}: {_line(error)}; check --model") from error
        self._files = self._index()
        found = [prefix for prefix in _PREFIXES if any(name.startswith(f"{prefix}layers.0.") for name in self._files)]
        if not found:
            raise HeadError(
                f"expected decoder layers called model.layers.N in {self.name}, found none; give a model of the Llama "
                f"or Qwen shape"
            )
        self.prefix = found[0]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        """The tensor stored under `name`; raises HeadError where there is none."""
        if name not in self._files:
            raise HeadError(f"{self.name} holds no tensor {name}; give a model of the Llama or Qwen shape")
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)

    def layer_tensors(self, layer: int) -> set[str]:
        """The names of a decoder layer's tensors, without the layer's own prefix."""
        start = f"{self.prefix}layers.{layer}."
        return {name.removeprefix(start) for name in self._files if name.startswith(start)}

    def holds(self, part: str) -> bool:
        """Whether a tensor has `part` in its name."""
        return any(part in name for name in self._files)

    def tokenizer(self) -> Any:
        """The tokenizer beside the model; None where there is none."""
        from transformers import AutoTokenizer

        if not any(self.path.glob("tokenizer*")):
            return None
        return AutoTokenizer.from_pretrained(self.path, local_files_only=True)

    def _index(self) -> dict[str, Path]:
        files: dict[str, Path] = {}
        try:
            index = self.path / "model.safetensors.index.json"
            if index.is_file():
                listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return {name: self.path / file for name, file in listed.items()}
            for path in sorted(self.path.glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    files |= dict.fromkeys(file.keys(), path)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise HeadError(f"the weights of {self.name} cannot be read: {_line(error)}; fetch it again") from error
        if not files:
            raise HeadError(f"expected weights as safetensors in {self.name}, found none; convert the model first")
        return files


class ModelFolder(Checkpoint):
    """A checkpoint of a family that transformers knows the shape of. Raises HeadError for others."""

    def __init__(self, model: str | Path) -> None:
        from transformers import AutoConfig

        super().__init__(model)
        try:
            self.config: Any = AutoConfig.from_pretrained(self.path, local_files_only=True).get_text_config()
        except (OSError, ValueError, StrictDataclassError) as error:
            raise HeadError(f"no usable model config in {self.name}: {_line(error)}; check --model") from error
        self.facts = TargetFacts.from_config(self.config)


def check_same_tokens(ours: Any, theirs: Any, names: tuple[str, str]) -> None:
    """Raises HeadError with the first id whose token differs between two tokenizers; None of either is not compared."""
    if ours is None or theirs is None:
        return
    difference = first_difference(ours, theirs)
    if difference is not None:
        raise HeadError(
            f"{names[0]} and {names[1]} must share one tokenizer, found {difference}; give a model of the target's "
            f"tokenizer"
        )


def first_difference(ours: Any, theirs: Any) -> str | None:
    """The first id whose token differs between two tokenizers, in words; None where they are one."""
    first, second = _tokens_by_id(ours), _tokens_by_id(theirs)
    i = next((i for i in sorted(first.keys() | second.keys()) if first.get(i) != second.get(i)), None)
    return None if i is None else f"id {i} to be {first.get(i)!r} and {second.get(i)!r}"


def shared_vocabulary(ours: Any, theirs: Any) -> int | None:
    """How many ids from 0 on name the same token in both tokenizers, where no later id is named by both; else None.

    Tokenizers of one family may differ in a few tokens at the end, as matrices do in padding.
    """
    first, second = _tokens_by_id(ours), _tokens_by_id(theirs)
    ids = sorted(first.keys() | second.keys())
    end = next((i for i in ids if first.get(i) != second.get(i)), ids[-1] + 1)
    return None if any(i >= end for i in first.keys() & second.keys()) else end


def _tokens_by_id(tokenizer: Any) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items()}


def _folder_of(model: str | Path) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)) or folder.is_absolute():
        raise HeadError(f"expected a model folder or a hub id like owner/name, found no folder {model}; check --model")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), allow_patterns=list(_PATTERNS)))
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise HeadError(f"{model} cannot be fetched: {_line(error)}; check --model or give a folder") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]
