"""End of a run: final/ and summary.json, or the line that says how to resume."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acc_lm import runtime
from acc_lm.checkpointing import resuming, rotation
from acc_lm.errors import EXIT_PREEMPTED
from acc_lm.evaluation.held_out import Evaluation
from acc_lm.export.card import card_with_benchmarks
from acc_lm.export.export import CARD, export_model, has_edited_card
from acc_lm.export.hub import push_or_explain
from acc_lm.progress import Progress
from acc_lm.reporting.console import closing_block
from acc_lm.run_files import metrics_file
from acc_lm.run_files.summary import read_summary, write_summary
from acc_lm.training.reporter import Reporter
from acc_lm.training.run import Run
from acc_lm.training.watching import evaluate


@dataclass(frozen=True)
class Ended:
    """End of the training loop: its position, last evaluation and reason."""

    progress: Progress
    evaluation: Evaluation | None
    """Evaluation of the last step's weights; None if that step was not evaluated."""
    stop: str | None
    """Source of the request to stop, such as a signal; None: no request."""
    early_stop: str | None
    newest: Path | None
    """Folder of the newest checkpoint."""
    seconds_held: float
    """Seconds for which saving blocked training."""
    seconds: float
    """Seconds since the start of the loop."""


def finish(run: Run, report: Reporter, ended: Ended, check: Callable[[], None]) -> int:
    """Write `summary.json` and, unless a stop was requested, export the last or best weights; return the exit code.

    Every process calls.
    """
    run.peers.at("the export")
    facts, progress = facts_of(run, ended), ended.progress
    if ended.stop:
        report.say(
            [
                f"stopped by {ended.stop} after step {progress.step}, saved {ended.newest}; run the same command to resume"
            ]
        )
        if run.is_main:
            write_summary(run.output_dir, status="preempted", exit_code=EXIT_PREEMPTED, reason=ended.stop, **facts)
        return EXIT_PREEMPTED
    was_complete = run.start.found.checkpoint is not None and progress.tokens == run.start.progress.tokens
    if was_complete:
        report.say([f"already complete: step {progress.step} of {run.plan.num_steps}"])
    report.say([ended.early_stop] if ended.early_stop else [])
    step, evaluation = weights_to_export(run, report, ended, check)
    result = evaluation.held_out
    metrics = result.metrics()
    final = export_model(run.accelerator, run.model, run.optimizer, run.data, run.config, metrics, step, progress.step)
    if run.is_main:
        bits_per_byte = run.data.facts.compared_with_compressors(result.bits_per_byte, result.num_targets)
        facts |= {"exported_step": step, "bits_per_byte": bits_per_byte, "final": final}
        facts |= keep_benchmarks(run.output_dir, final, step) if was_complete else {}
        write_summary(run.output_dir, status="completed", exit_code=0, reason=ended.early_stop, **facts)
        report.say([closing_block(run.config, run.data, bits_per_byte, final)])
    name = run.config.export.push_to_hub
    if name:  # last, so that nothing is lost with it
        runtime.on_main(run.accelerator, lambda: report.say([push_or_explain(final, name)]), takes_long=True)
    return 0


def keep_benchmarks(output_dir: Path, final: Path, step: int) -> dict[str, Any]:
    """Benchmarks of a finished run's weights for the new summary, after putting them into the card, which is new too."""
    known = read_summary(output_dir).get("benchmarks")
    tasks = known.items() if isinstance(known, dict) else ()
    kept = {name: task for name, task in tasks if isinstance(task, dict) and task.get("step") == step}
    card = final / CARD
    for name, task in () if has_edited_card(final) else kept.items():  # an edited one stays as it is
        with contextlib.suppress(
            LookupError, TypeError, ValueError, AttributeError
        ):  # a summary that was edited costs no run
            text = card_with_benchmarks(card.read_text(encoding="utf-8"), {name: task}, task["harness"])
            if text is not None:
                card.write_text(text, encoding="utf-8")
    return {"benchmarks": kept} if kept else {}


def weights_to_export(run: Run, report: Reporter, ended: Ended, check: Callable[[], None]) -> tuple[int, Evaluation]:
    """Put the weights of final/ into the model, the last or the best; return their step and their evaluation."""
    step, evaluation, metric = ended.progress.step, ended.evaluation, run.config.checkpoint.best_metric
    if run.config.exports_best:
        best = resuming.load_best(run.accelerator, run.output_dir, metric, run.model, run.optimizer)
        if best:
            step, evaluation = best, evaluation if best == step else None
            report.say([f"final/ holds the weights of step {best}, the best by {metric}"])
    return step, evaluation or evaluate(run, check)


def facts_of(run: Run, ended: Ended) -> dict[str, Any]:
    """Content of `summary.json` for this run, without its status. Every process calls."""
    metric, energy = run.config.checkpoint.best_metric, run.speed.gpus.energy_wh()
    return {
        **runtime.find_ranks(run.accelerator).facts,
        **ended.progress.facts,
        "num_steps": run.plan.num_steps,
        "tokens_per_second": (ended.progress.tokens - run.start.progress.tokens) / ended.seconds,
        "sources": run.data.by_source(run.plan.order, ended.progress.samples_seen),
        "last_checkpoint": ended.newest,
        "seconds_held_by_saving": ended.seconds_held,
        "best_checkpoint": rotation.link_best(run.accelerator, run.output_dir, metric),
        "best_evaluation": metrics_file.best(metrics_file.read(run.output_dir), metric),
        "resumed_from": run.start.found.checkpoint.folder if run.start.found.checkpoint else None,
        "eval_files": run.data.facts.eval_files,
        "peak_memory_gb": runtime.gather_objects(run.accelerator, run.memory.peak_gb),
        "peak_memory_gb_by_phase": runtime.gather_objects(run.accelerator, run.memory.phases),
        **({} if energy is None else {"energy_wh": energy}),
    }
