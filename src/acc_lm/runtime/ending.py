"""The end of a run, and what it used: memory, and a process group that no process leaves too early."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator


def peak_memory_gb(device: torch.device) -> float:
    """Most memory this process has used so far, in GB (1e9 bytes): of the accelerator, else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def close(accelerator: Accelerator) -> None:
    """End the process group so that no process leaves while another still uses it."""
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    accelerator.end_training()
