"""Cost of a step, measured on every process: time, memory and bytes sent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from acc_lm.files import write_json
from acc_lm.runtime.engines.collectives import gather_objects
from acc_lm.runtime.monitoring.live_bytes import LiveBytes
from acc_lm.runtime.monitoring.traffic import Traffic, summarize_traffic

if TYPE_CHECKING:
    from accelerate import Accelerator

MEASURED_FILE = "ACC_LM_MEASURED_FILE"
"""Environment variable: file that `train.py --dry-run` writes its measurements to, as JSON."""


@dataclass(frozen=True)
class StepCost:
    """Cost of a step on the process where it is highest."""

    seconds: float
    tensor_bytes: int | None
    """The most bytes of tensors at once; None where compiled code on a CPU allocates uncounted."""
    sent_bytes: float
    """Bytes that a process sends in rings."""

    def __str__(self) -> str:
        held = "" if self.tensor_bytes is None else f", {self.tensor_bytes / 1e6:,.1f} MB of tensors"
        sent = f", {self.sent_bytes / 1e6:,.1f} MB sent" if self.sent_bytes else ""
        return f"{self.seconds:.2f} s{held}{sent}"

    def write_if_asked(self, **facts: Any) -> None:
        """Write the cost, with further facts, to the file that the environment names; without one, do nothing."""
        if file := os.environ.get(MEASURED_FILE):
            write_json(Path(file), {**asdict(self), **facts})


def measure_step(accelerator: Accelerator, step: Callable[[], Any]) -> StepCost:
    """Take two steps, one for its time and one for its bytes, since counting slows a step. Every process calls.

    Args:
        step: takes an optimizer step and waits for its result.
    """
    accelerator.wait_for_everyone()
    started = time.monotonic()
    step()
    seconds = time.monotonic() - started
    device, traffic = accelerator.device, Traffic()
    held: int | None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        with traffic:
            step()
        held = torch.cuda.max_memory_allocated(device)
    else:
        live = LiveBytes(unit=1)
        live.add_existing()
        with traffic, live.counting():
            step()
        is_compiled = accelerator.state.dynamo_plugin.backend.value.lower() != "no"
        held = None if is_compiled else live.most
    sent = sum(entry["ring_bytes"] for entry in summarize_traffic(traffic.calls).values())
    everywhere = gather_objects(accelerator, (seconds, held, sent))
    times, sizes, amounts = zip(*everywhere, strict=True)
    return StepCost(max(times), None if None in sizes else max(sizes), max(amounts))
