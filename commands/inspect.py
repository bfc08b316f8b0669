"""`spectrain inspect`: what a shard folder or a head folder really holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AllowPackage

if TYPE_CHECKING:
    from ..extract.shards import Document

Folder = Annotated[Path, typer.Argument(help="A shard folder or a head folder.")]
Show = Annotated[int, typer.Option("--document", help="The document whose tokens are shown.")]
Verify = Annotated[bool, typer.Option(help="Read every shard and compare its checksum.")]


class InspectError(ValueError):
    """The folder is neither shards nor a head; the message says what was looked for."""


def inspect(folder: Folder, document: Show = 0, verify: Verify = True, allow_package: AllowPackage = None) -> None:
    """Show a shard folder (facts, checksums, one document with its loss mask) or a head folder (config, tensors)."""
    from ..extract.manifest import MANIFEST

    if (folder / MANIFEST).is_file():
        _shards(folder, document, verify)
    elif (folder / "spectrain.json").is_file():
        _head(folder, allow_package or [])
    else:
        raise InspectError(
            f"expected {MANIFEST} (shards) or spectrain.json (a head) in {folder}, found neither; give a folder "
            f"written by `spectrain extract` or `spectrain fit`"
        )


def _shards(folder: Path, number: int, verify: bool) -> None:
    from ..extract.shards import ShardSet

    shards = ShardSet.open([folder])
    manifest = shards.manifest
    if not 0 <= number < shards.num_documents:
        raise InspectError(f"--document must lie in 0..{shards.num_documents - 1}, found {number}")
    _table(
        {
            "target": manifest.target.name,
            "layer ids": f"{', '.join(map(str, manifest.layer_ids))} of {manifest.num_layers} layers",
            "states": f"{manifest.hidden_size} x {manifest.dtype}, before the final norm",
            "documents": f"{shards.num_documents:,}",
            "tokens": f"{shards.tokens:,}, {shards.supervised_tokens:,} supervised",
            "text by the target": "yes" if manifest.on_policy else "no or unknown",
            "chat template": manifest.template_hash[:12],
            "tokenizer": manifest.tokenizer_hash[:12],
            "shards": f"{len(manifest.shards)}",
        }
    )
    if verify:
        shards.verify()
        print("checksums of all shards agree")
    _show(shards.document(number), shards.target_folder)


def _show(document: "Document", target_folder: Path) -> None:
    """One document; what the loss counts stands out."""
    import torch
    from rich.console import Console
    from rich.text import Text
    from transformers import AutoTokenizer

    states = document.hidden_states.float()
    console = Console(highlight=False)
    console.print(f"\ndocument of input row {document.source_row}; supervised tokens are [bold green]green[/]:")
    tokenizer: Any = AutoTokenizer.from_pretrained(target_folder)
    text = Text()
    for token, supervised in zip(document.token_ids.tolist(), document.loss_mask.tolist(), strict=True):
        text.append(tokenizer.decode([token]), style="bold green" if supervised else "dim")
    console.print(text)
    rms = states.square().mean(dim=(0, 2)).sqrt().tolist()
    console.print(f"rms of the states by layer: {', '.join(f'{value:.3g}' for value in rms)}")
    if not torch.isfinite(states).all():
        raise InspectError("expected finite states, found NaN or infinity in this document; extract it again")


def _head(folder: Path, allowed_packages: list[str]) -> None:
    from ..heads.folder import load_head

    loaded = load_head(folder, allowed_packages=allowed_packages)
    config, record = loaded.head.config, loaded.record
    _table(
        {
            "head": record["config_class"],
            "target": record.get("shards", {}).get("target", {}).get("name", "unknown"),
            "layer ids": ", ".join(map(str, config.layer_ids)),
            "vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens can be drafted",
            "in vLLM": str(config.elsewhere().vllm),
            "in SGLang": str(config.elsewhere().sglang),
            "parameters": f"{sum(p.numel() for p in loaded.head.parameters()):,}",
            "versions": ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items()),
        }
    )
    for name, tensor in loaded.head.state_dict().items():
        print(f"  {name}  {list(tensor.shape)}")


def _table(rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
