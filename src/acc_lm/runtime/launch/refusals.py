"""Refusals: launches and recipes that would hang, crash or silently train something else here."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import TYPE_CHECKING

import torch

from acc_lm.config import DistributedConfig
from acc_lm.errors import ConfigError, MachineError
from acc_lm.runtime.launch.rendezvous import is_launchers_store
from acc_lm.runtime.settings.config_file import rendezvous_backend, requested_processes
from acc_lm.runtime.settings.fp8 import check_machine
from acc_lm.runtime.settings.grid import parts_of_layers, parts_of_rows
from acc_lm.runtime.settings.strategy import flag, is_apple_gpu, requested_precision

if TYPE_CHECKING:
    from accelerate.utils import TorchDynamoPlugin

    from acc_lm.config import Config


NCCL_ONLY_HOOKS = ("bf16",)


def refuse_silent_single_process(typed: Namespace | None) -> None:
    """Refuse the three kinds of launch that request several processes and silently get one."""
    if "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ and requested_processes(typed) > 1:
        raise MachineError(
            "the launch must start all requested processes, got one (accelerate starts only one for "
            "MULTI_CPU, for --cpu with --num_processes, and for distributed_type NO); use --config_file "
            "accelerate_configs/ddp.yaml --num_processes N, which works without a GPU too, or --num_processes 1"
        )


def refuse_restarts_that_hang() -> None:
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts > 0 and rendezvous_backend() == "static":
        raise MachineError(
            f"max_restarts must be 0 with the static rendezvous, which hangs after the first death, got {restarts}; add --rdzv_backend c10d"
        )
    if restarts > 0 and is_launchers_store() and os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]:
        raise MachineError(
            f"max_restarts must be 0 on several machines, where new processes look for each other at the addresses of the previous ones, got "
            f"{restarts}; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for the launcher on every machine"
        )


def refuse_what_needs_a_launcher(strategy: str) -> None:
    """Refuse sharding engines under plain Python, which starts one process whatever a leftover variable asks for."""
    if strategy in ("single", "ddp", "tensor_parallel") or "WORLD_SIZE" in os.environ:
        return
    name = "ACCELERATE_USE_DEEPSPEED" if strategy.startswith("deepspeed") else "ACCELERATE_USE_FSDP"
    raise MachineError(
        f"{strategy}, which {name}={os.environ[name]} requests, must be started by a launcher, got one process without a launcher; start it with "
        f"accelerate launch, or unset {name} if it is left over from another launch"
    )


def refuse_missing_devices(has_accelerator: bool) -> None:
    requested = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    present = torch.accelerator.device_count() if has_accelerator else 0
    if 0 < present < requested and torch.cuda.is_available():
        raise MachineError(
            f"the launch must not start more processes than this machine has GPUs, got {requested} for {present}; "
            f"use --num_processes {present}"
        )


def refuse_offloaded_fp16(strategy: str, precision: str) -> None:
    """Refuse offloaded fp16: torch copies the gradient scale to the CPU asynchronously and uses it without waiting."""
    if strategy in ("fsdp2", "hsdp") and precision == "fp16" and flag("FSDP_OFFLOAD_PARAMS"):
        raise MachineError(
            "fsdp_offload_params must be false with fp16, whose scale torch copies to the CPU without waiting for the GPU, got true; use "
            "training.mixed_precision=bf16, or accelerate_configs/fsdp2.yaml"
        )


def refuse_debugging_that_crashes(strategy: str, on_accelerator: bool) -> None:
    """Refuse TORCH_DISTRIBUTED_DEBUG=DETAIL for DDP on gloo, where torch (2.13) dies by SIGSEGV wrapping a model."""
    if strategy == "ddp" and not on_accelerator and os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        raise MachineError(
            "TORCH_DISTRIBUTED_DEBUG must be OFF or INFO under DDP on CPU processes, where torch crashes with DETAIL, got DETAIL; set it "
            "to INFO"
        )


def refuse_compilation_that_fails(compiler: TorchDynamoPlugin, strategy: str) -> None:
    """Refuse compiling a sharded model as a whole, which loses hooks, and full graphs that communication breaks."""
    shards = strategy in ("fsdp2", "hsdp")
    if compiler.backend.value == "NO":
        return
    if shards and not compiler.use_regional_compilation:  # Accelerate compiles before it shards
        raise MachineError(
            f"dynamo_use_regional_compilation must be true under {strategy}, got false; set it in dynamo_config, or give "
            "--dynamo_use_regional_compilation: each block is compiled, and gathers its own weights"
        )
    is_one_graph = strategy == "single" or (strategy == "ddp" and compiler.use_regional_compilation)
    if compiler.fullgraph and not is_one_graph:
        raise MachineError(
            f"dynamo_use_fullgraph must be false under {strategy}, which breaks the graph to communicate, got true; set it "
            "to false in dynamo_config"
        )


def refuse_overwritten_gradients(compiler: TorchDynamoPlugin, accumulation: int) -> None:
    """Refuse CUDA graphs with accumulation: the next micro-batch overwrites gradients that are still being summed."""
    uses_graphs = compiler.backend.value == "CUDAGRAPHS" or (
        compiler.backend.value == "INDUCTOR" and compiler.mode in ("reduce-overhead", "max-autotune")
    )
    if uses_graphs and accumulation > 1:
        got = compiler.mode if compiler.backend.value == "INDUCTOR" else "the backend CUDAGRAPHS"
        raise MachineError(
            f"dynamo_mode must be default or max-autotune-no-cudagraphs with {accumulation} micro-batches in a step, whose gradients CUDA "
            f"graphs would overwrite, got {got}; use one of these modes with INDUCTOR, or raise training.micro_batch_size to each process's share of the global batch"
        )


def refuse_other_dtypes(config: Config, strategy: str, precision: str) -> None:
    if strategy.startswith("deepspeed") and config.model.dtype != "float32":
        raise MachineError(
            f"model.dtype must be float32 under DeepSpeed, which updates in float32 whatever the model's dtype, got "
            f"{config.model.dtype}; for 16-bit compute use training.mixed_precision=bf16, for float64 another Accelerate config"
        )
    if strategy.startswith("deepspeed") and config.model.freeze and precision != "no":
        raise MachineError(
            f"model.freeze must be empty under DeepSpeed with {precision}, which keeps and would save the frozen weights in 16 "
            f"bits only, got {list(config.model.freeze)}; use training.mixed_precision=no, or accelerate_configs/fsdp2.yaml"
        )
    if strategy not in ("single", "ddp") and config.adapter.quantize_base != "none":
        raise MachineError(
            f"adapter.quantize_base must be none under {strategy}, which cannot shard 4-bit weights, got "
            f"{config.adapter.quantize_base}; use accelerate_configs/ddp.yaml, where each process holds all of them"
        )


def refuse_what_needs_complete_layers(config: Config | None, precision: str) -> None:
    """Refuse what needs complete layers on a process."""
    size = parts_of_layers()
    if size == 1:
        return
    if precision in ("fp16", "fp8"):
        raise MachineError(
            f"mixed_precision must be bf16 or no with layers in {size} parts, got {precision}; use training.mixed_precision=bf16, or "
            "accelerate_configs/fsdp2.yaml"
        )
    if config is not None and config.adapter.kind != "none":
        raise ConfigError(
            f"adapter.kind must be none with layers in {size} parts, got {config.adapter.kind}, which adds matrices that no plan cuts; use "
            "accelerate_configs/fsdp2.yaml"
        )
    if config is not None and config.optimizer.name == "muon":
        raise ConfigError(
            f"optimizer.name must be adamw with layers in {size} parts, got muon, which needs complete matrices; set optimizer.name=adamw, or "
            "use accelerate_configs/fsdp2.yaml"
        )


def refuse_a_search_that_hangs(config: Config, strategy: str) -> None:
    if not config.training.find_micro_batch_size or (strategy in ("single", "ddp") and parts_of_rows() == 1):
        return
    where = f"under {strategy}, where a process that runs out of memory leaves the others waiting for its shard"
    if parts_of_rows() > 1:
        where = "with rows in parts, where a process that runs out of memory leaves the others waiting for its part"
    if parts_of_layers() > 1:
        where = "with layers in parts, where a process that runs out of memory leaves the others waiting for its part"
    if strategy.startswith("deepspeed"):
        where = "under DeepSpeed, which fixes the size when it is built"
    raise ConfigError(
        f"training.find_micro_batch_size must be false {where}, got true; lower training.micro_batch_size yourself"
    )


def refuse_what_a_cpu_cannot_do(distributed: DistributedConfig, strategy: str, has_accelerator: bool) -> None:
    if has_accelerator:
        return
    if distributed.backend == "nccl":
        raise MachineError(
            "distributed.backend must be gloo or null on CPU processes, got nccl, which moves data between GPUs only; set it to gloo or null"
        )
    if strategy == "ddp" and distributed.comm_hook in NCCL_ONLY_HOOKS:
        raise MachineError(
            f"distributed.comm_hook must be none, fp16, power_sgd or batched_power_sgd on CPU processes, got "
            f"{distributed.comm_hook}, which only NCCL executes; set it to none for the rehearsal"
        )


def refuse_what_an_apple_gpu_cannot_do(dtype: str, precision: str, has_accelerator: bool) -> None:
    if not (has_accelerator and is_apple_gpu()):
        return
    if dtype == "float64":
        raise MachineError(
            "model.dtype must be float32 or bfloat16 on an Apple GPU, which has no float64, got float64; set it, or run on the CPU: ACCELERATE_USE_CPU=1"
        )
    if precision == "fp8":
        raise MachineError(
            "the precision must be bf16, fp16 or no on an Apple GPU, got fp8; set training.mixed_precision=bf16"
        )
    if precision == "bf16" and not torch.backends.mps.is_macos_or_newer(14, 0):
        raise MachineError(
            "the precision must be fp16 or no on an Apple GPU before macOS 14, got bf16; set training.mixed_precision=no, or update macOS"
        )


def refuse_a_hook_that_fails(config: Config, strategy: str) -> None:
    """Refuse runs in which batched PowerSGD compresses: torch (2.11 to 2.13) passes its helper a misshapen tensor."""
    starts_at = int(config.distributed.comm_hook_arguments.get("start_powerSGD_iter", 1000))
    steps = config.training.max_steps
    if (
        strategy == "ddp"
        and config.distributed.comm_hook == "batched_power_sgd"
        and (steps is None or steps >= starts_at)
    ):
        raise MachineError(
            f"distributed.comm_hook must not be batched_power_sgd, which fails inside torch from step {starts_at} on, where it "
            "begins to compress; use power_sgd"
        )


def checked_precision(by_recipe: str | None, has_accelerator: bool, strategy: str = "single") -> str:
    precision = requested_precision(by_recipe)
    key = "training.mixed_precision" if by_recipe else "mixed_precision of the launch"
    if precision not in ("no", "bf16", "fp16", "fp8"):
        raise MachineError(f"{key} must be no, bf16, fp16 or fp8, got {precision!r}; set it to one of these")
    if precision in ("fp16", "fp8") and not has_accelerator:
        raise MachineError(
            f"{key} must be bf16 or no on a CPU, got {precision}, which only accelerators execute; use bf16 or no there, or on the command line"
        )
    if precision == "fp8":
        check_machine(key, strategy)
    on_cuda = has_accelerator and torch.cuda.is_available()
    if precision == "bf16" and on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise MachineError(
            f"{key} must be fp16 or no on {torch.cuda.get_device_name()}, got bf16, which it does not support; set it to fp16 or no"
        )
    return precision
