"""Build the Accelerator that a launch asks for, from the environment that its launcher set."""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from acc_lm.config import DistributedConfig, TrainingConfig, nearest_multiples
from acc_lm.errors import ConfigError, MachineError, UserError
from acc_lm.modeling.attention import prefer_kernels
from acc_lm.runtime.config_file import (
    asked_processes,
    check_config_file,
    config_file,
    lost_settings,
    rendezvous_backend,
)
from acc_lm.runtime.deepspeed import asked_plugin, build_models_whole, deepspeed_plugin, offload_device
from acc_lm.runtime.extensions import build_extensions
from acc_lm.runtime.fp8 import check_machine, check_recipe, recipe_kwargs
from acc_lm.runtime.fsdp import fsdp_plugin, mesh, shard_on_cpu
from acc_lm.runtime.strategy import asked_strategy, flag, has_accelerator, world_size

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, TorchDynamoPlugin

    from acc_lm.config import Config

ABORT_SECONDS = 60
NCCL_ONLY_HOOKS = ("bf16",)


def build_accelerator(config: Config, output_dir: Path | None = None) -> Accelerator:
    """Build the Accelerator of this launch, after all checks that need no Accelerator.

    Raises:
        MachineError: the launch did not provide what it asked for, or this machine cannot run it.
        ConfigError: this launch cannot train the recipe, e.g. the global batch does not divide over the processes.
    """
    distributed = config.distributed
    asked = read_launch(config)
    strategy, precision, has_accelerator = asked.strategy, asked.precision, asked.has_accelerator
    _choose_port()
    _leave_the_store_of_the_dead()

    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration

    # Otherwise Accelerate searches all of sys.path twice per step for an optimizer that is never used here.
    sys.modules.setdefault("lomo_optim", None)  # type: ignore[arg-type]
    keywords: dict[str, Any] = {"cpu": not has_accelerator}
    if strategy.startswith("deepspeed"):
        keywords = dict(asked.plugins)
        build_extensions(**needed_extensions(has_accelerator))
        # With this variable Accelerate would switch DeepSpeed off; without a GPU it runs on the CPU anyway.
        os.environ.pop("ACCELERATE_USE_CPU", None)
    elif strategy in ("fsdp2", "hsdp"):
        keywords |= asked.plugins
    group = _group_arguments(distributed, strategy, has_accelerator)
    handlers = [_ddp_arguments(distributed), group]
    loads_on_main = False
    if precision == "fp8":
        handlers.append(recipe_kwargs(config))
        if strategy in ("fsdp2", "hsdp"):  # Accelerate refuses this loading with 8-bit gathers; ours are bf16
            loads_on_main, asked.plugins["fsdp_plugin"].cpu_ram_efficient_loading = True, False
    project = ProjectConfiguration(str(output_dir), logging_dir=f"{output_dir}/tensorboard") if output_dir else None
    try:
        with _accelerates_own_refusals():
            if strategy in ("fsdp2", "hsdp") and not has_accelerator:
                shard_on_cpu(precision, keywords, group.to_kwargs())
            accelerator = Accelerator(
                **keywords,
                mixed_precision=precision,
                kwargs_handlers=handlers,
                gradient_accumulation_plugin=GradientAccumulationPlugin(
                    num_steps=asked.accumulation,
                    sync_with_dataloader=False,
                    # Keep gradients sharded between micro-batches; otherwise each process would hold all of them.
                    sync_each_batch=strategy in ("fsdp2", "hsdp"),
                ),
                log_with=list(config.tracking.report_to) or None,
                project_config=project,
            )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise MachineError(_rendezvous_problem(str(error))) from None
    if loads_on_main:
        asked.plugins["fsdp_plugin"].cpu_ram_efficient_loading = True
    _check_process_count(asked.num_processes, accelerator.num_processes)
    if strategy.startswith("deepspeed"):
        build_models_whole(accelerator)
    _set_numerics(config.training, accelerator.device)
    return accelerator


def _check_process_count(launched: int, seen: int) -> None:
    if launched != seen:
        raise MachineError(
            f"the launcher must give what it started, got {launched} processes (WORLD_SIZE) where Accelerate sees "
            f"{seen}; launch with accelerate_configs/ddp.yaml, or with one process"
        )


def _group_arguments(distributed: DistributedConfig, strategy: str, has_accelerator: bool) -> InitProcessGroupKwargs:
    from accelerate.utils import InitProcessGroupKwargs

    # NCCL aborts after its timeout instead of raising: the extra time lets `Peers` end the run with a message first.
    grace = ABORT_SECONDS if has_accelerator and distributed.backend != "gloo" else 0
    group = InitProcessGroupKwargs(timeout=timedelta(seconds=distributed.timeout_seconds + grace))
    if distributed.backend is not None and has_accelerator:
        group.backend = distributed.backend
    if strategy.startswith("deepspeed") and not has_accelerator:
        group.backend = "gloo"  # else Accelerate counts one process and DeepSpeed all of them
    return group


def _ddp_arguments(distributed: DistributedConfig) -> DistributedDataParallelKwargs:
    from accelerate.utils import DistributedDataParallelKwargs
    from accelerate.utils.dataclasses import DDPCommunicationHookType

    return DistributedDataParallelKwargs(
        find_unused_parameters=distributed.find_unused_parameters,
        gradient_as_bucket_view=distributed.gradient_as_bucket_view,
        bucket_cap_mb=distributed.bucket_cap_mb,
        static_graph=distributed.static_graph,
        broadcast_buffers=distributed.broadcast_buffers,
        comm_hook=DDPCommunicationHookType("no" if distributed.comm_hook == "none" else distributed.comm_hook),
        comm_state_option=distributed.comm_hook_arguments,
    )


@dataclass(frozen=True)
class Asked:
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


def read_launch(config: Config | None, typed: Namespace | None = None) -> Asked:
    """Read the request of a launch from its environment, after all checks of it and of the recipe against it.

    Args:
        config: the recipe; None: assume one that agrees with the launch.
        typed: arguments of `accelerate launch`; None: read them from its command line.

    Raises:
        MachineError: the launch did not provide what it asked for, or this machine cannot run it.
        ConfigError: the recipe cannot be trained by this launch.
    """
    with _accelerates_own_refusals():
        from accelerate.utils import TorchDynamoPlugin

        num_processes = world_size()
        _refuse_silent_single_process(typed)
        _refuse_restarts_that_hang()
        check_config_file(typed)
        os.environ |= lost_settings()
        strategy, on_accelerator = asked_strategy(), has_accelerator()
        _refuse_what_needs_a_launcher(strategy)
        precision = _checked_precision(config.training.mixed_precision if config else None, on_accelerator, strategy)
        _refuse_missing_devices(on_accelerator)
        _refuse_offloaded_fp16(strategy, precision)
        _refuse_debugging_that_crashes(strategy, on_accelerator)
        asked = Asked(strategy, precision, num_processes, on_accelerator, TorchDynamoPlugin())
        _refuse_compilation_that_fails(asked)
        micro_batch_size, accumulation = _fit_recipe(config, asked) if config else (1, 1)
        plugins: dict[str, Any] = {}
        if strategy in ("fsdp2", "hsdp"):
            plugins = {"fsdp_plugin": fsdp_plugin(precision, on_accelerator), "parallelism_config": mesh(num_processes)}
        elif strategy.startswith("deepspeed"):
            plugin = (
                deepspeed_plugin(config, micro_batch_size, accumulation, precision, on_accelerator)
                if config
                else asked_plugin(precision, {})
            )
            plugins = {"deepspeed_plugin": plugin}
        return replace(asked, plugins=plugins, accumulation=accumulation)


@contextmanager
def _accelerates_own_refusals() -> Iterator[None]:
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


def _fit_recipe(config: Config, asked: Asked) -> tuple[int, int]:
    """Check the recipe against the launch, then return `split_global_batch` of it."""
    _refuse_other_dtypes(config, asked.strategy, asked.precision)
    _refuse_a_search_that_hangs(config, asked.strategy)
    if asked.precision == "fp8":
        check_recipe(config)
    _refuse_what_a_cpu_cannot_do(config.distributed, asked.strategy, asked.has_accelerator)
    _refuse_a_hook_that_fails(config, asked.strategy)
    if config.optimizer.name == "muon" and asked.strategy.startswith("deepspeed"):
        raise MachineError(
            "optimizer.name must be adamw under DeepSpeed, which updates flat parts of the weights that are no matrices any more, got muon; "
            "change it, or use accelerate_configs/fsdp2.yaml"
        )
    if config.data.streaming and config.data.num_streams % asked.num_processes:
        raise ConfigError(
            f"data.num_streams must be a multiple of the number of processes {asked.num_processes}, got {config.data.num_streams}; "
            f"nearest: {nearest_multiples(config.data.num_streams, asked.num_processes)}"
        )
    micro_batch_size, accumulation = split_global_batch(config.training, asked.num_processes)
    _refuse_overwritten_gradients(asked, accumulation)
    return micro_batch_size, accumulation


def needed_extensions(has_accelerator: bool) -> dict[str, bool]:
    """Arguments of `build_extensions` for this DeepSpeed launch."""
    devices = offload_device("optimizer"), offload_device("param")
    return {"needs_cpu_adam": devices[0] != "none", "needs_nvme": "nvme" in devices, "on_cpu": not has_accelerator}


def split_global_batch(training: TrainingConfig, num_processes: int) -> tuple[int, int]:
    """Return (micro-batch size, micro-batches per optimizer step) of each process.

    If a process's share of the global batch is smaller than the recipe's micro-batch, the micro-batch is that share.

    Raises:
        ConfigError: the global batch does not divide evenly.
    """
    share, rest = divmod(training.global_batch_size, num_processes)
    micro = min(training.micro_batch_size, share)
    if rest or share % micro:
        per_round = training.micro_batch_size * num_processes
        multiple_of = f"micro_batch_size {training.micro_batch_size} x {num_processes} processes = {per_round}"
        if training.global_batch_size < per_round:
            per_round = math.lcm(training.micro_batch_size, num_processes)
            multiple_of = f"micro_batch_size {training.micro_batch_size} and of the {num_processes} processes"
        raise ConfigError(
            f"training.global_batch_size must be a multiple of {multiple_of}, got {training.global_batch_size}; nearest: "
            f"{nearest_multiples(training.global_batch_size, per_round)}; or change training.micro_batch_size"
        )
    return micro, share // micro


def quiet_libraries() -> None:
    """Silence the libraries' own progress bars and notices; their errors still show.

    Raises:
        MachineError: Python runs without docstrings (-OO), which transformers reads.
    """
    if sys.flags.optimize > 1:
        raise MachineError(
            "python must run with docstrings, which transformers reads, got -OO (or PYTHONOPTIMIZE=2); start it without"
        )
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    # transformers imports DeepSpeed when it saves a model, even where it is not used, and DeepSpeed then logs.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno > logging.WARNING)
    # peft imports bitsandbytes, which warns about a missing kernel from the Hub that was never requested.
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: record.levelno > logging.WARNING)
    warnings.filterwarnings("ignore", message="Slicing a flattened dim")  # Accelerate's HSDP mesh, on every process
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


# --- refusals ------------------------------------------------------------------------------------------------------


def _refuse_silent_single_process(typed: Namespace | None) -> None:
    """Refuse the three kinds of launch that ask for several processes and silently get one."""
    if "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ and asked_processes(typed) > 1:
        raise MachineError(
            "the launch must start the processes it was asked for, got one process (accelerate starts only one for "
            "MULTI_CPU, for --cpu with --num_processes, and for distributed_type NO); use --config_file "
            "accelerate_configs/ddp.yaml --num_processes N, which works without a GPU too, or --num_processes 1"
        )


def _refuse_restarts_that_hang() -> None:
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts > 0 and rendezvous_backend() == "static":
        raise MachineError(
            f"max_restarts must be 0 with the static rendezvous, which hangs after the first death, got {restarts}; add --rdzv_backend c10d"
        )
    if restarts > 0 and _is_launchers_store() and os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]:
        raise MachineError(
            f"max_restarts must be 0 on several machines, where new processes look for each other at the addresses of the dead ones, got "
            f"{restarts}; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for the launcher on every machine"
        )


def _refuse_what_needs_a_launcher(strategy: str) -> None:
    """Refuse sharding engines under plain Python, which starts one process whatever a leftover variable asks for."""
    if strategy in ("single", "ddp") or "WORLD_SIZE" in os.environ:
        return
    name = "ACCELERATE_USE_DEEPSPEED" if strategy.startswith("deepspeed") else "ACCELERATE_USE_FSDP"
    raise MachineError(
        f"{strategy}, which {name}={os.environ[name]} asks for, must be started by a launcher, got one process without; start it with "
        f"accelerate launch, or unset {name} if it is left over from another launch"
    )


def _refuse_offloaded_fp16(strategy: str, precision: str) -> None:
    """Refuse offloaded fp16: torch copies the gradient scale to the CPU asynchronously and uses it without waiting."""
    if strategy in ("fsdp2", "hsdp") and precision == "fp16" and flag("FSDP_OFFLOAD_PARAMS"):
        raise MachineError(
            "fsdp_offload_params must be false with fp16, whose scale torch hands to the CPU without waiting for the GPU, got true; use "
            "training.mixed_precision=bf16, or accelerate_configs/fsdp2.yaml"
        )


def _refuse_debugging_that_crashes(strategy: str, on_accelerator: bool) -> None:
    """Refuse TORCH_DISTRIBUTED_DEBUG=DETAIL for DDP on gloo, where torch (2.13) dies by SIGSEGV wrapping a model."""
    if strategy == "ddp" and not on_accelerator and os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        raise MachineError(
            "TORCH_DISTRIBUTED_DEBUG must be OFF or INFO under DDP on CPU processes, where torch crashes with DETAIL, got DETAIL; set it "
            "to INFO"
        )


def _refuse_compilation_that_fails(asked: Asked) -> None:
    """Refuse compiling a sharded model as a whole, which loses hooks, and full graphs that communication breaks."""
    compiler, shards = asked.compiler, asked.strategy in ("fsdp2", "hsdp")
    if compiler.backend.value == "NO":
        return
    if shards and not compiler.use_regional_compilation:  # Accelerate compiles before it shards
        raise MachineError(
            f"dynamo_use_regional_compilation must be true under {asked.strategy}, got false; set it in dynamo_config, or give "
            "--dynamo_use_regional_compilation: each block is compiled, and gathers its own weights"
        )
    is_one_graph = asked.strategy == "single" or (asked.strategy == "ddp" and compiler.use_regional_compilation)
    if compiler.fullgraph and not is_one_graph:
        raise MachineError(
            f"dynamo_use_fullgraph must be false under {asked.strategy}, which interrupts the graph to send and receive, got true; set it "
            "to false in dynamo_config"
        )


def _refuse_overwritten_gradients(asked: Asked, accumulation: int) -> None:
    """Refuse CUDA graphs with accumulation: the next micro-batch overwrites gradients that are still being summed."""
    compiler = asked.compiler
    uses_graphs = compiler.backend.value == "CUDAGRAPHS" or (
        compiler.backend.value == "INDUCTOR" and compiler.mode in ("reduce-overhead", "max-autotune")
    )
    if uses_graphs and accumulation > 1:
        got = compiler.mode if compiler.backend.value == "INDUCTOR" else "the backend CUDAGRAPHS"
        raise MachineError(
            f"dynamo_mode must be default or max-autotune-no-cudagraphs with {accumulation} micro-batches in a step, whose gradients CUDA "
            f"graphs would write over, got {got}; change it, or make training.micro_batch_size a whole share of the global batch"
        )


def _refuse_other_dtypes(config: Config, strategy: str, precision: str) -> None:
    if strategy.startswith("deepspeed") and config.model.dtype != "float32":
        raise MachineError(
            f"model.dtype must be float32 under DeepSpeed, which updates in float32 whatever the model is in, got "
            f"{config.model.dtype}; for 16-bit compute use training.mixed_precision=bf16, for float64 another Accelerate config"
        )
    if strategy.startswith("deepspeed") and config.model.freeze and precision != "no":
        raise MachineError(
            f"model.freeze must be empty under DeepSpeed with {precision}, which keeps the frozen weights in 16 bits only and would save "
            f"them so, got {list(config.model.freeze)}; use training.mixed_precision=no, or accelerate_configs/fsdp2.yaml"
        )
    if strategy not in ("single", "ddp") and config.adapter.quantize_base != "none":
        raise MachineError(
            f"adapter.quantize_base must be none under {strategy}, which cannot divide weights of 4 bits, got "
            f"{config.adapter.quantize_base}; use accelerate_configs/ddp.yaml, on which each process has them whole"
        )


def _refuse_a_search_that_hangs(config: Config, strategy: str) -> None:
    if not config.training.find_micro_batch_size or strategy in ("single", "ddp"):
        return
    where = f"under {strategy}, where a process that lacks memory leaves the others waiting for its part of the weights"
    if strategy.startswith("deepspeed"):
        where = "under DeepSpeed, which is told the size when it is built"
    raise ConfigError(
        f"training.find_micro_batch_size must be false {where}, got true; lower training.micro_batch_size yourself"
    )


def asked_precision(by_recipe: str | None) -> str:
    """Precision of the recipe, else of the launch."""
    return by_recipe or os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()


def _checked_precision(by_recipe: str | None, has_accelerator: bool, strategy: str = "single") -> str:
    precision = asked_precision(by_recipe)
    key = "training.mixed_precision" if by_recipe else "mixed_precision of the launch"
    if precision not in ("no", "bf16", "fp16", "fp8"):
        raise MachineError(f"{key} must be no, bf16, fp16 or fp8, got {precision!r}; write one of them")
    if precision in ("fp16", "fp8") and not has_accelerator:
        raise MachineError(
            f"{key} must be bf16 or no on a CPU, got {precision}, which only accelerators execute; use bf16 or no there, or on the command line"
        )
    if precision == "fp8":
        check_machine(key, strategy)
    on_cuda = has_accelerator and torch.cuda.is_available()
    if precision == "bf16" and on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise MachineError(
            f"{key} must be fp16 or no on {torch.cuda.get_device_name()}, got bf16, which it does not have; change it"
        )
    return precision


def _refuse_missing_devices(has_accelerator: bool) -> None:
    asked = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    present = torch.accelerator.device_count() if has_accelerator else 0
    if 0 < present < asked and torch.cuda.is_available():
        raise MachineError(
            f"the launch must not start more processes than this machine has GPUs, got {asked} for {present}; "
            f"use --num_processes {present}"
        )


def _refuse_what_a_cpu_cannot_do(distributed: DistributedConfig, strategy: str, has_accelerator: bool) -> None:
    if has_accelerator:
        return
    if distributed.backend == "nccl":
        raise MachineError(
            "distributed.backend must be gloo or null on CPU processes, got nccl, which moves data between GPUs only; change it"
        )
    if strategy == "ddp" and distributed.comm_hook in NCCL_ONLY_HOOKS:
        raise MachineError(
            f"distributed.comm_hook must be none, fp16, power_sgd or batched_power_sgd on CPU processes, got "
            f"{distributed.comm_hook}, which only NCCL executes; change it for the rehearsal"
        )


def _refuse_a_hook_that_fails(config: Config, strategy: str) -> None:
    """Refuse runs in which batched PowerSGD compresses: torch (2.11 to 2.13) passes its helper a misshapen tensor."""
    starts_at = int(config.distributed.comm_hook_arguments.get("start_powerSGD_iter", 1000))
    steps = config.training.max_steps
    if (
        strategy == "ddp"
        and config.distributed.comm_hook == "batched_power_sgd"
        and (steps is None or steps >= starts_at)
    ):
        raise MachineError(
            f"distributed.comm_hook must be another than batched_power_sgd, which fails inside torch from step {starts_at} on, where it "
            "begins to compress; use power_sgd"
        )


def _choose_port() -> None:
    """Give a single process without torchrun a free port, so that a second run on this machine does not collide."""
    if os.environ.get("WORLD_SIZE", "1") == "1" and "TORCHELASTIC_RUN_ID" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port())


def _leave_the_store_of_the_dead() -> None:
    """Make restarted processes use a fresh rendezvous store.

    torch's launcher offers them the store of the previous attempt, where they would find the addresses of dead
    processes, and hang. Process 0 opens a new store, and publishes its port in the old one.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or not _is_launchers_store():
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    old = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    if os.environ["RANK"] == "0":
        old.set(f"port of attempt {attempt}", str(_free_port()))
    os.environ["MASTER_PORT"] = old.get(f"port of attempt {attempt}").decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(False)


def _is_launchers_store() -> bool:
    """Return whether processes use the launcher's rendezvous store instead of one that process 0 opens."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _rendezvous_problem(error: str) -> str:
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" not in error and "in use" not in error:
        return (
            f"the rendezvous at {address} must be reachable, got no answer; check main_process_ip, main_process_port and "
            "the firewall, and that machine 0 was started"
        )
    owner = _owner_of_port(os.environ.get("MASTER_PORT", ""))
    return f"the rendezvous at {address} must be free, got: it is in use{owner}; choose another --main_process_port (0 picks one)"


def _owner_of_port(port: str) -> str:
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and str(connection.laddr.port) == port and connection.status == psutil.CONN_LISTEN:
                return f" by process {connection.pid}" if connection.pid else ""
    except psutil.Error:
        pass  # no permission to see it
    return ""


def _set_numerics(training: TrainingConfig, device: torch.device) -> None:
    torch.backends.cuda.matmul.allow_tf32 = training.allow_tf32
    torch.backends.cudnn.allow_tf32 = training.allow_tf32
    if device.type == "cuda" and torch.version.hip is None:
        prefer_kernels(torch.cuda.get_device_capability(device), training.cudnn_attention)
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
