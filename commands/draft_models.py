"""Ordinary language models as draft heads: of the target's vocabulary, of one that is padded otherwise, of another."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..heads.base import HeadError
from ..heads.draft_model import DraftModel, DraftModelConfig
from ..heads.folder import LoadedHead
from ..heads.gemma4_assistant import load_assistant
from ..heads.model_folder import ModelFolder, check_same_tokens, first_difference, shared_vocabulary
from ..heads.pard import Pard, PardConfig
from ..infer.config import EngineConfig
from ..infer.proposers.base import ProposerError
from ..infer.proposers.draft_model_text import TextDraftModelProposer
from ..infer.proposers.drafting import DraftSampling
from ..infer.target import Target
from ..infer.token_text import TokenText
from ..infer.translation import Translation
from .heads import is_assistant


@dataclass(frozen=True)
class TextDraftModel(LoadedHead):
    """A draft model of another tokenizer than the target's."""

    translation: Translation


def load_model(
    folder: Path, method: str, target: Target, model: str, draft_sampling: DraftSampling = "greedy"
) -> LoadedHead:
    """A language model's or an assistant's folder as a draft head for a target that was loaded from `model`.

    Where its tokenizer is another one it is a TextDraftModel. Raises HeadError where it is of no use to draft with.
    """
    if is_assistant(folder):
        assistant = load_assistant(folder, target.facts, target.config)
        return LoadedHead(assistant.to(device=target.device, dtype=target.dtype), {})
    found = ModelFolder(folder)
    ours, theirs = target.tokenizer, found.tokenizer()
    if theirs is None:
        raise HeadError(
            f"a draft model's tokens are compared with the target's, found no tokenizer in {folder}; copy its own into "
            f"it"
        )
    shared = target.vocab_size if ours is None else shared_vocabulary(ours, theirs)
    if method == "pard" and shared is None:
        check_same_tokens(ours, theirs, (model, str(folder)))
    whole, rows = {"num_layers": found.facts.num_layers}, found.facts.vocab_size
    if method == "pard":
        assert shared is not None
        config = PardConfig.derive_from(target.facts, whole, found)
        if config.mask_token_id is None:
            raise HeadError(
                f"pard drafts behind a mask token, found no pard_token in the config.json of {folder}; give a model "
                f"trained for it (`fit --recipe pard`), or use --method draft_model"
            )
        return _load(Pard(config.served_as_it_is(target.vocab_size, min(shared, rows))), found, target)
    config = DraftModelConfig.derive_from(target.facts, whole, found)
    if shared is not None:
        return _load(DraftModel(config.served_as_it_is(target.vocab_size, min(shared, rows))), found, target)
    translation = _translation(target, theirs, model, folder)
    if draft_sampling != "greedy":
        raise HeadError(
            f"{folder} has another tokenizer than {model} and drafts its likeliest text, found --draft-sampling "
            f"{draft_sampling}; drop it"
        )
    tokens = translation.draft.num_ids
    config = config.served_as_it_is(max(tokens, rows), min(tokens, rows))
    return TextDraftModel(_load(DraftModel(config), found, target).head, {}, translation)


def text_proposer(
    loaded: TextDraftModel, target: Target, num_draft_tokens: int, config: EngineConfig
) -> TextDraftModelProposer:
    """What drafts through text in an engine of this config."""
    assert isinstance(loaded.head, DraftModel)
    return TextDraftModelProposer(
        loaded.head,
        target.tensors(),
        loaded.translation,
        num_draft_tokens,
        max_batch_size=config.max_batch_size,
        max_length=min(config.max_length or target.max_length, target.max_length),
    )


def _load(head: DraftModel, model: ModelFolder, target: Target) -> LoadedHead:
    head.start_from(model)
    head.assert_filled()
    return LoadedHead(head.to(device=target.device, dtype=target.dtype), {})


def _translation(target: Target, tokenizer: Any, model: str, folder: Path) -> Translation:
    difference = first_difference(target.tokenizer, tokenizer)
    try:
        made = Translation(TokenText(target.tokenizer, model), TokenText(tokenizer, str(folder)))
    except ProposerError as error:
        raise HeadError(f"{model} and {folder} do not share one tokenizer, found {difference}; {error}") from error
    print(f"spectrain: {folder} has another tokenizer, found {difference}: it drafts through text", file=sys.stderr)
    return made
