"""`train.py --dry-run`: everything a run will do, once, on the engine it will run on."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from acc_lm.checkpoint import load_checkpoint, weights_digest
from acc_lm.config import Config
from acc_lm.divergence import Watch
from acc_lm.errors import CheckpointError
from acc_lm.evaluation import evaluate_all
from acc_lm.optimizer import set_learning_rate
from acc_lm.order import MicroBatches, RowOrder
from acc_lm.progress import Progress
from acc_lm.retention import open_checkpoint
from acc_lm.rows import build_loader
from acc_lm.runtime import Gradients, on_main, split_global_batch
from acc_lm.saving import save_checkpoint
from acc_lm.step import in_steps, train_step

if TYPE_CHECKING:
    from accelerate import Accelerator

    from acc_lm.data import Data
    from acc_lm.router import Router


def try_everything(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    data: Data,
    order: RowOrder,
    config: Config,
    router: Router | None = None,
) -> None:
    """One step, one evaluation, one save, and one load after which every tensor is bit for bit what was saved.

    Every process calls. Nothing is left on disk, and nothing that exists there is touched.

    Raises:
        CheckpointError: what was loaded is not what was saved.
    """
    work = Path(config.output_dir) / "dry-run"
    progress = Progress()
    micro_batch_size, accumulation = split_global_batch(config.training, accelerator.num_processes)
    places = MicroBatches(
        order,
        micro_batch_size=micro_batch_size,
        process=accelerator.process_index,
        num_processes=accelerator.num_processes,
        first_step=1,
        last_step=2,
        lengths=data.padded_lengths,
    )
    steps = in_steps(build_loader(data.train, places, 0, pin_memory=accelerator.device.type == "cuda"), accumulation)
    gradients = Gradients(accelerator, model)
    watch = Watch(accelerator, gradients, config.training.model_copy(update={"max_nonfinite_steps": 1}), order, work)
    on_main(accelerator, lambda: work.mkdir(parents=True, exist_ok=True))
    saved: dict[str, Any] = {}

    def timed(what: str, work: Callable[[], str]) -> None:
        started = time.monotonic()
        line = f"dry run: {what:9}{work()}"
        if accelerator.is_main_process:
            print(f"{line}  ({time.monotonic() - started:.1f} s)", flush=True)

    def step(number: int) -> str:
        nonlocal progress
        rows = order.rows_at(number)
        set_learning_rate(optimizer, config.optimizer.learning_rate)
        outcome = train_step(
            accelerator,
            model,
            optimizer,
            next(steps),
            step=number,
            seed=config.seed,
            num_targets=data.train.count_targets(rows),
            max_grad_norm=config.optimizer.max_grad_norm,
            gradients=gradients,
            router=router,
        )
        progress = progress.advance(rows, outcome.num_targets)
        watch.note(number, outcome)
        return f"loss {watch.look(number):.4f}, gradient norm {float(outcome.grad_norm):.4f}"

    def evaluate() -> str:
        num_rows = config.training.global_batch_size
        result = evaluate_all(accelerator, model, data, micro_batch_size, num_rows)
        sets = "".join(f", {name} {of_set.loss:.4f}" for name, of_set in result.sets.items())
        return f"loss {result.held_out.loss:.4f}{sets} on {num_rows} rows"

    def save() -> str:
        saved["digest"] = weights_digest(accelerator, model, optimizer)
        saved["folder"] = save_checkpoint(accelerator, work, model, optimizer, progress, config, data.key)
        size = on_main(accelerator, lambda: sum(file.stat().st_size for file in saved["folder"].iterdir()))
        return f"{size / 1e6:.1f} MB in {accelerator.num_processes} parts"

    def load() -> str:
        step(2)  # everything changes
        if weights_digest(accelerator, model, optimizer) == saved["digest"]:
            raise CheckpointError("a step must change the weights, got the same ones; look at optimizer.learning_rate")
        load_checkpoint(accelerator, open_checkpoint(saved["folder"]), model, optimizer)
        if weights_digest(accelerator, model, optimizer) != saved["digest"]:
            raise CheckpointError("a loaded checkpoint must be what was saved, bit for bit, got other tensors")
        return "after another step, every tensor is bit for bit what was saved"

    try:
        with data.reading(order, 0, None, accelerator.process_index, accelerator.num_processes):
            timed("step", lambda: step(1))
            timed("evaluate", evaluate)
            timed("save", save)
            timed("load", load)
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(work, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty: a run has been here
                work.parent.rmdir()
    if accelerator.is_main_process:
        print("dry run: everything works here; nothing was kept")
