"""Sizes of an Accelerate config's parallelism_config: copies, shards, and the parts that rows are cut into.

Accelerate itself would ignore sp_size without DeepSpeed, and compute full rows on every process under cp_size. Here both
mean that many processes share each row, whatever the engine.
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
        MachineError: a size is not positive, layers are to be cut, or rows in two ways.
    """
    if os.environ.get(SWITCH_VARIABLE, "false").lower() != "true":
        return ProcessGrid()
    sizes = {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in DIMENSIONS}
    for name, size in sizes.items():
        if size < 1:
            raise MachineError(f"parallelism_config_{name}_size must be at least 1, got {size}; write 1, or remove it")
    if sizes["tp"] > 1:
        raise MachineError(
            f"parallelism_config_tp_size must be 1, got {sizes['tp']}: this version cuts data, parameters and rows, "
            "not layers; use parallelism_config_sp_size, or accelerate_configs/hsdp.yaml"
        )
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


def readers(accelerator: Accelerator) -> tuple[int, int]:
    """Return (index of this process's group among those that read different rows, number of these groups)."""
    size = parts_of_rows()
    return accelerator.process_index // size, accelerator.num_processes // size


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
