"""Targets with recurrent layers: whatever is drafted and however it is batched, they say what they say alone."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from spectrain.infer import recurrent
from spectrain.infer.batch import PackedBatch
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine, EngineError
from spectrain.infer.parity import packed_batch
from spectrain.infer.planes import Planes
from spectrain.infer.proposers.base import Proposer
from spectrain.infer.proposers.ngram import NgramProposer
from spectrain.infer.proposers.ngram_gpu import NgramGpuProposer
from spectrain.infer.proposers.ngram_rule import NgramRule
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.recurrent import States, StateSpec
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.scoring import score_rows
from spectrain.infer.target import Target, TargetError, TargetOutput
from spectrain.tests.fresh import loud_proposer
from spectrain.tests.infer.packed import compare, run_scenario
from spectrain.tests.infer.proposers import NoisyOracle
from spectrain.tests.models import HYBRIDS, SSM, hybrid, lone_forward, nemotron_h, qwen3_next

CONFIG = EngineConfig(num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=8)
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
ROUNDING = 1e-5  # of float32, against the largest logit
MAIN = ["qwen3_next", "nemotron_h", "lfm2"]
"""One of each kind of layer: a delta net, Mamba, a convolution alone."""


@dataclasses.dataclass
class Case:
    """A target, the untouched model, prompts, and what transformers itself generates after them."""

    target: Target
    oracle: PreTrainedModel
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=MAIN)
def case(request: pytest.FixtureRequest) -> Case:
    model = HYBRIDS[request.param]()
    oracle = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 3, 17, 9, 70)]
    return Case(Target.from_model(model), oracle, prompts, [generate(oracle, prompt) for prompt in prompts])


def generate(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": GREEDY.max_tokens, "do_sample": False, "eos_token_id": None}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


def noisy(case: Case, k: int) -> Proposer:
    texts = [prompt + output for prompt, output in zip(case.prompts, case.expected, strict=True)]
    return NoisyOracle(texts, k, 0.4, 97)


METHODS: dict[str, tuple[int, Callable[[Case, int], Proposer]]] = {
    "plain": (0, lambda case, k: NoneProposer()),
    "noisy": (3, noisy),
    "noisy 1": (1, noisy),
    "eagle3": (3, lambda case, k: loud_proposer("eagle3", case.target, k)),
    "ngram": (2, lambda case, k: NgramProposer(k, NgramRule(min_n=1, max_n=3))),
    "ngram_gpu": (4, lambda case, k: NgramGpuProposer(k, NgramRule(min_n=1, max_n=3))),
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_rows_and_states_equal_lone_forwards(family: str):
    errors = run_scenario(HYBRIDS[family]())
    assert errors.logits < ROUNDING * errors.scale
    assert errors.states < 1e-4


def test_time_steps_are_kept_within_the_configs_limits():
    """Narrower than any that the weights would give, so that both ends count."""
    errors = run_scenario(hybrid("Bamba", attn_layer_indices=[1], time_step_limit=(0.6, 0.7), **SSM))
    assert errors.logits < ROUNDING * errors.scale
    assert errors.states < 1e-4


@pytest.mark.usefixtures("poisoned_padding")
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_transformers(case: Case, method: str):
    k, proposer = METHODS[method]
    config = dataclasses.replace(CONFIG, num_draft_tokens=k)
    runs = [{}, {"max_batch_size": 1, "max_batch_tokens": 7}, {"num_blocks": 33}, {"launch_ahead": True}]
    for changes in runs if method in ("plain", "noisy") else runs[:1]:
        engine = Engine(case.target, proposer(case, k), dataclasses.replace(config, **changes))
        poison(engine)
        assert [o.token_ids for o in engine.generate(case.prompts, GREEDY)] == case.expected
        assert ("num_blocks" in changes) == (engine.statistics.num_preemptions > 0)
        drafted, accepted = engine.statistics.draft_tokens, engine.statistics.accepted_tokens
        assert (drafted > 0) == (k > 0)
        assert accepted < drafted or not k
        assert accepted > 0 or not method.startswith("noisy")


def poison(engine: Engine) -> None:
    """What the last requests left in the states of a row must not matter to the next: here NaN."""
    for mixer in engine.target._mixers:
        assert mixer.state is not None
        for tensor in (mixer.state.conv, mixer.state.recurrent):
            if tensor is not None:
                tensor.fill_(torch.nan)


def test_a_state_of_the_position_beside_would_show(monkeypatch, case: Case):
    """The proof that the tests above depend on which state a step starts from."""
    forward = Target.forward
    for part in ("conv", "recurrent"):
        if case.target._mixers[0].spec.shape is None and part == "recurrent":
            continue  # it only convolves

        def shift(target: Target, batch: PackedBatch, part: str = part) -> TargetOutput:
            output = forward(target, batch)
            for mixer in target._mixers:
                tensor = getattr(mixer.state, part)
                tensor.copy_(tensor.roll(1, dims=1))
            return output

        monkeypatch.setattr(Target, "forward", shift)
        engine = Engine(case.target, noisy(case, 3), dataclasses.replace(CONFIG, num_draft_tokens=3))
        assert [o.token_ids for o in engine.generate(case.prompts, GREEDY)] != case.expected


def test_a_prompt_may_be_cut_anywhere(case: Case):
    prompt, target = case.prompts[4][:20], case.target
    expected, _ = lone_forward(case.oracle, prompt)
    target.capture(())
    for k in (0, 4):
        for cut in range(1 + k % 3, 20, 2):
            target.bind(
                Planes(target.plane_specs, 6, 4, target.device), States(target.state_specs, 2, k, target.device)
            )
            parts = [(prompt[:cut], 0), (prompt[cut:], cut)]
            batches = [packed_batch([ids], [at], [[3, 1, 4, 2, 5]], 4, target.device) for ids, at in parts]
            logits = torch.cat([target.forward(batch).logits for batch in batches])
            assert (logits - expected).abs().max() < ROUNDING * expected.abs().max()


def test_seeded_samples_do_not_depend_on_company(case: Case):
    each = [SamplingParams(max_tokens=8, seed=i, temperature=0.9, ignore_eos=True) for i in range(len(case.prompts))]

    def outputs(k: int, order: list[int], **changes) -> list[list[int]]:
        proposer = loud_proposer("eagle3", case.target, k, "probabilistic") if k else NoneProposer()
        engine = Engine(case.target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=k, **changes))
        found = engine.generate([case.prompts[i] for i in order], [each[i] for i in order])
        return [found[order.index(i)].token_ids for i in range(len(order))]

    forwards, backwards = list(range(5)), list(range(4, -1, -1))
    plain = outputs(0, forwards)
    assert outputs(0, backwards, max_batch_tokens=20) == plain
    together = outputs(3, forwards)
    assert together != plain  # a sampled draft is not the token that would have been drawn without it
    assert outputs(3, backwards, launch_ahead=True) == together
    assert outputs(3, forwards, max_batch_size=1) == together


def test_adaptive_drafting_changes_nothing(case: Case):
    config = dataclasses.replace(CONFIG, num_draft_tokens=4, draft_policy="adaptive")
    engine = Engine(case.target, loud_proposer("eagle3", case.target, 4), config)
    assert [o.token_ids for o in engine.generate(case.prompts, GREEDY)] == case.expected


def test_scoring_says_what_a_lone_forward_says(case: Case):
    text = case.prompts[4] + case.expected[4]
    expected, _ = lone_forward(case.oracle, text)
    rows = list(range(65, len(text)))
    engine = Engine(case.target, NoneProposer(), dataclasses.replace(CONFIG, max_batch_tokens=32))
    for one_by_one in (False, True):
        logits = score_rows(engine, text, rows, one_by_one=one_by_one)
        assert (logits - expected[rows]).abs().max() < ROUNDING * expected.abs().max()


def test_planes_stand_for_attention_layers_and_states_for_the_others():
    target = Target.from_model(nemotron_h())
    assert [spec.name for spec in target.plane_specs] == ["target.2"]
    assert [spec.name for spec in target.state_specs] == ["target.0", "target.3"]  # layer 1 is an MLP
    assert target.num_layers == 4
    spec = Target.from_model(qwen3_next().bfloat16()).state_specs[0]
    assert spec == StateSpec("target.0", 2 * 16 + 24, 4, torch.bfloat16, (4, 8, 6), torch.float32)
    # 3 + k inputs of the convolution and k + 1 states
    assert spec.bytes_per_request(0) == 3 * 56 * 2 + 4 * 8 * 6 * 4
    assert spec.bytes_per_request(4) == 7 * 56 * 2 + 5 * 4 * 8 * 6 * 4
    states = States([spec], 3, 4, torch.device("cpu"))["target.0"]
    assert states.recurrent is not None
    assert states.conv.nbytes + states.recurrent.nbytes == 3 * spec.bytes_per_request(4)


def test_states_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    target = Target.from_model(qwen3_next())
    huge = dataclasses.replace(target.state_specs[0], shape=(4096, 1024, 1024))
    target.state_specs = (huge,)
    with pytest.raises(EngineError, match="states of 8 requests, 4 of each, take .* lower --batch-size to 1 or less"):
        Engine(target, NoneProposer(), dataclasses.replace(CONFIG, num_draft_tokens=3))


def test_no_blocks_are_shared(case: Case):
    engine = Engine(case.target, NoneProposer(), dataclasses.replace(CONFIG, prefix_cache=True))
    for _ in range(2):
        assert [o.token_ids for o in engine.generate(case.prompts, GREEDY)] == case.expected
    assert engine.statistics.cached_prompt_tokens == 0


def test_the_model_gets_its_own_code_back_for_a_newer_target():
    model = qwen3_next()
    oracle = copy.deepcopy(model)
    old = Target.from_model(model)
    errors = compare(Target.from_model(model), oracle)
    assert errors.logits < ROUNDING * errors.scale
    batch = packed_batch([[5]], [0], [[1]], 16, old.device)
    with pytest.raises(TargetError, match="taken over by a newer Target"):
        old.forward(batch)
    recurrent.restore(model)
    model.set_attn_implementation("eager")
    assert torch.equal(lone_forward(model, [5, 6, 7])[0], lone_forward(oracle, [5, 6, 7])[0])


def test_it_runs_its_own_code_and_says_so():
    target = Target.from_model(qwen3_next())
    assert target.fuse() == "Qwen3NextForCausalLM has recurrent layers, which run their own code"
    with pytest.raises(TargetError, match="bind states of its `state_specs`"):
        target.bind(Planes(target.plane_specs, 2, 16, target.device))


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "lfm2"])
def test_a_mixer_that_computes_something_else_is_refused(family: str):
    """The same parts put together otherwise: recognised, found out, and the model left with an ordinary error."""
    model = HYBRIDS[family]()
    layer = next(layer for layer in model.get_decoder().layers if not hasattr(layer, "self_attn"))
    mixer = next(m for m in layer.modules() if hasattr(m, "out_proj") and hasattr(m, "in_proj") or hasattr(m, "A_log"))
    honest = mixer.out_proj.forward
    calls = []

    def differently(x):
        calls.append(x)
        return honest(x if x.dim() == 3 else 1.05 * x)

    mixer.out_proj.forward = differently
    with pytest.raises(TargetError, match="packed with another request its logits are off"):
        Target.from_model(model)
