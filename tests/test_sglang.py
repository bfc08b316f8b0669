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
from transformers import AutoModelForCausalLM, PreTrainedModel

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
    assert 0 < sum(ours["accepted"]) < ours["draft_tokens"], "all or nothing accepted would prove little"


def test_sglang_shows_a_small_model_all_but_the_first_token(texts: Texts, tmp_path: Path) -> None:
    """Its draft rows are EAGLE's, a token beside the state before it; the first token has none and is left out."""
    assert PYTHON is not None
    case = Case(
        "draft_model", ("head.num_layers=2",), {"speculative_algorithm": "STANDALONE", **CHAIN}, needs_model=True
    )
    head = trained(texts, case, tmp_path)
    speculative = {**case.speculative, "speculative_draft_model_path": str(head)}
    ours, theirs = drafted_here(texts, head), drafted_there(decode_by(PYTHON, SCRIPT, texts, speculative, tmp_path))
    assert ours["texts"] == theirs["texts"]
    model = AutoModelForCausalLM.from_pretrained(head, dtype=torch.float32).eval()
    pairs = [*zip(texts.prompts, ours["texts"], strict=True)]
    steps = [sum(num_steps(model, prompt, text, first) for prompt, text in pairs) for first in (0, 1)]
    assert [ours["drafts"], theirs["drafts"]] == steps and steps[0] < steps[1]


@torch.no_grad()
def num_steps(model: PreTrainedModel, prompt: list[int], text: list[int], first: int) -> int:
    """Verifications until `text` stands behind `prompt`; drafts are what the model says to tokens from `first` on."""
    whole, known, steps = [*prompt, *text], len(prompt) + 1, 0
    while known < len(whole):
        drafted = whole[first:known]
        for _ in range(K):
            drafted.append(int(model(torch.tensor([drafted])).logits[0, -1].argmax()))
        right = [a == b for a, b in zip(drafted[known - first :], whole[known:], strict=False)]
        known, steps = known + (right.index(False) if False in right else len(right)) + 1, steps + 1
    return steps


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
