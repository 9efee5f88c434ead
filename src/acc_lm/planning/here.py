"""Test of a launch against the memory of this machine, before any text is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from acc_lm.errors import ConfigError, MachineError
from acc_lm.planning.hardware import GIB
from acc_lm.planning.memory import memory_of
from acc_lm.planning.probe import SWITCH, Probe, vocabulary_of
from acc_lm.runtime import placement_of, split_global_batch

if TYPE_CHECKING:
    from acc_lm.config import Config

LOADED_LIBRARIES = 0.4 * GIB
"""Bytes that a process on a CPU takes for Python and its libraries."""


def memory_here(config: Config, file: Path, num_processes: int | None) -> str | None:
    """Line about the memory that this launch will need, and what there is; None for a model that cannot be planned.

    Raises:
        MachineError: the launch cannot fit; the line has the next smaller configuration that would.
    """
    import psutil
    import torch

    placement = placement_of(file, num_processes, None, config)
    here = placement.num_processes // placement.num_machines
    devices = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    wanted = config.model.gradient_checkpointing
    checkpointing = next(name for name, value in SWITCH.items() if value == wanted)
    micro, accumulation = split_global_batch(config.training, placement.num_processes)
    try:
        probe = Probe(config, vocabulary_of(config), on_gpu=bool(devices))
        found = memory_of(probe, placement, micro, accumulation, checkpointing)
    except ConfigError:  # the line about the state of the training has to do
        return None
    if devices:
        available, low, high, of = float(min(devices)), found.low, found.high, "of each GPU"
    else:
        available, of = float(psutil.virtual_memory().total), f"of {here} process(es)"
        low = high = here * (found.tensors + LOADED_LIBRARIES)
    text = f"{low / GIB:.1f} to {high / GIB:.1f} GiB" if high > low else f"{low / GIB:.1f} GiB"
    if low > available:
        smaller = (
            "model.gradient_checkpointing=true"
            if checkpointing != "full"
            else "more GPUs, an offload or adapter.kind=lora"
        )
        if micro > 1:
            smaller = f"training.micro_batch_size={next(n for n in range(micro // 2, 0, -1) if micro % n == 0)}"
        raise MachineError(
            f"the memory {of} must hold {text}, by acc-lm plan, got {available / GIB:.1f} GiB; try {smaller}"
        )
    close = ", which may be too much" if high > available else ""
    return f"plan: {text} {of}, of {available / GIB:.1f} GiB{close}"
