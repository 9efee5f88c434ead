"""Ranks of a launch: world size, backend of the process group, and the machine of every process."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from acc_lm.runtime.engines.collectives import gather_objects

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Ranks:
    """Place of this process among all processes of the launch, and theirs."""

    rank: int
    local_rank: int
    backend: str | None
    """Backend of the process group; None for a process without one."""
    places: tuple[tuple[str, int], ...]
    """Host and local rank of each process, by rank."""

    @property
    def description(self) -> str:
        """Line for the start block; the ranks of each machine if there are several."""
        backend = f"backend {self.backend}" if self.backend else "no process group"
        line = f"world size {len(self.places)}, {backend}; this is rank {self.rank}, local rank {self.local_rank}"
        by_host: dict[str, list[int]] = {}
        for rank, (host, _) in enumerate(self.places):
            by_host.setdefault(host, []).append(rank)
        hosts = [f"ranks {_runs_of(ranks)} on {host}" for host, ranks in by_host.items()]
        return "; ".join([line, *hosts] if len(hosts) > 1 else [line])

    @property
    def facts(self) -> dict[str, Any]:
        """Content for `summary.json`."""
        processes = [
            {"rank": rank, "local_rank": local_rank, "host": host}
            for rank, (host, local_rank) in enumerate(self.places)
        ]
        return {
            "world_size": len(self.places),
            "backend": self.backend,
            "local_rank": self.local_rank,
            "processes": processes,
        }


def find_ranks(accelerator: Accelerator) -> Ranks:
    """Find the ranks of this launch. Every process calls."""
    local_rank = accelerator.local_process_index
    places = gather_objects(accelerator, (platform.node(), local_rank))
    backend = dist.get_backend() if dist.is_initialized() else None
    return Ranks(accelerator.process_index, local_rank, backend, tuple(places))


def _runs_of(ranks: list[int]) -> str:
    """Ascending ranks in short form: [0, 1, 2, 5] -> 0-2, 5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)
