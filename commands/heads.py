"""What every command that loads a draft head checks of it."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..infer.target import Target


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
