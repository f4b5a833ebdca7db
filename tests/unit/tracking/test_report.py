from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from caldera.errors import DataError
from caldera.tracking import write_jsonl_atomic, write_report
from caldera.tracking.report import (
    phase_times,
    read_metrics,
    read_validation_answers,
    validation_keys,
)

ACCURACY = "val-core/openai/gsm8k/acc/mean@1"


def metric_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"step": 0, "data": {ACCURACY: 0.125, "timing_s/testing": 9.0}}]
    for step in range(1, 5):
        timings = {"gen": 5.0, "reward": 1.0, "update_actor": 2.0, "step": 10.0}
        data = {f"timing_s/{name}": seconds for name, seconds in timings.items()}
        data |= {"critic/score/mean": step / 10, "perf/total_num_tokens": 12340}
        rows.append({"step": step, "data": data})
    rows[4]["data"]["timing_s/testing"] = 1.0
    rows.append({"step": 4, "data": {ACCURACY: 0.625}})  # validation, logged apart
    return rows


def dump_row(prompt: str, output: str, score: float, **extras: Any) -> dict[str, Any]:
    return {"input": prompt, "output": output, "gts": "42", "score": score, "step": 0} | extras


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    write_jsonl_atomic(run / "metrics.jsonl", metric_rows())
    (run / "config.yaml").write_text("trainer:\n  project_name: <b>bold</b>\n")
    before = [
        dump_row("same & unchanged", "same", 0.0),
        dump_row("only before", "gone", 0.0),
        dump_row("other words", "one", 1.0),
        dump_row("<script>alert(1)</script>", "</pre><b>wrong", 0.0),
    ]
    after = [
        dump_row("<script>alert(1)</script>", "right & proper", 1.0),
        dump_row("other words", "two", 1.0),
        dump_row("same & unchanged", "same", 0.0),
    ]
    write_jsonl_atomic(run / "validation" / "0.jsonl", before)
    write_jsonl_atomic(run / "validation" / "2.jsonl", [dump_row("x", "y", 0.0)])
    write_jsonl_atomic(run / "validation" / "10.jsonl", after)
    (run / "validation" / "notes.jsonl").write_text("not a dump")
    return run


def report(run: Path, title: str = "A run", **arguments: Any) -> str:
    out = run.parent / "out" / "report.html"
    write_report(run, out, title, **arguments)
    return out.read_text(encoding="utf-8")


class Outline(HTMLParser):
    """Checks that tags nest and collects what could reach outside the file."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.references += [f"{tag} {k}={v}" for k, v in attrs if k in {"src", "href"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_headline_numbers(run_dir: Path) -> None:
    page = report(run_dir)
    assert "12.5% → 62.5%" in page
    assert "+50.0 points · openai/gsm8k, steps 0 to 4" in page
    assert '<p class="value">40.0 s</p><p class="detail">10 s a step</p>' in page
    assert '<p class="value">1,234</p>' in page  # 4 * 12,340 tokens in 40 s


def test_page_is_well_formed_and_needs_nothing_else(run_dir: Path) -> None:
    page = report(run_dir)
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    assert outline.references == [] and "link" not in outline.seen
    assert "http" not in page and "@import" not in page and "url(" not in page
    charts = page.split("<figure>")[1:]
    assert len(charts) == 2  # validation accuracy and training reward
    for chart in charts:
        ElementTree.fromstring(chart.split("</figure>")[0])
    assert "Not logged by this run: actor/entropy, response_length/mean, actor/grad_norm." in page


def test_everything_is_escaped(run_dir: Path) -> None:
    page = report(run_dir, title="<i>Title</i> & $more")
    assert "&lt;i&gt;Title&lt;/i&gt; &amp; $more" in page and "<i>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "<script>alert" not in page
    assert "&lt;/pre&gt;&lt;b&gt;wrong" in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in page and "<b>" not in page


def test_answers_that_changed_come_first(run_dir: Path) -> None:
    page = report(run_dir)
    summary = "Of 3 responses, 1 scored higher at step 10 than at step 0, 0 lower and 2 the same."
    assert summary in page
    prompts = ["&lt;script&gt;alert", "other words", "same &amp; unchanged"]
    places = [page.index(f'<pre class="prompt">{prompt}') for prompt in prompts]
    assert places == sorted(places)
    assert "only before" not in page
    assert '<span class="mark">✗ 0</span></p><pre>&lt;/pre&gt;&lt;b&gt;wrong</pre>' in page
    assert '<span class="mark">✓ 1</span></p><pre>right &amp; proper</pre>' in page


def test_repeated_prompts_are_matched_in_order_and_judged_by_acc(tmp_path: Path) -> None:
    first = [dump_row("p", "a", 0.1, acc=0.0), dump_row("p", "b", 0.1, acc=0.0)]
    last = [dump_row("p", "c", 0.2, acc=True), dump_row("p", "d", 0.1, acc=False)]
    write_jsonl_atomic(tmp_path / "5.jsonl", first)
    write_jsonl_atomic(tmp_path / "10.jsonl", last)
    answers = read_validation_answers(tmp_path)
    assert answers is not None and (answers.first_step, answers.last_step) == (5, 10)
    assert [(p.before.text, p.after.text, p.after.correct) for p in answers.pairs] == [
        ("a", "c", True),
        ("b", "d", False),
    ]


def test_phase_times(run_dir: Path) -> None:
    times = {t.name: t for t in phase_times(read_metrics(run_dir / "metrics.jsonl"))}
    assert list(times) == ["gen", "reward", "update_actor", "testing", "other"]
    assert times["gen"].share == pytest.approx(20 / 41) and times["gen"].mean_seconds == 5.0
    # A validation is beside its step's time, the one before the first step belongs to none.
    assert (times["testing"].count, times["testing"].mean_seconds) == (1, 1.0)
    assert times["other"].share == pytest.approx(8 / 41)
    assert sum(t.share for t in times.values()) == pytest.approx(1.0)
    page = report(run_dir)
    assert '<span class="phase gen" style="width:48.780%"' in page
    assert "<td>4</td><td>5 s</td><td>48.8%</td>" in page


def test_phases_that_overlap_still_add_up_to_the_whole(tmp_path: Path) -> None:
    data = {"timing_s/gen": 3.0, "timing_s/reward": 1.0, "timing_s/step": 2.0}
    write_jsonl_atomic(tmp_path / "metrics.jsonl", [{"step": 1, "data": data}])
    shares = {t.name: t.share for t in phase_times(read_metrics(tmp_path / "metrics.jsonl"))}
    assert shares == {"gen": 0.75, "reward": 0.25, "other": 0.0}


def test_accuracy_is_preferred_to_reward_for_each_source(tmp_path: Path) -> None:
    data = {
        "val-core/a/reward/mean@4": 1.0,
        "val-core/a/acc/mean@4": 1.0,
        "val-core/b/reward/mean@1": 1.0,
        "val-core/b/reward/best@4/mean": 1.0,
        "val-aux/a/acc/mean@1": 1.0,
    }
    write_jsonl_atomic(tmp_path / "metrics.jsonl", [{"step": 0, "data": data}])
    keys = validation_keys(read_metrics(tmp_path / "metrics.jsonl"))
    assert keys == {"a": "val-core/a/acc/mean@4", "b": "val-core/b/reward/mean@1"}
    page = report(tmp_path)
    assert "Validation score" in page and "b, step 0 only" in page


def test_missing_pieces_are_explained(tmp_path: Path) -> None:
    run = tmp_path / "bare"
    write_jsonl_atomic(
        run / "metrics.jsonl", [{"step": 1, "data": {"actor/entropy": float("nan")}}]
    )
    page = report(run)
    for sentence in (
        "no validation was logged",
        "This run kept no validation responses.",
        "This run logged no timing_s/step",
        "This run left no config.yaml",
        "Not logged by this run: val-core/*, critic/score/mean, actor/entropy",
    ):
        assert sentence in page
    assert "nan" not in page.split("<body>")[1].split("<script>")[0]


def test_one_dump_or_no_common_prompt_is_explained(run_dir: Path, tmp_path: Path) -> None:
    dumps = tmp_path / "elsewhere"
    write_jsonl_atomic(dumps / "7.jsonl", [dump_row("p", "a", 0.0)])
    page = report(run_dir, validation_dir=dumps)
    assert "Only the validation of step 7 was kept" in page
    write_jsonl_atomic(dumps / "9.jsonl", [dump_row("q", "a", 0.0)])
    page = report(run_dir, validation_dir=dumps)
    assert "The validations of steps 7 and 9 have no prompt in common." in page


def test_a_missing_or_wrong_metrics_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl: no metrics file.*trainer\.logger"):
        report(tmp_path)
    write_jsonl_atomic(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    with pytest.raises(DataError, match="line 1 is not of the form"):
        report(tmp_path)
