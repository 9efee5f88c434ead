"""`summary.json`: how a run ended, for scripts and users; written atomically on success, failure and preemption."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from acc_lm.config import EVALUATION_METRICS
from acc_lm.files import write_json
from acc_lm.launcher import is_main_process, process_index
from acc_lm.redaction import redact
from acc_lm.run_files import metrics_file
from acc_lm.run_files.names import STATE, SUMMARY

"""First file that a run writes into its folder, which marks the folder as that of a run."""
MADE = ("num_steps", "eval_files", "exported_step", "bits_per_byte", "final", "benchmarks")
"""Facts of an attempt that stay in the summary when a later attempt fails, because they remain true."""


def write_summary(output_dir: Path, *, status: str, exit_code: int, reason: str | None = None, **facts: Any) -> None:
    """Write status and figures of the run; the losses come from `metrics.jsonl`."""
    attempt = read_summary(output_dir).get("attempt")
    entries = metrics_file.read(output_dir)
    _, train = metrics_file.series(entries, "train/loss")
    write_json(
        output_dir / SUMMARY,
        {
            "status": status,
            "exit_code": exit_code,
            "reason": reason,
            "attempt": (attempt if isinstance(attempt, int) else 0) + 1,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": platform.node(),
            "rank": process_index(),
            "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
            "train_loss": {"first": train[0], "last": train[-1], "best": min(train)} if train else None,
            "eval_loss": _course(entries, "eval/loss"),
            "evaluation_sets": {
                name: {metric: _course(entries, f"eval/{name}/{metric}") for metric in EVALUATION_METRICS}
                for name in metrics_file.sets(entries)
            },
            "epochs": metrics_file.epochs(entries),
            **facts,
        },
    )


def _course(entries: list[dict[str, Any]], metric: str) -> dict[str, float] | None:
    """First, last and best value of a metric, and the step of the best; None when it has no finite value."""
    _, values = metrics_file.series(entries, metric)
    best = metrics_file.best(entries, metric)
    return best and {"first": values[0], "last": values[-1], "best": best["value"], "best_step": best["step"]}


def write_failure(
    output_dir: str | None,
    status: str,
    exit_code: int,
    reason: str,
    speaks: bool | None = None,
    began: float | None = None,
) -> None:
    """Write how an attempt failed, if the folder can be written, and the progress of its newest checkpoint.

    Args:
        speaks: True if this process writes the summary; None: only the main process does.
        began: start of this attempt, by `time.time()`; processes other than the main one keep a newer summary as it is,
            and a stop keeps one of a run that this attempt has completed.
    """
    if output_dir is None or not (is_main_process() if speaks is None else speaks):
        return
    folder = Path(output_dir)
    with contextlib.suppress(Exception):  # no further error, such as a full disk, may hide the original one
        file = folder / SUMMARY
        is_newer = began is not None and file.exists() and file.stat().st_mtime > began
        was_completed = status in ("preempted", "interrupted") and read_summary(folder).get("status") == "completed"
        is_said = is_newer and (was_completed or not is_main_process())
        if folder.is_dir() and not is_said:
            made = {key: value for key, value in read_summary(folder).items() if key in MADE}
            facts = made | _standing(folder)
            write_summary(folder, status=status, exit_code=exit_code, reason=redact(reason), **facts)


def _standing(output_dir: Path) -> dict[str, Any]:
    """Progress of the newest checkpoint, from which the next attempt resumes, whatever ended this one."""
    newest = metrics_file.newest_checkpoint(output_dir)
    if newest is None:
        return {}
    try:
        progress = json.loads((newest / STATE).read_text())["progress"]
        reached = {key: progress[key] for key in ("step", "samples_seen", "tokens", "ledger")}
    except (OSError, ValueError, KeyError, TypeError):  # damaged: the next attempt reports it
        reached = {}
    return {**reached, "last_checkpoint": newest}


def record_benchmarks(output_dir: Path, figures: dict[str, dict[str, Any]]) -> bool:
    """Add figures of benchmarks, by task, to the summary of a run that has ended; False if it has none."""
    summary = read_summary(output_dir)
    if not summary:
        return False
    known = summary.get("benchmarks")
    write_json(output_dir / SUMMARY, summary | {"benchmarks": (known if isinstance(known, dict) else {}) | figures})
    return True


def read_summary(output_dir: Path) -> dict[str, Any]:
    """Existing summary; empty when it is missing or unreadable."""
    return read_json_file(output_dir / SUMMARY)


def read_json_file(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text()) if file.is_file() else {}  # a pipe would never end
        return values if isinstance(values, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}
