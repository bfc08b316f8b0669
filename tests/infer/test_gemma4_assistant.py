"""Gemma 4 assistants: drafts and logits of transformers' own loop, on the planes of a target that serves requests."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from spectrain.heads.base import DraftRows, HeadError
from spectrain.heads.gemma4_assistant import Gemma4Assistant, load_assistant
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.base import ProposerError
from spectrain.infer.proposers.gemma4_assistant import Gemma4AssistantProposer
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.gemma4_assistants import ORDERED, assistant_of, read_by_us, reference_drafts
from spectrain.tests.infer.proposers import keep_drafts
from spectrain.tests.models import build, gemma4, gemma4_composite, rand_llama
from spectrain.tests.test_lossless import assert_company_changes_nothing, joint_p

K = 4
CONFIG = EngineConfig(num_draft_tokens=K, num_blocks=200, block_size=4, max_batch_tokens=64, max_batch_size=16)
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
LONG = {"max_position_embeddings": 128, "vocab_size": 96}
SHARED = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "ordered embeddings": ({}, ORDERED),
    "a target that shares keys": (SHARED, {}),
    "values that are keys": (
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"text": {"num_global_key_value_heads": 1, "attention_k_eq_v": True}},
    ),
    "unified": ({}, {"kind": "gemma4_unified"}),
    "a target that also sees": ({}, {}),
    "own output rows": ({}, {"tie_word_embeddings": False}),
}


class Case:
    """A target of ours, the same model as transformers runs it, and an assistant both ways."""

    def __init__(self, name: str, folder: Path) -> None:
        theirs, changes = CASES[name]
        build_model = gemma4_composite if name == "a target that also sees" else gemma4
        self.model = build_model(**{**LONG, **theirs})
        self.target = Target.from_model(build_model(**{**LONG, **theirs}))
        self.assistant: PreTrainedModel = assistant_of(self.model.config.get_text_config(), **changes)
        self.head = read_by_us(self.assistant, folder, self.target)

    def proposer(self, **changes: Any) -> Gemma4AssistantProposer:
        return Gemma4AssistantProposer(self.head, self.target.tensors(), K, **changes)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("assistant"))


@pytest.fixture(scope="module")
def plain_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("plain", tmp_path_factory.mktemp("assistant"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (1, 3, 17, 26, 9)]


def keep_logits(head: Gemma4Assistant, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits [batch, vocab] of every draft from now on."""
    kept: list[Tensor] = []
    logits = type(head).logits

    def keep(self: Gemma4Assistant, states: Tensor, target: Any) -> Tensor:
        kept.append(logits(self, states, target).clone())
        return kept[-1]

    monkeypatch.setattr(type(head), "logits", keep)
    return kept


def same_logits(ours: Tensor, theirs: Tensor) -> bool:
    """To 1e-5 of their size; where groups are not scored, theirs are all the least and ours are -inf."""
    scored = ours.isfinite()
    hidden, seen = theirs[~scored], theirs[scored]
    apart = hidden.numel() == 0 or bool((hidden < seen.min()).all() and (hidden == hidden[0]).all())
    return apart and bool((ours[scored] - seen).norm() < 1e-5 * seen.norm())


@pytest.mark.usefixtures("poisoned_padding")
def test_drafts_and_their_logits_are_those_of_transformers_within_and_beyond_the_window(case, prompts, monkeypatch):
    """A request a run, so that a draft's logits are one row; the window is 5, the texts are 2 to 31 tokens long."""
    kept = keep_logits(case.head, monkeypatch)
    compared = set()
    for prompt in prompts[:4]:
        proposer = case.proposer()
        drafts = keep_drafts(proposer)
        engine = Engine(case.target, proposer, CONFIG)
        kept.clear()
        output = engine.generate([prompt], dataclasses.replace(GREEDY, max_tokens=6))[0].token_ids
        text, done = prompt + output, 0
        for (_, length), tokens in drafts.items():
            if tokens:
                expected, logits = reference_drafts(case.model, case.assistant, text[:length], K)
                assert tokens == expected[: len(tokens)]
                for step in range(len(tokens)):
                    assert same_logits(kept[done + step][0], logits[step]), (length, step)
                compared.add((length > 6, len(tokens)))
            done += len(tokens)
    assert {(False, K), (True, K)} <= compared


@pytest.mark.usefixtures("poisoned_padding")
@pytest.mark.parametrize("case", ["ordered embeddings", "a target that shares keys"], indirect=True)
def test_output_is_the_targets_and_drafts_depend_on_nothing_but_the_text(case, prompts):
    plain_config = dataclasses.replace(CONFIG, num_draft_tokens=0)
    plain = [o.token_ids for o in Engine(case.target, NoneProposer(), plain_config).generate(prompts, GREEDY)]
    assert_company_changes_nothing(case.proposer, case.target, CONFIG, GREEDY, prompts, plain, least=30)


def test_every_draft_of_a_step_stands_at_the_newest_tokens_position(plain_case, monkeypatch):
    """The text has 4 tokens when it first drafts: positions 3, 3, 3, 3, and 3 rows seen; nothing is written."""
    seen: list[int] = []
    forward = Gemma4Assistant.forward

    def spy(self: Gemma4Assistant, rows: DraftRows, read: Any) -> Any:
        seen.extend(rows.positions.tolist())
        return forward(self, rows, read)

    monkeypatch.setattr(Gemma4Assistant, "forward", spy)
    proposer = plain_case.proposer()
    assert proposer.requirements.planes == () and proposer.requirements.spare_slots(K) == 0
    engine = Engine(plain_case.target, proposer, CONFIG)
    engine.add_request([5, 6, 7], GREEDY)
    planes = [plane.k for plane in proposer._planes]
    engine.step()
    assert seen == [3] * K
    assert all(int((plane != 0).any(-1).any(-1).sum()) == 3 for plane in planes)


def test_keys_are_read_where_the_target_makes_them_last(plain_case, tmp_path):
    """Layers 4 and 5 of six share those of 2 and 3."""
    sharing = Target.from_model(gemma4(**{**LONG, **SHARED}))
    head = read_by_us(plain_case.assistant, tmp_path, sharing)
    assert [layer.target_layer for layer in head.config.layers] == [2, 3, 3]
    assert [layer.head_dim for layer in head.config.layers] == [8, 16, 16]


def test_drafts_end_where_the_assistant_ends(plain_case, prompts, tmp_path):
    assistant = assistant_of(plain_case.model.config, text={"max_position_embeddings": 24})
    head = read_by_us(assistant, tmp_path, plain_case.target)
    proposer = Gemma4AssistantProposer(head, plain_case.target.tensors(), K)
    drafts = keep_drafts(proposer)
    Engine(plain_case.target, proposer, CONFIG).generate(prompts, GREEDY)
    assert max(length + len(tokens) for (_, length), tokens in drafts.items() if tokens) == 24


TINY = {
    "vocab_size": 5,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 2,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_gemma4() -> PreTrainedModel:
    return build("Gemma4", head=0.5, **{**gemma4_settings(), **TINY})


def gemma4_settings() -> dict[str, Any]:
    config = gemma4().config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "hidden_size_per_layer_input")
    return {
        **{name: getattr(config, name) for name in names},
        **{"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "vocab_size_per_layer_input": 0},
        **{"max_position_embeddings": 64, "bos_token_id": 1},
    }


@pytest.mark.parametrize("sampling", ["probabilistic", "greedy"])
@pytest.mark.parametrize("ordered", [False, True])
def test_sampled_output_follows_the_targets_law(tmp_path, sampling, ordered):
    """With ordered embeddings the law of a draft leaves out two tokens of five, which the target may well say."""
    target = Target.from_model(tiny_gemma4())
    changes = {"use_ordered_embeddings": True, "num_centroids": 5, "centroid_intermediate_top_k": 3} if ordered else {}
    head = read_by_us(assistant_of(target.config, **changes), tmp_path, target)
    proposer = Gemma4AssistantProposer(head, target.tensors(), 3, sampling)
    assert joint_p(target, proposer, build_model=tiny_gemma4) > 1e-4


def test_the_softcap_is_applied_and_suppressed_tokens_are_never_drafted(plain_case, tmp_path):
    ordered = assistant_of(plain_case.model.config, text={"final_logit_softcapping": 3.0}, **ORDERED)
    states, targets = torch.randn(7, 24, generator=torch.Generator().manual_seed(0)), plain_case.target.tensors()
    raw = read_by_us(plain_case.assistant, tmp_path / "raw", plain_case.target).logits(states, targets)
    (tmp_path / "capped").mkdir()
    assistant = assistant_of(plain_case.model.config, text={"final_logit_softcapping": 3.0})
    assistant.generation_config.suppress_tokens = [int(raw[0].argmax()), 5]
    head = read_by_us(assistant, tmp_path / "capped", plain_case.target)
    expected = 3.0 * torch.tanh(raw / 3.0)
    expected[:, [int(raw[0].argmax()), 5]] = -torch.inf
    torch.testing.assert_close(head.logits(states, targets), expected)
    scored = read_by_us(ordered, tmp_path / "ordered", plain_case.target).logits(states, targets)
    assert (scored.isfinite().sum(-1) == 3 * 8).all()
    assert (scored[scored.isfinite()].abs() <= 3.0).all()


def test_half_precision_scales_embeddings_as_the_target_does(plain_case):
    """sqrt(32) = 5.657 is 5.65625 in bfloat16."""
    tensors = plain_case.target.tensors().to("cpu", torch.bfloat16)
    rows = plain_case.head.embed(torch.arange(96), tensors)
    embedding = plain_case.model.get_input_embeddings().to(torch.bfloat16)
    assert torch.equal(rows, embedding(torch.arange(96)))
    embedding.float()


def refused(folder: Path, target: Target, reason: str) -> None:
    with pytest.raises(HeadError, match=reason) as error:
        load_assistant(folder, target.facts, target.config)
    assert "\n" not in str(error.value)


def test_a_checkpoint_that_is_not_whole_is_refused_by_the_tensors_name(plain_case, tmp_path):
    assistant = assistant_of(plain_case.model.config, **ORDERED)
    read_by_us(assistant, tmp_path, plain_case.target)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)

    def written(**changes: Tensor | None) -> None:
        tensors = {**whole, **changes}
        save_file({name: t for name, t in tensors.items() if t is not None}, path, metadata={"format": "pt"})

    for changes, reason in (
        ({"post_projection.weight": None}, "missing post_projection.weight"),
        ({"model.layers.0.self_attn.k_proj.weight": torch.zeros(2)}, "unknown model.layers.0.self_attn.k_proj.weight"),
        ({"model.norm.weight": torch.ones(5)}, r"model.norm.weight has shape \[5\], expected \[24\]"),
        ({"model.norm.weight": torch.full((24,), torch.nan)}, "NaN or infinity in model.norm.weight"),
        ({"lm_head.weight": torch.zeros(96, 24)}, "unknown lm_head.weight"),
        ({"masked_embedding.token_ordering": torch.zeros(96, dtype=torch.int64)}, "each of the 96 tokens once"),
    ):
        written(**changes)
        refused(tmp_path, plain_case.target, reason)
    written(**{"lm_head.weight": whole["model.embed_tokens.weight"].clone()})  # a tied matrix may stand there twice
    load_assistant(tmp_path, plain_case.target.facts, plain_case.target.config)
    path.rename(tmp_path / "pytorch_model.bin")
    refused(tmp_path, plain_case.target, "expected a safetensors file")


def test_a_target_that_an_assistant_was_not_made_for_is_refused(plain_case, tmp_path):
    plain_case.assistant.save_pretrained(tmp_path)
    refused(tmp_path, Target.from_model(gemma4(**LONG, hidden_size=40)), "hidden_size 32, found 40")
    refused(tmp_path, Target.from_model(gemma4(**{**LONG, "vocab_size": 97})), "vocab_size 96, found 97")
    refused(tmp_path, Target.from_model(rand_llama(2, vocab_size=96)), "Gemma 4 with layers of full_attention, slid")
    all_full = Target.from_model(gemma4(**LONG, layer_types=["full_attention"] * 4))
    refused(tmp_path, all_full, "Gemma 4 with layers of full_attention, sliding_attention")
    wide = Target.from_model(gemma4(**LONG, global_head_dim=32))
    head = load_assistant(tmp_path, wide.facts, wide.config)
    with pytest.raises(ProposerError, match="4 heads of width 16 for the keys of target layer 3, found 2 of width 32"):
        Engine(wide, Gemma4AssistantProposer(head, wide.tensors(), K), CONFIG)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation gelu_pytorch_tanh, found silu"),
        ({"attention_bias": True}, "attention_bias False, found True"),
    ],
)
def test_what_an_assistant_is_not_is_refused(plain_case, tmp_path, changes, reason):
    plain_case.assistant.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, plain_case.target, reason)
