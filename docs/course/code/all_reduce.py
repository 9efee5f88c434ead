"""All-reduce by ring and by tree, written with sends and receives alone, next to gloo's own; rounds and bytes are counted.

    python docs/course/code/all_reduce.py                      # 4 processes on this machine
    python docs/course/code/all_reduce.py --processes 2
    python docs/course/code/all_reduce.py --output FOLDER      # the picture all_reduce.svg and its data; else into runs/theory

A collective is a number of rounds, each of which costs a latency `a`, and a number of bytes that pass one after the other, each of
which costs 1/B: seconds = rounds x a + bytes / B. Both are fitted to what was measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SIZES = (4_096, 65_536, 1_048_576, 16_777_216)
SMALL, SMALL_REPEATS, REPEATS = 1_048_576, 60, 25


@dataclass
class Wire:
    """Sends and receives of this process, counted."""

    rounds: int = 0
    bytes_sent: int = 0

    def exchange(self, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> None:
        """Send to one process and receive from another, both at the same time: one round."""
        works = []
        if send is not None:
            works.append(dist.isend(send, to))
            self.bytes_sent += send.numel() * send.element_size()
        if receive is not None:
            works.append(dist.irecv(receive, source))
        for work in works:
            work.wait()
        self.rounds += 1


def ring(gradient: Tensor, wire: Wire) -> None:
    """Sum over the processes, in place: N - 1 rounds of adding (reduce-scatter), N - 1 rounds of copying (all-gather)."""
    world, rank = dist.get_world_size(), dist.get_rank()
    parts = list(gradient.chunk(world))
    received = torch.empty_like(parts[0])
    after, before = (rank + 1) % world, (rank - 1) % world
    for round_ in range(world - 1):
        mine, theirs = (rank - round_) % world, (rank - round_ - 1) % world
        wire.exchange(parts[mine], after, received, before)
        parts[theirs] += received
    for round_ in range(world - 1):
        mine, theirs = (rank + 1 - round_) % world, (rank - round_) % world
        wire.exchange(parts[mine], after, parts[theirs], before)


def tree(gradient: Tensor, wire: Wire) -> None:
    """Sum over the processes, in place: up a binary tree to process 0, and down again. All of the tensor in each round."""
    world, rank = dist.get_world_size(), dist.get_rank()
    received = torch.empty_like(gradient)
    distances = [2**level for level in range((world - 1).bit_length())]
    for distance in distances:  # up
        if rank % (2 * distance) == distance:
            wire.exchange(gradient, rank - distance, None, 0)
        elif rank % (2 * distance) == 0 and rank + distance < world:
            wire.exchange(None, 0, received, rank + distance)
            gradient += received
        else:
            wire.rounds += 1  # nothing to do, but the others are busy
    for distance in reversed(distances):  # down
        if rank % (2 * distance) == 0 and rank + distance < world:
            wire.exchange(gradient, rank + distance, None, 0)
        elif rank % (2 * distance) == distance:
            wire.exchange(None, 0, gradient, rank - distance)
        else:
            wire.rounds += 1


def library(gradient: Tensor, wire: Wire) -> None:
    """Sum over the processes, in place, by the process group itself."""
    dist.all_reduce(gradient)


ALGORITHMS: dict[str, Callable[[Tensor, Wire], None]] = {"ring": ring, "tree": tree, "gloo": library}


def measure(sizes: tuple[int, ...] = SIZES, repeats: int | None = None) -> list[dict[str, Any]]:
    """Check each algorithm at each size, count and time it. Every process calls; the result is that of the busiest."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = []
    for num_bytes in sizes:
        counted: dict[str, Wire] = {}
        seconds: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
        for name, algorithm in ALGORITHMS.items():
            counted[name] = Wire()
            gradient = torch.full((num_bytes // 4,), float(rank + 1))
            algorithm(gradient, counted[name])
            assert bool((gradient == sum(range(1, world + 1))).all()), f"{name} gave a wrong sum"
        gradient = torch.zeros(num_bytes // 4)
        for _ in range(repeats or (SMALL_REPEATS if num_bytes <= SMALL else REPEATS)):
            for name, algorithm in ALGORITHMS.items():  # in turn, so that other programs disturb all alike
                dist.barrier()
                began = time.perf_counter()
                algorithm(gradient, Wire())
                seconds[name].append(time.perf_counter() - began)
        for name, wire in counted.items():
            times = torch.tensor(seconds[name], dtype=torch.float64)
            dist.all_reduce(times, op=dist.ReduceOp.MAX)  # a repeat takes as long as on its slowest process
            counts = torch.tensor([wire.rounds, wire.bytes_sent])
            dist.all_reduce(counts, op=dist.ReduceOp.MAX)
            row = {
                "algorithm": name,
                "bytes": num_bytes,
                "fastest_seconds": float(times.min()),
                "seconds": float(times.median()),
            }
            rows.append(row | {"rounds": int(counts[0]) or None, "bytes_sent": int(counts[1]) or None})
    return rows


def cost(algorithm: str, num_bytes: int, world: int) -> tuple[int, float]:
    """Rounds of an all-reduce, and the bytes that pass one after the other: those of the longest chain."""
    if algorithm == "ring":
        return 2 * (world - 1), 2 * (world - 1) / world * num_bytes
    levels = (world - 1).bit_length()
    return 2 * levels, 2.0 * levels * num_bytes


def fit(rows: list[dict[str, Any]], world: int) -> tuple[float, float]:
    """Seconds of a round and bytes per second, with the least relative error over ring and tree."""
    import numpy as np

    chosen = [row for row in rows if row["algorithm"] in ("ring", "tree")]
    terms = np.array([cost(row["algorithm"], row["bytes"], world) for row in chosen], dtype=float)
    seconds = np.array([row["fastest_seconds"] for row in chosen])
    (latency, inverse), *_ = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(seconds)), rcond=None)
    return float(latency), 1 / float(inverse)


def break_even(latency: float, bandwidth: float, world: int) -> float:
    """Bytes from which a ring is faster than a tree."""
    (ring_rounds, ring_share), (tree_rounds, tree_share) = (cost(name, 1, world) for name in ("ring", "tree"))
    return (ring_rounds - tree_rounds) * latency * bandwidth / (tree_share - ring_share)


def work(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    rows = measure()
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def run(world: int) -> list[dict[str, Any]]:
    """Measure on `world` new processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (world, folder), nprocs=world)
        rows: list[dict[str, Any]] = json.loads(Path(folder, "rows.json").read_text())
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("runs/theory"), help="folder for the picture and its data")
    known = parser.parse_args()
    world = known.processes
    if world < 2:
        parser.error("--processes must be at least 2 to exchange something; raise it")
    print(
        f"{world} processes, gloo\n{'bytes':>12} {'':6} {'rounds':>6} {'sent by the busiest':>20} {'fastest':>11} {'median':>11}"
    )
    rows = run(world)
    for row in rows:
        sent = "-" if row["bytes_sent"] is None else f"{row['bytes_sent']:,}"
        print(
            f"{row['bytes']:>12,} {row['algorithm']:6} {row['rounds'] or '-':>6} {sent:>20} "
            f"{1000 * row['fastest_seconds']:>8.3f} ms {1000 * row['seconds']:>8.3f} ms"
        )
    latency, bandwidth = fit(rows, world)
    print(f"fit: a = {1e6 * latency:.0f} microseconds a round, B = {bandwidth / 1e9:.2f} GB/s", end="")
    if world > 2:
        print(f"; by these a ring wins from {break_even(latency, bandwidth, world) / 1024:,.0f} KiB on", end="")
    print()
    import draw

    known.output.mkdir(parents=True, exist_ok=True)
    (known.output / "all_reduce.json").write_text(json.dumps({"processes": world, "rows": rows}) + "\n")
    draw.draw_data("all_reduce", known.output)


if __name__ == "__main__":
    main()
