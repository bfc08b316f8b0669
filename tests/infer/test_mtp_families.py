"""Each family's MTP layers in the engine behind a target of that family, or the one line that says why not."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen2Config,
)

from spectrain import cli
from spectrain.heads.base import DraftRows, HeadError
from spectrain.heads.model_folder import Checkpoint
from spectrain.heads.mtp import MtpConfig, MtpHead
from spectrain.heads.mtp_layouts import FRESH
from spectrain.infer import fused_heads
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.proposers.none import NoneProposer
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.fresh import loud_head, proposer_of, tiny_head_config
from spectrain.tests.heads.test_mtp import FACTS, causal
from spectrain.tests.infer.proposers import keep_drafts
from spectrain.tests.models import lone_forward, own_generator, randomise
from spectrain.tests.mtp_families import FAMILIES, draw, write_checkpoint
from spectrain.tests.steering import TOLERANCE, Steered, greedy_texts, trainer_logits

DRAFTS, NEW = 5, 12  # five drafts of two layers: the first has its third turn
QUICK = ("deepseek_v3", "glm4_moe", "mimo")
TRAINED = (
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_ocr",
    "mimo",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "ernie4_5_moe",
    "nemotron_h",
    "exaone_moe",
    "hy_v3",
)
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h")
"""Whose targets take their time here, where transformers runs them by its slow reference code."""
SERVED = ("mimo_v2", "exaone4_5", "step3p7")
"""Their layers have windows, sinks or output matrices of their own, which training does not know."""
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
SEEING = {
    "glm_ocr": {**VISION, "depth": 1, "out_hidden_size": 32},
    "exaone4_5": {**VISION, "depth": 1, "num_key_value_heads": 2, "out_hidden_size": 32},
    "step3p7": {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
"""Of models that see and are built whole, a vision part as small as can be."""


def target_model(folder: Path) -> PreTrainedModel:
    """The family's target, random; MiMo's own code, which lies beside it, builds a Qwen2."""
    values = json.loads((folder / "config.json").read_text())
    if values["model_type"] == "mimo":
        config = Qwen2Config(**{key: value for key, value in values.items() if key != "model_type"})
    else:
        kind = values["model_type"]
        config = AutoConfig.from_pretrained(folder, **({"vision_config": SEEING[kind]} if kind in SEEING else {}))
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    with own_generator(0):
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomise(model, 0)
    model.get_output_embeddings().weight.data.mul_(5.0)
    return model.eval().requires_grad_(False)


def written(name: str, folder: Path) -> Path:
    family = FAMILIES[name]
    return write_checkpoint(folder, family, draw(family.shapes))


def head_of(folder: Path, target: Target, **settings: object) -> MtpHead:
    found = Checkpoint(folder)
    head = MtpHead(MtpConfig.derive_from(target.facts, settings, found))
    head.start_from(found)
    return head


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TRAINED]
)
def test_every_draft_logit_of_the_engine_is_the_trainers(name: str, tmp_path: Path):
    texts = greedy_texts(target_model(written(name, tmp_path)), NEW)
    head = head_of(tmp_path, texts.target)
    expected = [trainer_logits(head, texts.target, target_model(tmp_path), text, DRAFTS) for text in texts.whole]
    for spoil, num_blocks in ((0.3, 16),) if name in RECURRENT else ((0.0, 200), (0.3, 16), (1.0, 200)):
        proposer = proposer_of(head, texts.target, DRAFTS)
        steered = Steered(proposer, texts.whole, spoil, head.config.vocab_size)
        config = EngineConfig(num_draft_tokens=DRAFTS, num_blocks=num_blocks, block_size=4, max_batch_tokens=13)
        outputs = Engine(texts.target, proposer, config).generate(texts.prompts, texts.params)
        assert [o.prompt_token_ids + o.token_ids for o in outputs] == texts.whole
        for (request, row, draft), logits in steered.logits.items():
            torch.testing.assert_close(logits, expected[request][draft, row], atol=TOLERANCE, rtol=1e-4)
        assert len(steered.logits) > 40


def whole_text_logits(head: MtpHead, target: Target, model: PreTrainedModel, text: list[int]) -> list[Tensor]:
    """Of the first draft of each layer [row, vocab]; rows attend as they would in one pass, without a cache."""
    tensors, token_ids = target.tensors(), torch.tensor([text])
    states, found = head.combine(lone_forward(model, text)[1][-1][None, :, None], tensors), []
    for k in range(head.config.num_layers):
        following = token_ids[:, 1 + k :]
        positions = k + torch.arange(following.shape[1])[None]
        states = states[:, : following.shape[1]]
        output = head(DraftRows(head.embed(following, tensors), states, positions, k), causal)
        found.append(head.logits(output.logits_states, tensors, k)[0])
        states = output.feedback
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
@torch.no_grad()
def test_layers_that_are_not_trained_draft_what_they_say_of_the_whole_text(name: str, tmp_path: Path):
    texts = greedy_texts(target_model(written(name, tmp_path)), NEW)
    head = head_of(tmp_path, texts.target)
    with pytest.raises(HeadError, match="cannot be trained"):
        trainer_logits(head, texts.target, target_model(tmp_path), texts.whole[0], DRAFTS)
    expected = [whole_text_logits(head, texts.target, target_model(tmp_path), text) for text in texts.whole]
    for spoil, num_blocks in ((0.0, 200), (0.3, 16)):
        proposer = proposer_of(head, texts.target, DRAFTS)
        steered = Steered(proposer, texts.whole, spoil, head.config.vocab_size)
        config = EngineConfig(num_draft_tokens=DRAFTS, num_blocks=num_blocks, block_size=4, max_batch_tokens=13)
        outputs = Engine(texts.target, proposer, config).generate(texts.prompts, texts.params)
        assert [o.prompt_token_ids + o.token_ids for o in outputs] == texts.whole
        first = {key: logits for key, logits in steered.logits.items() if key[2] < head.config.num_layers}
        for (request, row, draft), logits in first.items():
            torch.testing.assert_close(logits, expected[request][draft][row], atol=TOLERANCE, rtol=1e-4)
        assert len(first) > 10


def test_a_model_that_also_sees_is_loaded_for_its_texts(tmp_path: Path):
    """And its MTP layers from the same files."""
    model, tensors = target_model(written("glm_ocr", tmp_path)), draw(FAMILIES["glm_ocr"].shapes)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    save_file({**saved, **tensors}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    target, params = Target.load(tmp_path, dtype=torch.float32), SamplingParams(max_tokens=NEW, ignore_eos=True)
    assert target.facts.vocab_size == 97
    config, prompts = EngineConfig(num_draft_tokens=DRAFTS, num_blocks=50, block_size=4), [[5, 9]]
    proposer = proposer_of(head_of(tmp_path, target), target, DRAFTS)
    (drafted,) = Engine(target, proposer, config).generate(prompts, params)
    plain = EngineConfig(num_blocks=50, block_size=4)
    (expected,) = Engine(Target.from_model(model), NoneProposer(), plain).generate(prompts, params)
    assert drafted.token_ids == expected.token_ids


KERNELS = ("rope_store", "rms_norm", "gated_linear")


def plain_head(name: str, folder: Path, target: Target) -> MtpHead:
    if name != FRESH:
        return head_of(written(name, folder), target)
    head = loud_head(tiny_head_config("mtp", target.facts), target.tensors(), random_norms=True)
    assert isinstance(head, MtpHead)
    return head


@pytest.mark.parametrize("name", [FRESH, "mimo"])
def test_plain_layers_run_by_the_fused_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As other heads' layers do; what is drafted stays the same."""
    target = Target.from_model(target_model(written("mimo", tmp_path)))
    calls: list[str] = []
    for kernel in ("rope_store", "rms_norm", "gated_linear"):
        run = getattr(fused_heads.dispatch, kernel)
        monkeypatch.setattr(
            fused_heads.dispatch,
            kernel,
            lambda *a, run=run, kernel=kernel, **k: (calls.append(kernel), run(*a, **k))[1],
        )
    params, found = SamplingParams(max_tokens=NEW, ignore_eos=True), []
    for fused in (True, False):
        calls.clear()
        head = plain_head(name, tmp_path, target)
        if not fused:
            monkeypatch.setattr("spectrain.infer.proposers.head.fuse_head", lambda head: None)
        proposer = proposer_of(head, target, DRAFTS)
        drafts = keep_drafts(proposer)
        config = EngineConfig(num_draft_tokens=DRAFTS, num_blocks=200, block_size=4)
        Engine(target, proposer, config).generate([[5, 9, 31], [7] * 11], params)
        found.append(drafts)
        assert (set(KERNELS) <= set(calls)) == fused
    assert found[0] == found[1] and found[0]


UNKNOWN = "no usable model config in .*: The checkpoint you are trying to load has model type `{}` but Transformers"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mimo", UNKNOWN.format("mimo")),
        ("openpangu", UNKNOWN.format("pangu_ultra_moe")),
        ("intern_s2", UNKNOWN.format("intern_s2_preview")),
        ("step3p5", r"\(model type 'step3p5'\) is no causal language model that loads"),
        ("deepseek_v32", "DeepseekV32ForCausalLM is refused: it needs more than attention over cached keys"),
        ("deepseek_v4", "DeepseekV4ForCausalLM is refused: it needs more than attention over cached keys"),
        ("longcat_flash", "LongcatFlashForCausalLM is refused: expected one list of 4 decoder layers around its"),
    ],
)
def test_a_target_that_does_not_run_here_is_one_line(name: str, message: str, tmp_path: Path, capsys):
    folder = written(name, tmp_path / name)
    if "is refused" in message:
        target_model(folder).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(FAMILIES[name].config))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a b c"}\n')
    options = ("--prompts", prompts, "--raw", "--method", "mtp", "--out", tmp_path / "report", "--device", "cpu")
    with pytest.raises(SystemExit) as leaving:
        cli.main(["eval", "--model", *map(str, (folder, *options))])
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert leaving.value.code and re.search(message, line), line


@pytest.mark.parametrize(
    ("dtype", "name", "message"),
    [
        (torch.float8_e4m3fn, "eh_proj.weight", "found model.layers.4.eh_proj.weight in float8_e4m3fn: they run in"),
        (torch.int8, "mlp.experts.1.up_proj.weight", "found model.layers.4.mlp.experts.1.up_proj.weight in int8"),
        (torch.int32, "self_attn.o_proj.qweight", "found model.layers.4.self_attn.o_proj.qweight in int32"),
        (
            torch.uint8,
            "self_attn.o_proj.weight_packed",
            "found .*weight_packed in uint8: .*give the unquantised",
        ),
        (torch.bfloat16, "eh_proj.bias", None),
    ],
)
def test_quantised_layers_are_refused_by_name_and_dtype(dtype: torch.dtype, name: str, message: str | None, tmp_path):
    family = FAMILIES["deepseek_v3"]
    tensors = draw(family.shapes)
    replaced = f"model.layers.4.{name}".replace("qweight", "weight").replace("_packed", "")
    tensors[f"model.layers.4.{name}"] = tensors.pop(replaced, torch.zeros(2)).to(dtype)
    found = Checkpoint(write_checkpoint(tmp_path, family, tensors))
    head = MtpHead(MtpConfig.derive_from(FACTS, {}, found))
    if message is None:
        return head.start_from(found)
    with pytest.raises(HeadError, match=f"the MTP layers of .* are quantised, {message}"):
        head.start_from(found)
