"""On-policy text: the target answers prompts, and the rows it wrote are extracted like any other text.

Prompts are answered in chunks of a fixed number, each one drained engine run written in one step, so a killed run
continues after its last whole chunk and ends with the same text. Rows carry the ids themselves: nothing is tokenised a
second time.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..infer.config import EngineConfig
from ..infer.engine import Engine
from ..infer.prompts import Prompt, template_hash, tokenizer_hash
from ..infer.proposers.none import NoneProposer
from ..infer.request import RequestOutput
from ..infer.sampling import SamplingParams
from ..infer.target import Target
from .manifest import write_atomically
from .plan import ExtractionError

RECORD = "text.json"


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How answers are written."""

    max_new_tokens: int
    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0
    seed: int = 0
    max_length: int  # prompt and answer together
    batch_tokens: int = 4096
    batch_size: int = 128
    chunk_rows: int = 1024

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ExtractionError(
                f"--generate takes the longest answer in tokens, at least 1, found {self.max_new_tokens}"
            )


class TextWriter:
    """Answers prompts into `folder/text-00000.jsonl` and so on."""

    def __init__(self, target: Target, folder: Path, settings: GenerationSettings) -> None:
        self.target, self.folder, self.settings = target, folder, settings
        self.tokenizer: Any = target.tokenizer
        self._hash = tokenizer_hash(self.tokenizer)

    def chunks(self, prompts: Sequence[Prompt]) -> list[tuple[Path, Sequence[Prompt]]]:
        """The files to be written and the prompts each answers."""
        size = self.settings.chunk_rows
        return [
            (self.folder / f"text-{start // size:05d}.jsonl", prompts[start : start + size])
            for start in range(0, len(prompts), size)
        ]

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Settles what the text is made with; raises ExtractionError where earlier text was made otherwise."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / RECORD
        record = self._record(prompts)
        if path.is_file():
            try:
                before = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ExtractionError(f"{path} is not JSON ({error}); pass --overwrite to start again") from error
            changed = [key for key in record if before.get(key) != record[key]]
            if changed:
                raise ExtractionError(
                    f"the text in {self.folder} was begun with another {changed[0].replace('_', ' ')} (found "
                    f"{before.get(changed[0])}, now {record[changed[0]]}); use the same settings or pass --overwrite"
                )
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink()
        text = json.dumps(record, indent=2) + "\n"
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def write(
        self, chunks: Sequence[tuple[Path, Sequence[Prompt]]], on_answer: Callable[[int], None] | None = None
    ) -> int:
        """Writes the chunks that are missing and returns their number; `on_answer` hears the tokens of each answer."""
        missing = [(path, prompts) for path, prompts in chunks if not path.is_file()]
        if not missing:
            return 0
        settings = self.settings
        engine = Engine(
            self.target,
            NoneProposer(),
            EngineConfig(
                max_batch_tokens=settings.batch_tokens,
                max_batch_size=settings.batch_size,
                max_length=settings.max_length,
                memory_share=0.6,  # the cache outlives this engine until extraction binds its own
            ),
        )
        for path, prompts in missing:
            # a chunk's bytes may not depend on which chunks this process wrote before it
            engine.pool.forget()
            outputs = engine.generate(
                [prompt.token_ids for prompt in prompts],
                [self._params(prompt) for prompt in prompts],
                None if on_answer is None else lambda output: on_answer(len(output.token_ids)),
            )
            failed = next((i for i, output in enumerate(outputs) if output.error), None)
            if failed is not None:
                raise ExtractionError(f"{prompts[failed].source}: {outputs[failed].error}; use --dtype float32")
            rows = [self._row(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write_atomically(path, lambda temporary, text=text: temporary.write_text(text, encoding="utf-8"))
        return len(missing)

    def _params(self, prompt: Prompt) -> SamplingParams:
        settings = self.settings
        return SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=_row_seed(settings.seed, prompt.index),
            max_tokens=min(settings.max_new_tokens, settings.max_length - len(prompt.token_ids)),
        )

    def _row(self, prompt: Prompt, output: RequestOutput) -> dict[str, Any]:
        answer = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        return {
            "index": prompt.index,
            "messages": [*prompt.messages, {"role": "assistant", "content": answer}],
            "finish_reason": output.finish_reason.value,
            "prompt_token_ids": list(prompt.token_ids),
            "token_ids": output.token_ids,
            "tokenizer_hash": self._hash,
        }

    def _record(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        digest = hashlib.sha256()
        for prompt in prompts:
            digest.update(json.dumps([prompt.index, prompt.token_ids]).encode())
        fingerprint = {key: value for key, value in self.target.fingerprint().items() if key != "facts"}
        return {
            **asdict(self.settings),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "tokenizer_hash": self._hash,
            "template_hash": template_hash(self.tokenizer),
            "target_fingerprint": json.dumps(fingerprint, sort_keys=True),
            "prompts": digest.hexdigest(),
        }


def _row_seed(seed: int, index: int) -> int:
    """A seed for each row that depends on nothing but the run's seed and the row."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
