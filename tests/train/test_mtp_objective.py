"""Multi-token prediction trained by self-feeding: the weights of its steps, and targets whose law is known."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spectrain.heads.base import HeadError
from spectrain.heads.model_folder import Checkpoint
from spectrain.heads.mtp import MtpConfig, MtpHead
from spectrain.tests.fresh import loud_head
from spectrain.tests.mtp_families import FAMILIES, draw, write_checkpoint
from spectrain.tests.train.reference_decoder import assert_decoders_logits, decoder_losses
from spectrain.tests.train.texts import cross_entropy, unshifted
from spectrain.tests.train.toys import (
    MK,
    Document,
    counted,
    law_target,
    mk_windows,
    on_final,
    pack,
    random_document,
    random_target,
    share,
    tiny_facts,
    train,
)
from spectrain.train import alignment
from spectrain.train.losses import LossKind
from spectrain.train.objectives.base import LossOutput
from spectrain.train.objectives.mtp import MtpObjective, MtpSettings

FLOOR, TWO_AWAY = 0.766596, 0.945307
SHALLOW = {"hidden_size": 8, "intermediate_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}


def config(**settings: object) -> MtpConfig:
    return MtpConfig.derive(tiny_facts(vocab=3, hidden=8), {**SHALLOW, **settings})


def learn(rows: list[list[Document]], train_steps: int, steps: int, lr: float = 3e-2, **settings: object) -> LossOutput:
    target, shape = law_target(MK, 8), config(**settings)
    objective = MtpObjective(shape, MtpSettings(steps=steps, loss="kl"))
    rows = [[on_final(d) if d.aux.any() else d._replace(aux=d.aux[:, :1]) for d in row] for row in rows]
    return train(objective, loud_head(shape, target), target, pack(rows, target, steps), train_steps, lr)


def test_steps_weigh_what_was_published():
    weights = MtpObjective(config(), MtpSettings()).term_weights(torch.ones(3))
    assert weights.tolist() == pytest.approx([0.5102, 0.3061, 0.1837], abs=1e-4)
    assert MtpSettings().loss == "ce"
    halves = MtpObjective(config(), MtpSettings()).term_weights(torch.full((3,), 2.0))
    torch.testing.assert_close(halves, weights / 2)


def documents(*lengths: int, seed: int = 1) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    return [on_final(random_document(n, 16, 16, generator)) for n in lengths]


@pytest.mark.parametrize("feedback", ["normed", "raw"])
@torch.no_grad()
def test_training_logits_equal_an_incremental_decoder(feedback: str):
    """Of every row and step, fed by itself; two documents share a row."""
    shape, target, steps = MtpConfig.derive(tiny_facts(), {"feedback": feedback}), random_target(16, 16), 4
    head = loud_head(shape, target, random_norms=True)
    rows = [documents(7), documents(4, 3, seed=2)]
    batch, grid = pack(rows, target, steps, seq=8), torch.arange(16)
    objective = MtpObjective(shape, MtpSettings(steps=steps))
    found = head.logits(objective.unroll(head, target, batch, [grid] * steps), target).unflatten(0, (steps, 2, 8))
    assert assert_decoders_logits(found, rows, head, target, rtol=1e-4) == 18 + 6 + 3


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_loss_equals_the_formula_on_the_decoders_logits(kind: LossKind):
    shape, target = MtpConfig.derive(tiny_facts(), {}), random_target(16, 16)
    head = loud_head(shape, target, random_norms=True)
    objective = MtpObjective(shape, MtpSettings(loss=kind))
    rows = [documents(9), documents(5, 4, seed=2)]
    output = objective(head, target, counted(objective, head, pack(rows, target, 3)))
    losses = decoder_losses(kind, rows, head, target, 3)
    expected = sum(0.6**k / 1.96 * sum(losses[k]) / len(losses[k]) for k in range(3))
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("num_layers", [1, 2], ids=["one layer", "a layer for each of two steps"])
def test_every_step_converges_to_the_entropy_of_the_chain_and_never_below(num_layers: int):
    output = learn(mk_windows(5, 8)[::3], 150, 3, 2e-2, num_layers=num_layers)
    assert share(output, "entropy_0") == pytest.approx(FLOOR, abs=1e-5)
    assert FLOOR - 1e-5 < cross_entropy(output) < FLOOR + 3e-3
    for step in range(3):  # what is above the entropy of the contexts at that step
        assert -1e-6 < share(output, f"loss_{step}") < 3e-3


def test_an_unshifted_token_stops_at_the_entropy_two_tokens_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(alignment, "input_tokens", unshifted)
    assert cross_entropy(learn(mk_windows(3, 8), 70, 1)) == pytest.approx(TWO_AWAY, abs=2e-3)


def test_layers_with_output_matrices_of_their_own_are_not_trained():
    with pytest.raises(HeadError, match="step3p5's, each with an output matrix of its own"):
        MtpObjective(config(layout="step3p5"), MtpSettings())


def test_windowed_layers_are_not_trained(tmp_path: Path):
    family = FAMILIES["mimo_v2"]
    found = Checkpoint(write_checkpoint(tmp_path, family, draw(family.shapes)))
    facts = replace(tiny_facts(vocab=97, hidden=32), num_layers=4)
    head = MtpHead(MtpConfig.derive_from(facts, {}, found))
    head.start_from(found)
    target = random_target(97, 32)
    document = on_final(random_document(8, 97, 32, torch.Generator().manual_seed(0)))
    with pytest.raises(HeadError, match="mimo_v2's, with a window or attention sinks, cannot be trained"):
        MtpObjective(head.config, MtpSettings())(head, target, pack([[document]], target, 3))
