"""What the trainer computes is what the engine serves, for every head, row and draft, on the folder `fit` wrote.

Extraction, training and `Engine.step` run for real on a tiny target in float32. Drafts handed to verification are
right, wrong at some position, or wrong at once, and blocks are too few for the batch, so that rejected drafts and
preemptions lie in between. Drafts that are sampled carry the law that the trainer gives at the request's temperature.
"""

import dataclasses

import pytest
import torch

from spectrain.heads.base import DraftHead
from spectrain.heads.folder import load_head
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers import lattice
from spectrain.infer.sampling import SamplingParams
from spectrain.tests.fresh import head_recipes, proposer_of
from spectrain.tests.loop import extract_and_fit
from spectrain.tests.models import rand_llama
from spectrain.tests.steering import TOLERANCE, Steered, Texts, greedy_texts, trainer_logits

DRAFTS, NEW = 4, 20
CONFIG = EngineConfig(num_draft_tokens=DRAFTS, num_blocks=200, block_size=4, max_batch_tokens=13)
HEADS: dict[str, tuple[str, tuple[str, ...]]] = {
    "eagle": ("eagle", ()),
    "eagle3": ("eagle3", ()),
    "mtp": ("mtp", ()),
    "mtp, a layer for each of the first drafts": ("mtp", ("head.num_layers=3",)),
    "mtp, fed what stands before its norm": ("mtp", ("head.feedback=raw",)),
    "mtp, the same for three layers": ("mtp", ("head.feedback=raw", "head.num_layers=3")),
    "peagle": ("peagle", ()),
    "draft model": ("draft_model", ()),
    "pard, beyond the trained length": ("pard", ()),
    "medusa": ("medusa", ()),
    "medusa, shared and reduced": ("medusa", ("head.lm_head=shared", "head.draft_vocab_size=64")),
    "mlp": ("mlp_speculator", ()),
    "mlp, tied and scaled": ("mlp_speculator", ("head.tie_weights=true", "head.scale_input=true", "objective.loss=kl")),
    "dflash": ("dflash", ()),
    "dspark": ("dspark", ()),
    "dflash, every flag": ("dflash", ("head.sample_from_anchor=true", "head.causal=true", "head.sliding_window=7")),
}


def test_every_head_is_here():
    assert {recipe for recipe, _ in HEADS.values()} == set(head_recipes())


@pytest.fixture(scope="module")
def texts() -> Texts:
    return greedy_texts(rand_llama(max_position_embeddings=128), NEW)


@pytest.fixture(scope="module", params=HEADS)
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DraftHead:
    recipe, changes = HEADS[request.param]
    model, folder = rand_llama(max_position_embeddings=128), tmp_path_factory.mktemp("loop")
    return load_head(extract_and_fit(model, folder, *changes, recipe=recipe), dtype=torch.float32).head


@pytest.fixture(scope="module")
def expected(texts: Texts, head: DraftHead) -> list[torch.Tensor]:
    model = rand_llama(max_position_embeddings=128)
    return [trainer_logits(head, texts.target, model, text, DRAFTS) for text in texts.whole]


@pytest.mark.parametrize(("spoil", "num_blocks"), [(0.0, 200), (0.3, 16), (1.0, 200)])
def test_every_draft_logit_of_the_engine_is_the_trainers(
    texts, head, expected, spoil: float, num_blocks: int, monkeypatch: pytest.MonkeyPatch
):
    proposer = proposer_of(head, texts.target, DRAFTS)
    steered = Steered(proposer, texts.whole, spoil, head.config.vocab_size)
    # a walk draws each slot behind the token before it
    monkeypatch.setattr(lattice, "draw", lambda scores, step, slot, *_: steered.draw(scores, step, slot))
    engine = Engine(texts.target, proposer, dataclasses.replace(CONFIG, num_blocks=num_blocks))
    outputs = engine.generate(texts.prompts, texts.params)
    assert [o.prompt_token_ids + o.token_ids for o in outputs] == texts.whole
    assert (engine.statistics.accepted_tokens < engine.statistics.draft_tokens) == (spoil > 0)
    assert (engine.statistics.num_preemptions > 0) == (num_blocks == 16)
    for (request, row, draft), logits in steered.logits.items():
        torch.testing.assert_close(logits, expected[request][draft, row], atol=TOLERANCE, rtol=1e-4)
    if spoil == 1.0:
        # nothing was ever accepted and blocks never ran short, so drafting started from every row of every output
        assert len(steered.logits) >= sum(DRAFTS * (NEW - DRAFTS - 1) for _ in texts.prompts)
    assert len(steered.logits) > 60


def test_every_sampled_draft_carries_the_trainers_law_at_its_temperature(texts, head):
    """Behind the tokens that were drafted before it, whether they were kept or not."""
    proposer, model = proposer_of(head, texts.target, DRAFTS, "probabilistic"), rand_llama(max_position_embeddings=128)
    drafted: list[tuple[int, int, float, list[int], torch.Tensor]] = []

    def keep(step, propose=proposer.propose):
        drafts = propose(step)
        for i, (request, length) in enumerate(zip(step.request_ids, step.seq_lens.tolist(), strict=True)):
            if n := int(drafts.lengths[i]):
                tokens, laws = drafts.token_ids[i, :n].tolist(), drafts.log_probs[i, :n].clone()
                drafted.append((request, length, float(step.temperature[i]), tokens, laws))
        return drafts

    proposer.propose = keep
    heats = (0.5, 0.8, 1.0, 1.4, 2.0)
    params = [SamplingParams(max_tokens=NEW, temperature=t, seed=i, ignore_eos=True) for i, t in enumerate(heats)]
    outputs = Engine(texts.target, proposer, CONFIG).generate(texts.prompts, params)
    assert len(drafted) > 40
    for request, length, temperature, tokens, laws in drafted[::5]:
        known = (texts.prompts[request] + outputs[request].token_ids)[:length]
        logits = trainer_logits(head, texts.target, model, known + tokens, DRAFTS)[: len(tokens), length - 2]
        torch.testing.assert_close(laws.exp(), (logits / temperature).softmax(-1), atol=1e-4, rtol=1e-3)


def test_a_head_off_by_one_row_would_be_seen(texts, expected):
    for draft, rows in enumerate(expected[0]):
        known = rows[: len(texts.whole[0]) - 2 - draft]  # rows whose token exists
        assert known.diff(dim=0).abs().amax(-1).min() > 50 * TOLERANCE
