"""One training run: the step, its schedule of events, checks, reports and ending.

    run             build everything before the first step
    reporter        metrics.jsonl, curves, trackers and terminal: one call for each kind of record
    watching        divergence, epochs and early stopping, and their state in checkpoints
    ending          summary.json and final/
    step            gradient of the mean loss over a global batch, clipped and applied
    timetable       which events are due after a step
    divergence      skip steps with a non-finite gradient, detect loss spikes
    early_stopping  stop when evaluations no longer improve
    epochs          the report of each pass over the training rows
    dry_run         run every stage once, keep nothing

`train.py` owns the loop and every decision in it; nothing here calls back.
"""

from acc_lm.progress import is_due
from acc_lm.training.dry_run import try_everything
from acc_lm.training.ending import Ended, finish
from acc_lm.training.reporter import Reporter
from acc_lm.training.run import Run, build_on_all, build_rows, find_start, load_start, plan_steps
from acc_lm.training.step import train_step
from acc_lm.training.watching import Watchers, evaluate_and_report, training_metrics

__all__ = [
    "Ended",
    "Reporter",
    "Run",
    "Watchers",
    "build_on_all",
    "build_rows",
    "evaluate_and_report",
    "find_start",
    "finish",
    "is_due",
    "load_start",
    "plan_steps",
    "train_step",
    "training_metrics",
    "try_everything",
]
