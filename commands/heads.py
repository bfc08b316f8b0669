"""What every command that loads a draft head checks of it."""

import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..heads.folder import LoadedHead
    from ..infer.proposers.base import Proposer
    from ..infer.proposers.drafting import DraftSampling
    from ..infer.target import Target

MODEL_METHODS = ("draft_model", "pard")
"""Methods that any causal language model of the target's tokenizer can serve, whoever trained it."""


def is_model(folder: Path, method: str | None) -> bool:
    """Whether a folder is to be read as an ordinary language model and not as a head that `fit` wrote."""
    return method in MODEL_METHODS and (folder / "config.json").is_file() and not (folder / "spectrain.json").is_file()


ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


def is_assistant(folder: Path) -> bool:
    """Whether a folder holds a Gemma 4 assistant as transformers saves it."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("model_type") in ASSISTANT_TYPES


class HeadTargetError(ValueError):
    """A head and a target that do not belong together."""


def load_trained(folder: Path, target: "Target", model: str, allowed_packages: Collection[str] = ()) -> "LoadedHead":
    """A head that `fit` wrote, on the device of a target that was loaded from `model`.

    Raises HeadTargetError where it was trained for a target of another shape; what else differs is only warned of.
    """
    from ..heads.folder import load_head

    loaded = load_head(folder, device=target.device, dtype=target.dtype, allowed_packages=allowed_packages)
    made, found = loaded.head.config.target, target.facts
    for name in ("hidden_size", "num_layers", "vocab_size"):
        if getattr(made, name) != getattr(found, name):
            raise HeadTargetError(
                f"{folder} was trained for a target of {name} {getattr(made, name)}, {model} has "
                f"{getattr(found, name)}; give the target it was trained for"
            )
    warn_of_differences(loaded.record, target, folder, model)
    return loaded


def load_model(folder: Path, method: str, target: "Target", model: str) -> "LoadedHead":
    """A language model's or an assistant's folder as a draft head for a target.

    Raises HeadError where its shape or its tokenizer is not what drafting needs.
    """
    from ..heads.draft_model import DraftModel, DraftModelConfig
    from ..heads.folder import LoadedHead
    from ..heads.gemma4_assistant import load_assistant
    from ..heads.model_folder import ModelFolder, check_same_tokens
    from ..heads.pard import Pard, PardConfig

    if is_assistant(folder):
        assistant = load_assistant(folder, target.facts, target.config)
        return LoadedHead(assistant.to(device=target.device, dtype=target.dtype), {})
    found = ModelFolder(folder)
    check_same_tokens(target.tokenizer, found.tokenizer(), (model, str(folder)))
    whole = {"num_layers": found.facts.num_layers}
    if method == "pard":
        head = Pard(PardConfig.derive_from(target.facts, whole, found))
    else:
        head = DraftModel(DraftModelConfig.derive_from(target.facts, whole, found))
    head.start_from(found)
    head.assert_filled()
    return LoadedHead(head.to(device=target.device, dtype=target.dtype), {})


def warn_of_differences(record: Mapping[str, Any], target: "Target", head: Path, model: str) -> None:
    """Warns of a head trained on another chat template, tokenizer or set of weights, since such a head drafts badly."""
    from ..infer.prompts import template_hash, tokenizer_hash

    trained = record.get("shards", {})
    weights = json.loads(trained.get("target", {}).get("fingerprint") or "{}").get("weights")
    here = target.fingerprint()["weights"]
    pairs = {
        "chat template": (trained.get("template_hash"), template_hash(target.tokenizer)),
        "tokenizer": (trained.get("tokenizer_hash"), tokenizer_hash(target.tokenizer)),
        "target's weights": (weights and weights["values"], here["values"]),
    }
    for what, (then, now) in pairs.items():
        if then not in (None, now):
            print(
                f"spectrain: warning: the {what} {head} was trained with ({then[:12]}) differ from those of "
                f"{model} ({now[:12]}); acceptance will suffer",
                file=sys.stderr,
            )


def head_proposer(
    target: "Target",
    loaded: "LoadedHead",
    num_draft_tokens: int,
    draft_sampling: "DraftSampling",
    allowed_packages: Collection[str] = (),
) -> "Proposer":
    """What drafts with a head."""
    from ..heads.resolve import resolve

    proposer = resolve(loaded.head.config.proposer, allowed_packages)
    return proposer(loaded.head, target.tensors(), num_draft_tokens, draft_sampling)
