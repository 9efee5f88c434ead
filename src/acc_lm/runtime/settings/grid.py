"""Sizes of an Accelerate config's parallelism_config: copies, shards, and the parts that rows or layers are cut into.

Accelerate itself would ignore sp_size without DeepSpeed, and compute full rows on every process under cp_size. Here both
mean that many processes share each row, whatever the engine. Under tp_size it would leave the layers complete; here that
many processes share each layer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from acc_lm.errors import MachineError
from acc_lm.runtime.settings.config_file import config_file, launch_arguments, read_config

if TYPE_CHECKING:
    from argparse import Namespace

    from accelerate import Accelerator

SWITCH_VARIABLE = "ACCELERATE_USE_PARALLELISM_CONFIG"
DIMENSIONS = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
OVERRULED = (
    "cp_comm_strategy",
    "cp_backend",
    "sp_backend",
    "sp_seq_length",
    "sp_seq_length_is_variable",
    "sp_attn_implementation",
)
"""Settings of Accelerate's own divisions of rows, which do not run here."""


@dataclass(frozen=True)
class ProcessGrid:
    """Sizes of a launch's groups of processes; 1 where the launch does not ask for such groups."""

    copies: int = 1
    shards: int = 1
    layers: int = 1
    """Parts that layers are cut into."""
    rows: int = 1
    """Parts that rows are cut into."""
    key: str = ""
    """Key of the config that asks for parts of rows."""


def requested_grid() -> ProcessGrid:
    """Sizes that this launch requests.

    Raises:
        MachineError: a size is not positive, or rows are to be cut in two ways.
    """
    if os.environ.get(SWITCH_VARIABLE, "false").lower() != "true":
        return ProcessGrid()
    sizes = {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in DIMENSIONS}
    for name, size in sizes.items():
        if size < 1:
            raise MachineError(f"parallelism_config_{name}_size must be at least 1, got {size}; write 1, or remove it")
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        raise MachineError(
            f"only one of parallelism_config_cp_size and parallelism_config_sp_size must be above 1, got {sizes['cp']} and "
            f"{sizes['sp']}; both cut rows in the same way here: give their product as parallelism_config_sp_size"
        )
    key = "parallelism_config_cp_size" if sizes["cp"] > 1 else "parallelism_config_sp_size"
    return ProcessGrid(sizes["dp_replicate"], sizes["dp_shard"], sizes["tp"], sizes["cp"] * sizes["sp"], key)


def parts_of_rows() -> int:
    """Number of processes that share each row of this launch."""
    return requested_grid().rows


def parts_of_layers() -> int:
    """Number of processes that share each layer of this launch."""
    return requested_grid().layers


def processes_of_reader() -> int:
    """Number of processes that read the same rows, because they share the rows or the layers."""
    grid = requested_grid()
    return grid.rows * grid.layers


def groups_of_rows(num_processes: int) -> list[list[int]]:
    """Processes that share each row, by group: neighbours among those that have the same part of each layer."""
    grid = requested_grid()
    size = grid.rows * grid.layers
    firsts = [start + part for start in range(0, num_processes, size) for part in range(grid.layers)]
    return [list(range(first, first + size, grid.layers)) for first in firsts]


def readers(accelerator: Accelerator) -> tuple[int, int]:
    """Return (index of this process's group among those that read different rows, number of these groups)."""
    size = processes_of_reader()
    return accelerator.process_index // size, accelerator.num_processes // size


def readers_of_whole_rows(accelerator: Accelerator) -> tuple[int, int]:
    """The same, where rows are not divided: only processes that share layers read the same rows."""
    size = parts_of_layers()
    return accelerator.process_index // size, accelerator.num_processes // size


def repeats_losses(accelerator: Accelerator) -> bool:
    """True if an earlier process computes the same losses as this one, because they share layers but not rows."""
    return bool(accelerator.process_index % parts_of_layers())


def check_grid(num_processes: int, strategy: str, typed: Namespace | None) -> None:
    """Check the sizes against the number of processes and the engine; those of FSDP's own groups are checked with them.

    Args:
        typed: arguments of `accelerate launch`; None: read them from its command line.

    Raises:
        MachineError: a size would have no effect, or the sizes do not multiply to the number of processes.
    """
    arguments = typed or launch_arguments()
    given = {name: getattr(arguments, f"parallelism_config_{name}_size", None) or 1 for name in DIMENSIONS}
    name = max(given, key=given.__getitem__)
    if SWITCH_VARIABLE not in os.environ and given[name] > 1:
        raise MachineError(
            f"--parallelism_config_{name}_size must come with a parallelism_config in the Accelerate config, got {given[name]} without, "
            "which Accelerate ignores; write the size there"
        )
    grid = requested_grid()
    if grid.layers > 1:
        _check_layers(grid, num_processes, strategy)
        return
    if num_processes % grid.rows:
        raise MachineError(
            f"{grid.key} must divide the number of processes {num_processes}, got {grid.rows}; change num_processes or the size"
        )
    if strategy in ("fsdp2", "hsdp"):
        return
    # DDP copies and DeepSpeed shards over all processes that read different rows: no other sizes have an effect.
    size, other = (grid.shards, grid.copies) if strategy.startswith("deepspeed") else (grid.copies, grid.shards)
    if other > 1 or (size > 1 and (grid.rows == 1 or size * grid.rows != num_processes)):
        raise MachineError(
            f"a parallelism_config must come with use_fsdp, got dp_replicate_size {grid.copies} x dp_shard_size {grid.shards} under "
            f"{strategy} for {num_processes} processes; use accelerate_configs/hsdp.yaml, or remove both"
        )


def _check_layers(grid: ProcessGrid, num_processes: int, strategy: str) -> None:
    """Check a grid whose layers are cut: alone, or with FSDP2 over the processes that hold the same parts of them."""
    key = f"parallelism_config_tp_size must be 1 under {strategy}, got {grid.layers}"
    if strategy.startswith("deepspeed"):
        raise MachineError(f"{key}; use accelerate_configs/fsdp2_tensor_parallel.yaml")
    if grid.copies > 1:
        raise MachineError(
            f"parallelism_config_dp_replicate_size must be 1 with tp_size {grid.layers}, got {grid.copies}; give all processes of different "
            "rows as parallelism_config_dp_shard_size, as in accelerate_configs/fsdp2_tensor_parallel.yaml"
        )
    if strategy != "fsdp2" and grid.rows > 1:
        raise MachineError(
            f"{grid.key} must be 1 with tp_size {grid.layers} and without use_fsdp, got {grid.rows}; give both sizes in "
            "accelerate_configs/fsdp2_tensor_parallel.yaml"
        )
    if grid.shards * grid.layers * grid.rows != num_processes:
        in_parts = f" x {grid.key.removeprefix('parallelism_config_')} {grid.rows}" if grid.rows > 1 else ""
        raise MachineError(
            f"parallelism_config must multiply to the number of processes, got dp_shard_size {grid.shards} x tp_size {grid.layers}{in_parts} for "
            f"{num_processes} processes; change num_processes or the sizes"
        )
    if strategy == "fsdp2" and grid.shards * grid.rows == 1:
        raise MachineError(
            "parallelism_config_dp_shard_size must be at least 2 under FSDP2, got 1, which shards nothing; use "
            "accelerate_configs/tensor_parallel.yaml"
        )
    if strategy != "fsdp2" and grid.shards > 1:
        raise MachineError(
            f"parallelism_config_dp_shard_size must be 1 without use_fsdp, got {grid.shards}; use "
            "accelerate_configs/fsdp2_tensor_parallel.yaml"
        )


def overruled_sizes() -> list[str]:
    """List the settings of parts of rows that have no effect, one line each."""
    file = config_file()
    if file is None or parts_of_rows() == 1:
        return []
    written = getattr(read_config(file), "parallelism_config", None) or {}
    keys = [key for name in OVERRULED if (key := f"parallelism_config_{name}") in written]
    return [f"{key} {written[key]} has no effect: rows are cut by this project, not by Accelerate" for key in keys]


@contextmanager
def without_grid() -> Iterator[None]:
    """Context without the switch at which Accelerate builds groups of its own."""
    switch = os.environ.pop(SWITCH_VARIABLE, None)
    try:
        yield
    finally:
        if switch is not None:
            os.environ[SWITCH_VARIABLE] = switch
