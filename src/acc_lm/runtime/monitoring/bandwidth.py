"""Measurements of communication: timed collectives, DDP that sends nothing, memory held, many GPUs in one process."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acc_lm.runtime.monitoring.traffic import ring_share

BUCKETED_CONFIGS = ("ddp", "deepspeed_zero2")
"""Files in accelerate_configs/ whose engines collect gradients in buckets of distributed.bucket_cap_mb."""
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def bus_bandwidth(kind: str, num_bytes: int, num_processes: int, seconds: float) -> float:
    """Bytes per second over the slowest link of a ring, comparable between kinds and numbers of processes."""
    return num_bytes / seconds * ring_share(kind, num_processes)


def time_collective(kind: str, num_bytes: int, device: torch.device, repeats: int) -> tuple[int, list[float]]:
    """Return (bytes of the full tensor, rounded to equal shares; seconds of the slowest process in each repeat).

    Every process must call it. The result is checked first, and a collective with a wrong result is not timed.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    share = max(1, num_bytes // 4 // world)
    full = torch.full((share * world,), float(rank + 1), device=device)
    part = torch.full((share,), float(rank + 1), device=device)
    total = float(sum(range(1, world + 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names, 2.11 only these
        run: Callable[[], Any]
        if kind == "all-reduce":
            run = lambda: dist.all_reduce(full)  # noqa: E731
            run()
            right = bool((full == total).all())
        elif kind == "all-gather":
            run = lambda: dist.all_gather_into_tensor(full, part)  # noqa: E731
            run()
            right = all(float(full[i * share]) == i + 1 for i in range(world))
        elif kind == "all-to-all":
            received = torch.empty_like(full)
            run = lambda: dist.all_to_all_single(received, full)  # noqa: E731
            run()
            right = all(float(received[i * share]) == i + 1 for i in range(world))
        else:
            run = lambda: dist.reduce_scatter_tensor(part, full)  # noqa: E731
            run()
            right = bool((part == total).all())
        if not right:
            raise RuntimeError(f"{kind} of {num_bytes} bytes gave a wrong result")
        full.zero_(), part.zero_()  # repeated sums would soon be infinite
        run()
        seconds = [_seconds(run, device) for _ in range(repeats)]
    return 4 * share * world, seconds_of_slowest(seconds, device)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    dist.barrier()
    wait_for(device)
    began = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - began


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def seconds_of_slowest(seconds: list[float], device: torch.device) -> list[float]:
    """Time of the slowest process in each repeat, in seconds. Every process must call it."""
    times = torch.tensor(seconds, device=device, dtype=torch.float32)
    if dist.is_initialized():
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [float(value) for value in times]


def keep_gradients_home(model: nn.Module) -> bool:
    """Let DDP fill its buckets but send nothing, to time a step without communication; False for other engines."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return False

    def keep(state: Any, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    keep.__annotations__ = {}  # torch reads types there, and these are still strings
    model.register_comm_hook(None, keep)  # type: ignore[arg-type]
    return True


def memory_held(device: torch.device) -> int | None:
    """Bytes that this process holds now: on a GPU, else on the host after it gave back free memory; None if unknown."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if sys.platform != "linux":
        return None
    import psutil

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is None:
        return None
    trim(0)
    return int(psutil.Process().memory_info().rss)


class _Replicable(nn.Module):
    """Model for DataParallel whose copies compute with their own weights and return a loss that can be gathered.

    The model's forward is bound to the model. A copy inherits that, and would compute with the first GPU's weights.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        bound = self.model.__dict__.get("forward")
        loss: Tensor = self.model(**batch) if bound is None else bound.__func__(self.model, **batch)
        return loss[None]


def data_parallel(model: nn.Module) -> nn.Module:
    """Put the model on all GPUs of this process, only to compare: `wrapped(**batch)` gives each GPU's summed loss."""
    return nn.DataParallel(_Replicable(model))
