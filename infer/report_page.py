"""The report as one self-contained HTML page: tables, and plots as inline SVG. It loads nothing from anywhere."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from .report import DEFINITIONS, MethodResult, advice, table_rows, verdict

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #6a7078; --line: #dfe2e6; --page: #ffffff; --panel: #f6f7f8;
  --first: #2f6f9f; --second: #c98a2b; --bad: #b3402f; --good: #33784a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6e9; --soft: #9aa1a9; --line: #34383d; --page: #17191b;
  --panel: #1f2225; --first: #6fa9d3; --second: #ddae62; --bad: #e0806f; --good: #74bd8c; } }
body { margin: 0 auto; max-width: 62rem; padding: 2.5rem 1.5rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem; }
p.soft, .soft { color: var(--soft); } .good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
.figures { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0; }
.figure { background: var(--panel); border-radius: 6px; padding: .75rem 1rem; min-width: 8.5rem; flex: 1; }
.figure b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 1rem; }
.plot { background: var(--panel); border-radius: 6px; padding: .75rem 1rem; }
.plot h3 { font-size: .9rem; font-weight: 600; margin: 0 0 .5rem; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; } svg .axis { stroke: var(--line); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td:first-child { color: var(--soft); white-space: pre; }
details { margin-top: 1rem; } summary { cursor: pointer; color: var(--soft); }
"""

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 380, 170, 42, 24, 14


class Bar(NamedTuple):
    """One column of a bar plot: a label and stacked (value, colour) parts."""

    label: str
    parts: list[tuple[float, str]]
    text: str


def page(results: Sequence[MethodResult], settings: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """The whole document."""
    sections = "\n".join(_section(result) for result in results)
    facts = [(str(k), str(v)) for k, v in {**settings, **environment}.items()]
    title = f"spectrain eval: {', '.join(dict.fromkeys(result.method for result in results))}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p class="soft">{escape(str(settings.get("model", "")))}</p>
{_comparison(results) if len(results) > 1 else ""}
{sections}
<h2>How it was measured</h2>
{_table(facts)}
<details><summary>What each figure means</summary>{_table(list(DEFINITIONS.items()))}</details>
</body></html>
"""


def _comparison(results: Sequence[MethodResult]) -> str:
    """The figures that methods are chosen by, side by side."""
    bars = [Bar(result.method, [(result.speedup, "var(--first)")], f"{result.speedup:.2f}") for result in results]
    heads = ("method", "prompts", "acceptance length", "tokens per step", "speed-up", "draft + verify", "lossless")
    rows = [
        (
            result.method,
            result.prompt_set,
            _figure(result.acceptance_length),
            _figure(result.tokens_per_step),
            f"{result.speedup:.2f}x",
            f"{_figure(result.draft_ms)} + {_figure(result.verify_ms)} ms",
            verdict(result),
        )
        for result in results
    ]
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    plot = f'<div class="plot"><h3>Speed-up</h3>{bar_plot(bars, mark=1.0)}</div>' if len(bars) <= 8 else ""
    return f"""<h2>Side by side</h2>
<div class="scroll"><table><tr>{head}</tr>{body}</table></div>
{plot}"""


def _section(result: MethodResult) -> str:
    tone = "good" if result.lossless.passed else "bad"
    figures = [
        ("acceptance length", _figure(result.acceptance_length)),
        ("speed-up", f"{result.speedup:.2f}x"),
        ("tokens/s", f"{result.tokens_per_second:.0f}"),
        ("break-even length", _figure(result.break_even_acceptance_length)),
        ("best k", "none" if result.best_k is None else str(result.best_k)),
    ]
    tiles = "".join(
        f'<div class="figure"><b>{escape(v)}</b><span class="soft">{escape(n)}</span></div>' for n, v in figures
    )
    plots = "".join(f'<div class="plot"><h3>{escape(name)}</h3>{svg}</div>' for name, svg in _plots(result))
    return f"""<h2>{escape(result.method)} on {escape(result.prompt_set)}</h2>
<p>{escape(advice(result))}</p>
<p class="{tone}">Lossless: {escape(verdict(result))}</p>
<div class="figures">{tiles}</div>
<div class="plots">{plots}</div>
<details open><summary>All figures</summary>{_table(table_rows(result))}</details>"""


def _plots(result: MethodResult) -> list[tuple[str, str]]:
    plots = []
    if result.acceptance_by_position:
        bars = [
            Bar(str(i), [(rate, "var(--first)")], f"{rate:.2f}")
            for i, rate in enumerate(result.acceptance_by_position, 1)
        ]
        plots.append(("Share of drafts accepted up to a position", bar_plot(bars, largest=1.0)))
    bars = [
        Bar("plain", [(result.baseline_tokens_per_second, "var(--soft)")], f"{result.baseline_tokens_per_second:.0f}"),
        Bar(result.method, [(result.tokens_per_second, "var(--first)")], f"{result.tokens_per_second:.0f}"),
    ]
    plots.append(("Tokens a second", bar_plot(bars)))
    if result.draft_ms is not None and result.verify_ms is not None and result.decode_ms is not None:
        total = result.draft_ms + result.verify_ms
        parts = [(result.verify_ms, "var(--first)"), (result.draft_ms, "var(--second)")]
        bars = [
            Bar("plain step", [(result.decode_ms, "var(--soft)")], f"{result.decode_ms:.2f} ms"),
            Bar("verify + draft", parts, f"{result.verify_ms:.2f} + {result.draft_ms:.2f} ms"),
        ]
        plots.append((f"Time of a step ({total / result.decode_ms:.2f} plain steps)", bar_plot(bars)))
    if result.predicted_speedup_by_k:
        bars = [Bar(str(k), [(s, "var(--first)")], f"{s:.2f}") for k, s in enumerate(result.predicted_speedup_by_k, 1)]
        plots.append(("Predicted speed-up by draft tokens", bar_plot(bars, mark=1.0)))
    return plots


def bar_plot(bars: Sequence[Bar], *, largest: float | None = None, mark: float | None = None) -> str:
    """Stacked bars with their values written above; `mark` draws a dashed level."""
    sums = [sum(value for value, _ in bar.parts) for bar in bars]
    top = largest or max([*sums, mark or 0.0]) * 1.08 or 1.0
    floor, room = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    slot = (WIDTH - LEFT) / len(bars)
    width = min(slot * 0.6, 72)
    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for share in (0.0, 0.5, 1.0):
        y = floor - share * room
        out += [_line(y, 'class="axis"'), _text(LEFT - 5, y + 4, f"{top * share:.3g}", "end")]
    for i, (bar, total) in enumerate(zip(bars, sums, strict=True)):
        middle, y = LEFT + slot * (i + 0.5), float(floor)
        for value, colour in bar.parts:
            height = room * value / top
            y -= height
            place = f'x="{middle - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
            out.append(f'<rect {place} fill="{colour}"/>')
        out += [_text(middle, floor - room * total / top - 4, bar.text), _text(middle, HEIGHT - 8, bar.label)]
    if mark is not None:
        out.append(_line(floor - room * mark / top, 'stroke="var(--soft)" stroke-dasharray="4 3"'))
    return "".join([*out, "</svg>"])


def _line(y: float, look: str) -> str:
    return f'<line {look} x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f'<div class="scroll"><table>{cells}</table></div>'


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"
