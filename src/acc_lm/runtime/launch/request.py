"""Request of a launch: strategy, precision and plugins, read from the launcher's environment and checked against the recipe."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from acc_lm.config import TrainingConfig, nearest_multiples
from acc_lm.errors import ConfigError, MachineError, UserError
from acc_lm.runtime.launch import refusals
from acc_lm.runtime.settings.config_file import check_config_file, config_file, lost_settings
from acc_lm.runtime.settings.deepspeed import deepspeed_plugin, offload_device, requested_plugin
from acc_lm.runtime.settings.fp8 import check_engine, check_recipe
from acc_lm.runtime.settings.fsdp import fsdp_plugin, mesh
from acc_lm.runtime.settings.grid import check_grid, parts_of_layers, parts_of_rows, processes_of_reader
from acc_lm.runtime.settings.strategy import has_accelerator, requested_precision, requested_strategy, world_size

if TYPE_CHECKING:
    from accelerate.utils import TorchDynamoPlugin

    from acc_lm.config import Config


@dataclass(frozen=True)
class LaunchRequest:
    """Request of a launch that this machine can satisfy."""

    strategy: str
    precision: str
    num_processes: int
    has_accelerator: bool
    compiler: TorchDynamoPlugin
    plugins: dict[str, Any] = field(default_factory=dict)
    """Accelerate's plugins, by the name of the `Accelerator` argument that takes each."""
    accumulation: int = 1
    """Number of micro-batches per optimizer step; 1 without a recipe."""


def read_launch(config: Config | None, typed: Namespace | None = None) -> LaunchRequest:
    """Read the request of a launch from its environment, after all checks of it and of the recipe against it.

    Args:
        config: the recipe; None: assume one that agrees with the launch.
        typed: arguments of `accelerate launch`; None: read them from its command line.

    Raises:
        MachineError: the launch did not provide what it requested, or this machine cannot run it.
        ConfigError: the recipe cannot be trained by this launch.
    """
    with accelerates_own_refusals():
        from accelerate.utils import TorchDynamoPlugin

        num_processes = world_size()
        refusals.refuse_silent_single_process(typed)
        refusals.refuse_restarts_that_hang()
        check_config_file(typed)
        os.environ |= lost_settings()
        strategy, on_accelerator = requested_strategy(), has_accelerator()
        refusals.refuse_what_needs_a_launcher(strategy)
        check_grid(num_processes, strategy, typed)
        precision = refusals.checked_precision(
            config.training.mixed_precision if config else None, on_accelerator, strategy
        )
        refusals.refuse_what_needs_complete_layers(config, precision)
        refusals.refuse_missing_devices(on_accelerator)
        refusals.refuse_offloaded_fp16(strategy, precision)
        refusals.refuse_debugging_that_crashes(strategy, on_accelerator)
        request = LaunchRequest(strategy, precision, num_processes, on_accelerator, TorchDynamoPlugin())
        refusals.refuse_compilation_that_fails(request.compiler, strategy)
        micro_batch_size, accumulation = _fit_recipe(config, request) if config else (1, 1)
        plugins: dict[str, Any] = {}
        if strategy in ("fsdp2", "hsdp"):
            plugins = {"fsdp_plugin": fsdp_plugin(precision, on_accelerator), "parallelism_config": mesh(num_processes)}
        elif strategy.startswith("deepspeed"):
            plugin = (
                deepspeed_plugin(config, micro_batch_size, accumulation, precision, on_accelerator)
                if config
                else requested_plugin(precision, {})
            )
            plugins = {"deepspeed_plugin": plugin}
        return replace(request, plugins=plugins, accumulation=accumulation)


@contextmanager
def accelerates_own_refusals() -> Iterator[None]:
    """Turn errors of Accelerate about its own settings, from its config or the shell, into a one-line MachineError."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, ImportError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise MachineError(
            f"the settings of the launch must be ones that Accelerate takes, got: {words}; correct them in "
            f"{config_file() or 'the variables of the launch'}"
        ) from error


def _fit_recipe(config: Config, request: LaunchRequest) -> tuple[int, int]:
    """Check the recipe against the launch, then return `split_global_batch` of it."""
    _refuse_recipe(config, request.strategy, request.precision, request.num_processes)
    refusals.refuse_what_an_apple_gpu_cannot_do(config.model.dtype, request.precision, request.has_accelerator)
    refusals.refuse_what_a_cpu_cannot_do(config.distributed, request.strategy, request.has_accelerator)
    micro_batch_size, accumulation = split_global_batch(config.training, request.num_processes)
    refusals.refuse_overwritten_gradients(request.compiler, accumulation)
    return micro_batch_size, accumulation


def _refuse_recipe(config: Config, strategy: str, precision: str, num_processes: int) -> None:
    """Refuse a recipe that this launch cannot train on any machine, whatever its micro-batch is."""
    refusals.refuse_other_dtypes(config, strategy, precision)
    refusals.refuse_a_search_that_hangs(config, strategy)
    if precision == "fp8":
        check_recipe(config)
    refusals.refuse_a_hook_that_fails(config, strategy)
    if config.optimizer.name == "muon" and strategy.startswith("deepspeed"):
        raise MachineError(
            "optimizer.name must be adamw under DeepSpeed, which updates flat parts of the weights that are no longer matrices, got muon; "
            "set optimizer.name=adamw, or use accelerate_configs/fsdp2.yaml"
        )
    num_readers = num_processes // processes_of_reader()
    if config.data.streaming and config.data.num_streams % num_readers:
        raise ConfigError(
            f"data.num_streams must be a multiple of the number of processes {num_processes}{divided_by()}, got {config.data.num_streams}; "
            f"nearest: {nearest_multiples(config.data.num_streams, num_readers)}"
        )


def check_planned(config: Config, typed: Namespace) -> None:
    """Check a launch that another machine may make, by those checks of `read_launch` that hold on every machine.

    Args:
        typed: arguments of `accelerate launch`.

    Raises:
        MachineError: no machine can start this launch.
        ConfigError: it cannot train this recipe.
    """
    with accelerates_own_refusals():
        check_config_file(typed)
        num_processes, strategy = world_size(), requested_strategy()
        precision = requested_precision(config.training.mixed_precision)
        check_grid(num_processes, strategy, typed)
        refusals.refuse_what_needs_complete_layers(config, precision)
        refusals.refuse_offloaded_fp16(strategy, precision)
        if precision == "fp8":
            check_engine("mixed_precision", strategy)
        _refuse_recipe(config, strategy, precision, num_processes)
        if strategy in ("fsdp2", "hsdp"):
            fsdp_plugin(precision, has_accelerator=True)


def divided_by() -> str:
    """Words after a number of processes: by how many of them each row is read; empty if by one."""
    parts = {"a row": parts_of_rows(), "the layers": parts_of_layers()}
    return "".join(f" / {size} parts of {what}" for what, size in parts.items() if size > 1)


def needed_extensions(has_accelerator: bool) -> dict[str, bool]:
    """Arguments of `build_extensions` for this DeepSpeed launch."""
    devices = offload_device("optimizer"), offload_device("param")
    return {"needs_cpu_adam": devices[0] != "none", "needs_nvme": "nvme" in devices, "on_cpu": not has_accelerator}


def split_global_batch(training: TrainingConfig, num_processes: int, parts: int | None = None) -> tuple[int, int]:
    """Return (micro-batch size, micro-batches per optimizer step) of each process.

    If a process's share of the global batch is smaller than the recipe's micro-batch, the micro-batch is that share.
    Processes that share their rows count as one.

    Args:
        num_processes: number of processes of this launch.
        parts: processes that share each row; None: as many as in this launch.

    Raises:
        ConfigError: the global batch does not divide evenly.
    """
    parts = parts or processes_of_reader()
    num_readers = num_processes // parts
    share, rest = divmod(training.global_batch_size, num_readers)
    micro = min(training.micro_batch_size, share)
    if rest or share % micro:
        per_round = training.micro_batch_size * num_readers
        processes = f"{num_processes} processes{divided_by()}"
        multiple_of = f"micro_batch_size {training.micro_batch_size} x {processes} = {per_round}"
        if training.global_batch_size < per_round:
            per_round = math.lcm(training.micro_batch_size, num_readers)
            multiple_of = f"micro_batch_size {training.micro_batch_size} and of the {processes}"
        raise ConfigError(
            f"training.global_batch_size must be a multiple of {multiple_of}, got {training.global_batch_size}; nearest: "
            f"{nearest_multiples(training.global_batch_size, per_round)}; or change training.micro_batch_size"
        )
    return micro, share // micro
