"""Texts of known law for learning tests: `from spectrain.tests.train.texts import cycle_documents`."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spectrain.heads.base import DraftHead
from spectrain.heads.target_tensors import TargetTensors
from spectrain.tests.train.toys import Document, counted, onehot_document, share
from spectrain.train import alignment
from spectrain.train.batch import TrainBatch
from spectrain.train.objectives.base import LossOutput, Objective

CYCLE, FIB = 11, 5
ENTROPIES = (0.766596, 0.945307, 1.007871, 1.032148, 1.041904)
"""<H(P^k)>, k = 1..5, of the chain MK: what is left to guess of the token k places on."""


def certain_law(vocab: int) -> Tensor:
    """Law of a target that is sure of the token its final state names."""
    return torch.eye(vocab) * (1 - 1e-4 * vocab) + 1e-4


def cycle_documents(length: int, layers: int = 3) -> list[Document]:
    """x_{t+1} = x_t + 1 from every token; the final state names the next token."""
    walks = [(torch.arange(length) + start) % CYCLE for start in range(CYCLE)]
    return [onehot_document(walk, (walk + 1) % CYCLE, hidden=16, layers=layers) for walk in walks]


def fibonacci_documents(length: int, modulus: int = FIB, layers: int = 3) -> list[Document]:
    """x_{t+1} = x_t + x_{t-1} from every pair; the aux state names x_t only, the final state the next token."""
    documents = []
    for pair in range(modulus * modulus):
        walk = [pair // modulus, pair % modulus]
        while len(walk) <= length:
            walk.append((walk[-1] + walk[-2]) % modulus)
        documents.append(onehot_document(torch.tensor(walk[:-1]), torch.tensor(walk[1:]), 16, layers))
    return documents


def blank(documents: Sequence[Document]) -> list[Document]:
    """The same texts with aux states that tell nothing."""
    return [d._replace(aux=torch.zeros_like(d.aux)) for d in documents]


def shortened(documents: Sequence[Document]) -> list[Document]:
    """The same texts with the last token unsupervised: a label one row further then still exists."""
    return [d._replace(loss_mask=torch.arange(len(d.token_ids)) < len(d.token_ids) - 1) for d in documents]


def unshifted(batch: TrainBatch, step: int) -> Tensor:
    """`alignment.input_tokens` broken: the token of a row is its own."""
    return alignment.shift_left(batch.token_ids, step, batch.document_ids)


def cross_entropy(output: LossOutput, step: int = 0) -> float:
    """Of a loss on laws, entropy of the labels included."""
    return share(output, f"loss_{step}") + share(output, f"entropy_{step}")


def learn_uniform(
    objective: Objective,
    head: DraftHead,
    target: TargetTensors,
    draw: Callable[[torch.Generator, int], TrainBatch],
    *,
    steps: int = 60,
    lr: float = 5e-3,
) -> Tensor:
    """Fresh texts `draw(generator, step)` every step; each term's mean loss over the later half of the steps."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(head.parameters(), lr=lr)
    recent = []
    for step in range(steps):
        batch = counted(objective, head, draw(generator, step))
        optimizer.zero_grad()
        output = objective(head, target, batch)
        output.loss.backward()
        optimizer.step()
        if step >= steps // 2:
            entropy = share(output, "entropy_0") if objective.settings.loss == "kl" else 0.0
            recent.append([share(output, f"loss_{k}") + entropy for k in range(objective.num_terms)])
    return torch.tensor(recent).mean(0)


def assert_nothing_was_known(losses: Tensor, vocab: int, above: float = 0.2) -> None:
    """Uniform tokens leave log(vocab) to guess: below it lies only a leak, far above only a head that did not learn."""
    floor = math.log(vocab)
    assert (losses > floor - 0.02).all() and (losses < floor + above).all(), losses
