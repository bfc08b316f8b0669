"""MTP layers on a GPU: recorded steps say what eager ones say, and drafting changes nothing."""

import dataclasses
from pathlib import Path

import pytest
import torch

from spectrain.heads.model_folder import Checkpoint
from spectrain.heads.mtp import MtpConfig, MtpHead
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.mtp import MtpProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import loud_head, tiny_head_config
from spectrain.tests.infer import gpu_runs
from spectrain.tests.infer.gpu_runs import CONFIG
from spectrain.tests.infer.test_mtp_families import target_model
from spectrain.tests.models import rand_llama
from spectrain.tests.mtp_families import FAMILIES, draw, write_checkpoint

pytestmark = pytest.mark.gpu


def decode(target: Target, head: MtpHead | None, k: int, temperature: float = 0.0, **changes) -> list[list[int]]:
    proposer = NoneProposer()
    if head is not None:
        proposer = MtpProposer(head, target.tensors(), k, "probabilistic" if temperature else "greedy")
    return gpu_runs.decode(target, proposer, k, temperature, **changes)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_recorded_steps_say_what_eager_ones_say(num_layers: int, temperature: float):
    target = Target.from_model(rand_llama(max_position_embeddings=256).cuda())
    config, tensors = tiny_head_config("mtp", target.facts, num_layers=num_layers), target.tensors()
    head = loud_head(config, tensors.to("cpu")).cuda()
    assert isinstance(head, MtpHead)
    recorded = decode(target, head, 5, temperature)
    assert recorded == decode(target, head, 5, temperature, eager=True)
    if not temperature:
        assert recorded == decode(target, None, 0)


@pytest.mark.parametrize("name", ["deepseek_v3", "ernie4_5_moe"])
def test_a_familys_layers_draft_eagerly_and_change_nothing(name: str, tmp_path: Path):
    family = FAMILIES[name]
    found = Checkpoint(write_checkpoint(tmp_path, family, draw(family.shapes)))
    target = Target.from_model(target_model(tmp_path).cuda(), max_length=128)
    head = MtpHead(MtpConfig.derive_from(target.facts, {}, found))
    head.start_from(found)
    prompts = [torch.arange(3, 3 + n).tolist() for n in (1, 5, 17)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    config = dataclasses.replace(CONFIG, num_draft_tokens=4, eager=True)
    drafted = Engine(target, MtpProposer(head.cuda(), target.tensors(), 4), config).generate(prompts, params)
    plain = Engine(target, NoneProposer(), dataclasses.replace(CONFIG, eager=True)).generate(prompts, params)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
