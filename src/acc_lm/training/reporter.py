"""Reports of a run while it trains: `metrics.jsonl`, the curves, the trackers, the terminal.

One call for each kind of record. Every process calls; the main process writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from acc_lm import runtime
from acc_lm.config import Mode
from acc_lm.evaluation.held_out import Evaluation
from acc_lm.redaction import printable
from acc_lm.reporting.console import Bar, start_block
from acc_lm.reporting.run_record import resumes_of, starts_in
from acc_lm.reporting.tracking import Tracking
from acc_lm.run_files import curves, metrics_file
from acc_lm.run_files.names import ENVIRONMENT
from acc_lm.run_files.summary import read_json_file
from acc_lm.training.run import Run


class Reporter:
    def __init__(self, run: Run, mode: Mode) -> None:
        """Start the trackers and the progress bar, and print the start block."""
        self._run, self._tracking = run, Tracking(run.accelerator)
        config, plan = run.config, run.plan
        if mode == Mode.TRAIN:
            self._tracking.start(config, run.output_dir, plan.due.metrics)
        trackers = self._tracking.description
        ranks = runtime.find_ranks(run.accelerator)
        block = start_block(
            config, run.identity, ranks, run.model_facts, run.data, plan.order, plan.num_steps, trackers
        )
        self.say([block, *map(printable, run.start.notes)])
        enabled = run.is_main and mode != Mode.DRY_RUN
        self._bar = Bar(plan.num_steps, run.start.progress.step, run.output_dir, enabled=enabled)

    def step_done(self, step: int) -> None:
        self._bar.advance(step)

    def training(self, step: int, metrics: dict[str, float]) -> None:
        """Report the metrics of a logged step."""
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON has no nan or inf
        self._record(step, metrics)
        self._bar.show(step, metrics)
        if self._run.speed.slow:
            self.lines([self._run.speed.slow])

    def evaluation(self, step: int, result: Evaluation, samples: dict[str, Any]) -> None:
        self._record(step, result.metrics(), samples)
        if self._run.is_main:
            folder, metric = self._run.output_dir, self._run.config.checkpoint.best_metric
            shown = self._run.data.facts.compared_with_compressors(
                result.held_out.bits_per_byte, result.held_out.num_targets
            )
            compressors = {name: value for name, value in shown.items() if name != "model"}
            resumes = resumes_of(starts_in(read_json_file(folder / ENVIRONMENT)))
            curves.draw_curves(folder, folder.name, metric, compressors, resumes)
        self._bar.show_evaluation(step, result)

    def epoch(self, step: int, metrics: dict[str, float]) -> None:
        """Report the metrics of the pass over the training rows that this step completes; {}: it completes none."""
        if metrics:
            self._record(step, metrics)
            self._bar.show_epoch(metrics)

    def lines(self, lines: Iterable[str]) -> None:
        """Print lines above the progress bar: a saved checkpoint, a skipped step, a straggler."""
        for line in lines:
            self._bar.line(line)

    def say(self, lines: Iterable[str]) -> None:
        """Print lines outside of the loop."""
        for line in lines if self._run.is_main else ():
            print(line, flush=True)

    def end_loop(self, lines: Iterable[str]) -> None:
        """Print the last lines and close the progress bar."""
        self.lines(lines)
        self._bar.close()

    def finish(self) -> None:
        """End the trackers; call this before the process group ends."""
        self._tracking.finish()

    def _record(self, step: int, metrics: dict[str, float], extra: dict[str, Any] | None = None) -> None:
        if self._run.is_main:
            metrics_file.append(self._run.output_dir, step, metrics)
        self._tracking.log(step, {**metrics, **(extra or {})})
