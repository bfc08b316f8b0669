"""Every alignment of every objective, moved by one in a copy of its source: a named test notices each time.

A row of `TABLE` belongs to a recipe that stands for a head. Of each kind of alignment it says which shifts there are
and which ordinary test fails on each, or why there is nothing to shift. `state` is the row a state is taken from, or
that may be seen; `layer` is the layer it is taken from and, where draft steps have parameters of their own, the step; a
`norm` is shifted by applying it once too often or too rarely.
"""

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

from spectrain.extract.shards import ShardSet
from spectrain.heads.eagle import EagleHead
from spectrain.heads.mtp import MtpHead
from spectrain.recipes.loader import load_recipe, recipe_names
from spectrain.tests.fresh import head_recipes
from spectrain.tests.mutants import Edit, mutated
from spectrain.tests.shard_folders import write_shards
from spectrain.tests.train import test_data
from spectrain.tests.train import test_dflash_objective as dflash
from spectrain.tests.train import test_draft_model_objective as draft
from spectrain.tests.train import test_dspark_objective as dspark
from spectrain.tests.train import test_eagle3_objective as eagle3
from spectrain.tests.train import test_eagle_objective as eagle
from spectrain.tests.train import test_every_objective as every
from spectrain.tests.train import test_mtp_objective as mtp
from spectrain.tests.train import test_peagle_objective as peagle
from spectrain.tests.train import test_per_step_objective as per_step
from spectrain.train import alignment, attention
from spectrain.train.attention import BlockAttend
from spectrain.train.data import RowReader
from spectrain.train.objectives import rollout
from spectrain.train.objectives.dflash import DFlashObjective
from spectrain.train.objectives.draft_model import DraftModelObjective
from spectrain.train.objectives.dspark import DSparkObjective
from spectrain.train.objectives.eagle import EagleObjective
from spectrain.train.objectives.eagle3 import Eagle3Objective
from spectrain.train.objectives.pard import PardObjective
from spectrain.train.objectives.peagle import PEagleObjective
from spectrain.train.objectives.per_step import PerStepObjective

KINDS = ("token", "state", "label", "mask", "position", "layer", "norm")

Mutant = tuple[Edit, ...]
"""What is changed at once."""


class Check(NamedTuple):
    """An ordinary test and the case of it; further parameters are fixtures."""

    test: Callable[..., None]
    case: dict[str, Any]

    def __str__(self) -> str:
        where = self.test.__module__.rpartition(".")[2]
        return "-".join([f"{where}.{self.test.__name__}", *map(str, self.case.values())])

    def run(self, request: pytest.FixtureRequest) -> None:
        wanted = [name for name in inspect.signature(self.test).parameters if name not in self.case]
        self.test(**self.case, **{name: request.getfixturevalue(name) for name in wanted})


class Caught(NamedTuple):
    """A test and the mutants it notices."""

    by: Check
    mutants: tuple[Mutant, ...]


Notices = Callable[..., Caught]
"""A test that is yet to be told of which mutants."""

Row = dict[str, list[Caught] | str]
"""Of each kind, or why there is nothing to shift."""


def caught(test: Callable[..., None], *mutants: tuple[Mutant, ...], **case: Any) -> Caught:
    return Caught(Check(test, case), tuple(itertools.chain(*mutants)))


def each(function: Callable[..., Any], old: str, *news: str) -> tuple[Mutant, ...]:
    return tuple((Edit(function, old, new),) for new in news)


def rolled(function: Callable[..., Any], values: str, dim: int, before: str = "") -> tuple[Mutant, ...]:
    """`values` moved by one along a dimension, either way, in front of what follows it."""
    return each(function, values + before, *(f"{values}.roll({by}, {dim}){before}" for by in (1, -1)))


def normed(function: Callable[..., Any], states: str) -> tuple[Mutant, ...]:
    return each(function, f"target.norm({states})", states, f"target.norm(target.norm({states}))")


TOKEN = each(alignment.input_tokens, "1 + step", "2 + step", "step")
HARD_LABEL = each(alignment.label_tokens, "ahead + 1 + step", "ahead + 2 + step", "ahead + step")
SOFT_LABEL = each(alignment.soft_label_rows, "ahead + steps", "ahead + 1 + steps", "ahead - 1 + steps")
TOP_LABEL = rolled(alignment.label_tops, "batch.target_argmax", 1)
MASK = (
    *rolled(alignment.valid_rows, "batch.loss_mask", 1),
    *rolled(alignment.valid_rows, "shift_left(mask", 1, ", ahead, "),
    *each(alignment.valid_rows, "ahead + 1 + step", "ahead + 2 + step", "ahead + step"),
)
STATE = "batch.aux_states", ".to("
SEEN = each(attention._Dense.__init__, "keys <= rows[:, None]", "keys <= rows[:, None] + 1", "keys < rows[:, None]")
SEEN_BY_DRAFTS = each(
    attention.ParallelAttend.__init__,
    "document_line(document_ids)[None], from_rows",
    *(f"document_line(document_ids)[None], (from_rows {by}).clamp(0, batch * seq - 1)" for by in ("+ 1", "- 1")),
)
OWN_HISTORY = each(attention.UnrolledAttend.__call__, "in history[1:]", "in history[:-1]")
OWN_STEPS = each(attention._add_own_rows, "steps > back", "steps >= back", "steps > back + 1")
POSITION = each(rollout.unroll, "batch.positions + step", "batch.positions", "batch.positions + 2 * step")
FEEDBACK_NORM = each(rollout.unroll, "states = output.feedback", "states = output.logits_states")
SOFT_NORM = normed(rollout.soft_labels, "batch.final_states.flatten(0, 1)[label_rows].to(dtype)")
STORED_LAYER = caught(
    test_data.test_rows_hold_documents_side_by_side_and_padding_is_marked,
    each(RowReader.fill, "states[:, self.columns]", "states[:, [column - 1 for column in self.columns]]"),
    each(RowReader.fill, "states[:, self.final_column]", "states[:, self.final_column - 1]"),
)
ALL_MOVE = "in one forward over real rows only the distances between positions matter, and a shift moves all of them"


def parallel_positions(function: Callable[..., Any]) -> tuple[Mutant, ...]:
    place = "positions[line.from_rows] + line.steps"
    return each(function, place, f"{place} + 1", f"{place} - 1")


def supervised(case: str) -> dict[str, Caught]:
    """What decides a row's part in the loss, of a head by its name among all of them."""
    table = partial(caught, every.test_counted_rows_and_their_labels_equal_a_table_made_by_hand, case=case)
    return {"mask": table(MASK, loss="ce"), "label": table(TOP_LABEL, loss="kl")}


def of_own_steps(style: str) -> Row:
    """Medusa's row and the MLP speculator's: one objective, two networks."""
    logits = partial(caught, per_step.test_training_logits_equal_the_formulas, style=style)
    loss = partial(caught, per_step.test_loss_equals_the_formula_on_reference_logits, style=style)
    unroll, call = PerStepObjective.unroll, PerStepObjective.__call__
    others = [f"(step {by}) % self.num_terms" for by in ("+ 1", "- 1")]
    return {
        "token": "no head sees a token" if style == "medusa" else [logits(TOKEN)],
        "state": [logits(rolled(unroll, "batch.final_states.flatten(0, 1)", 0, "[rows]"))],
        "label": [loss(HARD_LABEL, kind="ce"), loss(SOFT_LABEL, kind="kl"), supervised(style)["label"]],
        "mask": [supervised(style)["mask"]],
        "position": "a row knows no other row, so it stands nowhere",
        "layer": [
            STORED_LAYER,
            logits(each(unroll, "[rows], step)", *(f"[rows], {other})" for other in others))),
            loss(each(call, "weight(target, step)", *(f"weight(target, {other})" for other in others)), kind="ce"),
        ],
        "norm": [
            logits(normed(unroll, "batch.final_states.flatten(0, 1)[rows].to(next(head.parameters()).dtype)")),
            loss(normed(call, "final[label_rows].to(states.dtype)"), kind="kl"),
        ],
    }


def of_blocks(
    case: str, logits: Callable[..., Caught], hard: Callable[..., Caught], soft: Callable[..., Caught]
) -> Row:
    """DFlash's row, and what DSpark's has in common with it."""
    call, drawn = DFlashObjective.__call__, DFlashObjective.draft
    slot, first = "drafts + self.config.first_draft_slot", "[rows, None] + 1"
    sees, rows, more = attention.sees_context, "column <= row", "line * self._seq + "
    seen = (
        (Edit(sees, rows, "column <= row + 1"), Edit(BlockAttend._cut, f"{more}1)", f"{more}2)")),
        (Edit(sees, rows, "column < row"),),
    )
    return {
        "token": [logits(TOKEN)],
        "state": [logits(rolled(drawn, STATE[0], 1, STATE[1]), seen)],
        "label": [hard(HARD_LABEL), soft(SOFT_LABEL), supervised(case)["label"]],
        "mask": [supervised(case)["mask"]],
        "position": [
            logits(each(drawn, first, "[rows, None] + 2", "[rows, None]")),
            hard(each(call, slot, *(f"({slot} {by}) % self.config.block_size" for by in ("+ 1", "- 1")))),
        ],
        "layer": [STORED_LAYER, logits(rolled(drawn, STATE[0], 2, STATE[1]))],
        "norm": [soft(SOFT_NORM)],
    }


def eagle_row() -> Row:
    logits = partial(caught, eagle.test_training_logits_equal_an_incremental_decoder, style="plain")
    drafts = partial(caught, eagle.test_drafts_from_its_own_predictions_equal_an_incremental_decoder, style="plain")
    loss = partial(caught, eagle.test_loss_equals_the_formula_on_the_decoders_states)
    # learning what cannot be known takes long: the quickest head stands for all of them
    leak = caught(every.test_uniform_tokens_cannot_be_predicted, SEEN[:1], case="eagle")
    return {
        "token": [logits(TOKEN)],
        "state": [logits(rolled(EagleObjective.unroll, STATE[0], 1, STATE[1]), SEEN), drafts(OWN_HISTORY), leak],
        "label": [loss(HARD_LABEL, kind="ce"), loss(SOFT_LABEL, kind="kl"), supervised("eagle")["label"]],
        "mask": [supervised("eagle")["mask"]],
        "position": [drafts(POSITION)],
        "layer": [STORED_LAYER],
        "norm": [logits(normed(EagleHead.combine, "aux_states[..., 0, :]")), loss(SOFT_NORM, kind="kl")],
    }


def eagle3_row() -> Row:
    logits = partial(caught, eagle3.test_training_logits_equal_an_incremental_decoder, style="llama")
    loss = partial(caught, eagle3.test_loss_equals_the_formula_on_the_decoders_logits, style="llama")
    unroll = Eagle3Objective.unroll
    return {
        "token": [logits(TOKEN)],
        "state": [logits(rolled(unroll, STATE[0], 1, STATE[1]), SEEN, OWN_HISTORY)],
        "label": [loss(HARD_LABEL, kind="ce"), loss(SOFT_LABEL, kind="kl"), supervised("eagle3")["label"]],
        "mask": [supervised("eagle3")["mask"]],
        "position": [logits(POSITION)],
        "layer": [STORED_LAYER, logits(rolled(unroll, STATE[0], 2, STATE[1]))],
        "norm": [logits(FEEDBACK_NORM), loss(SOFT_NORM, kind="kl")],
    }


def mtp_row() -> Row:
    logits = partial(caught, mtp.test_training_logits_equal_an_incremental_decoder, feedback="normed")
    loss = partial(caught, mtp.test_loss_equals_the_formula_on_the_decoders_logits)
    return {
        "token": [logits(TOKEN)],
        "state": [logits(rolled(Eagle3Objective.unroll, STATE[0], 1, STATE[1]), SEEN, OWN_HISTORY)],
        "label": [loss(HARD_LABEL, kind="ce"), loss(SOFT_LABEL, kind="kl"), supervised("mtp")["label"]],
        "mask": [supervised("mtp")["mask"]],
        "position": [logits(POSITION)],
        "layer": [STORED_LAYER],
        "norm": [logits(normed(MtpHead.combine, "states")), loss(SOFT_NORM, kind="kl")],
    }


def peagle_row() -> Row:
    logits = partial(caught, peagle.test_training_logits_equal_an_incremental_decoder, style="llama")
    loss = partial(caught, peagle.test_loss_is_the_mean_over_rows_of_each_step_and_every_step_weighs_the_same)
    unroll = PEagleObjective.unroll
    return {
        "token": [logits(TOKEN)],
        "state": [logits(rolled(unroll, STATE[0], 1, STATE[1]), SEEN, SEEN_BY_DRAFTS, OWN_STEPS)],
        "label": [loss(HARD_LABEL, kind="ce"), loss(SOFT_LABEL, kind="kl"), supervised("peagle")["label"]],
        "mask": [supervised("peagle")["mask"]],
        "position": [logits(parallel_positions(unroll))],
        "layer": [STORED_LAYER, logits(rolled(unroll, STATE[0], 2, STATE[1]))],
        "norm": [loss(SOFT_NORM, kind="kl")],
    }


def of_language_models(case: str, steps: int) -> Row:
    """A draft model's row and PARD's, which sees its own masks besides."""
    logits = partial(caught, draft.test_training_logits_equal_those_of_transformers, style="llama", steps=steps)
    loss = partial(caught, draft.test_loss_is_one_mean_of_the_formula_over_all_rows, steps=min(steps, 3))
    if case == "pard":
        unroll = PardObjective.unroll
        token, seen = rolled(unroll, "batch.token_ids.flatten()", 0), (*SEEN, *SEEN_BY_DRAFTS, *OWN_STEPS)
    else:
        token, seen = rolled(DraftModelObjective.unroll, "head.embed(batch.token_ids", 1, ", target"), SEEN
    return {
        "token": [logits(token)],
        "state": [logits(seen)],
        "label": [loss(HARD_LABEL, kind="ce"), loss(SOFT_LABEL, kind="kl"), supervised(case)["label"]],
        "mask": [supervised(case)["mask"]],
        "position": [logits(parallel_positions(PardObjective.unroll))] if case == "pard" else ALL_MOVE,
        "layer": [STORED_LAYER],
        "norm": [loss(SOFT_NORM, kind="kl")],
    }


def dflash_row() -> Row:
    loss = partial(caught, dflash.test_loss_equals_the_formula_on_the_drafters_logits, from_anchor=False)
    logits = partial(caught, dflash.test_training_logits_equal_a_drafter_of_single_blocks, style="plain")
    return of_blocks("dflash", partial(logits, query_block=256), partial(loss, kind="ce"), partial(loss, kind="kl"))


def dspark_row() -> Row:
    """Beside what it shares with DFlash, the token before a slot decides its bias."""
    loss = partial(caught, dspark.test_loss_equals_the_formula_on_the_drafters_logits, from_anchor=True)
    shared = of_blocks("dspark", loss, loss, loss)
    previous = each(DSparkObjective._previous, "batch, k)", "batch, k + 1)", "batch, max(k - 1, 0))")
    return {**shared, "token": [*shared["token"], loss(previous)]}


TABLE: dict[str, Row] = {
    "eagle": eagle_row(),
    "eagle3": eagle3_row(),
    "mtp": mtp_row(),
    "peagle": peagle_row(),
    "medusa": of_own_steps("medusa"),
    "mlp_speculator": of_own_steps("mlp"),
    "dflash": dflash_row(),
    "dspark": dspark_row(),
    "draft_model": of_language_models("draft model", 1),
    "pard": of_language_models("pard", 4),
}
"""By the recipes that stand for a head each; the others are settings of one of these and train as it does."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    return ShardSet.open([write_shards(tmp_path_factory.mktemp("data") / "shards")])


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_has_a_row(recipe: str) -> None:
    head = load_recipe(recipe).origins["head.config"].removesuffix(".yaml")
    assert head in TABLE, (
        f"{recipe} trains the head of recipes/{head}.yaml, which has no row in TABLE of tests/test_mutations.py; say "
        f"of each of {', '.join(KINDS)} which shifts which test notices, or why there is nothing to shift"
    )
    assert tuple(TABLE[head]) == KINDS and all(TABLE[head].values())


def test_no_row_outlives_its_recipe() -> None:
    assert set(TABLE) <= set(head_recipes())


def cells() -> list[Any]:
    """Every mutant with its test, and an id that says whose, which and by which test."""
    found = []
    for recipe, row in TABLE.items():
        for kind, cell in row.items():
            for by, mutants in () if isinstance(cell, str) else cell:
                for mutant in mutants:
                    what = f"{mutant[0].function.__qualname__}: {mutant[0].new}"
                    found.append(pytest.param(by, mutant, id=f"{recipe}-{kind}-{what}-{by}"))
    return found


@pytest.mark.parametrize(("by", "mutant"), cells())
def test_the_named_test_fails_on_the_mutant(by: Check, mutant: Mutant, request: pytest.FixtureRequest) -> None:
    with mutated(mutant), pytest.raises(AssertionError):
        by.run(request)


def unmutated() -> list[Any]:
    """Every test once, with all functions that are mutated under it."""
    found: dict[str, tuple[Check, dict[str, Edit]]] = {}
    for row in TABLE.values():
        for cell in row.values():
            for by, mutants in () if isinstance(cell, str) else cell:
                functions = found.setdefault(str(by), (by, {}))[1]
                for edit in itertools.chain(*mutants):
                    functions[edit.function.__qualname__] = Edit(edit.function, edit.old, edit.old)
    return [pytest.param(by, tuple(copies.values()), id=name) for name, (by, copies) in found.items()]


@pytest.mark.parametrize(("by", "copies"), unmutated())
def test_the_named_test_passes_on_plain_copies(by: Check, copies: Mutant, request: pytest.FixtureRequest) -> None:
    with mutated(copies):
        by.run(request)


def test_a_source_that_changed_is_an_error_and_functions_are_restored() -> None:
    code = alignment.input_tokens.__code__
    with (
        pytest.raises(LookupError, match="'2 [+] step' once in input_tokens, found it 0 times"),
        mutated([Edit(alignment.input_tokens, "2 + step", "3 + step")]),
    ):
        pass
    with mutated(TOKEN[0]):
        assert alignment.input_tokens.__code__ is not code
    assert alignment.input_tokens.__code__ is code
