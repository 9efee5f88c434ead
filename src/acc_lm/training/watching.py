"""Checks of a run while it trains: divergence, early stopping, reports of epochs.

One object holds the state that checkpoints keep of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from acc_lm import runtime
from acc_lm.checkpointing import resuming
from acc_lm.checkpointing.saving import Saver
from acc_lm.errors import Preempted
from acc_lm.evaluation.held_out import Evaluation, evaluate_all
from acc_lm.evaluation.samples import write_samples
from acc_lm.progress import Progress, is_due
from acc_lm.run_files import metrics_file
from acc_lm.stop import StopRequest
from acc_lm.training.divergence import Watch
from acc_lm.training.early_stopping import EarlyStopping
from acc_lm.training.epochs import Epochs
from acc_lm.training.reporter import Reporter
from acc_lm.training.run import Run, num_evaluated_rows
from acc_lm.training.step import StepResult


class Watchers:
    """Monitors of loss, evaluations and epochs of a run, restored from the checkpoint that it resumes from."""

    def __init__(self, run: Run, gradients: runtime.Gradients) -> None:
        self._run = run
        config, checkpoint = run.config, run.start.found.checkpoint
        num_skipped = run.start.progress.step - runtime.count_updates(run.optimizer)
        self.divergence = Watch(
            run.accelerator,
            gradients,
            config.training,
            run.plan.order,
            run.output_dir,
            num_skipped,
            run.start.found.state,
        )
        self._epochs = Epochs(run.plan.order, self.divergence, run.output_dir, checkpoint)
        self._early_stopping = EarlyStopping(config.training, config.checkpoint.best_metric, checkpoint)

    def catch_up(self, report: Reporter, check: Callable[[], None]) -> None:
        """Evaluate and report what was due at the step that the run resumes from, because a stop saves first."""
        run, step = self._run, self._run.start.progress.step
        if run.start.found.checkpoint is None:
            return
        if run.plan.due.evaluates(step):
            metric = run.config.checkpoint.best_metric
            known = runtime.on_main(run.accelerator, lambda: metrics_file.evaluation_at(run.output_dir, step, metric))
            self._early_stopping.count(step, known or evaluate_and_report(run, report, step, check).metrics())
        self.end_epoch(step, report)

    @property
    def last_step(self) -> int:
        return self._run.start.progress.step if self.early_stop else self._run.plan.num_steps

    @property
    def early_stop(self) -> str | None:
        """Reason why the run ends before its last step; None while it continues."""
        return self._early_stopping.reason

    def note(self, step: int, outcome: StepResult, saver: Saver) -> None:
        """Record a step; load the newest checkpoint if the loss spiked and the recipe says rewind. Every process calls.

        Raises:
            DivergedError: too many steps with a non-finite gradient, or a spike that the recipe does not tolerate.
        """
        run = self._run
        if self.divergence.note(step, outcome):
            saver.wait()
            back = resuming.rewind(run.accelerator, run.output_dir, run.model, run.optimizer, run.config.checkpoint)
            num_skipped = step - runtime.count_updates(run.optimizer)
            self.divergence.rewound(step, back.progress.step, num_skipped, back.state.get("recent_losses", ()))
        if is_due(step, run.config.distributed.check_parameters_every, 0):
            runtime.check_replicas(run.accelerator, run.model, step)

    def evaluate(self, step: int, report: Reporter, stop_request: StopRequest) -> Evaluation | None:
        """Evaluate, report, and count the evaluation for early stopping.

        Returns None when a stop was requested meanwhile; the resumed run then makes up for the evaluation.
        """
        try:
            evaluation = evaluate_and_report(self._run, report, step, stop_request.check)
        except Preempted:
            return None
        self._early_stopping.count(step, evaluation.metrics())
        return evaluation

    def end_epoch(self, step: int, report: Reporter) -> None:
        """Report the pass over the training rows that this step completes, if it completes one."""
        report.epoch(step, self._epochs.end(step, self._run.plan.learning_rate_at(step)))

    def state_at(self, step: int) -> dict[str, Any]:
        """State to keep in a checkpoint of this step.

        Raises:
            DivergedError: the run has diverged; a diverged state is not saved.
        """
        self.divergence.look(step)
        return self.divergence.state | self._epochs.state | self._early_stopping.state | self._run.start.origin


def training_metrics(
    run: Run, watch: Watchers, progress: Progress, outcome: StepResult, learning_rate: float
) -> dict[str, float]:
    """Metrics of a logged step, by their names in metrics.jsonl. Waits for the device; every process calls."""
    sources = run.data.by_source(run.plan.order, progress.samples_seen)
    return {
        "train/loss": watch.divergence.look(progress.step),
        "train/grad_norm": float(outcome.grad_norm),
        "train/learning_rate": learning_rate,
        "train/epoch": run.plan.order.epochs_at(progress.samples_seen),
        "train/tokens": float(progress.tokens),
        **run.speed.metrics(progress.tokens),
        "train/skipped_steps": float(watch.divergence.num_skipped),
        **(outcome.router_loss.metrics() if outcome.router_loss else {}),
        **{f"train/tokens/{name}": float(source["tokens"]) for name, source in sources.items()},
    }


def evaluate(run: Run, check: Callable[[], None]) -> Evaluation:
    """Evaluate the current weights on the held-out text and every evaluation set; an exception from `check` ends it."""
    with run.speed.evaluating():
        num_rows = num_evaluated_rows(run.config)
        return evaluate_all(run.accelerator, run.model, run.data, run.micro_batch_size, num_rows, check)


def evaluate_and_report(run: Run, report: Reporter, step: int, check: Callable[[], None]) -> Evaluation:
    evaluation = evaluate(run, check)
    samples = write_samples(run.accelerator, run.model, run.data, run.config, step, check)
    report.evaluation(step, evaluation, samples)
    return evaluation
