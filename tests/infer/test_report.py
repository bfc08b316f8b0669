"""The record, the table and the page."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from spectrain.infer.losslessness import Losslessness
from spectrain.infer.report import MethodResult, advice, print_table, report_json, verdict, write_json
from spectrain.infer.report_page import page

LOSSLESS = Losslessness(
    mode="greedy",
    passed=True,
    checked=10,
    equal=9,
    divergences=1,
    excused=1,
    p_value=None,
    num_tokens=640,
    reason="",
)
RESULT = MethodResult(
    method="eagle3",
    prompt_set="mt_bench",
    num_draft_tokens=3,
    temperature=0.0,
    batch_size=1,
    num_prompts=10,
    output_tokens=640,
    acceptance_length=2.2,
    acceptance_length_kept=2.1,
    tokens_per_step=2.15,
    acceptance_by_position=[0.7, 0.35, 0.15],
    conditional_acceptance_by_position=[0.7, 0.5, None],
    draft_acceptance_rate=0.4,
    tokens_per_second=150.0,
    baseline_tokens_per_second=100.0,
    speedup=1.5,
    draft_ms=2.0,
    verify_ms=11.0,
    decode_ms=10.0,
    break_even_acceptance_length=1.3,
    best_k=2,
    predicted_speedup_by_k=[1.4, 1.6, 1.5],
    noise_floor=0.02,
    lossless=LOSSLESS,
)
PLAIN = dataclasses.replace(
    RESULT,
    method="none",
    num_draft_tokens=0,
    acceptance_length=None,
    acceptance_length_kept=None,
    tokens_per_step=1.0,
    acceptance_by_position=None,
    conditional_acceptance_by_position=None,
    draft_acceptance_rate=None,
    draft_ms=None,
    verify_ms=None,
    break_even_acceptance_length=None,
    best_k=None,
    predicted_speedup_by_k=None,
)
KEYS = {
    "method",
    "num_draft_tokens",
    "temperature",
    "batch_size",
    "num_prompts",
    "output_tokens",
    "acceptance_length",
    "acceptance_length_kept",
    "tokens_per_step",
    "acceptance_by_position",
    "draft_acceptance_rate",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "draft_ms",
    "verify_ms",
    "break_even_acceptance_length",
    "best_k",
    "noise_floor",
    "lossless",
}
SETTINGS = {"model": "smol<lm>", "seed": 0}


def test_one_result_lies_at_the_top_level() -> None:
    report = report_json([RESULT], SETTINGS, {"torch": "2"})
    assert set(report) >= KEYS | {"settings", "environment", "definitions"}
    assert "results" not in report
    assert set(report["lossless"]) >= {"mode", "passed", "checked", "equal", "divergences", "excused", "p_value"}


def test_several_results_are_a_list() -> None:
    report = report_json([RESULT, PLAIN], SETTINGS, {})
    assert [record["method"] for record in report["results"]] == ["eagle3", "none"]
    assert all(set(record) >= KEYS for record in report["results"])
    assert not KEYS & set(report)


def test_json_round_trips_and_refuses_what_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, report_json([PLAIN], SETTINGS, {}))
    loaded = json.loads(path.read_text())
    assert loaded["acceptance_length"] is None and loaded["tokens_per_step"] == 1.0
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"speedup": float("nan")})


def test_every_figure_without_an_obvious_meaning_is_defined() -> None:
    definitions = report_json([RESULT], {}, {})["definitions"]
    assert "accepted draft tokens / drafts" in definitions["acceptance_length"]
    assert set(definitions) <= set(report_json([RESULT], {}, {}))


def test_verdict_names_prompts_or_p_and_n() -> None:
    assert verdict(RESULT) == "passed: 9/10 prompts equal, 1 differ by rounding"
    sampled = dataclasses.replace(LOSSLESS, mode="sampled", passed=False, p_value=3e-7, reason="wrong law")
    text = verdict(dataclasses.replace(RESULT, lossless=sampled))
    assert text == "FAILED: KS p = 3e-07, n = 640; wrong law"


def test_advice_is_plain_about_a_draft_that_does_not_pay() -> None:
    assert "does not pay" in advice(dataclasses.replace(RESULT, best_k=0, speedup=0.8))
    assert "--num-draft-tokens 2" in advice(RESULT)
    assert "beyond noise" in advice(dataclasses.replace(RESULT, speedup=1.01, best_k=3))
    assert "nothing was drafted" in advice(PLAIN)


def test_table_shows_every_figure_and_a_ratio_below_one(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([dataclasses.replace(RESULT, speedup=0.27)])
    shown = capsys.readouterr().out
    for text in ("2.20", "0.700 0.350 0.150", "0.700 0.500 -", "0.27x", "1.30", "9/10 prompts equal"):
        assert text in shown


class Links(HTMLParser):
    """Collects what a page would load, and checks that tags close."""

    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("results", [[RESULT], [PLAIN], [RESULT, PLAIN]], ids=["drafted", "plain", "both"])
def test_page_is_self_contained_and_well_formed(results: list[MethodResult]) -> None:
    text = page(results, SETTINGS, {"torch": "2"})
    reader = Links()
    reader.feed(text)
    assert reader.loads == [] and reader.open == []
    assert not re.search(r"https?:|@import|url\(", text)
    assert "<script" not in text
    assert "smol&lt;lm&gt;" in text and "smol<lm>" not in text


def test_page_plots_what_was_measured() -> None:
    text = page([RESULT], SETTINGS, {})
    assert text.count("<svg") == 4
    assert page([PLAIN], SETTINGS, {}).count("<svg") == 1
    assert "prefers-color-scheme: dark" in text


def test_bars_are_as_high_as_their_values() -> None:
    from spectrain.infer.report_page import BOTTOM, HEIGHT, TOP, Bar, bar_plot

    svg = bar_plot([Bar("a", [(0.5, "red"), (0.25, "blue")], "x"), Bar("b", [(1.0, "red")], "y")], largest=1.0)
    heights = [float(h) for h in re.findall(r'<rect [^>]*height="([\d.]+)"', svg)]
    room = HEIGHT - BOTTOM - TOP
    assert heights == pytest.approx([0.5 * room, 0.25 * room, room], abs=0.06)
