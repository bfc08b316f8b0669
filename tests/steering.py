"""What the trainer computes beside what the engine serves: `from spectrain.tests.steering import Steered`.

The engine's draft loop is fed the text's own tokens, as the trainer feeds it, while what is handed to verification may
be spoiled. Then every draft logit of the engine has its like in the trainer's forward over the whole text.
"""

import typing

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spectrain.heads.base import DraftHead
from spectrain.heads.eagle3 import Eagle3Head
from spectrain.heads.mtp import MtpHead
from spectrain.heads.pard import Pard
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.base import Drafts, DraftStep, Proposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import objective_of
from spectrain.tests.models import lone_forward
from spectrain.train.batch import TrainBatch
from spectrain.train.objectives.base import Objective
from spectrain.train.objectives.dflash import DFlashObjective
from spectrain.train.objectives.per_step import PerStepObjective
from spectrain.train.objectives.rollout import SupervisedRows

# the logits of these targets lie within 40 of zero, where float32 resolves 4e-6
TOLERANCE = 2e-4


class Texts(typing.NamedTuple):
    """A target and what it says greedily."""

    target: Target
    prompts: list[list[int]]
    whole: list[list[int]]  # prompts and answers
    params: SamplingParams


def greedy_texts(model: PreTrainedModel, max_tokens: int) -> Texts:
    """Answers to five prompts of one token to thirty."""
    target, params = Target.from_model(model), SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (1, 2, 9, 17, 30)]
    outputs = Engine(target, NoneProposer(), EngineConfig(num_blocks=200, block_size=4)).generate(prompts, params)
    return Texts(target, prompts, [p + o.token_ids for p, o in zip(prompts, outputs, strict=True)], params)


class Steered:
    """Takes hold of a proposer: its loop goes on with `texts`, by request, and a share of its drafts is spoiled."""

    def __init__(self, proposer: Proposer, texts: list[list[int]], spoil: float, vocab_size: int) -> None:
        self.texts, self.spoil, self.vocab_size = texts, spoil, vocab_size
        self.generator = torch.Generator().manual_seed(0)
        self.logits: dict[tuple[int, int, int], Tensor] = {}
        """By request, row (the last one the target has computed) and draft."""
        self._inner = proposer.propose
        proposer._draw, proposer.propose = self.draw, self.propose  # pyright: ignore[reportAttributeAccessIssue]

    def draw(self, logits: Tensor, step: DraftStep, k: int | None = None) -> tuple[Tensor, Tensor]:
        """Of chains [batch, vocab], draft by draft; of blocks [batch, drafts, vocab], at once."""
        rows, first = (logits, 0) if k is None else (logits[:, None], k)
        tokens = torch.zeros(rows.shape[:2], dtype=torch.int64)
        for i, (request, length) in enumerate(zip(step.request_ids, step.seq_lens.tolist(), strict=True)):
            ahead = self.texts[request][length + first : length + first + tokens.shape[1]]
            tokens[i, : len(ahead)] = torch.tensor(ahead, dtype=torch.int64)
            for j in range(first, min(first + tokens.shape[1], int(step.room[i]))):  # beyond it lies padding
                self.logits[request, length - 2, j] = rows[i, j - first].clone()
        return (tokens, logits) if k is None else (tokens[:, 0], logits)

    def propose(self, step: DraftStep) -> Drafts:
        drafts = self._inner(step)
        wrong = torch.rand(drafts.token_ids.shape, generator=self.generator) < self.spoil
        spoiled = torch.where(wrong, (drafts.token_ids + 1) % self.vocab_size, drafts.token_ids)
        return drafts._replace(token_ids=spoiled)


def trainer_logits(head: DraftHead, target: Target, model: PreTrainedModel, text: list[int], drafts: int) -> Tensor:
    """[drafts, row, draft_vocab]: the objective's own forward over one document, states from transformers itself."""
    objective, tensors, rows = _objective(head.eval(), drafts), target.tensors(), torch.arange(len(text))
    batch = _one_document(model, text, head.config.layer_ids, drafts)
    with torch.no_grad():
        if isinstance(objective, DFlashObjective):
            states = objective.draft(head, tensors, batch, rows[:-1])[:, objective.config.first_draft_slot :][
                :, :drafts
            ]
            steps = torch.arange(drafts).repeat(len(text) - 1)
            drawn = SupervisedRows(steps, rows[:-1].repeat_interleave(drafts), [])
            factors = objective.draft_logits(head, tensors, batch, drawn, states.flatten(0, 1))
            return (factors.states @ factors.whole_weight().T).unflatten(0, (-1, drafts)).transpose(0, 1)
        if isinstance(objective, PerStepObjective):
            found = list(objective.unroll(head, tensors, batch, rows))[:drafts]
            return torch.stack([head.logits(states, tensors, k) for k, states in enumerate(found)])
        if head.config.objective.endswith(":DraftModelObjective"):
            # an ordinary language model: draft k of a row is what it says k + 1 tokens further
            logits = head.logits(objective.unroll(head, tensors, batch, [rows]), tensors)
            return torch.stack([logits.roll(-1 - k, dims=0) for k in range(drafts)])
        logits = head.logits(objective.unroll(head, tensors, batch, [rows] * drafts), tensors)
        logits = logits.unflatten(0, (drafts, len(text)))
        return logits if getattr(objective, "ahead", 1) else logits.roll(-1, dims=1)


def _objective(head: DraftHead, drafts: int) -> Objective:
    steps = {"steps": drafts} if isinstance(head, Eagle3Head | MtpHead | Pard) else {}
    return objective_of(head.config, **steps)


def _one_document(model: PreTrainedModel, text: list[int], layer_ids: tuple[int, ...], terms: int) -> TrainBatch:
    states = lone_forward(model, text)[1]
    aux = [states[i] for i in layer_ids]
    return TrainBatch(
        token_ids=torch.tensor([text]),
        positions=torch.arange(len(text))[None],
        document_ids=torch.zeros(1, len(text), dtype=torch.int32),
        loss_mask=torch.ones(1, len(text), dtype=torch.bool),
        target_argmax=torch.zeros(1, len(text), dtype=torch.int64),
        aux_states=torch.stack(aux, dim=1)[None] if aux else torch.zeros(1, len(text), 0, 1),
        final_states=states[-1][None],
        denominators=torch.ones(terms),
    )
