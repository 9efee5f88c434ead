"""acc-lm report: what a page shows of a run, and that no file of a folder, whatever it holds, spoils or owns the page."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import html
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import run_training

from acc_lm.cli import main, report
from acc_lm.reporting.chart_svg import log_ticks, short, ticks
from acc_lm.reporting.report_html import as_page
from acc_lm.reporting.report_sections import report_of
from acc_lm.reporting.run_comparison import compare
from acc_lm.reporting.run_record import read_record
from acc_lm.run_files.charts import PIXEL_COLUMNS, Drawn, thin
from acc_lm.run_files.columns import MetricColumns
from acc_lm.run_files.curves import PALETTE
from acc_lm.run_files.names import ENVIRONMENT, METRICS, RECIPE, SAMPLES, SUMMARY
from acc_lm.run_files.output_dir import is_in_use

LEDGER = "ab" * 16
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m"
SECTIONS = (
    "Curves", "Evaluations", "Samples over time", "Text by source", "Time of a step", "Memory by phase",
    "Starts, resumes and backends", "Proof", "Recipe", "Environment",
)  # fmt: skip


def loss_at(step: int) -> float:
    return 2 + 3 / math.sqrt(step)


def write_run(
    folder: Path, num_steps: int = 60, loss: Callable[[int], float] = loss_at, name: str = "set", **recipe: Any
) -> Path:
    """A folder with the files of an ended run of a mixture, resumed after step 40 on two processes."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    for step in range(1, num_steps + 1):
        parts = {"data": 0.01, "waiting": 0.0, "communication": 0.02, "compute": 0.07}
        train = {
            "loss": loss(step), "grad_norm": 1.0, "learning_rate": 1e-3, "epoch": step / 30, "tokens": 100.0 * step,
            "tokens_per_second": 1000.0, "seconds_per_step": 0.1, "memory_gb": 0.5, "skipped_steps": 0.0,
            **{f"seconds_{part}": seconds for part, seconds in parts.items()},
            "tokens/prose": 75.0 * step, f"tokens/{name}": 25.0 * step,
        }  # fmt: skip
        lines.append({"step": step, **{f"train/{key}": value for key, value in train.items()}})
        if step % 20 == 0:
            values = {"loss": loss(step), "perplexity": 9.0, "token_accuracy": 0.25, "bits_per_byte": 2.5}
            lines.append(
                {"step": step, **{f"eval/{key}": value for key, value in values.items()}, f"eval/{name}/loss": 4.0}
            )
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = {"time": "2026-01-01T00:00:00+00:00", "device": "cpu", "precision": "float32", "threads": 1}
    first = {"step": 0, "strategy": "single", "engine": "Model", "num_processes": 1, **start}
    second = {
        "step": 40, "strategy": "ddp", "engine": "Wrapped", "num_processes": 2, **start,
        "checkpoint": "/elsewhere/step-00000040", "checked": "checked in 0.1 s", "ledger": "cd" * 16,
    }  # fmt: skip
    environment = {
        "strategy": "ddp", "engine": "Wrapped", "num_processes": 2, "precision": "float32", "placement": "complete",
        "num_parameters": 1000, "parameters_per_process": [1000, 1000], "versions": {"torch": "2.0"},
        "launch_command": ["accelerate", "launch", "train.py"], "notes": [name], "starts": [first, second],
    }  # fmt: skip
    (folder / ENVIRONMENT).write_text(json.dumps(environment))
    summary = {
        "status": "completed", "exit_code": 0, "attempt": 2, "reason": None, "time": "2026-01-01T00:10:00+00:00",
        "step": num_steps, "num_steps": num_steps, "ledger": LEDGER, "seconds_held_by_saving": 1.5,
        "bits_per_byte": {"model": 2.5, "gzip": 2.25, "xz": 1.75},
        "peak_memory_gb_by_phase": [{"model built": 0.25, "later steps": 0.5}, {"model built": 0.25, "later steps": 0.75}],
        "sources": {"prose": {"tokens": 1, "passes": 0.5}},
    }  # fmt: skip
    (folder / SUMMARY).write_text(json.dumps(summary))
    keys = {
        "seed": 1,
        "training": {"max_steps": num_steps, "log_every": 1},
        "optimizer": {"name": "adamw"},
        "data": {"mixture": [{"weight": 3, "files": []}]},
    } | recipe
    (folder / RECIPE).write_text(json.dumps(keys))  # YAML, too
    samples = [{"step": step, "prompt": "Once", "text": f" upon {step}"} for step in (20, 40, 60)]
    (folder / SAMPLES).write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


def page_of(folder: Path) -> str:
    return as_page(report_of(read_record(folder)))


class Seen(HTMLParser):
    """Elements and visible text of a page, by section; fails at markup that a browser would have to repair."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self._texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == ["html"]
        found = re.split("\x00(.*?)\x00", "".join(self._texts))
        self.sections = dict(zip(["", *found[1::2]], found[0::2], strict=True))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self._open.append(tag)
        if tag == "h2":
            self._texts.append("\x00")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "h2":
            self._texts.append("\x00")

    def handle_data(self, data: str) -> None:
        if self._open[-1:] not in (["script"], ["style"]):
            self._texts.append(f"{data} " if self._open[-1:] != ["h2"] else data)


# --- one run ---------------------------------------------------------------------------------------------------------


def test_a_page_shows_everything_that_a_run_wrote(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    shutil.copy(Path(__file__).parents[2] / "docs/promises/parity.json", run / "parity.json")
    seen = Seen(page_of(run))
    assert tuple(seen.sections) == ("", *SECTIONS)
    text = {title: " ".join(words.split()) for title, words in seen.sections.items()}
    for shown in ("completed", "60 of 60", "6,000", "2.3873", "2.5000", "gzip -9 2.2500", "xz -9 1.7500", "0:06"):
        assert shown in text[""], shown
    titles = (
        "Training loss",
        "Evaluation loss",
        "Held-out text, compressed",
        "Learning rate",
        "Gradient norm",
        "Speed",
    )
    assert all(title in text["Curves"] for title in (*titles, "Time of a step", "Peak memory"))
    assert "xz 1.75" in text["Curves"]
    assert "ddp x2" in text["Curves"], "a change of the backend is a mark with its name"
    assert "set 4.0000 4.0000 at step 20" in text["Evaluations"]
    assert text["Samples over time"].startswith("step 60 Once → upon 60 2 earlier step 40")
    assert "prose 4,500 tokens, 75.0%, 0.5 passes" in text["Text by source"]
    assert "communication 20.0%, 0:01 of 0:06" in text["Time of a step"]
    assert "later steps 0.75 GB (least 0.50)" in text["Memory by phase"]
    assert "step 40 2026-01-01 00:00 UTC ddp x2 Wrapped" in text["Starts, resumes and backends"]
    assert f"ledger {LEDGER} of step 60" in text["Proof"]
    assert "from /elsewhere/step-00000040, checked in 0.1 s before it was loaded" in text["Proof"]
    assert "fsdp2 x2 FSDPLlamaForCausalLM" in text["Proof"], "the parity table in the run's folder"
    assert "training.log_every 1 10" in text["Recipe"]
    assert "data.mixture.0.weight 3 null" in text["Recipe"].partition("all ")[0]
    assert "data.mixture.0.files" not in text["Recipe"].partition("all ")[0], "the default of a source's key"
    assert "optimizer.name adamw" not in text["Recipe"].partition("all ")[0], "a default is no change"
    assert "torch 2.0" in text["Environment"]
    assert "left out" not in str(text)
    assert "float64" not in page_of(run)
    assert len(page_of(run)) < 100_000


def test_a_page_loads_nothing_and_runs_one_script(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"))
    seen = Seen(page)
    assert [tag for tag, _ in seen.tags].count("script") == 1
    assert not [tag for tag, attributes in seen.tags if {"src", "xlink:href"} & attributes.keys()]
    links = [attributes["href"] for tag, attributes in seen.tags if "href" in attributes]
    assert all(link and link.startswith("#") for link in links)
    script = re.search("<script>(.*)</script>", page, re.DOTALL)
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    assert '<meta name=viewport content="width=device-width' in page


def test_no_text_of_a_run_becomes_markup_or_reveals_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "correct-horse-battery")
    run = write_run(tmp_path / HOSTILE.replace("/", "|"), name=HOSTILE, extra={HOSTILE: HOSTILE})
    for name in (SUMMARY, ENVIRONMENT):
        values = json.loads((run / name).read_text())
        changed = {"status": HOSTILE, "reason": HOSTILE} if name == SUMMARY else {"host": HOSTILE, "notes": [HOSTILE]}
        for start in values.get("starts", []):
            start |= {"strategy": HOSTILE, "engine": HOSTILE, "time": HOSTILE}
        (run / name).write_text(json.dumps(values | changed))
    sample = {"step": 60, "prompt": HOSTILE, "text": f"{HOSTILE} ``` hf_{'a' * 20} correct-horse-battery"}
    (run / SAMPLES).write_text(json.dumps(sample) + "\n")
    for page in (page_of(run), compared_page(run, run)):
        seen = Seen(page)
        assert [tag for tag, _ in seen.tags].count("script") == 1
        assert "img" not in dict(seen.tags)
        assert not [name for _, attributes in seen.tags for name in attributes if name.startswith("on")]
        assert page.count(html.escape("<script>alert(1)")) > 5
        assert "\x1b" not in page
    assert "correct-horse" not in page_of(run)
    assert "hf_aaaa" not in page_of(run)
    assert main(["report", str(run), "--output", str(tmp_path / "x.html"), "--markdown", str(tmp_path / "x.md")]) == 0
    text = (tmp_path / "x.md").read_text()
    outside = re.sub(r"^(```+)$.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "\\<script\\>" in outside
    assert "<script" not in outside.replace("\\<", "")
    assert "correct-horse" not in text
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def compared_page(first: Path, second: Path) -> str:
    from acc_lm.reporting.run_comparison import comparison_report

    return as_page(comparison_report([read_record(first), read_record(second)]))


DAMAGES: dict[str, bytes] = {
    "half": b'{"step": 1, "train/lo',
    "other": b"[1, 2]",
    "nested": b"[" * 100_000,
    "binary": bytes(range(256)) * 10,
    "empty": b"",
}


@pytest.mark.parametrize("damage", [*DAMAGES, "missing", "folder", "fifo"])
@pytest.mark.parametrize("name", [METRICS, SUMMARY, ENVIRONMENT, RECIPE, SAMPLES])
def test_a_damaged_or_missing_file_costs_its_own_sections_only(name: str, damage: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / name).unlink()
    if damage == "folder":
        (run / name).mkdir()
    elif damage == "fifo":
        os.mkfifo(run / name)
    elif damage in DAMAGES:
        (run / name).write_bytes(DAMAGES[damage])
    text = {title: " ".join(words.split()) for title, words in Seen(page_of(run)).sections.items()}
    lost = {
        METRICS: ("Curves", "Evaluations", "Text by source", "Time of a step"),
        SUMMARY: ("Memory by phase",),
        ENVIRONMENT: ("Starts, resumes and backends", "Environment"),
        RECIPE: ("Recipe",),
        SAMPLES: ("Samples over time",),
    }
    left_out = {title for title in SECTIONS if "left out: " in text[title]}
    assert left_out == {*lost[name]}
    assert "values that no run writes" not in str(text)
    # A missing samples.jsonl is that of a run without samples; an empty file of lines is that of a run without any yet.
    if (name, damage) not in {(SAMPLES, "missing"), (SAMPLES, "empty"), (METRICS, "empty")}:
        assert name in text[lost[name][0]] or name in text[""]


@pytest.mark.parametrize("value", [None, True, -1, 1e308, "x", [], [None], {}, {"a": {"b": [1]}}, 10**200])
def test_values_of_another_kind_never_break_a_page(value: object, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for name in (SUMMARY, ENVIRONMENT, RECIPE):
        (run / name).write_text(json.dumps(dict.fromkeys(json.loads((run / name).read_text()), value)))
    for name in (METRICS, SAMPLES):
        first = json.loads((run / name).read_text().splitlines()[0])
        with (run / name).open("a") as file:
            file.write(json.dumps(dict.fromkeys(first, value)) + "\n")
            file.write(json.dumps({key: 61 if key == "step" else value for key in first}) + "\n")
    assert tuple(Seen(page_of(run)).sections) == ("", *SECTIONS)
    Seen(compared_page(write_run(tmp_path / "other"), run))


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "runs/one")
    (run / "final").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / METRICS).write_text('{"step": 1, "loss": 2.0}\n')
    for folder, hint in {
        tmp_path / "missing": "(nothing there); name one like runs/quickstart",
        run / METRICS: f"(a file); name {run}",
        run / "final": f"in which no run wrote; name {run}",
        tmp_path / "runs": f"in which no run wrote; name one of those in it: {run}",
        tmp_path / "empty": "in which no run wrote; name one like runs/quickstart",
        tmp_path / "foreign": "in which no run wrote; name one like runs/quickstart",
    }.items():
        assert main(["report", str(folder)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith(f"error: RUN must be the folder of a run, got {folder}")
        assert lines[0].endswith(hint)
    assert main(["report", str(run), str(tmp_path / "runs/../runs/one")]) == 2
    assert "once, got one twice" in capsys.readouterr().err
    assert main(["report", str(run), "--output", str(run / METRICS / "page.html")]) == 2
    assert "page.html must be in a folder that can be written" in capsys.readouterr().err


def test_a_failed_and_a_killed_run_say_so_first(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=8, loss=lambda step: 10.0**step)
    summary = json.loads((run / SUMMARY).read_text())
    (run / SUMMARY).write_text(json.dumps(summary | {"status": "diverged", "exit_code": 6, "reason": "the loss must"}))
    (run / "nonfinite_step_9.json").write_text(json.dumps({"step": 9, "parameters": ["a.weight"]}))
    (run / "spike_step_7.json").write_text(json.dumps({"step": 7, "loss": 1e7, "median_before": 10.0}))
    page = page_of(run)
    assert "<p class=bad>diverged: the loss must</p>" in page
    assert "skipped: the gradient was not finite, first in a.weight" in page
    assert "loss spike: 10000000.0000, median before it 10.0000" in page
    assert "nats per target (logarithmic)" in page
    assert "<span class=bad>✗</span><span><b>numbers</b>" in page
    (run / ".lock").write_text("process 1 on host")
    assert "killed: the run left its lock" in page_of(run)


def test_a_real_run_proves_itself_and_its_repetition_is_the_same_run(tiny: list[str], tmp_path: Path) -> None:
    """Trained to step 4, resumed to step 6, compared with one that was not interrupted."""
    run = tmp_path / "run"
    sampled = ["tracking.sample_tokens=4", "schedule.name=constant_with_warmup", "training.log_every=1"]
    run_training([*tiny, *sampled, "training.max_steps=4"])
    run_training([*tiny, *sampled])
    page = page_of(run)
    assert "✗" not in page
    checks = re.findall(r"<span class=good>✓</span><span><b>(.*?)</b>", page)
    assert checks == [
        "engine",
        "record",
        "checkpoints",
        "text",
        "recipe",
        "ledger",
        "resume at step 4",
        "numbers",
        "final/",
    ]
    kept = json.loads((run / ENVIRONMENT).read_text())
    (run / ENVIRONMENT).write_text(json.dumps(kept | {"starts": [{**kept["starts"][1], "ledger": LEDGER}]}))
    assert "<span class=bad>✗</span><span><b>resume at step 4</b>" in page_of(run)
    (run / ENVIRONMENT).write_text(json.dumps(kept))
    run_training([*tiny, *sampled, f"output_dir={tmp_path / 'other'}"])
    found = compare(read_record(run), read_record(tmp_path / "other"))
    assert found.verdict == "the same run, equal in every digit over 6 logged steps"
    (next((run / "checkpoints").glob("step-*")) / "state.json").write_text("{}")
    assert "<span class=bad>✗</span><span><b>checkpoints</b>" in page_of(run)


# --- live and large --------------------------------------------------------------------------------------------------


@contextmanager
def held_lock(folder: Path, seconds: float, then: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Another process holds the lock of a run for a while, then writes what an ended run writes."""
    lock = (folder / ".lock").open("w")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        os.write(writer, b"x")
        time.sleep(seconds)
        then()
        (folder / ".lock").unlink()
        os._exit(0)
    os.read(reader, 1)
    yield
    os.waitpid(pid, 0)


def test_a_running_run_is_watched_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(report, "PATIENCE_FACTOR", 0)
    run = write_run(tmp_path / "run", training={"max_steps": 80})
    lines = (run / METRICS).read_text().splitlines(keepends=True)
    (run / METRICS).write_text("".join(lines[:30]) + lines[30][:25])  # the last line is half written
    assert not is_in_use(run)

    def finish() -> None:
        with (run / METRICS).open("a") as file:
            file.write(lines[30][25:] + "".join(lines[31:]))

    with held_lock(run, 0.7, finish):
        assert is_in_use(run)
        page = page_of(run)
        assert '<meta http-equiv=refresh content="30">' in page
        assert "<dd>running</dd>" in page
        assert "<dt>time left, about</dt><dd>0:05</dd>" in page
        assert main(["report", str(run), "--watch"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(
        "run: step 29/80  loss 2.5571  eval 2.6708  2.500 bits per byte  1,000 tokens/s  0:05 left"
    )
    assert out[0].endswith("running")
    assert out[-2].startswith("run: step 60/80")
    assert out[-2].endswith("completed")
    assert out[-1] == str(run / "report.html")
    assert "refresh" not in (run / "report.html").read_text()


def test_columns_read_new_lines_and_a_replaced_file(tmp_path: Path) -> None:
    file = tmp_path / METRICS
    file.write_text(
        '{"step": 1, "a": 1.0}\nnonsense\n{"step": 2, "a": NaN, "b": 1e999, "c": null, "d": "x", "e": true}\n{"st'
    )
    columns = MetricColumns()
    columns.update(tmp_path)
    assert (columns.curve("a").steps.tolist(), columns.num_lines, columns.num_damaged) == ([1], 2, 1)
    assert columns.nonfinite == {"a": 1, "b": 1, "c": 1}
    with file.open("a") as stream:
        stream.write('ep": 4, "a": 4.0}\n{"step": 3, "a": 3.0}\n{"step": 4, "a": 5.0}\n')
    columns.update(tmp_path)
    assert (columns.curve("a").steps.tolist(), columns.curve("a").values.tolist()) == ([1, 3, 4], [1, 3, 5])
    assert columns.last_step == 4
    (tmp_path / "new").write_text('{"step": 7, "a": 7.0}\n' * 20)  # longer than before
    (tmp_path / "new").rename(file)
    columns.update(tmp_path)
    assert (columns.curve("a").steps.tolist(), columns.num_damaged) == ([7], 0)


def test_a_long_run_has_a_small_page_that_keeps_its_extremes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 60_000, lambda step: 50.0 if step == 31_234 else loss_at(step))
    page = page_of(run)
    assert len(page) < 200_000
    scale = re.search(r'data-scale="(.*?)"', page)
    assert scale
    assert float(scale[1].split()[3]) > 50, "the one spike of the training loss is still drawn"
    xs, ys = np.arange(50_000.0), np.random.default_rng(0).normal(size=50_000)
    few, kept = thin(xs, ys)
    assert len(few) <= 4 * PIXEL_COLUMNS
    assert set(zip(few, kept, strict=True)) <= set(zip(xs, ys, strict=True))
    for part in range(PIXEL_COLUMNS):
        inside = (xs * PIXEL_COLUMNS // xs[-1]).clip(max=PIXEL_COLUMNS - 1) == part
        shown = kept[np.isin(few, xs[inside])]
        assert (shown.min(), shown.max()) == (ys[inside].min(), ys[inside].max())


def test_curves_lie_over_steps_tokens_or_time(tmp_path: Path) -> None:
    columns = MetricColumns()
    columns.update(write_run(tmp_path / "run"))
    run = Drawn("run", columns)
    steps = np.array([0.0, 20.0, 60.0])
    assert run.at(steps, "step").tolist() == [0, 20, 60]
    assert run.at(steps, "tokens").tolist() == [0, 2000, 6000]
    assert run.at(steps, "time") == pytest.approx([0, 20 * 0.1 / 60, 60 * 0.1 / 60])
    assert main(["report", str(tmp_path / "run"), "--by", "tokens", "--png", str(tmp_path / "a.png")]) == 0
    assert "By tokens." in (tmp_path / "run/report.html").read_text()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_axes_have_round_numbers() -> None:
    assert ticks(0, 100, 5) == [0, 20, 40, 60, 80, 100]
    assert ticks(1.5, 3.1, 5) == [1.5, 2, 2.5, 3]
    assert log_ticks(0.5, 2000) == [1, 10, 100, 1000]
    assert [short(value) for value in (0, 0.0005, 0.02, 5000, 15_000, 2_500_000, 3e20)] == [
        "0", "5e-4", "0.02", "5000", "15k", "2.5M", "3e20",
    ]  # fmt: skip


# --- two runs --------------------------------------------------------------------------------------------------------


def test_two_runs_that_differ_by_rounding_are_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", loss=lambda step: loss_at(step) * (1 + 2e-7))
    assert compare(read_record(first), read_record(second)).verdict == "the same run to 2e-07 over 60 logged steps"
    assert main(["report", str(first), str(second)]) == 0
    assert capsys.readouterr().out == f"{first / 'comparison.html'}\n"
    seen = Seen((first / "comparison.html").read_text())
    assert tuple(seen.sections) == ("", "Curves", "b compared with a", "Run a", "Run b")
    assert "Same recipe." in seen.sections["b compared with a"]
    marks = re.findall(
        r'<line class=mark style="stroke:(.*?)" .*?<title>(.*?)</title>', (first / "comparison.html").read_text()
    )
    assert set(marks) == {(PALETTE[0], "a resumed on ddp x2"), (PALETTE[1], "b resumed on ddp x2")}


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_runs_with_long_names_within_its_width(browser: Any, width: int, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{letter * 60}_of_a_run", name=f"{letter}_set" * 12) for letter in "ab"]
    pages = [tmp_path / "one.html", tmp_path / "two.html"]
    assert main(["report", str(runs[0]), "--output", str(pages[0])]) == 0
    assert main(["report", *map(str, runs), "--output", str(pages[1])]) == 0
    problems: list[str] = []
    requests: list[str] = []
    for page in pages:
        view = browser.new_page(viewport={"width": width, "height": 844})
        view.on("console", lambda message: problems.append(message.text))
        view.on("pageerror", lambda error: problems.append(str(error)))
        view.on("request", lambda request: requests.append(request.url))
        view.goto(page.as_uri())
        assert view.evaluate("document.documentElement.scrollWidth") <= width, page.name
        assert view.evaluate("document.querySelectorAll('figure svg').length") >= 8
        view.close()
    assert problems == []
    assert requests == [page.as_uri() for page in pages]


def later(step: int) -> float:
    return loss_at(step) + 0.01 * (step > 40)


@pytest.mark.parametrize(
    ("recipe", "environment", "summary", "reason"),
    [
        ({"seed": 2}, {}, {}, "other seed, which draws the initial weights and the data order"),
        (
            {"data": {"shuffle": False, "mixture": [{"weight": 3, "files": []}]}},
            {},
            {},
            "other data order (data.shuffle)",
        ),
        ({}, {}, {"ledger": "00" * 16}, "other data order (the ledgers of step 60 differ)"),
        ({}, {"text_key": "other"}, {"ledger": "00" * 16}, "other text"),
        ({"optimizer": {"name": "adamw", "learning_rate": 0.5}}, {}, {}, "other recipe (optimizer.learning_rate)"),
        ({"model": {"config": {"hidden_size": 8}}}, {}, {}, "other model (model.config.hidden_size)"),
        ({}, {"precision": "bfloat16"}, {}, "other precision (float32 and bfloat16)"),
        (
            {},
            {"strategy": "single"},
            {},
            "rounding of another engine or machine (strategy ddp and single), grown over more than the 20 steps of the tolerance",
        ),
        ({"training": {"max_steps": 60, "log_every": 5}}, {"starts": []}, {}, "rounding after a resume"),
    ],
)
def test_two_runs_part_at_a_step_for_a_reason(
    recipe: dict[str, Any], environment: dict[str, Any], summary: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", loss=later, **recipe)
    for folder, changes in ((first, {"text_key": "text"}), (second, {"text_key": "text"} | environment)):
        (folder / ENVIRONMENT).write_text(json.dumps(json.loads((folder / ENVIRONMENT).read_text()) | changes))
    (second / SUMMARY).write_text(json.dumps(json.loads((second / SUMMARY).read_text()) | summary))
    found = compare(read_record(first), read_record(second))
    assert found.parts_at is not None
    assert (found.parts_at.name, found.parts_at.first_step) == ("train/loss", 41)
    assert found.parts_at.values == (loss_at(41), later(41))
    assert found.verdict.startswith(f"parts at step 41: {reason}")
    assert {key.split(".")[0] for key, _, _ in found.recipe} == set(recipe)


def test_runs_without_a_common_step_or_with_lost_values_are_compared(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    lines = [json.loads(line) for line in (second / METRICS).read_text().splitlines()]
    (second / METRICS).write_text("".join(json.dumps({**line, "step": line["step"] + 60}) + "\n" for line in lines))
    assert (
        compare(read_record(first), read_record(second)).verdict
        == "not comparable: they logged no loss at the same step"
    )
    (second / METRICS).write_text("".join(json.dumps(line | {"train/loss": None}) + "\n" for line in lines))
    assert compare(read_record(first), read_record(second)).verdict.startswith("the same run")
    Seen(compared_page(first, second))
