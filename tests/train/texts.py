"""Texts of known law for learning tests: `from spectrain.tests.train.texts import cycle_documents`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spectrain.tests.train.toys import MK, MK_STATIONARY, Document, onehot_document, share
from spectrain.train import alignment
from spectrain.train.batch import TrainBatch
from spectrain.train.objectives.base import LossOutput

CYCLE, FIB = 11, 5
ENTROPIES = (0.766596, 0.945307, 1.007871, 1.032148, 1.041904)
"""<H(P^k)>, k = 1..5, of the chain MK: what is left to guess of the token k places on."""


def overlap(distance: int) -> float:
    """How often the best guess of MK's token `distance` places on is accepted, all tokens up to it being the chain's.

    The guess knows the token it starts from; the target's law is that behind the token just before.
    """
    guess, reached = (torch.linalg.matrix_power(MK, k) for k in (distance, distance - 1))
    shared = torch.minimum(guess[:, None], MK[None]).sum(-1)  # [start, before]
    return float((MK_STATIONARY[:, None] * reached * shared).sum())


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
