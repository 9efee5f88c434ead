"""What the processes can exchange: collectives of a given size, a gradient that stays at home, memory that is held, many GPUs in one process."""

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

from acc_lm.runtime.traffic import ring_share

BUCKETED_CONFIGS = ("ddp", "deepspeed_zero2")
"""Files in accelerate_configs/ whose engines collect gradients in buckets, of distributed.bucket_cap_mb."""
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")


def bus_bandwidth(kind: str, num_bytes: int, num_processes: int, seconds: float) -> float:
    """Bytes per second that a ring would have sent over its slowest link: comparable between kinds and numbers of processes."""
    return num_bytes / seconds * ring_share(kind, num_processes)


def time_collective(kind: str, num_bytes: int, device: torch.device, repeats: int) -> tuple[int, list[float]]:
    """(bytes of the whole tensor, rounded to equal shares; seconds of each repeat, of its slowest process). Every process calls.

    The result is checked first: what does not add up, or is not gathered, is not timed.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    share = max(1, num_bytes // 4 // world)
    whole = torch.full((share * world,), float(rank + 1), device=device)
    part = torch.full((share,), float(rank + 1), device=device)
    total = float(sum(range(1, world + 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names, 2.11 only these
        run: Callable[[], Any]
        if kind == "all-reduce":
            run = lambda: dist.all_reduce(whole)  # noqa: E731
            run()
            right = bool((whole == total).all())
        elif kind == "all-gather":
            run = lambda: dist.all_gather_into_tensor(whole, part)  # noqa: E731
            run()
            right = all(float(whole[i * share]) == i + 1 for i in range(world))
        else:
            run = lambda: dist.reduce_scatter_tensor(part, whole)  # noqa: E731
            run()
            right = bool((part == total).all())
        if not right:
            raise RuntimeError(f"{kind} of {num_bytes} bytes gave a wrong result")
        whole.zero_(), part.zero_()  # sums of sums would soon be infinite
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
    """Until the device has done all that was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def seconds_of_slowest(seconds: list[float], device: torch.device) -> list[float]:
    """Of each repeat, the time of the process that took longest. Every process calls."""
    times = torch.tensor(seconds, device=device, dtype=torch.float32)
    if dist.is_initialized():
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [float(value) for value in times]


def keep_gradients_home(model: nn.Module) -> bool:
    """Let DDP fill its buckets and send nothing: a step without communication, for its time alone; False for other engines."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return False

    def keep(state: Any, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    keep.__annotations__ = {}  # torch reads types there, and these are not resolved yet
    model.register_comm_hook(None, keep)  # type: ignore[arg-type]
    return True


def memory_held(device: torch.device) -> int | None:
    """Bytes that this process holds now: of the device, else of the machine, after all that is free was given back to it."""
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
    """A model for DataParallel: its copies compute with their own weights, and return a loss that can be gathered.

    The model's forward is bound to the model, and a copy inherits that: it would compute with the first GPU's weights.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        bound = self.model.__dict__.get("forward")
        loss: Tensor = self.model(**batch) if bound is None else bound.__func__(self.model, **batch)
        return loss[None]


def data_parallel(model: nn.Module) -> nn.Module:
    """The model on all GPUs of this one process: `wrapped(**batch)` gives the summed loss of each. Not a way to train, to compare."""
    return nn.DataParallel(_Replicable(model))
