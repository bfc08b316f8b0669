"""Medusa and MLP speculator drafting in the engine: lossless with any head, and nothing depends on the batch."""

import dataclasses

import pytest
import torch

from spectrain.heads.base import DraftHead, HeadError
from spectrain.heads.per_step import PerStepHead
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.base import Proposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import fresh_head, fresh_proposer, proposer_of, tiny_head_config
from spectrain.tests.infer.markov import first_accepted, markov_target, output_of
from spectrain.tests.models import rand_llama
from spectrain.tests.train.toys import MK

CONFIG = EngineConfig(num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=16)
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 3, 5, 17, 26, 2, 9)]


STYLES: dict[str, tuple[str, dict[str, object]]] = {
    "medusa": ("medusa", {}),
    "medusa, shared lm_head and token map": ("medusa", {"lm_head": "shared", "draft_vocab_size": 50}),
    "mlp": ("mlp_speculator", {}),
    "mlp, tied and scaled": ("mlp_speculator", {"tie_weights": True, "scale_input": True}),
}


def proposer(target: Target, style: str, k: int, sampling: str = "greedy") -> Proposer:
    """Medusa as it starts, which is right now and then on a random target; an MLP speculator is mostly wrong."""
    recipe, settings = STYLES[style]
    return fresh_proposer(recipe, target, k, sampling, num_heads=5, **settings)


def test_more_drafts_than_heads_are_refused(target):
    with pytest.raises(HeadError, match="at most 5 tokens a step.*lower --num-draft-tokens"):
        proposer(target, "medusa", 6)


def perfect_head(recipe: str, target: Target) -> DraftHead:
    """A head that makes the best of MK: Medusa knows the newest state, an MLP speculator the token before a draft."""
    head = fresh_head(tiny_head_config(recipe, target.facts, num_heads=4), target.tensors())
    assert isinstance(head, PerStepHead)
    with torch.no_grad():
        if recipe == "medusa":
            for i, part in enumerate(head.lm_heads.parameters()):
                part.copy_(output_of(torch.linalg.matrix_power(MK, i + 2)))
            return head
        for name, part in head.named_parameters():
            if ".proj." in name:
                part.zero_()
        for step in range(4):
            made = head(torch.zeros(3, 32), torch.arange(3), step).logits_states
            head.output_weight(target.tensors(), step).copy_((torch.linalg.pinv(made) @ MK.log()).T)
    return head


@pytest.mark.parametrize(
    ("recipe", "sampling", "survive"),
    [
        ("medusa", "probabilistic", (0.767621, 0.543182, 0.369060, 0.246224)),
        ("mlp_speculator", "probabilistic", (1.0, 1.0, 1.0, 1.0)),
        ("mlp_speculator", "greedy", (0.704301, 0.508065, 0.373495, 0.278629)),
    ],
)
def test_acceptance_is_the_closed_form_of_perfect_heads(recipe: str, sampling: str, survive: tuple[float, ...]):
    target = markov_target()
    accepted = first_accepted(target, proposer_of(perfect_head(recipe, target), target, 4, sampling))
    for i, expected in enumerate(survive):
        assert float((accepted > i).float().mean()) == pytest.approx(expected, abs=0.03 if expected < 1 else 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("style", ["medusa", "medusa, shared lm_head and token map", "mlp, tied and scaled"])
def test_recorded_steps_say_what_eager_ones_say(prompts, style: str, temperature: float):
    target = Target.from_model(rand_llama(max_position_embeddings=128).cuda())
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=5 + 9 * (i % 5)) for i in range(len(prompts))]
    outputs = []
    for eager in (False, True):
        drafter = proposer(target, style, 5, "probabilistic" if temperature else "greedy")
        config = dataclasses.replace(CONFIG, block_size=16, num_draft_tokens=5, eager=eager)
        outputs.append([o.token_ids for o in Engine(target, drafter, config).generate(prompts, params)])
    assert outputs[0] == outputs[1]
    if not temperature:
        plain = Engine(target, NoneProposer(), dataclasses.replace(CONFIG, block_size=16)).generate(prompts, params)
        assert outputs[0] == [o.token_ids for o in plain]
