"""Every head of recipes/ in the engine: drafting never changes what a target says, whatever the head and the batch.

The heads are untrained, so their drafts are mostly wrong, which is when it matters.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.base import Drafts, DraftStep, Proposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import fresh_proposer, head_recipes, loud_proposer
from spectrain.tests.infer import test_engine_law as law
from spectrain.tests.infer.proposers import keep_drafts

RECIPES = head_recipes()
CONFIG = EngineConfig(num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=16)
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
TOP3 = {"temperature": 0.7, "top_k": 3}


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    return [o.token_ids for o in Engine(target, NoneProposer(), CONFIG).generate(prompts, GREEDY)]


def assert_company_changes_nothing(
    make: Callable[[], Proposer],
    target: Target,
    config: EngineConfig,
    params: SamplingParams,
    prompts: list[list[int]],
    plain: list[list[int]],
    least: int,
) -> None:
    """Output and drafts, more than `least` of them, are the same in any batch, chunk, preemption or cached prefix."""
    seen: list[dict[tuple[int, int], list[int]]] = []
    alone = {"max_batch_size": 1, "max_batch_tokens": 7}
    for changes in ({}, alone, {"num_blocks": 26}, {"prefix_cache": True, "launch_ahead": True}):
        proposer = make()
        drafts = keep_drafts(proposer)
        engine = Engine(target, proposer, dataclasses.replace(config, **changes))
        for again in range(2 if "prefix_cache" in changes else 1):
            if again:  # the second time every full block of the prompts is found
                drafts.clear()
            assert [o.token_ids for o in engine.generate(prompts, params)] == plain
        assert ("num_blocks" in changes) == (engine.statistics.num_preemptions > 0)
        assert ("prefix_cache" in changes) == (engine.statistics.cached_prompt_tokens > 0)
        assert engine.pool.num_free == engine.pool.num_blocks - 1
        seen.append({(request % len(prompts), length): tokens for (request, length), tokens in drafts.items()})
    for drafts in seen[1:]:
        # where a draft starts may differ, and blocks may leave room for fewer; what is drafted there may not
        common = seen[0].keys() & drafts.keys()
        assert len(common) > least
        for key in common:
            shared = min(len(seen[0][key]), len(drafts[key]))
            assert seen[0][key][:shared] == drafts[key][:shared]


@pytest.mark.usefixtures("poisoned_padding")
@pytest.mark.parametrize(("recipe", "settings"), [*((r, {}) for r in RECIPES), ("mtp", {"num_layers": 3})], ids=str)
def test_output_and_drafts_do_not_depend_on_batch_chunks_preemptions_or_cached_prefixes(
    target, prompts, plain, recipe: str, settings: dict
):
    def make() -> Proposer:
        return loud_proposer(recipe, target, 3, **settings)

    config = dataclasses.replace(CONFIG, num_draft_tokens=3)
    assert_company_changes_nothing(make, target, config, GREEDY, prompts, plain, least=40)


FLAGS: list[tuple[str, dict[str, object], int]] = [
    ("eagle3", {"draft_vocab_size": 50}, 2),
    ("eagle3", {"layer_style": "qwen3", "num_layers": 2}, 1),
    ("eagle3", {"norm_before_residual": True, "norm_before_fc": True}, 5),
    ("eagle3", {"layer_ids": [0, 1, 2, 4, 6], "norm_output": True, "fc_norm": True, "num_layers": 2}, 3),
    ("eagle3", {"layer_ids": [6]}, 3),
    ("eagle", {"num_layers": 2, "fc_bias": True}, 5),
    ("peagle", {"draft_vocab_size": 50, "layer_style": "qwen3", "fc_norm": True, "num_layers": 4}, 5),
    ("peagle", {}, 1),
    ("mtp", {"num_layers": 3}, 5),
    ("mtp", {"num_layers": 2}, 1),
    ("draft_model", {"family": "qwen3"}, 5),
    ("pard", {"family": "qwen2", "tie_word_embeddings": True}, 1),
    ("medusa", {"lm_head": "shared", "draft_vocab_size": 50}, 2),
    ("mlp_speculator", {"tie_weights": True, "scale_input": True}, 3),
    ("mlp_speculator", {}, 1),
    ("dflash", {}, 1),
    ("dflash", {"sample_from_anchor": True}, 6),
    ("dflash", {"causal": True, "num_layers": 2}, 8),
    ("dflash", {"sliding_window": 9}, 8),
    ("dspark", {"num_candidates": 5, "confidence_head": False}, 4),
]


@pytest.mark.parametrize(("recipe", "settings", "k"), FLAGS, ids=str)
def test_greedy_output_never_changes(target, prompts, plain, recipe: str, settings: dict, k: int):
    proposer = fresh_proposer(recipe, target, k, **settings)
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=k, num_blocks=60))
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
    assert engine.statistics.draft_tokens > 0


@pytest.mark.parametrize("recipe", ["dflash", "peagle"])
def test_adaptive_drafting_changes_nothing(target, prompts, plain, recipe: str):
    config = dataclasses.replace(CONFIG, num_draft_tokens=4, draft_policy="adaptive")
    engine = Engine(target, fresh_proposer(recipe, target, 4), config)
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain


@pytest.mark.parametrize("recipe", RECIPES)
def test_drafts_end_where_the_head_ends(target, prompts, plain, recipe: str):
    """A head made for fewer positions than its target drafts up to them and then leaves the target alone."""
    proposer = fresh_proposer(recipe, target, 3)
    if not hasattr(proposer.head.config, "max_position_embeddings"):
        pytest.skip("a head without positions ends nowhere")
    proposer = fresh_proposer(recipe, target, 3, max_position_embeddings=24)
    drafts = keep_drafts(proposer)
    engine = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=3))
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
    reached = max(length + len(tokens) for (_, length), tokens in drafts.items() if tokens)
    assert reached == 25 - getattr(proposer.head.config, "first_draft_slot", 0)
    assert engine.statistics.num_decode_steps > 0


@pytest.fixture(scope="module")
def toy() -> Target:
    return Target.from_model(law.model())


def joint_p(
    toy: Target, proposer: Proposer, samples: int = 1500, build_model: Callable[[], PreTrainedModel] = law.model
) -> float:
    """p value of the first tokens' joint law; drafts must have been kept now and then."""
    engine = Engine(toy, proposer, law.CONFIG)
    each = [SamplingParams(max_tokens=law.DEPTH + 1, seed=i, **TOP3) for i in range(samples)]
    outputs = engine.generate([law.PROMPT] * samples, each)
    counts = Counter(tuple(output.token_ids[: law.DEPTH]) for output in outputs)
    statistics = engine.statistics
    assert 0.03 * statistics.draft_tokens < statistics.accepted_tokens < statistics.draft_tokens
    return law.chi_square_p(counts, law.exact_law(each[0], build_model=build_model), samples)


SMALLER: list[tuple[str, dict[str, object]]] = [
    ("eagle3", {"draft_vocab_size": 3}),
    ("mlp_speculator", {"draft_vocab_size": 3}),
    ("mtp", {"num_layers": 2}),
    ("dflash", {"sample_from_anchor": True, "causal": True}),
    ("dspark", {"num_candidates": 3}),
]


@pytest.mark.parametrize(("recipe", "settings"), [*((recipe, {}) for recipe in RECIPES), *SMALLER], ids=str)
def test_sampled_output_follows_the_targets_law(toy: Target, recipe: str, settings: dict):
    assert joint_p(toy, loud_proposer(recipe, toy, 3, "probabilistic", **settings)) > 1e-4


@pytest.mark.parametrize("recipe", ["draft_model", "pard"])
def test_sampled_output_follows_the_targets_law_with_certain_drafts(toy: Target, recipe: str):
    assert joint_p(toy, loud_proposer(recipe, toy, 3, "greedy")) > 1e-4


@pytest.mark.parametrize("recipe", ["eagle3", "pard", "dspark"])
def test_a_law_that_is_not_the_drafts_own_is_seen(toy: Target, recipe: str):
    proposer = loud_proposer(recipe, toy, 3, "probabilistic")
    propose = proposer.propose

    def misstated(step: DraftStep) -> Drafts:
        drafts = propose(step)
        return drafts._replace(log_probs=None if drafts.log_probs is None else drafts.log_probs.roll(1, dims=-1))

    proposer.propose = misstated
    assert joint_p(toy, proposer) < 1e-6
