"""`bench heads` from a plan to its table: trains and measures what is missing, as far as time goes."""

import time
from dataclasses import dataclass, field

import torch

from ....extract.shards import ShardSet
from ....infer.target import Target
from ....train.trainer import TrainingError
from ...devices import device_of, dtype_of
from ...heads import load_trained
from ...outputs import check_folders
from ...prompt_sets import check_draft_length, read_prompts
from ..record import BenchError, Record
from .estimate import START_SECONDS, Clock, minutes, product_speed, training_seconds
from .measuring import FIRST_RUNS, Bench, Outcome
from .plan import Plan, Run
from .table import fill, loads_and_sets, markdown
from .training import assembled, budget_of, check_trained, train
from .work import Load, Work, facts_of

DRAFTING_COST = 1.5
"""Time of a head's measurement over plain decoding's, before any was made: drafts cost, and end steps early."""


def run(plan: Plan) -> Record:
    """Does what is left of a plan and writes `table.json` and `table.md`; what is finished is taken over.

    Raises BenchError where something was refused, after everything else was done and written.
    """
    job = Job.begin(plan)
    try:
        job.work_through()
    finally:
        record = job.write()
    if job.refused:
        raise BenchError(f"no figure without a passing check: {'; '.join(job.refused)}")
    return record


@dataclass
class Job:
    """One call of the command."""

    plan: Plan
    work: Work
    shards: ShardSet
    device: torch.device
    clock: Clock
    estimates: dict[str, float] = field(default_factory=dict)  # seconds of each training that is left
    step_seconds: float = 0.0  # of plain decoding at the smallest batch; larger ones take little more
    refused: list[str] = field(default_factory=list)
    stopped: bool = False

    @classmethod
    def begin(cls, plan: Plan) -> "Job":
        """Checks everything that can be checked before anything runs."""
        work = Work(plan.work)
        check_folders(plan.work, *map(work.head_folder, plan.runs()), option="--work")
        device = device_of(plan.device)
        shards = ShardSet.open(plan.shards)
        job = cls(plan, work, shards, device, Clock(plan.time_limit))
        for run in job.trainings():
            assembled(plan, run, shards, work)
        for run in job.runs():
            if work.trained(run) is not None:
                check_trained(plan, run, work, shards, len(job.unmeasured(run)))
        work.check_begun(facts_of(plan, shards.content_hash()))
        return job

    def runs(self) -> list[Run]:
        """The runs of this call, each behind the one it starts from."""
        ordered: list[Run] = []
        for run in self.plan.runs():
            start = self.plan.starts_from(run)
            ordered += [needed for needed in (start, run) if needed is not None and needed not in ordered]
        return ordered

    def trainings(self) -> list[Run]:
        """What is left to train, in order; a run that others start from counts only where one of them is left."""
        return [run for run in self.runs() if self.work.trained(run) is None and self._is_needed(run)]

    def unmeasured(self, run: Run) -> list[tuple[Load, list[str]]]:
        """The measurements of a run that are left: prompt sets by load."""
        if not run.head.measured or not self._is_asked(run):
            return []
        left: dict[Load, list[str]] = {}
        for k in self.plan.draft_tokens(run.head, run.seed):
            for load, name in loads_and_sets(self.plan, run.head, k):
                if self.work.measured(run, load, name) is None:
                    left.setdefault(load, []).append(name)
        return list(left.items())

    def work_through(self) -> None:
        """Trains and measures, run after run, until all is done or the time limit is near."""
        measuring = [run for run in self.runs() if self.unmeasured(run)]
        trainings = self.trainings()
        if not measuring and not trainings:
            print("everything is finished; writing the table")
            return
        bench = None
        if self._has_room(bench, 0.0):
            bench = self._bench() if measuring else None
            self._print_plan(bench, trainings, measuring)
            self._each(bench, trainings)
        if bench is not None and self.clock.has_room(bench.plain_again_seconds):
            bench.measure_plain_again()
        if self.stopped:
            print(f"stopped before the limit of {minutes(self.plan.time_limit or 0)}; run the command again to go on")

    def _each(self, bench: Bench | None, trainings: list[Run]) -> None:
        for run in self.runs():
            trained = self._train(bench, run) if run in trainings else self.work.trained(run) is not None
            if bench is not None and trained:
                self._measure(bench, run)
            if self.stopped:
                return

    def write(self) -> Record:
        """The table of everything that is finished, as JSON and as Markdown."""
        plan = self.plan
        settings = {
            "model": plan.model.rstrip("/").rpartition("/")[2],
            "prompt_sets": list(plan.prompts),
            **{name: getattr(plan, name) for name in SETTINGS},
            "heads": {head.label: [head.recipe, *head.overrides] for head in plan.heads},
        }
        record = Record("heads", self.device, settings, self.work.folder / "table.json")
        fill(record, plan, self.work)
        record.refused = "; ".join(self.refused) or None
        record.write()
        if record.rows:
            (self.work.folder / "table.md").write_text(markdown(record.as_json()), encoding="utf-8")
        return record

    def _train(self, bench: Bench | None, run: Run) -> bool:
        """Whether the run is now trained."""
        start = self.plan.starts_from(run)
        if start is not None and self.work.trained(start) is None:
            return False
        estimate = self.estimates[run.name]
        if not self._has_room(bench, estimate):
            return False
        begun = time.perf_counter()
        self._say(f"{run.name}: training")
        try:
            record = train(self.plan, run, self.work, self.shards)
        except TrainingError as error:
            self.refused.append(f"{run.name}: {error}")
            self._say(f"{run.name}: {error}")
            return False
        self.clock.note(estimate, time.perf_counter() - begun)
        self._say(f"{run.name}: trained {record['tokens']:,} tokens in {minutes(record['seconds'])}")
        return True

    def _measure(self, bench: Bench, run: Run) -> None:
        left = self.unmeasured(run)
        if not left:
            return
        folder = self.work.head_folder(run)
        loaded = load_trained(folder, bench.target, self.plan.model, self.plan.packages)
        for load, sets in left:
            estimate = self._measuring_seconds(load, len(sets))
            if not self._has_room(bench, estimate):
                return
            bench.measure_plain(load, sets)
            begun = time.perf_counter()
            for outcome in bench.measure(run, loaded, load, sets):
                self._tell(outcome)
            self.clock.note(estimate, time.perf_counter() - begun)

    def _tell(self, outcome: Outcome) -> None:
        record, load = outcome.record, outcome.load
        about = f"{outcome.run.name}, {load.name(outcome.prompt_set)}"
        if outcome.refused is not None:
            self.refused.append(f"{about}: {outcome.refused}")
            self._say(f"{about}: refused, {outcome.refused}")
            return
        length = record["acceptance_length"]
        tokens = "nothing drafted" if length is None else f"{length:.2f} tokens a step"
        self._say(f"{about}: {tokens}, {record['speedup']:.2f} x plain, {record['verdict']}")

    def _bench(self) -> Bench:
        plan = self.plan
        dtype = dtype_of(plan.dtype, self.device)
        target = Target.load(plan.model, device=self.device, dtype=dtype, max_length=plan.max_length)
        self.work.check_begun({"target": target.fingerprint()["weights"]["values"], "prompts": {}})
        prompts = {
            name: read_prompts(path, target, plan.model, limit=plan.num_prompts) for name, path in plan.prompts.items()
        }
        check_draft_length(max(k for head in plan.heads for k in plan.draft_tokens(head)), target)
        return Bench(plan, self.work, target, prompts)

    def _print_plan(self, bench: Bench | None, trainings: list[Run], measuring: list[Run]) -> None:
        """The time plan, from what this machine does in a few seconds."""
        kind = torch.bfloat16 if self.device.type == "cuda" and self.plan.dtype != "float32" else torch.float32
        speed = product_speed(self.device, kind) if trainings else 1.0
        for run in trainings:
            parts = assembled(self.plan, run, self.shards, self.work)
            budget = budget_of(self.plan, run, self.shards)
            self.estimates[run.name] = training_seconds(parts, budget, speed, self.device)
            print(
                f"train {run.name}: {budget.tokens:,} tokens, {budget.steps} steps, {budget.epochs} epochs, about "
                f"{minutes(self.estimates[run.name])}"
            )
        total = sum(self.estimates.values())
        if bench is not None:
            self.step_seconds = bench.step_seconds(min(self.plan.batch_sizes))
            for run in measuring:
                left = self.unmeasured(run)
                seconds = sum(self._measuring_seconds(load, len(sets)) for load, sets in left)
                total += seconds
                print(f"measure {run.name}: {sum(len(s) for _, s in left)} measurements, about {minutes(seconds)}")
            loads = len(self.plan.temperatures) * len(self.plan.prompts)
            plain = (FIRST_RUNS + 1) * loads * sum(map(self._plain_seconds, self.plan.batch_sizes))
            total += plain
            print(f"plain decoding, {FIRST_RUNS + 1} times: about {minutes(plain)}")
        limit = "" if self.plan.time_limit is None else f", of which this call takes {minutes(self.plan.time_limit)}"
        print(f"in all about {minutes(total)}{limit}", flush=True)

    def _measuring_seconds(self, load: Load, num_sets: int) -> float:
        return START_SECONDS[self.device.type] + DRAFTING_COST * num_sets * self._plain_seconds(load.batch_size)

    def _plain_seconds(self, batch_size: int) -> float:
        steps = -(-self.plan.num_prompts // batch_size) * self.plan.max_new_tokens
        return steps * self.step_seconds

    def _has_room(self, bench: Bench | None, estimate: float) -> bool:
        """Whether a piece fits before the last plain runs; else this call stops."""
        closing = 0.0 if bench is None else bench.plain_again_seconds
        self.stopped = not self.clock.has_room(estimate, closing)
        return not self.stopped

    def _is_asked(self, run: Run) -> bool:
        return self.plan.only is None or run.head.label in self.plan.only

    def _is_needed(self, run: Run) -> bool:
        if self._is_asked(run) and run.head.measured:
            return True
        return any(
            self.plan.starts_from(other) == run and self.work.trained(other) is None for other in self.plan.runs()
        )

    def _say(self, text: str) -> None:
        print(f"[{minutes(self.clock.seconds)}] {text}", flush=True)


SETTINGS = (
    "token_budget",
    "sequence_length",
    "rows_a_step",
    "num_draft_tokens",
    "more_draft_tokens",
    "batch_sizes",
    "temperatures",
    "num_prompts",
    "max_new_tokens",
    "seed",
    "dtype",
)
