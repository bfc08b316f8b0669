"""EAGLE (arXiv 2401.15077): one layer over the token embedding and the target's last state, in vLLM's tensor names.

The state is the target's own after its final norm, and what the head returns stands for the next such state: the
target's output matrix turns it into logits and nothing norms it again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .base import (
    Attend,
    DraftOutput,
    DraftRows,
    Elsewhere,
    HeadError,
    No,
    TargetFacts,
    check_plain_logits,
    check_whole_vocabulary,
)
from .decoder import DecoderConfig, DecoderHead, DecoderLayer
from .layers import Linear, RotaryEmbedding, initialise_
from .target_tensors import TargetTensors


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DecoderConfig):
    """Shape of an EAGLE head. Its layers are Llama's whatever the target: vLLM knows no other kind."""

    network = "spectrain.heads.eagle:EagleHead"
    objective = "spectrain.train.objectives.eagle:EagleObjective"
    proposer = "spectrain.infer.proposers.eagle:EagleProposer"
    requires_final_state = True

    fc_bias: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_ids != (self.target.num_layers,):
            raise HeadError(
                f"EAGLE is conditioned on the state after the target's last layer, id {self.target.num_layers}, found "
                f"head.layer_ids {list(self.layer_ids)}; set it to null"
            )
        check_whole_vocabulary(self, "EAGLE")

    @classmethod
    def implied(cls, target: TargetFacts) -> dict[str, Any]:
        return {**super().implied(target), "layer_ids": (target.num_layers,), "fc_bias": False}

    def serving_config(self) -> dict[str, Any]:
        """SGLang takes the first name, vLLM, which puts Eagle before each, the first that it then knows.

        vLLM drops `fc.bias` without a word, so a head that has one goes by SGLang's name alone.
        """
        vllms = [] if isinstance(self.elsewhere().vllm, No) else ["LlamaForCausalLM"]
        return {
            "architectures": ["LlamaForCausalLMEagle", *vllms],
            "model_type": "llama",
            **super().serving_config(),
        }

    def elsewhere(self) -> Elsewhere:
        return Elsewhere(No("it drops fc.bias") if self.fc_bias else "method eagle", "algorithm EAGLE")


class EagleHead(DecoderHead):
    """The EAGLE network; tensor names are those of the checkpoint. It holds neither embeddings nor an output head."""

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        if not config.fc_bias:
            # SGLang's fc always has a bias, a random one where the file holds none
            del self.fc.bias
            self.fc.register_buffer("bias", torch.zeros(config.hidden_size))
        # what fc returns goes into the first layer as it is
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, qk_norm=False, input_norm=i > 0) for i in range(config.num_layers)
        )
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_parameters, config.max_position_embeddings)

    def forward(self, rows: DraftRows, attend: Attend) -> DraftOutput:
        """One step over rows of any leading shape; what gives logits is also what is fed back."""
        cos, sin = self.rotary(rows.positions)
        states = self.fc(torch.cat([rows.token_embeds, rows.states], dim=-1))
        for layer in self.layers:
            states = layer(states, cos, sin, attend)
        return DraftOutput(states, states)

    def combine(self, aux_states: Tensor, target: TargetTensors) -> Tensor:
        return target.norm(aux_states[..., 0, :])

    def output_weight(self, target: TargetTensors) -> Tensor:
        return target.lm_head

    def initialise(self, target: TargetTensors, generator: torch.Generator) -> None:
        """Everything random, nothing copied from the target.

        Raises HeadError for a target whose logits are more than a product with its output matrix, because that product
        is all that engines give this head.
        """
        check_plain_logits(target, "EAGLE")
        initialise_(self, generator)
