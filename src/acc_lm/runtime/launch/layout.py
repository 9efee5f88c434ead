"""Layout of a launch: where weights, gradients and moments of a model live, in numbers, for `acc-lm plan`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from acc_lm.runtime.launch.doctor import launched
from acc_lm.runtime.settings.deepspeed import offload_device
from acc_lm.runtime.settings.strategy import flag, requested_precision, requested_strategy

if TYPE_CHECKING:
    from acc_lm.config import Config

Compute = Literal["autocast", "cast", "own"]
BUCKET = 1e9
"""Bytes of DeepSpeed's buckets: 5e8 elements of 16 bits to gather into, which is its default."""
LIVE = 1e9
"""Elements that ZeRO-3 keeps gathered at most, its default."""


@dataclass(frozen=True)
class Layout:
    """Bytes of each parameter on each device of a launch, and what is sent.

    Frozen parameters have weights only. "Between" is between the micro-batches of a step.
    """

    config: str
    """Name of the Accelerate config."""
    num_processes: int
    num_machines: int
    shards: int
    """Processes that share one copy of what is sharded; 1: nothing is."""
    compute: Compute
    """autocast: stored weights under autocast; cast: a 16-bit copy, gathered or kept; own: in the stored dtype."""
    weights: float
    """Bytes of a parameter that are always on the device."""
    trained: float
    """Bytes of a trained parameter that are always on the device in addition: moments, masters, buckets."""
    gradients: float
    """Bytes of a trained parameter's gradient: on the device between micro-batches and at the end of a step."""
    gathers: Literal["nothing", "blocks", "kept", "limited"]
    """Weights that are gathered: block by block, all blocks until the backward, or up to a number of elements."""
    buckets: float
    """Bytes of buffers for communication."""
    host: float
    """Bytes of a trained parameter in the memory of the machine."""
    overlaps: bool
    """True if communication runs while gradients are computed."""
    sends: Literal["nothing", "gradients", "updates", "parts"]
    """Sent: gradients once in a step; also updated weights; weights and gradients with every micro-batch."""

    @property
    def replicas(self) -> int:
        return self.num_processes // self.shards

    @property
    def is_offloaded(self) -> bool:
        return self.host > 0


def layout_of(file: Path, num_processes: int, num_machines: int, config: Config) -> Layout:
    """Layout of this recipe under an Accelerate config, with other than its own number of GPUs.

    Raises:
        MachineError: the config cannot be launched so.
    """
    here = num_processes // num_machines
    options = ["--num_processes", str(num_processes), "--num_machines", str(num_machines)]
    if num_machines > 1:
        options += ["--machine_rank", "0", "--main_process_ip", "127.0.0.1", "--main_process_port", "29500"]
    with launched(file, options):
        strategy = requested_strategy()
        precision = requested_precision(config.training.mixed_precision)
        shards = min(here, num_processes) if strategy == "hsdp" else num_processes
        keeps = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false"
        offloads = flag("FSDP_OFFLOAD_PARAMS")
        devices = (
            (offload_device("optimizer"), offload_device("param"))
            if strategy.startswith("deepspeed")
            else ("none",) * 2
        )
    own = 2 if config.model.dtype == "bfloat16" else 8 if config.model.dtype == "float64" else 4
    is_mixed, name = precision != "no", file.stem
    if strategy in ("single", "ddp"):
        compute: Compute = "autocast" if is_mixed else "own"
        buckets = own if strategy == "ddp" else 0  # of all gradients, which are views of them
        gradients = 0 if strategy == "ddp" else own
        sends = "gradients" if strategy == "ddp" else "nothing"
        return Layout(
            name,
            num_processes,
            num_machines,
            1,
            compute,
            own,
            2 * own + buckets,
            gradients,
            "nothing",
            0,
            0,
            True,
            sends,  # type: ignore[arg-type]
        )
    compute = "cast" if is_mixed else "own"
    if strategy in ("fsdp2", "hsdp"):
        on_device = 0.0 if offloads else 1.0
        return Layout(
            name,
            num_processes,
            num_machines,
            shards,
            compute,
            own / shards * on_device,
            2 * own / shards * on_device,
            own / shards * on_device,
            "kept" if keeps else "blocks",
            0,
            (0 if on_device else 4 * own / shards),
            True,
            "parts",
        )
    stage = int(strategy[-1])
    small, n = (2 if is_mixed else 4), num_processes
    masters = (12 if is_mixed else 8) / n
    summed = (4 if is_mixed else 0) + small  # fp32 sums next to the gradients of a micro-batch
    weights = small / n if stage == 3 else float(small)
    kept = {1: float(summed), 2: 4 / n, 3: (4 + small + (2 if is_mixed else 0)) / n}[stage]
    host = 0.0
    if devices[0] != "none":
        host, masters, kept = masters + 4 / n, 0.0, 0.0
    if devices[1] != "none":
        host, weights = host + weights, 0.0
    return Layout(
        name,
        num_processes,
        num_machines,
        n,
        compute,
        weights,
        masters,
        kept,
        "limited" if stage == 3 else "nothing",
        BUCKET,
        host,
        stage == 3,
        "parts" if stage == 3 else "updates",
    )
