"""Prompt files as the commands that decode them read them: one set a file, each with a name of its own."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..infer.prompts import Prompt
    from ..infer.target import Target


class PromptSetError(ValueError):
    """Prompt files that cannot be told apart, or prompts that the target cannot take."""


def set_names(paths: Sequence[Path]) -> list[str]:
    """A name for each file, the shortest that tells them apart; a file given twice is refused."""
    for names in (
        [path.name.split(".")[0] for path in paths],
        [path.name for path in paths],
        [f"{path.resolve().parent.name}/{path.name}" for path in paths],
    ):
        if len(set(names)) == len(names):
            return names
    doubled = next(name for name in names if names.count(name) > 1)
    raise PromptSetError(
        f"every --prompts file needs a name of its own, found {doubled} twice; rename one or give it once"
    )


def read_prompts(
    path: Path, target: "Target", model: str, *, raw: bool = False, all_turns: bool = False, limit: int | None = None
) -> "list[Prompt]":
    """The prompts of a file, rendered for a target that was loaded from `model`.

    Those that leave no room in the target's context are left out, with a warning each; raises PromptSetError where none
    is left.
    """
    from ..infer.prompts import load_prompts

    if target.tokenizer is None:
        raise PromptSetError(f"prompts need a tokenizer, found none beside {model}; copy it into the model's folder")
    prompts = load_prompts([path], target.tokenizer, raw=raw, all_turns=all_turns, limit=limit)
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) < target.max_length]
    for prompt in prompts:
        if len(prompt.token_ids) >= target.max_length:
            print(
                f"spectrain: warning: {prompt.source} is left out: prompts must leave room in the context of "
                f"{target.max_length} tokens, found {len(prompt.token_ids)}; shorten it or raise --max-length",
                file=sys.stderr,
            )
    if not fitting:
        raise PromptSetError(f"{path} holds no prompt shorter than the context of {target.max_length} tokens")
    return fitting


def check_draft_length(num_draft_tokens: int, target: "Target") -> None:
    """Raises PromptSetError where so many drafts do not fit the target's context."""
    if num_draft_tokens >= target.max_length:
        raise PromptSetError(
            f"drafts must be shorter than the context of {target.max_length} tokens, found --num-draft-tokens "
            f"{num_draft_tokens}; lower it or raise --max-length"
        )
