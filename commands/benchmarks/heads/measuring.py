"""Measuring heads beside plain decoding: one engine a load, all prompt sets through it, plain runs shared by all heads.

Plain decoding is measured in every call anew, at its start and at its end: ratios are within one call, and its spread
is the noise floor of that call.
"""

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ....heads.folder import LoadedHead
from ....infer.engine import Engine
from ....infer.evaluate import (
    Drafted,
    Evaluation,
    as_verified,
    check_equal,
    check_law,
    decode,
    needs_plain_differences,
    plain_differences,
    result_of,
)
from ....infer.evaluate import Run as Decoded
from ....infer.losslessness import Losslessness
from ....infer.prompts import Prompt
from ....infer.proposers.none import NoneProposer
from ....infer.report import verdict
from ....infer.sampling import SamplingParams
from ....infer.statistics import EngineStatistics
from ....infer.target import Target
from ...devices import environment
from ...engines import build_engine
from ...heads import head_proposer
from .estimate import START_SECONDS
from .plan import Plan, Run
from .work import Load, Work

FIRST_RUNS = 2
"""Runs of plain decoding before a head is measured against them; one more follows at the end."""


class Key(NamedTuple):
    """What a plain run is shared by."""

    prompt_set: str
    batch_size: int
    temperature: float

    @property
    def name(self) -> str:
        return f"{self.prompt_set} b{self.batch_size} t{self.temperature:g}"


class Outcome(NamedTuple):
    """One measurement: its record where its check passed, else why it is refused."""

    run: Run
    load: Load
    prompt_set: str
    record: dict[str, Any]
    refused: str | None


class Bench:
    """A target, its prompts, and the plain runs of this call."""

    def __init__(self, plan: Plan, work: Work, target: Target, prompts: Mapping[str, Sequence[Prompt]]) -> None:
        self.plan, self.work, self.target, self.prompts = plan, work, target, prompts
        self.call = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._plain: dict[Key, list[Decoded]] = {}
        self._differences: dict[tuple[Key, int], int] = {}
        longest = max(len(prompt.token_ids) for some in prompts.values() for prompt in some)
        self._longest = longest + plan.max_new_tokens

    def measure(self, run: Run, loaded: LoadedHead, load: Load, sets: Sequence[str]) -> list[Outcome]:
        """One engine, all of `sets`; what passed its check is saved."""
        self.measure_plain(load, sets)
        decoded, verdicts = self._drafted(run, loaded, load, sets)
        undecided = [name for name in sets if name not in verdicts]
        verdicts |= self._compare_again(run, load, {name: decoded[name] for name in undecided})
        outcomes = []
        for name in sets:
            work, key = self._evaluation(run, load, name), Key(name, load.batch_size, load.temperature)
            result = result_of(work, self._plain[key], Drafted(decoded[name], {}, None, None), verdicts[name])
            record = {"call": self.call, "run": run.name, **dataclasses.asdict(result), "verdict": verdict(result)}
            refused = None if verdicts[name].passed else verdict(result)
            if refused is None:
                self.work.save_measured(run, load, name, record)
            outcomes.append(Outcome(run, load, name, record, refused))
        return outcomes

    def measure_plain(self, load: Load, sets: Sequence[str]) -> None:
        """Plain decoding at the batch size of `load`, at every temperature, where this call has not measured it."""
        temperatures = {load.temperature, *self.plan.temperatures}
        keys = [Key(name, load.batch_size, temperature) for temperature in sorted(temperatures) for name in sets]
        missing = [key for key in keys if key not in self._plain]
        if missing:
            self._run_plain(missing, FIRST_RUNS)

    def measure_plain_again(self) -> None:
        """Once more what was measured, so that a machine that slowed down shows."""
        for batch_size in sorted({key.batch_size for key in self._plain}):
            self._run_plain([key for key in self._plain if key.batch_size == batch_size], 1)

    @property
    def plain_again_seconds(self) -> float:
        """About how long `measure_plain_again` takes."""
        engines = len({key.batch_size for key in self._plain})
        decoding = sum(runs[-1].statistics.wall_seconds for runs in self._plain.values())
        return decoding + engines * START_SECONDS[self.target.device.type]

    def step_seconds(self, batch_size: int) -> float:
        """Seconds of a decoding step of this batch, of a prompt or two: for the time plan."""
        some = next(iter(self.prompts.values()))
        prompts = [some[i % len(some)].token_ids for i in range(batch_size)]
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        engine = self._engine(None, Load(0, batch_size, 0.0))
        engine.generate(prompts, params)  # compiles
        engine.pool.forget()
        engine.statistics = EngineStatistics()
        engine.generate(prompts, params)
        return engine.statistics.wall_seconds / params.max_tokens

    def _run_plain(self, keys: Sequence[Key], times: int) -> None:
        load = Load(0, keys[0].batch_size, 0.0)
        engine = self._engine(None, load)
        for _ in range(times):
            for key in keys:
                work = self._evaluation(None, load._replace(temperature=key.temperature), key.prompt_set)
                self._plain.setdefault(key, []).append(decode(work, engine, _quiet))
        self._save_plain()

    def _drafted(
        self, run: Run, loaded: LoadedHead, load: Load, sets: Sequence[str]
    ) -> tuple[dict[str, Decoded], dict[str, Losslessness]]:
        """The head's runs, and the verdicts that need no further plain run."""
        engine = self._engine(loaded, load)
        decoded, verdicts = {}, {}
        for name in sets:
            work, key = self._evaluation(run, load, name), Key(name, load.batch_size, load.temperature)
            decoded[name] = decode(work, engine, _quiet)
            if load.temperature > 0:
                verdicts[name] = check_law(work, engine, decoded[name])
                continue
            differences = self._differences.get((key, load.num_draft_tokens))
            found = check_equal(work, engine, self._plain[key][0], decoded[name], differences)
            if differences is not None or not needs_plain_differences(work, found):
                verdicts[name] = found
        return decoded, verdicts

    def _compare_again(self, run: Run, load: Load, drafted: Mapping[str, Decoded]) -> dict[str, Losslessness]:
        """Greedy verdicts beside what plain decoding shows against itself at as many rows a step."""
        if not drafted:
            return {}
        works = {name: self._evaluation(run, load, name) for name in drafted}
        engine = self._engine(None, Load(0, as_verified(next(iter(works.values()))).batch_size, 0.0))
        verdicts = {}
        for name, work in works.items():
            key = Key(name, load.batch_size, load.temperature)
            first = self._plain[key][0]
            differences = plain_differences(work, first, decode(as_verified(work), engine, _quiet))
            self._differences[key, load.num_draft_tokens] = differences
            verdicts[name] = check_equal(work, engine, first, drafted[name], differences)
        return verdicts

    def _engine(self, loaded: LoadedHead | None, load: Load) -> Engine:
        k, packages = load.num_draft_tokens, self.plan.packages
        sampling = "probabilistic" if load.temperature > 0 else "greedy"
        return build_engine(
            self.target,
            NoneProposer() if loaded is None else head_proposer(self.target, loaded, k, sampling, packages),
            num_draft_tokens=k,
            batch_size=load.batch_size,
            longest=self._longest,
            eager=self.plan.eager,
        )

    def _evaluation(self, run: Run | None, load: Load, prompt_set: str) -> Evaluation:
        prompts, seed = self.prompts[prompt_set], self.plan.seed
        return Evaluation(
            method="none" if run is None else run.head.label,
            prompt_set=prompt_set,
            prompts=[prompt.token_ids for prompt in prompts],
            params=[
                SamplingParams(
                    max_tokens=self.plan.max_new_tokens, temperature=load.temperature, seed=seed + prompt.index
                )
                for prompt in prompts
            ],
            num_draft_tokens=load.num_draft_tokens,
            batch_size=load.batch_size,
            dtype=self.target.dtype,
            seed=seed,
        )

    def _save_plain(self) -> None:
        runs = {
            key.name: {
                **key._asdict(),
                "tokens_per_second": [run.tokens_per_second for run in decoded],
                "output_tokens": decoded[0].statistics.output_tokens,
            }
            for key, decoded in self._plain.items()
        }
        facts = {"date": time.strftime("%Y-%m-%d"), "environment": environment(self.target.device)}
        facts["dtype"] = str(self.target.dtype).removeprefix("torch.")
        self.work.save_plain(self.call, {**facts, "runs": runs})


def _quiet(finished: int) -> None:
    pass
