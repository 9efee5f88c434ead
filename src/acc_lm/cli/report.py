"""`acc-lm report`: one page about a run, live or ended, or about several runs compared with the first."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from acc_lm.cli import replaced_file
from acc_lm.errors import ConfigError

if TYPE_CHECKING:
    from acc_lm.reporting.run_record import RunRecord
    from acc_lm.run_files.columns import MetricColumns

REPORT_PAGE, COMPARISON_PAGE = "report.html", "comparison.html"
POLL_SECONDS = 2.0
PATIENCE_FACTOR = 10
"""A page that takes a second to write is written every ten seconds at most."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run; others are compared with the first"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"page to write (default: RUN/{REPORT_PAGE}; of several runs: {COMPARISON_PAGE})",
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="also write it as Markdown, with FILE's name and .png for its curves",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="also write the curves as a picture")
    parser.add_argument(
        "--by", choices=("step", "tokens", "time"), default="step", help="axis of the curves (default: step)"
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="print the progress and renew the page until all runs have ended, with the attempts of keep-going",
    )


def run(known: argparse.Namespace) -> int:
    from acc_lm.run_files.columns import MetricColumns

    runs: list[Path] = known.runs
    if len({folder.resolve() for folder in runs}) < len(runs):
        raise ConfigError("RUN must name each run once, got one twice; remove it, or name another to compare with")
    columns = {folder: MetricColumns() for folder in runs}
    if known.watch:
        return watch(known, columns)
    write(known, columns)
    print(_page_of(known))
    return 0


def write(known: argparse.Namespace, columns: dict[Path, MetricColumns]) -> list[RunRecord]:
    """Read the runs, and write the page and what else is asked for."""
    from acc_lm.reporting.report_html import as_page
    from acc_lm.reporting.report_markdown import as_markdown
    from acc_lm.reporting.report_sections import report_of
    from acc_lm.reporting.run_comparison import comparison_report
    from acc_lm.reporting.run_record import read_record

    records = [read_record(folder, columns[folder]) for folder in known.runs]
    report = report_of(records[0], known.by) if len(records) == 1 else comparison_report(records, known.by)
    _write_text(_page_of(known), as_page(report))
    if known.markdown is not None:
        picture = known.markdown.with_suffix(".png")
        _write_text(known.markdown, as_markdown(report, picture.name))
        _draw(records, known, picture)
    if known.png is not None:
        _draw(records, known, known.png)
    return records


def watch(known: argparse.Namespace, columns: dict[Path, MetricColumns]) -> int:
    """Renew the page whenever a run has written something, until none of them is running."""
    seen: object = None
    width, pause, is_terminal = 0, POLL_SECONDS, sys.stdout.isatty()
    while True:
        if (now := _state_of(known.runs)) != seen:
            is_first, seen, began = seen is None, now, time.monotonic()
            records = write(known, columns)
            seconds = 0.0 if is_first else time.monotonic() - began  # the first page loads libraries, too
            pause = max(POLL_SECONDS, PATIENCE_FACTOR * seconds)
            line = " | ".join(progress_line(record) for record in records)
            print(f"\r{line:<{width}}" if is_terminal else line, end="" if is_terminal else "\n", flush=True)
            width = len(line)
            if not any(record.continues for record in records):
                print(f"\n{_page_of(known)}" if is_terminal else _page_of(known))
                return 0
        time.sleep(pause)


def progress_line(record: RunRecord) -> str:
    """A run on one line of the terminal."""
    from acc_lm.redaction import printable
    from acc_lm.reporting.report_sections import time_left

    columns, steps = record.columns, record.num_steps
    parts = [f"{record.name}: step {record.step:,}" + (f"/{steps:,}" if steps else "")]
    for name, form in (
        ("train/loss", "loss {:.4f}"),
        ("eval/loss", "eval {:.4f}"),
        ("eval/bits_per_byte", "{:.3f} bits per byte"),
        ("train/tokens_per_second", "{:,.0f} tokens/s"),
    ):
        if len(curve := columns.curve(name)):
            parts.append(form.format(curve.last))
    parts += [f"{text} left" for name, text in time_left(record) if name.startswith("time left")]
    return printable("  ".join([*parts, record.status]))


def _state_of(runs: list[Path]) -> list[tuple[int, int, int]]:
    """Whatever changes when a run writes: time and size of its files, and whether it runs."""
    from acc_lm.run_files.output_dir import FILES, is_in_use, is_supervised

    state = []
    for folder in runs:
        for name in FILES:
            try:
                facts = (folder / name).stat()
                state.append((facts.st_mtime_ns, facts.st_size, 0))
            except OSError:
                state.append((0, 0, 0))
        state.append((0, int(is_supervised(folder)), int(is_in_use(folder))))
    return state


def _page_of(known: argparse.Namespace) -> Path:
    page: Path | None = known.output
    return page or known.runs[0] / (REPORT_PAGE if len(known.runs) == 1 else COMPARISON_PAGE)


def _write_text(file: Path, text: str) -> None:
    with replaced_file(file) as work:
        work.write_text(text, encoding="utf-8")


def _draw(records: list[RunRecord], known: argparse.Namespace, file: Path) -> None:
    from acc_lm.redaction import printable, redact
    from acc_lm.reporting.run_comparison import drawn_as
    from acc_lm.run_files.charts import AXES, charts_of, marks_of
    from acc_lm.run_files.curves import draw_charts

    runs = drawn_as(records)
    title = printable(redact(", ".join(one.name for one in runs)))
    with replaced_file(file) as work:
        draw_charts(charts_of(runs, known.by), marks_of(runs, known.by), title, work, AXES[known.by])
