"""What `fit` wrote, loaded in a real SGLang: it drafts there what it drafts here, token for token.

Needs SGLang 0.5.23 in an environment of its own, whose interpreter SPECTRAIN_SGLANG names; no GPU:

    python -m venv sglang && sglang/bin/pip install sglang==0.5.23
    SPECTRAIN_SGLANG=sglang/bin/python pytest -m slow tests/test_sglang.py
"""

import copy
import os
from pathlib import Path

import pytest
import torch

from spectrain.heads.folder import load_head, save_head
from spectrain.infer.target import Target
from spectrain.tests.fresh import fresh_head, tiny_head_config
from spectrain.tests.serving import Case, K, Texts, decode_by, drafted_here, drafted_there, make_texts, trained

PYTHON = os.environ.get("SPECTRAIN_SGLANG")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="SPECTRAIN_SGLANG names no Python that has SGLang"),
]
SCRIPT = Path(__file__).parent / "sglang_counts.py"
CHAIN = {"speculative_num_steps": K, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": K + 1}
EAGLE3 = {"speculative_algorithm": "EAGLE3", **CHAIN}
CASES = {
    "eagle": Case("eagle", (), {"speculative_algorithm": "EAGLE", **CHAIN}),
    "eagle, bias": Case("eagle", ("head.fc_bias=true",), {"speculative_algorithm": "EAGLE", **CHAIN}),
    "three layers": Case("eagle3", ("head.layer_ids=[1,2,3]", "head.draft_vocab_size=null"), EAGLE3),
    "reduced": Case("eagle3", ("head.layer_ids=[1,2,3]", "head.draft_vocab_size=64"), EAGLE3),
    "fc_norm": Case(
        "eagle3",
        ("head.layer_ids=[1,2,3]", "head.draft_vocab_size=null", "head.fc_norm=true", "head.norm_output=true"),
        EAGLE3,
    ),
    "small model": Case(
        "draft_model", ("head.num_layers=2",), {"speculative_algorithm": "STANDALONE", **CHAIN}, needs_model=True
    ),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return make_texts(tmp_path_factory.mktemp("texts")).first(2)


@pytest.mark.parametrize("name", CASES)
def test_sglang_drafts_what_the_engine_drafts(name: str, texts: Texts, tmp_path: Path) -> None:
    assert PYTHON is not None
    head = trained(texts, CASES[name], tmp_path)
    speculative = {**CASES[name].speculative, "speculative_draft_model_path": str(head)}
    assert load_head(head).head.config.elsewhere().sglang == f"algorithm {speculative['speculative_algorithm']}"
    ours, theirs = drafted_here(texts, head), drafted_there(decode_by(PYTHON, SCRIPT, texts, speculative, tmp_path))
    assert ours["texts"] == theirs["texts"]
    assert theirs == ours
    assert 0 < ours["accepted"][0] < ours["drafts"], "all or nothing accepted would prove little"


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("peagle", {"num_layers": 1}),
        ("eagle3", {"norm_before_residual": True}),
        ("eagle3", {"num_layers": 2}),
        ("eagle3", {"layer_style": "qwen3"}),
    ],
)
def test_what_sglang_would_serve_wrongly_stops_it(
    recipe: str, settings: dict[str, object], texts: Texts, tmp_path: Path
) -> None:
    assert PYTHON is not None
    target = Target.from_model(copy.deepcopy(texts.model))
    config = tiny_head_config(recipe, target.facts, layer_ids=[1, 2, 3], **settings)
    save_head(tmp_path / "head", fresh_head(config, target.tensors()), {}, torch.float32)
    speculative = {**EAGLE3, "speculative_draft_model_path": str(tmp_path / "head")}
    done = decode_by(PYTHON, SCRIPT, texts.first(1), speculative, tmp_path)
    assert done.returncode != 0 and "RESULT" not in done.stdout
    assert "can only concatenate str" in done.stderr or "Eagle3Qwen3ForCausalLM" in done.stderr, done.stderr[-3000:]
