"""`train.py --dry-run`: run every stage of a run once, on the engine of that run."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from acc_lm.checkpointing.format import open_checkpoint
from acc_lm.checkpointing.loading import load_checkpoint, weights_digest
from acc_lm.checkpointing.saving import save_checkpoint
from acc_lm.errors import CheckpointError
from acc_lm.evaluation.held_out import evaluate_all
from acc_lm.optimization.optimizer import set_learning_rate
from acc_lm.progress import Progress
from acc_lm.rows.loader import build_loader
from acc_lm.runtime import Gradients, measure_step, on_main, readers
from acc_lm.training.divergence import Watch
from acc_lm.training.step import in_steps, train_step

if TYPE_CHECKING:
    from acc_lm.training.run import Run

NUM_STEPS = 3
"""The first step, and two that are measured."""


def try_everything(run: Run) -> None:
    """Run a step, an evaluation and a save, measure further steps, then load; check that all tensors are restored bit for bit.

    Every process calls. Files go to `dry-run` in the output folder and are removed at the end; no other file is touched.

    Raises:
        CheckpointError: the loaded tensors differ from the saved ones, or a step changed no weight.
    """
    accelerator, work = run.accelerator, run.output_dir / "dry-run"
    on_main(accelerator, lambda: work.mkdir(parents=True, exist_ok=True))
    trial = _Trial(run, work)
    stages = (
        ("step", trial.step),
        ("evaluate", trial.evaluate),
        ("save", trial.save),
        ("measure", trial.measure),
        ("load", trial.load),
    )
    try:
        with run.data.reading(run.plan.order, 0, None, *readers(accelerator)):
            for name, stage in stages:
                started = time.monotonic()
                line = f"dry run: {name:9}{stage()}"
                if accelerator.is_main_process:
                    print(f"{line}  ({time.monotonic() - started:.1f} s)", flush=True)
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(work, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty: a run has written here
                work.parent.rmdir()
    if accelerator.is_main_process:
        print("dry run: everything works; nothing was kept")


class _Trial:
    """Stages of a dry run; each returns the line to print. Every process calls."""

    def __init__(self, run: Run, work: Path) -> None:
        self._run, self._work, self._progress = run, work, Progress()
        accelerator, data, training = run.accelerator, run.data, run.config.training
        loader = build_loader(data.train, run.micro_batches(NUM_STEPS), 0, pin_memory=accelerator.device.type == "cuda")
        self._steps = in_steps(loader, accelerator.gradient_accumulation_steps)
        self._gradients = Gradients(accelerator, run.model)
        training = training.model_copy(update={"max_nonfinite_steps": 1})
        self._watch = Watch(accelerator, self._gradients, training, run.plan.order, work)
        self._saved, self._digest, self._number = work, "", 0

    def step(self) -> str:
        run, self._number = self._run, self._number + 1
        number = self._number
        rows = run.plan.order.rows_at(number)
        set_learning_rate(run.optimizer, run.config.optimizer.learning_rate)
        outcome = train_step(
            run.accelerator,
            run.model,
            run.optimizer,
            next(self._steps),
            step=number,
            seed=run.config.seed,
            num_targets=run.data.train.count_targets(rows),
            max_grad_norm=run.config.optimizer.max_grad_norm,
            gradients=self._gradients,
            router=run.model_facts.router,
        )
        self._progress = self._progress.advance(rows, outcome.num_targets)
        self._watch.note(number, outcome)
        return f"loss {self._watch.look(number):.4f}, gradient norm {float(outcome.grad_norm):.4f}"

    def evaluate(self) -> str:
        run, num_rows = self._run, self._run.config.training.global_batch_size
        result = evaluate_all(run.accelerator, run.model, run.data, run.micro_batch_size, num_rows)
        sets = "".join(f", {name} {of_set.loss:.4f}" for name, of_set in result.sets.items())
        return f"loss {result.held_out.loss:.4f}{sets} on {num_rows} rows"

    def save(self) -> str:
        run, self._digest = self._run, self._weights()
        saved = save_checkpoint(
            run.accelerator, self._work, run.model, run.optimizer, self._progress, run.config, run.data.key
        )
        self._saved = saved
        size = on_main(run.accelerator, lambda: sum(file.stat().st_size for file in saved.iterdir()))
        return f"{size / 1e6:.1f} MB in {run.accelerator.num_processes} parts"

    def measure(self) -> str:
        run = self._run
        cost = measure_step(run.accelerator, self.step)
        length = run.config.data.sequence_length
        flops = run.model_facts.flops.of_token(length) if not run.model_facts.flops.unknown else None
        if run.is_main:
            cost.write_if_asked(
                identity=asdict(run.identity),
                micro_batch_size=run.micro_batch_size,
                accumulation=run.accelerator.gradient_accumulation_steps,
                sequence_length=length,
                flops_per_token=flops,
            )
        return f"a step takes {cost}"

    def load(self) -> str:
        run = self._run  # the steps that were measured have changed all weights and moments
        if self._weights() == self._digest:
            raise CheckpointError("a step must change the weights, got the same ones; check optimizer.learning_rate")
        load_checkpoint(run.accelerator, open_checkpoint(self._saved), run.model, run.optimizer)
        if self._weights() != self._digest:
            raise CheckpointError("a loaded checkpoint must equal the saved one bit for bit, got other tensors")
        return "every tensor is restored bit for bit after another step"

    def _weights(self) -> str:
        return weights_digest(self._run.accelerator, self._run.model, self._run.optimizer)
