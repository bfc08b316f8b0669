"""Prompts of the kind a code editor sends: a whole function and a small change to it, so that answers repeat it."""

import json
from pathlib import Path

from ..infer.rows import Row, read_rows

FIELDS = ("prompt", "canonical_solution", "entry_point")

EDITS = (
    "Rename the function `{name}` to `{name}_v2`.",
    "Add the line `# checked` above the function `{name}`.",
    "Add a parameter `verbose=False` at the end of the parameters of `{name}`.",
    "Rename the first parameter of `{name}` to `value`, also where it is used.",
)


class CodeEditsError(ValueError):
    """A file that holds no functions to edit; the message says what to do."""


def write_code_edits(source: Path, out: Path) -> int:
    """Writes a `prompt` row for each function of a HumanEval file; how many. Raises CodeEditsError for other files."""
    prompts = [_prompt(i, row) for i, row in enumerate(read_rows(source))]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts))
    return len(prompts)


def _prompt(index: int, row: Row) -> str:
    function = row.value
    if not isinstance(function, dict) or not all(isinstance(function.get(field), str) for field in FIELDS):
        raise CodeEditsError(
            f"expected rows with {', '.join(FIELDS)}, found {row.source} without; give HumanEval.jsonl.gz or a file "
            f"like it"
        )
    code = (function["prompt"] + function["canonical_solution"]).strip()
    edit = EDITS[index % len(EDITS)].format(name=function["entry_point"])
    return f"{edit} Answer with the whole code and nothing else.\n\n```python\n{code}\n```"
