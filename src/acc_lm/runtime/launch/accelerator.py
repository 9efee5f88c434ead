"""Build the Accelerator that a launch requests, from the environment that its launcher set."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from acc_lm.config import DistributedConfig, TrainingConfig
from acc_lm.errors import MachineError
from acc_lm.modeling.attention import prefer_kernels
from acc_lm.runtime.launch import rendezvous
from acc_lm.runtime.launch.request import accelerates_own_refusals, needed_extensions, read_launch
from acc_lm.runtime.settings.deepspeed import build_models_whole
from acc_lm.runtime.settings.extensions import build_extensions
from acc_lm.runtime.settings.fp8 import recipe_kwargs
from acc_lm.runtime.settings.fsdp import shard_on_cpu
from acc_lm.runtime.settings.grid import without_grid

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    from acc_lm.config import Config

ABORT_SECONDS = 60


def build_accelerator(config: Config, output_dir: Path | None = None) -> Accelerator:
    """Build the Accelerator of this launch, after all checks that need no Accelerator.

    Raises:
        MachineError: the launch did not provide what it requested, or this machine cannot run it.
        ConfigError: this launch cannot train the recipe, e.g. the global batch does not divide over the processes.
    """
    distributed = config.distributed
    request = read_launch(config)
    strategy, precision, has_accelerator = request.strategy, request.precision, request.has_accelerator
    rendezvous.choose_port()
    rendezvous.use_fresh_store_after_restart()

    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration

    # Otherwise Accelerate searches all of sys.path twice per step for an optimizer that is never used here.
    sys.modules.setdefault("lomo_optim", None)  # type: ignore[arg-type]
    keywords: dict[str, Any] = {"cpu": not has_accelerator}
    if strategy.startswith("deepspeed"):
        keywords = dict(request.plugins)
        build_extensions(**needed_extensions(has_accelerator))
        # With this variable Accelerate would switch DeepSpeed off; without a GPU it runs on the CPU anyway.
        os.environ.pop("ACCELERATE_USE_CPU", None)
    elif strategy in ("fsdp2", "hsdp"):
        keywords |= request.plugins
    group = _group_arguments(distributed, strategy, has_accelerator)
    handlers = [_ddp_arguments(distributed), group]
    loads_on_main = False
    if precision == "fp8":
        handlers.append(recipe_kwargs(config))
        if strategy in ("fsdp2", "hsdp"):  # Accelerate refuses this loading with 8-bit gathers; ours are bf16
            loads_on_main, request.plugins["fsdp_plugin"].cpu_ram_efficient_loading = True, False
    project = ProjectConfiguration(str(output_dir), logging_dir=f"{output_dir}/tensorboard") if output_dir else None
    try:
        with accelerates_own_refusals(), without_grid():
            if strategy in ("fsdp2", "hsdp") and not has_accelerator:
                shard_on_cpu(precision, keywords, group.to_kwargs())
            accelerator = Accelerator(
                **keywords,
                mixed_precision=precision,
                kwargs_handlers=handlers,
                gradient_accumulation_plugin=GradientAccumulationPlugin(
                    num_steps=request.accumulation,
                    sync_with_dataloader=False,
                    # Keep gradients sharded between micro-batches; otherwise each process would hold all of them.
                    sync_each_batch=strategy in ("fsdp2", "hsdp"),
                ),
                log_with=list(config.tracking.report_to) or None,
                project_config=project,
            )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise MachineError(rendezvous.explain_failure(str(error))) from None
    if loads_on_main:
        request.plugins["fsdp_plugin"].cpu_ram_efficient_loading = True
    _check_process_count(request.num_processes, accelerator.num_processes)
    if strategy.startswith("deepspeed"):
        build_models_whole(accelerator)
    _set_numerics(config.training, accelerator.device)
    return accelerator


def _check_process_count(launched: int, seen: int) -> None:
    if launched != seen:
        raise MachineError(
            f"Accelerate must see every process that was launched, got {launched} processes (WORLD_SIZE) where it sees "
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
    # Accelerate finds no layers in parts to prepare: `engines.tensor_parallel` cuts them itself.
    logging.getLogger("accelerate.accelerator").addFilter(lambda record: "TP preparation" not in record.getMessage())
    warnings.filterwarnings("ignore", message="Slicing a flattened dim")  # Accelerate's HSDP mesh, on every process
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


def _set_numerics(training: TrainingConfig, device: torch.device) -> None:
    torch.backends.cuda.matmul.allow_tf32 = training.allow_tf32
    torch.backends.cudnn.allow_tf32 = training.allow_tf32
    if device.type == "cuda" and torch.version.hip is None:
        prefer_kernels(torch.cuda.get_device_capability(device), training.cudnn_attention)
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
