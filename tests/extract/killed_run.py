"""Run by test_kill.py: extracts in forked children that die by SIGKILL, then once to the end.

Importing torch once and forking keeps a dozen deaths affordable.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from spectrain.extract.conversations import RowCounts
from spectrain.extract.extraction import Extraction, ExtractionSettings
from spectrain.extract.plan import Plan
from spectrain.infer.target import Target
from spectrain.tests.extraction_runs import rows_of
from spectrain.tests.models import rand_llama


def extract(out: Path) -> None:
    rows = rows_of((9, 14, 3, 20, 7, 11, 16, 5))
    plan = Plan((tuple(rows[:3]), tuple(rows[3:5]), tuple(rows[5:])), RowCounts(kept=len(rows)), False)
    settings = ExtractionSettings(layer_ids=(0, 2, 3), batch_tokens=24, max_length=63)
    out.mkdir(exist_ok=True)
    Extraction(Target.from_model(rand_llama()), plan, out, settings).run()


def die_at(name: str, number: int, *, after: bool) -> None:
    """Makes this process kill itself around call `number` of an os function."""
    real, calls = getattr(os, name), [0]

    def counted(*args: object) -> object:
        calls[0] += 1
        if calls[0] != number:
            return real(*args)
        if after:
            real(*args)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(os, name, counted)


def child(out: Path, name: str | None, number: int, after: bool, delay: float | None) -> bool:
    """Whether the child died before its work was done."""
    pid = os.fork()
    if pid == 0:
        if name is not None:
            die_at(name, number, after=after)
        extract(out)
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) != 0:
        raise SystemExit(f"the child failed with status {os.WEXITSTATUS(status)}")
    return os.WIFSIGNALED(status)


def check_no_half_file(out: Path, whole: Path) -> None:
    """What bears a final name is already what it will be."""
    for path in [*out.glob("shard-*.safetensors"), *out.glob("*.json")]:
        if path.read_bytes() != (whole / path.name).read_bytes():
            raise SystemExit(f"{path.name} is half written")
    if (out / "manifest.json").exists() and len(list(out.glob("shard-*.safetensors"))) != 3:
        raise SystemExit("a manifest without its shards")


def main(mode: str, whole: Path, out: Path) -> None:
    child(whole, None, 0, False, None)
    started = time.perf_counter()
    child(out.with_name("timing"), None, 0, False, None)
    duration = time.perf_counter() - started
    if mode == "writes":
        deaths = 0
        for number in range(1, 40):
            # each death at a write of its own, every one from a fresh folder so that all writes are met
            fresh = out.with_name(f"{out.name}-{number}")
            died = child(fresh, "fsync" if number % 2 else "replace", (number + 1) // 2, number % 4 < 2, None)
            if not died:
                break
            deaths += 1
            check_no_half_file(fresh, whole)
            child(fresh, None, 0, False, None)
            print(fresh)
        if deaths < 8:
            raise SystemExit(f"only {deaths} writes were met")
        return
    chance = random.Random(0)
    for _ in range(5):
        child(out, None, 0, False, chance.uniform(0.2, 1.0) * duration)
        check_no_half_file(out, whole)
    child(out, None, 0, False, None)
    print(out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
