"""A target that speaks the chain MK, heads that know its law, and what share of their drafts it accepts.

`from spectrain.tests.infer.markov import markov_target`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spectrain.heads.decoder import DecoderHead
from spectrain.heads.draft_model import DraftModel
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.base import Drafts, DraftStep, Proposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.models import COMMON, build
from spectrain.tests.train.toys import MK, MK_STATIONARY

DRAFTS, HIDDEN = 4, 32
STATIONARY = (1600, 1400, 720)
"""Numbers of texts that begin with each token, as the stationary law has them."""

MASKED_LAW = torch.cat([torch.nn.functional.pad(MK, (0, 1), value=1e-12), torch.full((1, 4), 0.25)])
"""MK, and a fourth token that never comes."""

_FREQUENCY = 0.25  # rad a position, of the one pair that the marginal heads turn
_WIDTH = 8
_LENGTH = 100.0  # of every state that a marginal head says


def markov_target(law: Tensor = MK) -> Target:
    """Tokens of a law [vocab, vocab]: the state names the last token, whatever came before it."""
    vocab = len(law)
    model = build(
        "Llama", **{**COMMON, "vocab_size": vocab, "num_hidden_layers": 1, "eos_token_id": None, "bos_token_id": None}
    )
    decoder = model.get_decoder()
    with torch.no_grad():
        decoder.embed_tokens.weight.copy_(torch.eye(vocab, HIDDEN))
        decoder.norm.weight.fill_(1.0)
        for layer in decoder.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.get_output_embeddings().weight.copy_(output_of(law))
    return Target.from_model(model)


def output_of(law: Tensor) -> Tensor:
    """The matrix whose softmax after normed state onehot(c) * sqrt(hidden) is law[c]."""
    weight = torch.zeros(law.shape[1], HIDDEN)
    weight[:, : len(law)] = law.log().T / HIDDEN**0.5
    return weight


def marginal_settings(places: int) -> dict[str, object]:
    """Head settings that `make_marginal` needs for rows 0 to `places` - 1 behind the newest token."""
    rope = {"rope_type": "default", "rope_theta": _FREQUENCY ** -(_WIDTH / 2)}
    shape = {"num_layers": 1, "num_heads": places, "num_kv_heads": 1, "head_dim": _WIDTH}
    return {**shape, "mask_token_id": 3, "rope_parameters": rope}


@torch.no_grad()
def make_marginal(head: DecoderHead, target: Target, first: int = 0) -> None:
    """Sets a head of one layer so that its row j behind the newest token says MK's law j + 1 - `first` tokens on.

    For a target of MASKED_LAW and texts of some ten tokens. Attention head j reads the token j places back. Where head
    j finds text and head j - 1 a mask, the row is j places behind the newest token, and the text is that token: one
    column of the MLP for each such case writes the law.
    """
    layer: Any = (head.model if isinstance(head, DraftModel) else head).layers[0]
    attention = layer.self_attn
    for parameter in head.parameters():
        parameter.fill_(1.0 if parameter.dim() == 1 else 0.0)
    token = torch.eye(4, attention.q_proj.in_features)  # the normed embedding is the input's first half, or all of it
    turned, pair = -_FREQUENCY * torch.arange(attention.heads), [1, 1 + _WIDTH // 2]
    query = torch.zeros(attention.heads, _WIDTH)
    query[:, pair] = torch.stack([turned.cos(), turned.sin()], dim=1)
    attention.q_proj.weight.copy_(query.flatten()[:, None] * token.sum(0))
    attention.k_proj.weight.copy_(query[0][:, None] * token.sum(0))
    (attention.q_norm if attention.has_qk_norm else attention.q_proj).weight.mul_(300)  # the nearest place wins
    attention.v_proj.weight[:4] = token
    gate, up, down = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, layer.mlp.down_proj.weight
    for j in range(attention.heads):
        here, before = 4 * (j + 1), 4 * j
        attention.o_proj.weight[here : here + 4, _WIDTH * j : _WIDTH * j + 4] = torch.eye(4)
        for c in range(3):
            gate[3 * j + c, here + c] = 20.0
            up[3 * j + c, before + 3 if j else slice(here, here + 3)] = 1.0
            if j >= first:
                down[:, 3 * j + c] = 1e4 * _said(target, j + 1 - first, c)
    final = head.model.norm if isinstance(head, DraftModel) else head.norm
    final.weight.fill_(_LENGTH / HIDDEN**0.5)
    head.output_weight(target.tensors()).copy_(target.tensors().lm_head)  # in some heads that very matrix
    if isinstance(head, DraftModel):
        head.model.embed_tokens.weight.copy_(target.tensors().embed_tokens)


def survival(laws: Tensor) -> list[float]:
    """What share of a stationary text's drafts is accepted up to each position.

    laws [drafts, start, vocab]: what each draft is drawn from, knowing the token that the drafts start from alone.
    """
    mass, shares = MK_STATIONARY.diag(), []  # [start, newest]: accepted so far
    for law in laws:
        mass = torch.einsum("sx,sxy->sy", mass, torch.minimum(law[:, None], MK[None]))
        shares.append(float(mass.sum()))
    return shares


def first_accepted(
    target: Target, proposer: Proposer, starts: tuple[int, ...] = STATIONARY, temperature: float = 1.0
) -> Tensor:
    """How many of its first drafts each text accepts; `starts` are the numbers of texts that begin with each token.

    Later drafts of a request start where earlier ones were rejected, which is no stationary place.
    """
    lengths: dict[int, list[int]] = {}

    def keep(step: DraftStep, propose: Callable[[DraftStep], Drafts] = proposer.propose) -> Drafts:
        for request, length in zip(step.request_ids, step.seq_lens.tolist(), strict=True):
            lengths.setdefault(request, []).append(length)
        return propose(step)

    proposer.propose = keep
    config = EngineConfig(
        num_draft_tokens=DRAFTS, num_blocks=2000, block_size=4, max_batch_tokens=4096, max_batch_size=400
    )
    prompts = [[token] for token, count in enumerate(starts) for _ in range(count)]
    params = [SamplingParams(max_tokens=DRAFTS + 2, temperature=temperature, seed=i) for i in range(len(prompts))]
    Engine(target, proposer, config).generate(prompts, params)
    assert len(lengths) == len(prompts)
    return torch.tensor([lengths[request][1] - lengths[request][0] - 1 for request in sorted(lengths)])


def _said(target: Target, distance: int, start: int) -> Tensor:
    """The logits state [hidden] of MK's law `distance` tokens behind `start`, all of one length."""
    logits = torch.nn.functional.pad(torch.linalg.matrix_power(MK, distance)[start].log(), (0, 1), value=-20.0)
    state = torch.zeros(HIDDEN)
    state[:4] = torch.linalg.solve(target.tensors().lm_head[:, :4], logits)
    state[-1] = (_LENGTH**2 - state.square().sum()).sqrt()
    return state
