"""Test of a launch against the memory of this machine, before any text is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from acc_lm.errors import ConfigError, MachineError, UserError, warn_once
from acc_lm.planning.hardware import GIB
from acc_lm.planning.memory import memory_of
from acc_lm.planning.probe import SWITCH, Probe, vocabulary_of
from acc_lm.runtime import Placement, current_placement, placement_of, split_global_batch

if TYPE_CHECKING:
    from accelerate import Accelerator

    from acc_lm.config import Config

LOADED_LIBRARIES = 0.4 * GIB
"""Bytes that a process on a CPU takes for Python and its libraries."""


@dataclass(frozen=True)
class Fit:
    """Memory that a launch needs, and that of this machine, in bytes."""

    low: float
    high: float
    available: float
    of: str
    """Name of what has this memory: each GPU, or the processes together."""
    smaller: str
    """Smallest change of the recipe or the launch that needs less."""

    def __str__(self) -> str:
        amount = (
            f"{self.low / GIB:.1f} to {self.high / GIB:.1f} GiB"
            if self.high > self.low
            else f"{self.low / GIB:.1f} GiB"
        )
        return f"{amount} {self.of}"


def memory_here(config: Config, file: Path, num_processes: int | None) -> str | None:
    """Line about the memory that this launch will need, and what there is; None for a model that cannot be planned.

    Raises:
        MachineError: the launch cannot fit.
    """
    fit = _fit(config, placement_of(file, num_processes, None, config))
    if fit is None:
        return None
    there = f"{fit.available / GIB:.1f} GiB"
    if fit.low > fit.available:
        raise MachineError(f"the memory must hold {fit}, by acc-lm plan, got {there}; try {fit.smaller}")
    close = ", which may be too much" if fit.high > fit.available else ""
    return f"plan: {fit}, of {there}{close}"


def warn_of_memory(accelerator: Accelerator, config: Config) -> None:
    """Warn before any text is read if this launch needs more memory than each GPU has; it is an estimate, so no error."""
    if accelerator.device.type != "cuda" or not accelerator.is_main_process:
        return
    # Models that scan a row position by position would take minutes on fake tensors, so only plain decoders are measured.
    fit = _fit(config, current_placement(config), only_plain=True)
    if fit is not None and fit.high > fit.available:
        will = "will not" if fit.low > fit.available else "may not"
        warn_once(
            f"the run {will} fit: {fit} by acc-lm plan, got {fit.available / GIB:.1f} GiB; {fit.smaller} needs less"
        )


def predicted_and_used(config: Config) -> str | None:
    """Line for an error of memory: what was predicted for a GPU, and what this process used; None without a prediction."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        fit = _fit(config, current_placement(config), only_plain=True)
    except (UserError, MemoryError, RuntimeError):  # the error of the run is what counts
        return None
    if fit is None:
        return None
    used = torch.cuda.max_memory_allocated() / GIB
    return (
        f"memory: {fit} predicted by acc-lm plan, {used:.1f} GiB of tensors used, {fit.available / GIB:.1f} GiB there"
    )


def _fit(config: Config, placement: Placement, *, only_plain: bool = False) -> Fit | None:
    import psutil
    import torch

    if placement.layers_in_parts > 1:  # activations of a part are not planned yet
        return None
    here = placement.num_processes // placement.num_machines
    devices = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    wanted = config.model.gradient_checkpointing
    checkpointing = next(name for name, value in SWITCH.items() if value == wanted)
    micro, accumulation = split_global_batch(config.training, placement.num_processes, placement.rows_in_parts)
    try:
        probe = Probe(config, vocabulary_of(config), on_gpu=bool(devices))
        if only_plain and probe.sizes is None:
            return None
        found = memory_of(probe, placement, micro, accumulation, checkpointing)
    except ConfigError:  # a model that runs only with data: nothing is known before it does
        return None
    smaller = "model.gradient_checkpointing=true" if checkpointing != "full" else "an offload, or adapter.kind=lora,"
    if micro > 1:
        smaller = f"training.micro_batch_size={next(n for n in range(micro // 2, 0, -1) if micro % n == 0)}"
    if devices:
        return Fit(found.low, found.high, float(min(devices)), "of each GPU", smaller)
    of_all = here * (found.tensors + LOADED_LIBRARIES)
    return Fit(of_all, of_all, float(psutil.virtual_memory().total), f"of {here} process(es)", smaller)
