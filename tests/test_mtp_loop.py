"""A target with MTP layers in its checkpoint: `eval` drafts with them, `fit` trains them, and they fit back in.

The target is a DeepSeek V3 that continues every token with the next one. Its MTP layer is random at first, so that no
draft is accepted; after `fit` all of them are.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spectrain import cli
from spectrain.commands.eval import Options, run
from spectrain.commands.fit import fit
from spectrain.heads.folder import load_head
from spectrain.infer.config import EngineConfig
from spectrain.infer.engine import Engine
from spectrain.infer.report import MethodResult
from spectrain.infer.sampling import SamplingParams
from spectrain.infer.target import Target
from spectrain.tests.chats import PLAIN, word_tokenizer
from spectrain.tests.fresh import proposer_of
from spectrain.tests.models import deepseek_v3
from spectrain.tests.shard_folders import make_document, write_shards

VOCAB, LENGTH, LAYERS = 43, 20, 2
MTP = f"model.layers.{LAYERS}."


@torch.no_grad()
def counting_deepseek():
    model = deepseek_v3(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_nextn_predict_layers=1,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    orthonormal, _ = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    decoder = model.get_decoder()
    decoder.embed_tokens.weight.copy_(orthonormal[:VOCAB])
    decoder.norm.weight.fill_(1.0)
    for name, parameter in decoder.layers.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.zero_()
    model.get_output_embeddings().weight.copy_(orthonormal[:VOCAB].roll(1, dims=0))
    return model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("target"), counting_deepseek()
    model.save_pretrained(folder)
    word_tokenizer(PLAIN, end="<e>").save_pretrained(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    last = f"model.layers.{LAYERS - 1}."
    shapes = {MTP + name.removeprefix(last): like.shape for name, like in tensors.items() if name.startswith(last)}
    shapes |= {f"{MTP}{name}.weight": (64,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{MTP}eh_proj.weight"] = (64, 128)
    for name, shape in shapes.items():
        norm = "norm" in name
        tensors[name] = torch.ones(shape) if norm else 0.02 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model, rows = tmp_path_factory.mktemp("head"), counting_deepseek(), torch.arange(LENGTH)
    documents = [make_document(model, (rows + 5 * i) % VOCAB, rows >= 2, i, (LAYERS,)) for i in range(VOCAB)]
    shards = write_shards(folder / "shards", model=model, documents=documents, layers=(LAYERS,))
    settings = ("optimizer.lr=5e-3", "data.sequence_length=32", "data.batch_size=4", "data.micro_batch_size=4")
    often = ("stopping.epochs=10", "stopping.eval_every=500", "stopping.save_every=500", "data.validation_share=0.2")
    fit(
        recipe="mtp",
        shards=[shards],
        out=folder / "mtp",
        model=str(target),
        overrides=[*settings, *often],
        device="cpu",
    )
    return folder / "mtp"


def evaluate(target: Path, out: Path, **options: object) -> list[MethodResult]:
    prompts = out.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("a b c", "d e f", "q r s")))
    settings: dict[str, object] = {"raw": True, "max_new_tokens": 16, "ignore_eos": True, "num_draft_tokens": 3}
    where: dict[str, object] = {"device": "cpu", "dtype": "float32", "out": out}
    return run(Options(**{"model": str(target), "prompts": [prompts], **settings, **where, **options}), quiet=True)


def test_eval_needs_no_head_where_the_target_has_mtp_layers(target: Path, tmp_path: Path):
    (own,) = evaluate(target, tmp_path / "report", method="mtp")
    assert own.method == "mtp" and own.lossless.passed
    assert own.draft_acceptance_rate is not None and own.draft_acceptance_rate < 0.2, "its layer is random"


def test_fit_makes_the_targets_own_layer_right_and_every_draft_is_accepted(target: Path, head: Path):
    loaded = Target.load(target, dtype=torch.float32)
    proposer = proposer_of(load_head(head, dtype=torch.float32).head, loaded, 3)
    engine = Engine(loaded, proposer, EngineConfig(num_draft_tokens=3, num_blocks=100, block_size=4))
    params = SamplingParams(max_tokens=LENGTH - 4, ignore_eos=True)
    for start, output in zip((0, 7, 39), engine.generate([[0, 1], [7, 8], [39, 40]], params), strict=True):
        assert output.token_ids == [(start + 2 + i) % VOCAB for i in range(LENGTH - 4)]
    assert engine.statistics.accepted_tokens == engine.statistics.draft_tokens > 0


def test_the_trained_layer_goes_back_into_the_checkpoint(target: Path, head: Path, tmp_path: Path):
    trained, folder = load_file(head / "model.safetensors"), tmp_path / "stitched"
    whole = load_file(target / "model.safetensors")
    assert trained.keys() == {name for name in whole if name.startswith(MTP)}
    folder.mkdir()
    for file in target.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file({**whole, **trained}, folder / "model.safetensors", metadata={"format": "pt"})
    (result,) = evaluate(folder, tmp_path / "report", method="mtp")
    assert result.lossless.passed and result.draft_acceptance_rate == 1.0
    assert json.loads((head / "config.json").read_text())["model_type"] == "deepseek_v3"


def test_a_saved_head_is_the_one_that_was_loaded(head: Path):
    loaded = load_head(head, dtype=torch.float32).head
    again = load_file(head / "model.safetensors")
    assert loaded.state_dict().keys() == again.keys()
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, again[name].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dropped", r"must hold model.layers.2.mlp.experts.3.down_proj.weight of its MTP layers, found none: commonly"),
        ("none", r"has no MTP layers: num_nextn_predict_layers is 0 in its config.json; train a fresh one"),
        (
            "quantised",
            r"are quantised, found model.layers.2.eh_proj.weight in int8: they run in bfloat16, float16 or float32",
        ),
    ],
)
def test_what_a_checkpoint_lacks_is_one_line(change: str, message: str, target: Path, tmp_path: Path, capsys):
    folder = tmp_path / "target"
    folder.mkdir()
    for file in target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    if change == "dropped":
        del tensors[f"{MTP}mlp.experts.3.down_proj.weight"]
    elif change == "quantised":
        tensors[f"{MTP}eh_proj.weight"] = tensors[f"{MTP}eh_proj.weight"].to(torch.int8)
    else:
        config["num_nextn_predict_layers"] = 0
        (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a b c"}\n')
    out = tmp_path / "report"
    arguments = ("--model", folder, "--prompts", prompts, "--raw", "--method", "mtp", "--out", out, "--device", "cpu")
    with pytest.raises(SystemExit) as leaving:
        cli.main(["eval", *map(str, arguments)])
    lines = capsys.readouterr().err.strip().splitlines()
    assert leaving.value.code and len(lines) >= 1
    assert re.search(message, lines[-1]), lines[-1]
