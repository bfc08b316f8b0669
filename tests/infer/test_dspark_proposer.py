"""DSpark in the engine: the walk over a block behind every token is the one a drafter written apart takes."""

import dataclasses

import pytest
import torch
from torch import Tensor

from spectrain.heads.dspark import DSparkConfig, DSparkHead
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.dspark import DSparkProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import loud_head
from spectrain.tests.models import rand_llama
from spectrain.tests.train.blocks import WalkingBlockDrafter

CONFIG = EngineConfig(num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=16)
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
STYLES = {"as published": {}, "candidates": {"num_candidates": 5}, "behind the anchor": {"sample_from_anchor": False}}


@pytest.fixture(scope="module")
def plain(target, prompts) -> list[list[int]]:
    return [o.token_ids for o in Engine(target, NoneProposer(), CONFIG).generate(prompts, GREEDY)]


def head_of(target: Target, **settings) -> DSparkHead:
    shape = {"mask_token_id": 0, "num_layers": 1, "block_size": 5, "markov_rank": 6, **settings}
    head = loud_head(DSparkConfig.derive(target.facts, shape), target.tensors(), random_norms=True)
    assert isinstance(head, DSparkHead)
    with torch.no_grad():  # as loud as the block's own logits
        head.markov_head.markov_w1.weight.mul_(20)
    return head


class Recording(DSparkProposer):
    """Keeps drafts, laws and confidences by (request, known tokens)."""

    def propose(self, step):
        drafts = super().propose(step._replace(wants_confidence=True))
        self.seen = getattr(self, "seen", {})
        for i, (request, length) in enumerate(zip(step.request_ids, step.seq_lens.tolist(), strict=True)):
            n = int(drafts.lengths[i])
            if n:
                law = None if drafts.log_probs is None else drafts.log_probs[i, :n].clone()
                self.seen[request, length] = (drafts.token_ids[i, :n].tolist(), law, drafts.confidence[i, :n].clone())
        return drafts


def reference_rows(
    head: DSparkHead, target: Target, text: list[int], length: int, drafts: list[int]
) -> tuple[Tensor, Tensor]:
    """Logits [n, vocab] and confidences [n] of the slots behind `length` known tokens, given the drafts themselves."""
    model = rand_llama(max_position_embeddings=128)
    states_of = model(torch.tensor([text[:length]]), output_hidden_states=True).hidden_states
    aux = torch.stack([states_of[i][0] for i in head.config.layer_ids], dim=1)
    drafter, first, n = WalkingBlockDrafter(head, target.tensors(), aux), head.config.first_draft_slot, len(drafts)
    states = drafter.states(length - 1, text[length - 1])[first : first + n]
    logits = states @ target.tensors().lm_head.T
    w1 = head.state_dict()["markov_head.markov_w1.weight"]
    before = [text[length - 1], *drafts[:-1]]
    biased = torch.stack([row + drafter.bias(token) for row, token in zip(logits, before, strict=True)])
    if head.config.num_candidates:
        for row, own in zip(biased, logits, strict=True):
            row[own < own.topk(head.config.num_candidates).values[-1]] = -torch.inf
    weight, bias = head.confidence_head.proj.weight[0], head.confidence_head.proj.bias[0]
    pairs = zip(states, before, strict=True)
    return biased, torch.stack([torch.sigmoid(weight @ torch.cat([h, w1[t]]) + bias) for h, t in pairs])


@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_greedy_drafts_are_the_reference_walk(target, prompts, plain, style):
    head = head_of(target, **STYLES[style])
    proposer = Recording(head, target.tensors(), 4)
    engine = Engine(
        target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=4, max_batch_tokens=13, num_blocks=24)
    )
    assert [o.token_ids for o in engine.generate(prompts, GREEDY)] == plain
    assert engine.statistics.num_preemptions > 0
    for request, length in list(proposer.seen)[::7]:
        drafts, _, confidence = proposer.seen[request, length]
        text = prompts[request] + plain[request]
        logits, expected = reference_rows(head, target, text, length, drafts)
        assert logits.argmax(-1).tolist() == drafts
        torch.testing.assert_close(confidence, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("style", ["as published", "candidates"])
@torch.no_grad()
def test_laws_are_those_of_the_taken_path(target, prompts, style):
    head = head_of(target, **STYLES[style])
    proposer = Recording(head, target.tensors(), 4, "probabilistic")
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.7, seed=i) for i in range(len(prompts))]
    outputs = Engine(target, proposer, dataclasses.replace(CONFIG, num_draft_tokens=4)).generate(prompts, params)
    for request, length in list(proposer.seen)[::5]:
        drafts, law, _ = proposer.seen[request, length]
        text = prompts[request] + outputs[request].token_ids
        logits, _ = reference_rows(head, target, text, length, drafts)
        torch.testing.assert_close(law.exp(), (logits / 0.7).softmax(-1), atol=1e-4, rtol=1e-3)
