"""DSpark through the whole loop: extract, fit, load, serve."""

import json
from pathlib import Path

import torch

from spectrain.heads.dspark import DSparkHead
from spectrain.heads.folder import load_head
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import proposer_of
from spectrain.tests.loop import extract_and_fit
from spectrain.tests.models import rand_llama


def test_dspark_trains_and_serves(tmp_path: Path) -> None:
    model = rand_llama(max_position_embeddings=128)
    folder = extract_and_fit(model, tmp_path, recipe="dspark")
    head, target = load_head(folder, dtype=torch.float32).head, Target.from_model(model)
    assert isinstance(head, DSparkHead)
    assert head.markov_head.markov_w2.weight.any()  # zero where training began
    # the tokenizer ends before the target's 97 rows do, and the first row beyond it stands for unknown tokens
    assert head.mask_token_id == json.loads((folder / "config.json").read_text())["dflash_config"]["mask_token_id"]
    assert 26 < head.mask_token_id < 97
    prompts = [[5, 9, 20], [7], [30, 31, 32, 33, 34, 35, 36]]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    plain = Engine(target, NoneProposer(), EngineConfig(num_blocks=60, block_size=4)).generate(prompts, params)
    engine = Engine(target, proposer_of(head, target, 4), EngineConfig(num_draft_tokens=4, num_blocks=60, block_size=4))
    assert [o.token_ids for o in engine.generate(prompts, params)] == [o.token_ids for o in plain]
