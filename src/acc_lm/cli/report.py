"""`acc-lm report`: one page about a run, live or ended, or about several runs compared."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run; several are compared with the first"
    )


def run(known: argparse.Namespace) -> int:
    from acc_lm.reporting.report_html import as_page
    from acc_lm.reporting.report_sections import report_of
    from acc_lm.reporting.run_record import read_record

    (known.runs[0] / "report.html").write_text(as_page(report_of(read_record(known.runs[0]))))
    return 0
