"""Toy targets of known law, tiny heads, hand-packed batches: `from spectrain.tests.train.toys import ...`."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spectrain.heads.base import DraftHead, TargetFacts
from spectrain.heads.eagle import EagleConfig
from spectrain.heads.eagle3 import Eagle3Config
from spectrain.heads.peagle import PEagleConfig
from spectrain.heads.target_tensors import FinalNorm, TargetTensors
from spectrain.train.batch import TrainBatch
from spectrain.train.objectives.base import LossOutput, Objective

MK = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.7, 0.2], [0.25, 0.25, 0.5]])
MK_STATIONARY = torch.tensor([40.0, 35.0, 18.0]) / 93
# 186 times the stationary law of bigrams: whole numbers
MK_BIGRAMS = [[64, 12, 4], [7, 49, 14], [9, 9, 18]]


class Document(NamedTuple):
    """One document as a shard holds it: row t of every field speaks of token t."""

    token_ids: Tensor  # [tokens]
    loss_mask: Tensor  # [tokens] bool
    aux: Tensor  # [tokens, layers, hidden]
    final: Tensor  # [tokens, hidden]


def tiny_facts(vocab: int = 16, hidden: int = 16) -> TargetFacts:
    return TargetFacts(
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=9,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=vocab,
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def tiny_config(vocab: int = 16, hidden: int = 16, layers: int = 3, **settings: object) -> Eagle3Config:
    return Eagle3Config.derive(tiny_facts(vocab, hidden), {"layer_ids": tuple(range(2, 2 + layers)), **settings})


def tiny_eagle_config(vocab: int = 16, hidden: int = 16, **settings: object) -> EagleConfig:
    return EagleConfig.derive(tiny_facts(vocab, hidden), settings)


def tiny_peagle_config(vocab: int = 16, hidden: int = 16, layers: int = 3, **settings: object) -> PEagleConfig:
    ids = tuple(range(2, 2 + layers))
    facts = tiny_facts(vocab, hidden)
    return PEagleConfig.derive(facts, {"layer_ids": ids, "mask_token_id": vocab - 1, **settings})


def random_target(vocab: int, hidden: int, seed: int = 0) -> TargetTensors:
    """Norm weights away from 1: all-ones weights hide a norm that is missing or doubled."""
    generator = torch.Generator().manual_seed(seed)
    return TargetTensors(
        embed_tokens=torch.randn(vocab, hidden, generator=generator),
        lm_head=torch.randn(vocab, hidden, generator=generator),
        lm_head_bias=None,
        norm=FinalNorm("rms", torch.rand(hidden, generator=generator) * 2 + 0.1, None, 1e-6),
    )


def law_target(law: Tensor, hidden: int, seed: int = 0) -> TargetTensors:
    """A target whose law after a row with final state onehot(c) is exactly law[c]; law [contexts, vocab]."""
    lm_head = torch.zeros(law.shape[1], hidden)
    lm_head[:, : len(law)] = law.clamp(min=1e-12).log().T
    embeds = torch.randn(law.shape[1], hidden, generator=torch.Generator().manual_seed(seed))
    return TargetTensors(embeds, lm_head, None, FinalNorm("none", None, None, 0.0))


def random_document(
    tokens: int, vocab: int, hidden: int, generator: torch.Generator, layers: int = 3, prompt: int = 0
) -> Document:
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[:prompt] = False
    return Document(
        torch.randint(0, vocab, (tokens,), generator=generator),
        mask,
        torch.randn(tokens, layers, hidden, generator=generator),
        torch.randn(tokens, hidden, generator=generator),
    )


def numbered_documents(
    lengths: Sequence[int], hidden: int, generator: torch.Generator, layers: int = 3
) -> list[Document]:
    """Every token id occurs once in all of them, so that an embedding row names a place."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return [
        random_document(n, 1, hidden, generator, layers)._replace(token_ids=torch.arange(int(start), int(start) + n))
        for n, start in zip(lengths, starts, strict=False)
    ]


def onehot_document(token_ids: Tensor, contexts: Tensor, hidden: int, layers: int = 3) -> Document:
    """Aux states onehot(x_t) at every layer, final state onehot(context_t), everything supervised."""
    eye = torch.eye(hidden)
    return Document(
        token_ids,
        torch.ones(len(token_ids), dtype=torch.bool),
        eye[token_ids][:, None].repeat(1, layers, 1),
        eye[contexts],
    )


def on_final(document: Document) -> Document:
    """The document for a head whose only aux state is the last one."""
    return document._replace(aux=document.final[:, None])


def pack(rows: list[list[Document]], target: TargetTensors, num_terms: int, seq: int | None = None) -> TrainBatch:
    """Documents laid end to end in rows of `seq`; positions restart, padding is zero."""
    seq = seq or max(sum(len(d.token_ids) for d in row) for row in rows)
    first = rows[0][0]
    batch = len(rows)
    token_ids = torch.zeros(batch, seq, dtype=torch.int64)
    positions, tops = torch.zeros_like(token_ids), torch.full_like(token_ids, -1)
    document_ids = torch.full((batch, seq), -1, dtype=torch.int32)
    loss_mask = torch.zeros(batch, seq, dtype=torch.bool)
    aux = torch.zeros(batch, seq, *first.aux.shape[1:])
    final = torch.zeros(batch, seq, first.final.shape[-1])
    number = 0
    for b, row in enumerate(rows):
        start = 0
        for document in row:
            span = slice(start, start + len(document.token_ids))
            token_ids[b, span], loss_mask[b, span] = document.token_ids, document.loss_mask
            positions[b, span] = torch.arange(len(document.token_ids))
            document_ids[b, span] = number
            aux[b, span], final[b, span] = document.aux, document.final
            used = torch.cat([document.loss_mask[1:], torch.tensor([False])])
            tops[b, span] = torch.where(used, target.logits(document.final).argmax(-1), -1)
            start, number = span.stop, number + 1
    denominators, seeds = torch.ones(num_terms), document_ids.long() + 1
    return TrainBatch(token_ids, positions, document_ids, loss_mask, tops, aux, final, denominators, seeds)


def seeded(batch: TrainBatch, epoch: int = 0) -> TrainBatch:
    """The batch with seeds that are a function of each document's tokens and the epoch, wherever it is packed."""
    seeds = torch.zeros_like(batch.token_ids)
    for line in range(len(seeds)):
        for number in batch.document_ids[line].unique().tolist():
            where = batch.document_ids[line] == number
            tokens = batch.token_ids[line, where]
            seeds[line, where] = (tokens * 31 ** (torch.arange(len(tokens)) % 11)).sum() * 1009 + epoch
    return batch._replace(document_seeds=seeds)


def counted(objective: Objective, head: DraftHead, batch: TrainBatch) -> TrainBatch:
    """The batch with its own rows as denominators."""
    return batch._replace(denominators=objective.count(head, batch))


def gradients(head: DraftHead) -> dict[str, Tensor]:
    found = {}
    for name, parameter in head.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return found


def train(
    objective: Objective, head: DraftHead, target: TargetTensors, batch: TrainBatch, steps: int, lr: float
) -> LossOutput:
    """Full-batch Adam with a linear decay; returns the last loss."""
    optimizer = torch.optim.Adam(head.parameters(), lr=lr)
    batch = counted(objective, head, batch)
    for i in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - i / steps)
        optimizer.zero_grad()
        output = objective(head, target, batch)
        output.loss.backward()
        optimizer.step()
    with torch.no_grad():
        return objective(head, target, batch)


def share(output: LossOutput, name: str) -> float:
    numerator, denominator = output.metrics[name]
    return float(numerator / denominator)


def mk_circuit() -> list[int]:
    """A closed walk of 186 steps that uses every MK bigram in exact proportion (Hierholzer)."""
    left = [row.copy() for row in MK_BIGRAMS]
    stack, walk = [0], []
    while stack:
        here = stack[-1]
        following = next((y for y in range(3) if left[here][y]), None)
        if following is None:
            walk.append(stack.pop())
        else:
            left[here][following] -= 1
            stack.append(following)
    return walk[::-1][:-1]


def mk_windows(length: int, hidden: int) -> list[list[Document]]:
    """Every window of the circuit as its own document: each column's law, and each bigram's, is exactly stationary."""
    walk = mk_circuit()
    assert len(walk) == 186
    windows = [torch.tensor([walk[(i + j) % 186] for j in range(length)]) for i in range(186)]
    return [[onehot_document(window, window, hidden)] for window in windows]
