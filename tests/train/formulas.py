"""What papers and documentation write of one row, for tests: `from spectrain.tests.train.formulas import row_loss`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spectrain.heads.base import DraftHead
from spectrain.heads.target_tensors import TargetTensors
from spectrain.tests.train.toys import Document, pack, seeded
from spectrain.train.objectives.base import LossOutput, Objective


def normed(target: TargetTensors, final: Tensor) -> Tensor:
    if target.norm.kind == "none":
        return final
    assert target.norm.weight is not None
    return final / (final.pow(2).mean(-1, keepdim=True) + target.norm.eps).sqrt() * target.norm.weight


def law_of(target: TargetTensors, final: Tensor) -> Tensor:
    """The target's law after each row, [tokens, vocab]."""
    return (normed(target, final) @ target.lm_head.T).softmax(-1)


def row_loss(kind: str, logits: Tensor, p: Tensor, label: int, ids: Sequence[int] | None = None) -> float | None:
    """Of draft logits, the target's law [vocab] and the text's token; None where `ids` leave out what is asked for."""
    kept = list(range(len(p))) if ids is None else list(ids)
    if (label if kind == "ce" else int(p.argmax())) not in kept:
        return None
    q, p = logits.softmax(0), p[kept]
    if kind == "ce":
        return -float(q[kept.index(label)].log())
    alpha, whole = torch.minimum(p, q).sum(), p / p.sum()
    return float({"kl": (whole * (whole / q).log()).sum(), "tv": 1 - alpha, "lk_alpha": -alpha.log()}[kind])


def influences(
    objective: Objective, head: DraftHead, target: TargetTensors, document: Document
) -> tuple[set[int], set[int], set[int]]:
    """The rows whose token, aux states and final state change the loss of this document alone."""

    def loss(changed: Document) -> float:
        batch = seeded(pack([[changed]], target, objective.num_terms))
        assert torch.equal(objective.count(head, batch), counts)
        with torch.no_grad():
            return float(objective(head, target, batch._replace(denominators=counts)).loss)

    counts = objective.count(head, seeded(pack([[document]], target, objective.num_terms)))
    found, expected = (set[int](), set[int](), set[int]()), loss(document)
    for t in range(len(document.token_ids)):
        token_ids, aux, final = document.token_ids.clone(), document.aux.clone(), document.final.clone()
        token_ids[t] = (token_ids[t] + 1) % (head.config.vocab_size - 1)  # the last id may be the mask token
        aux[t] += torch.arange(float(aux.shape[-1]))
        final[t] += torch.arange(float(final.shape[-1]))
        for rows, change in zip(found, ({"token_ids": token_ids}, {"aux": aux}, {"final": final}), strict=True):
            if loss(document._replace(**change)) != expected:
                rows.add(t)
    return found


def assert_acceptance(output: LossOutput, hits: Sequence[dict[tuple[int, int], bool]], steps: int) -> list[float]:
    """Holds the metrics against `hits[document][row, step]` of rows that have a label; the share accepted by step."""
    agree, accept, valid = [0] * steps, [0] * steps, [0] * steps
    for document in hits:
        for row, step in document:
            valid[step] += 1
            agree[step] += document[row, step]
            accept[step] += all(document[row, earlier] for earlier in range(step + 1))
    assert accept != agree and min(accept) > 0
    for k in range(steps):
        assert tuple(map(float, output.metrics[f"agree_{k}"])) == (agree[k], valid[k])
        assert tuple(map(float, output.metrics[f"accept_{k}"])) == (accept[k], valid[k])
    return [a / n for a, n in zip(accept, valid, strict=True)]
