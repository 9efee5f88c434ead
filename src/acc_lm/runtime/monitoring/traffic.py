"""Network traffic of a step: every collective, counted where torch hands it to the backend."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

VARIABLE = "ACC_LM_COUNT_TRAFFIC"
"""Environment variable, as `FOLDER@STEP`: each process counts that step and writes `FOLDER/traffic-RANK.json`.

The first step of a launch is 1.
"""
# Keys are prefixes of an operator's name without underscores; the first that fits counts.
KINDS = {
    "allreduce": "all-reduce",
    "reducescatter": "reduce-scatter",
    "allgather": "all-gather",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "receive",
}
TCP_BYTES_ACKED = 120  # offset in Linux's struct tcp_info; the received bytes follow it


@dataclass(frozen=True)
class Collective:
    """One call of a collective."""

    kind: str
    num_bytes: int
    """Size of the full tensor: the one that an all-reduce sums, an all-gather produces, a reduce-scatter takes."""
    num_processes: int
    dtype: str


def ring_share(kind: str, num_processes: int) -> float:
    """Ratio of the bytes that each process sends in a ring to those of the full tensor.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, "bus bandwidth".
    """
    if kind == "all-reduce":
        return 2 * (num_processes - 1) / num_processes
    if kind in ("all-gather", "reduce-scatter", "all-to-all", "gather", "scatter"):
        return (num_processes - 1) / num_processes
    return 1.0 if num_processes > 1 else 0.0


class Traffic(TorchDispatchMode):
    """Counter of the collectives of this process. Use as a context manager.

    Every collective passes torch's dispatcher, on this thread or on autograd's, even if torch's C++ starts it. Sends from
    callbacks on other threads, such as PowerSGD's on gloo, are not seen; `received_over_tcp` includes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: else torch runs nothing compiled here, and the step would need the memory of an eager one."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if function.namespace in ("c10d", "_c10d_functional"):
            kind = _kind(function.overloadpacket.__name__)
            if kind is not None:
                given = [_tensors(argument) for argument in (*args, output)]
                largest = max(given, key=_num_bytes)
                dtype = str(largest[0].dtype).removeprefix("torch.") if largest else ""
                self.calls.append(Collective(kind, _num_bytes(largest), _group_size(args), dtype))
        return output


def _kind(name: str) -> str | None:
    name = name.replace("_", "")
    return next((kind for start, kind in KINDS.items() if name.startswith(start)), None)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for inner in value for tensor in _tensors(inner)] if isinstance(value, (list, tuple)) else []


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _group_size(args: Any) -> int:
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return int(dist.ProcessGroup.unbox(argument).size())  # type: ignore[attr-defined]
    return dist.get_world_size()


def summarize_traffic(calls: Iterable[Collective]) -> dict[str, dict[str, float]]:
    """Totals by kind: calls, bytes handed over, and bytes that each process then sends in a ring."""
    found: dict[str, dict[str, float]] = {}
    for call in calls:
        entry = found.setdefault(call.kind, {"calls": 0, "bytes": 0, "ring_bytes": 0.0})
        entry["calls"] += 1
        entry["bytes"] += call.num_bytes
        entry["ring_bytes"] += call.num_bytes * ring_share(call.kind, call.num_processes)
    return found


def received_over_tcp() -> int | None:
    """Bytes received over this process's open connections, by the system's own count; None where there is no count."""
    if sys.platform != "linux":
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_BYTES_ACKED + 16)
        except OSError:  # already closed, or not TCP
            continue
        if len(state) == TCP_BYTES_ACKED + 16:
            total += struct.unpack_from("QQ", state, TCP_BYTES_ACKED)[1]
    return total


class CountedStep:
    """Traffic counter for the one step of a run that the environment variable names."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step, self._number = folder, step, 0
        self._traffic: Traffic | None = None
        self._received: int | None = None

    @classmethod
    def asked(cls) -> CountedStep | None:
        folder, _, step = os.environ.get(VARIABLE, "").rpartition("@")
        return cls(Path(folder), int(step)) if folder else None

    def start_step(self) -> None:
        """Start or end the count. Called before the first step and after each step."""
        self._number += 1
        if self._number == self._step:
            self._received = received_over_tcp()
            self._traffic = Traffic()
            self._traffic.__enter__()
        elif self._traffic is not None:
            self._traffic.__exit__(None, None, None)
            self._write(self._traffic.calls)
            self._traffic = None

    def _write(self, calls: list[Collective]) -> None:
        is_there = dist.is_initialized()
        over_tcp = is_there and dist.get_backend() == "gloo" and self._received is not None
        received = (received_over_tcp() or 0) - (self._received or 0) if over_tcp else None
        values = {
            "backend": dist.get_backend() if is_there else None,
            "collectives": summarize_traffic(calls),
            "tcp_bytes": received,
        }
        file = self._folder / f"traffic-{dist.get_rank() if is_there else 0}.json"
        file.write_text(json.dumps(values) + "\n")
