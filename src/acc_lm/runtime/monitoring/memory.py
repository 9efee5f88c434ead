"""Memory: measure its peak, find a micro-batch that fits, and suggest remedies when there is not enough."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acc_lm.config import Config
from acc_lm.errors import OutOfMemoryError, is_out_of_memory
from acc_lm.optimization.muon import moments
from acc_lm.rows.batch import RowSource
from acc_lm.runtime.engines.collectives import gather_objects
from acc_lm.runtime.launch.request import split_global_batch
from acc_lm.runtime.settings.strategy import requested_strategy

if TYPE_CHECKING:
    from accelerate import Accelerator


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory of this process so far, in GB (1e9 bytes): on the GPU, else on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class Memory:
    """Peak memory of this process in each phase of a run, in GB.

    On a GPU each phase has a peak of its own. A host reports only the peak so far, so there a phase has the peak of the
    run up to its end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.init()  # its counters are read before the model exists
        self.phases: dict[str, float] = {}
        self._between = "before first step"

    @property
    def peak_gb(self) -> float:
        """Peak memory of the run so far, in GB."""
        return max([*self.phases.values(), peak_memory_gb(self._device)])

    def note(self, phase: str) -> None:
        """Count the memory used since the last note towards the peak of this phase."""
        self.phases[phase] = max(self.phases.get(phase, 0.0), peak_memory_gb(self._device))
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context that is measured as a separate phase from what comes before and after it."""
        self.note(self._between)
        try:
            yield
        finally:
            self.note(name)

    def watch_first_step(self, model: nn.Module) -> None:
        """Measure the next forward, and the backward up to the update, as phases.

        What is noted after that belongs to the update or to later steps.
        """
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def forward_ends(*_: Any) -> None:
            forward.remove()
            self.note("first forward")

        def update_begins(*_: Any) -> None:
            update.remove()
            self.note("first backward")

        self.note(self._between)
        self._between = "later steps"
        forward = model.register_forward_hook(forward_ends)
        update = register_optimizer_step_pre_hook(update_begins)


def out_of_memory(error: BaseException, config: Config) -> OutOfMemoryError:
    """Build the error for a lack of memory, with the cheapest remedy that the run does not use yet."""
    words = " ".join(str(error).split())[:160] or type(error).__name__
    return OutOfMemoryError(
        f"the memory must hold a step with training.micro_batch_size {config.training.micro_batch_size}, got: {words}; "
        f"{next_rung(config)}; run the same command to resume from the last checkpoint"
    )


def next_rung(config: Config) -> str:
    """Cheapest unused remedy: first those that keep result and hardware, then sharding, precision, offload."""
    micro, strategy = config.training.micro_batch_size, requested_strategy()
    if micro > 1:
        rungs = [f"training.micro_batch_size={smaller(micro)} splits the same batches into smaller parts"]
        if config.model.gradient_checkpointing is not True:
            rungs.append("model.gradient_checkpointing=true keeps fewer activations")
        return ", ".join(rungs)
    if config.model.gradient_checkpointing is not True:
        return "model.gradient_checkpointing=true keeps fewer activations"
    if strategy not in ("fsdp2", "hsdp", "deepspeed_zero3"):
        return "spread the model over several devices with accelerate_configs/fsdp2.yaml or deepspeed_zero3.yaml"
    if (config.training.mixed_precision or "no") == "no":
        return "training.mixed_precision=bf16 halves the activations"
    return "keep the optimizer in the host's memory with accelerate_configs/fsdp2_offload.yaml or deepspeed_zero3_offload.yaml, or use more devices"


def smaller(micro_batch_size: int) -> int:
    """Largest proper divisor of the micro-batch size, so that the global batch stays the same."""
    return next(size for size in range(micro_batch_size // 2, 0, -1) if micro_batch_size % size == 0)


def fit_micro_batch(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, rows: RowSource, config: Config
) -> tuple[Config, list[str]]:
    """Shrink the micro-batch until it fits on all processes; return the recipe, and a line for each that did not fit.

    The global batch stays the same, and so does the gradient, to rounding. Every process must call it, before the first
    step.

    Raises:
        OutOfMemoryError: not even a single row fits.
    """
    lines: list[str] = []
    while True:
        micro, accumulation = split_global_batch(config.training, accelerator.num_processes)
        accelerator.gradient_accumulation_steps = accumulation
        errors = gather_objects(accelerator, _try_once(accelerator, model, optimizer, rows.__getitems__(range(micro))))
        found = next((error for error in errors if error is not None), None)
        if found is None:
            return config, lines
        if micro == 1:
            raise out_of_memory(MemoryError(found), config)
        lines.append(f"training.micro_batch_size {micro} does not fit, continuing with {smaller(micro)}: {found}")
        training = config.training.model_copy(update={"micro_batch_size": smaller(micro)})
        config = config.model_copy(update={"training": training})


def _try_once(accelerator: Accelerator, model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> str | None:
    """Run one forward and backward next to memory reserved for the moments; return the error if memory runs out."""
    problem = None
    try:
        inner = getattr(optimizer, "optimizer", optimizer)
        reserved = [
            torch.empty_like(getattr(p, "_local_tensor", p))
            for group in inner.param_groups
            for p in group["params"]
            for _ in moments(group)
            if p not in inner.state
        ]
        # Without DDP, which exchanges gradients and buffers, a process that lacks memory leaves no other one waiting.
        alone = getattr(model, "module", model)
        loss = alone(**{name: tensor.to(accelerator.device) for name, tensor in batch.items()})
        accelerator.backward(loss * 0.0)
        del loss, reserved
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = " ".join(str(error).split())[:120] or type(error).__name__
    model.zero_grad(set_to_none=True)
    gc.collect()
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()
    return problem
