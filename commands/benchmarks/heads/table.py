"""The table: every finished piece of a work folder as one JSON record and as Markdown."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..record import Check, Record
from .plan import Head, Plan, Run
from .work import Load, Work

LENGTHS = "acceptance_length"


def fill(record: Record, plan: Plan, work: Work) -> None:
    """Adds a row a head and number of draft tokens; raises BenchError where a stored measurement had not passed."""
    calls: dict[str, Any] = {}
    missing: list[str] = []
    for head in plan.heads:
        trained = {seed: found for seed in head.seeds if (found := work.trained(Run(head, seed))) is not None}
        for seed in head.seeds:
            if seed not in trained:
                missing.append(f"{Run(head, seed).name}: training")
        if not head.measured:
            continue
        for k in plan.draft_tokens(head):
            cells, checks = [], []
            seeds = {seed: record for seed, record in trained.items() if k in plan.draft_tokens(head, seed)}
            for load, name in loads_and_sets(plan, head, k):
                found = {seed: m for seed in seeds if (m := work.measured(Run(head, seed), load, name)) is not None}
                missing += [f"{Run(head, seed).name}: {load.name(name)}" for seed in seeds if seed not in found]
                if not found:
                    continue
                for seed, measured in found.items():
                    calls.setdefault(measured["call"], work.plain(measured["call"]) or {})
                    passed = bool(measured["lossless"]["passed"])
                    checks.append(Check(f"{load.name(name)} seed {seed}", passed, measured["verdict"]))
                cells.append(_cell(load, name, list(found.values()), calls))
            if cells:
                record.add({**_training_row(head, k, list(seeds.values())), "measurements": cells}, checks)
    plain = [{"call": call, **run} for call, found in sorted(calls.items()) for run in found.get("runs", {}).values()]
    about = {call: {key: value for key, value in found.items() if key != "runs"} for call, found in calls.items()}
    record.facts = {"calls": about, "plain": plain, "missing": missing}
    record.write()


def loads_and_sets(plan: Plan, head: Head, num_draft_tokens: int) -> Iterable[tuple[Load, str]]:
    """Every measurement of a row; `more_draft_tokens` are for acceptance, which the largest batch shows soonest."""
    for batch_size in plan.batch_sizes if num_draft_tokens in plan.num_draft_tokens else plan.batch_sizes[-1:]:
        for temperature in plan.temperatures:
            for name in plan.prompts:
                yield Load(num_draft_tokens, batch_size, temperature), name


def markdown(record: Mapping[str, Any]) -> str:
    """The record's tables, to be pasted into a page."""
    rows = record["results"]
    lines = [_heading(record), ""]
    lines += _training_table(rows)
    cells = [(row, cell) for row in rows for cell in row["measurements"]]
    for temperature in sorted({cell["temperature"] for _, cell in cells}):
        for name in dict.fromkeys(cell["prompt_set"] for _, cell in cells):
            chosen = [
                (row, [c for c in row["measurements"] if (c["prompt_set"], c["temperature"]) == (name, temperature)])
                for row in rows
            ]
            lines += ["", f"### {name}, temperature {temperature:g}", ""]
            lines += _measured_table([(row, found) for row, found in chosen if found], record["plain"])
    if record["missing"]:
        lines += ["", f"Not run yet: {len(record['missing'])} pieces, the first {record['missing'][0]}."]
    if record["refused"]:
        lines += ["", f"Refused: {record['refused']}."]
    return "\n".join(lines) + "\n"


def _training_row(head: Head, k: int, trained: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = trained[0]
    starts = {record["starts_from"] for record in trained}
    return {
        "head": head.label,
        "recipe": head.recipe,
        "num_draft_tokens": k,
        "seeds": [record["seed"] for record in trained],
        "parameters_trained": first["parameters"]["trained"],
        "parameters_stored": first["parameters"]["stored"],
        "trained_tokens": first["tokens"],
        "optimizer_steps": first["steps"],
        "starts_from": None if starts == {None} else sorted(filter(None, starts)),
        "training_tokens_per_second": _over_seeds(record["tokens_per_second"] for record in trained),
        "peak_memory_bytes": _over_seeds(record["peak_memory_bytes"] for record in trained),
        "predicted_acceptance_length": _over_seeds(record["predicted_acceptance_length"] for record in trained),
    }


def _cell(load: Load, name: str, found: Sequence[Mapping[str, Any]], calls: Mapping[str, Any]) -> dict[str, Any]:
    """One measurement over its seeds; speed-ups are each within the call that measured them."""
    speedups, floors = [], []
    for measured in found:
        run = calls[measured["call"]].get("runs", {}).get(f"{name} b{load.batch_size} t{load.temperature:g}")
        rates = run["tokens_per_second"] if run else [measured["baseline_tokens_per_second"]]
        mean = statistics.fmean(rates)
        speedups.append(measured["tokens_per_second"] / mean)
        floors.append((max(rates) - min(rates)) / mean if run else measured["noise_floor"])
    return {
        "prompt_set": name,
        "temperature": load.temperature,
        "batch_size": load.batch_size,
        "num_prompts": found[0]["num_prompts"],
        LENGTHS: _over_seeds(m[LENGTHS] for m in found),
        "acceptance_by_position": _by_position([m["acceptance_by_position"] for m in found]),
        "break_even_acceptance_length": _over_seeds(m["break_even_acceptance_length"] for m in found),
        "tokens_per_second": _over_seeds(m["tokens_per_second"] for m in found),
        "speedup": _over_seeds(speedups),
        "noise_floor": max(floors),
        "lossless": [m["verdict"] for m in found],
        "calls": sorted({m["call"] for m in found}),
    }


def _over_seeds(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and ends; None where a value is not known."""
    found = list(values)
    if not found or any(value is None for value in found):
        return None
    known = [value for value in found if value is not None]
    return {"mean": statistics.fmean(known), "min": min(known), "max": max(known)}


def _by_position(rates: Sequence[Sequence[float] | None]) -> list[float] | None:
    known = [some for some in rates if some is not None]
    if len(known) < len(rates) or not known:
        return None
    return [statistics.fmean(column) for column in zip(*known, strict=False)]


def _heading(record: Mapping[str, Any]) -> str:
    machines = {call["environment"]["hardware"] for call in record["calls"].values() if "environment" in call}
    settings = record["settings"]
    facts = [
        f"{record['date']}, {', '.join(sorted(machines)) or record['environment']['hardware']}",
        f"target {settings['model']}",
        f"{settings['token_budget']:,} tokens in rows of {settings['sequence_length']}",
        f"{settings['num_prompts']} prompts a set, {settings['max_new_tokens']} new tokens",
        f"ratios within a call, {len(record['calls'])} in all",
    ]
    note = f" {record['note']}." if record["note"] else ""
    return f"{'; '.join(facts)}.{note} With several seeds: mean ± half the distance of the ends."


def _training_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    titles = ("head", "trained / stored parameters", "tokens", "steps", "tokens/s", "peak memory", "predicted length")
    lines = _titles(titles)
    # the first row of a head has all its seeds, rows of more draft tokens may have fewer
    for head in dict.fromkeys(row["head"] for row in rows):
        row = next(row for row in rows if row["head"] == head)
        memory = row["peak_memory_bytes"]
        start = f" (from {', '.join(row['starts_from'])})" if row["starts_from"] else ""
        cells = (
            row["head"] + start,
            f"{row['parameters_trained'] / 1e6:.1f} M / {row['parameters_stored'] / 1e6:.1f} M",
            f"{row['trained_tokens']:,}",
            str(row["optimizer_steps"]),
            _spread(row["training_tokens_per_second"], ",.0f"),
            "-" if memory is None else f"{memory['max'] / 2**30:.2f} GiB",
            _spread(row["predicted_acceptance_length"], ".3f"),
        )
        lines.append(_line(cells))
    return lines


def _measured_table(
    rows: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]], plain: Sequence[Mapping[str, Any]]
) -> list[str]:
    """A line a head and k, a pair of columns a batch size; plain decoding first."""
    first = rows[0][1][0]
    name, temperature = first["prompt_set"], first["temperature"]
    batches = sorted({cell["batch_size"] for _, cells in rows for cell in cells})
    titles = ["head", "k", "acceptance length", "by position", *(f"tokens/s, batch {b} (speed-up)" for b in batches)]
    lines = _titles([*titles, "lossless"])
    runs = {b: [r for r in plain if (r["prompt_set"], r["temperature"], r["batch_size"]) == (name, temperature, b)]
            for b in batches}  # fmt: skip
    lines.append(_line(["plain", "0", "1", "", *(_plain_cell(runs[b]) for b in batches), ""]))
    for row, cells in rows:
        by_batch = {cell["batch_size"]: cell for cell in cells}
        rates = cells[0]["acceptance_by_position"] or ()
        speeds = [_speed_cell(by_batch.get(batch)) for batch in batches]
        verdicts = "; ".join(dict.fromkeys(text for cell in cells for text in cell["lossless"]))
        lines.append(
            _line(
                [
                    row["head"],
                    str(row["num_draft_tokens"]),
                    _spread(cells[0][LENGTHS], ".2f"),
                    " ".join(f"{rate:.2f}".removeprefix("0") for rate in rates),
                    *speeds,
                    verdicts,
                ]
            )
        )
    return lines


def _plain_cell(runs: Sequence[Mapping[str, Any]]) -> str:
    """Tokens/s of each call, and the widest noise floor."""
    if not runs:
        return "-"
    means = [statistics.fmean(run["tokens_per_second"]) for run in runs]
    noise = max(
        (max(run["tokens_per_second"]) - min(run["tokens_per_second"])) / mean
        for run, mean in zip(runs, means, strict=True)
    )
    return f"{' / '.join(f'{mean:,.0f}' for mean in means)} (noise {100 * noise:.1f} %)"


def _speed_cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    return f"{_spread(cell['tokens_per_second'], ',.0f')} ({_spread(cell['speedup'], '.2f')} x)"


def _spread(value: Mapping[str, float] | None, form: str) -> str:
    if value is None:
        return "-"
    half = (value["max"] - value["min"]) / 2
    return f"{value['mean']:{form}}" + (f" ± {half:{form}}" if half else "")


def _titles(titles: Sequence[str]) -> list[str]:
    return [_line(titles), "|" + "---|" * len(titles)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
