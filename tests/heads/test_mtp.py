"""MTP layers read from a checkpoint: every family's step is what an independent computation of it gives."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spectrain.heads.base import DraftRows, TargetFacts
from spectrain.heads.model_folder import Checkpoint
from spectrain.heads.mtp import MtpConfig, MtpHead
from spectrain.tests.mtp_families import FAMILIES, LAYERS, H, draw, write_checkpoint

FACTS = TargetFacts(
    model_type="any",
    hidden_size=H,
    intermediate_size=48,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=97,
    rms_norm_eps=1e-5,
    max_position_embeddings=128,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)


def read(folder: Path) -> MtpHead:
    found = Checkpoint(folder)
    head = MtpHead(MtpConfig.derive_from(FACTS, {}, found))
    head.start_from(found)
    head.assert_filled()
    return head.eval()


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int = 0, sinks: Tensor | None = None) -> Tensor:
    """`attend` over whole texts [batch, seq, heads, dim]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    row = torch.arange(q.shape[2])
    seen = row[None] <= row[:, None]
    if window:
        seen = seen & (row[None] > row[:, None] - window)
    scores = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_step_is_the_familys(name: str, tmp_path: Path):
    """Row 0 included: its embedding is a real token's."""
    family, generator = FAMILIES[name], torch.Generator().manual_seed(1)
    tensors = draw(family.shapes)
    head = read(write_checkpoint(tmp_path, family, tensors))
    assert len(head.layers) == family.layers
    embeds, given = torch.randn(3, 11, H, generator=generator), torch.randn(11, H, generator=generator)
    ours = theirs = given
    for step in range(3):
        rows = DraftRows(embeds[step][None], ours[None], torch.arange(11)[None] + step, step)
        output = head(rows, causal)
        expected, theirs = family.reference(tensors, family.config, embeds[step], theirs, step % family.layers)
        torch.testing.assert_close(output.logits_states[0], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(output.feedback[0], theirs, atol=1e-5, rtol=1e-5)
        ours = output.feedback[0]
