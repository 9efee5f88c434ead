"""`acc-lm doctor`: describe this machine, and check whether an Accelerate config can run on it."""

from __future__ import annotations

import os
import platform
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from acc_lm.errors import MachineError, UserError
from acc_lm.runtime.engines.identity import library_versions
from acc_lm.runtime.engines.prepare import refuse_buckets_that_mix
from acc_lm.runtime.engines.tensor_parallel import modules_to_cut
from acc_lm.runtime.launch.request import LaunchRequest, needed_extensions, read_launch, split_global_batch
from acc_lm.runtime.settings.config_file import CONFIG_FILE_VARIABLE, config_file, launch_with, read_config
from acc_lm.runtime.settings.deepspeed import offload_device
from acc_lm.runtime.settings.extensions import COMPILERS, check_extensions, has_libaio
from acc_lm.runtime.settings.fp8 import check_rows
from acc_lm.runtime.settings.fsdp import block_classes
from acc_lm.runtime.settings.grid import parts_of_layers, parts_of_rows
from acc_lm.runtime.settings.strategy import has_accelerator, requested_precision, requested_strategy, world_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from acc_lm.config import Config


def machine() -> dict[str, Any]:
    """Describe versions, devices with their memory in GB, process-group backends, and DeepSpeed's build tools."""
    return {
        "python": platform.python_version(),
        "libraries": library_versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "cuda": {"built_for": torch.version.cuda, "available": torch.cuda.is_available()},
        "devices": _devices(),
        "process_groups": {
            "nccl": dist.is_nccl_available(),
            "gloo": dist.is_gloo_available(),
            "mpi": dist.is_mpi_available(),
        },
        "precision": _precision(),
        "cpp_compiler": next((name for name in COMPILERS if shutil.which(name)), None),
        "libaio": has_libaio(),
    }


def _devices() -> list[dict[str, Any]]:
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [
            {
                "name": each.name,
                "memory_gb": round(each.total_memory / 1e9, 1),
                "capability": f"{each.major}.{each.minor}",
            }
            for each in found
        ]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        return [{"name": str(kind), "memory_gb": None, "capability": None}] * torch.accelerator.device_count()
    return []


def _precision() -> str:
    """Recommended precision: bf16 where the hardware has it (compute capability 8.0 or later), fp16 on older GPUs."""
    if not torch.cuda.is_available():
        return "no, or bf16 (slow on most CPUs)"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def shares_layers(file: Path) -> bool:
    """True if the processes of a launch of this config share layers."""
    with launched(file, []):
        return parts_of_layers() > 1


def refusal(file: Path, num_processes: int, recipe: Config) -> str | None:
    """Reason why a launch of this config refuses this recipe, by the checks of `read_launch`; None if it does not.

    With layers in parts the model is checked, too.
    """
    with launched(file, ["--num_processes", str(num_processes)]) as typed:
        try:
            read_launch(recipe, typed)
            if parts_of_layers() > 1:
                _checked(recipe)
        except UserError as error:
            return str(error)
    return None


def check_config(file: Path, num_processes: int | None, recipe: Config | None = None) -> list[str]:
    """Check a launch of this config here by the calls that train.py makes before it reads text, and return notes.

    Args:
        num_processes: total over all machines; None: the number in the file.
        recipe: the recipe to train; None: assume one that agrees with the config.

    Raises:
        MachineError: the config cannot run here.
        ConfigError: the recipe cannot be trained, or not by this number of processes.
        DataError: a file of the recipe does not exist.
    """
    options = [] if num_processes is None else ["--num_processes", str(num_processes)]
    with launched(file, options) as typed:
        request = read_launch(recipe, typed)
        if request.strategy.startswith("deepspeed"):
            check_extensions(**needed_extensions(request.has_accelerator))
        memory = _check_memory(recipe, _checked(recipe)[1], request, typed.num_machines or 1) if recipe else None
    machines, cores = typed.num_machines or 1, os.cpu_count() or 1
    notes = [
        f"{request.strategy}, {request.num_processes} process(es) on {machines} machine(s), mixed_precision {request.precision}: it can run here"
    ]
    if memory:
        notes.append(memory)
    if not request.has_accelerator and request.strategy != "single":
        notes.append("no accelerator here: a rehearsal on CPU processes, for correctness, not for speed")
    if not request.has_accelerator and request.num_processes // machines > cores:
        notes.append(f"{request.num_processes // machines} processes will share {cores} cores")
    return notes


def check_run(config: Config) -> PreTrainedTokenizerBase | None:
    """Check everything in a recipe under this launch that can be checked before text is read and weights are created.

    The model runs on the meta device. A vocabulary that is yet to be built from the text counts with the size that the
    recipe asks for.

    Returns:
        The tokenizer, if it exists already.

    Raises:
        ConfigError: the model or tokenizer does not exist, or cannot be trained as the recipe says.
        MachineError: the engine of this launch cannot train this model.
        DataError: a file does not exist.
    """
    return _checked(config)[0]


def _checked(config: Config) -> tuple[PreTrainedTokenizerBase | None, nn.Module]:
    """The tokenizer, and the model on the meta device, after the checks of `check_run`."""
    from acc_lm.data import check_files
    from acc_lm.modeling.build import DTYPES
    from acc_lm.modeling.checks import check_model, check_parts_early
    from acc_lm.text.tokenizer import load_tokenizer, vocabulary_to_build

    strategy, distributed = requested_strategy(), config.distributed
    tokenizer = load_tokenizer(config.tokenizer, config.model)
    model = check_model(
        config.model,
        tokenizer,
        vocabulary_to_build(config.tokenizer),
        config.data.sequence_length,
        distributed.find_unused_parameters,
        config.adapter,
    )
    if strategy in ("fsdp2", "hsdp"):
        block_classes(model)
    if parts_of_rows() > 1:
        check_parts_early(model, config.data.sequence_length, parts_of_rows())
    if parts_of_layers() > 1:
        modules_to_cut(model, parts_of_layers())
    if strategy == "ddp":
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        size = trained * DTYPES[config.model.dtype].itemsize
        refuse_buckets_that_mix(distributed.comm_hook, distributed.bucket_cap_mb, size, not has_accelerator())
    if requested_precision(config.training.mixed_precision) == "fp8":
        check_rows(config, split_global_batch(config.training, world_size())[0])
    check_files(config.data)
    return tokenizer, model


def _check_memory(recipe: Config, model: nn.Module, request: LaunchRequest, num_machines: int) -> str:
    """Describe what a machine needs at least for the state of the training, without activations.

    Raises:
        MachineError: the machine has less.
    """
    parameters = list(model.parameters())
    # Weights, and for trained ones a gradient of the same type and two moments in float32.
    state = sum(p.numel() * (2 * p.element_size() + 8 if p.requires_grad else p.element_size()) for p in parameters)
    here = request.num_processes // num_machines
    needed = state * here if request.strategy == "ddp" else state / num_machines
    host = float(psutil.virtual_memory().total)
    devices = [float(torch.cuda.get_device_properties(i).total_memory) for i in range(torch.cuda.device_count())]
    can_offload = request.strategy not in ("single", "ddp")
    memory = sum(devices[:here]) + host * can_offload if devices else host
    amounts = f"{needed / 1e9:.1f} GB for weights, gradients and moments"
    is_deepspeed = request.strategy.startswith("deepspeed")
    if is_deepspeed and "nvme" in (offload_device("optimizer"), offload_device("param")):
        return f"memory: {amounts}, some of it on a disk; activations come on top"
    if needed > memory:
        raise MachineError(
            f"this machine must have at least {amounts} of {recipe.output_dir}, got {memory / 1e9:.1f} GB; "
            "use more machines, an offload, a smaller model, or adapter.kind=lora"
        )
    return f"memory: at least {amounts}, of {memory / 1e9:.1f} GB here; activations come on top"


@contextmanager
def launched(file: Path, options: list[str]) -> Iterator[Namespace]:
    """Set the environment of the first process that `accelerate launch` would start; yields the launch's arguments."""
    before = dict(os.environ)
    os.environ[CONFIG_FILE_VARIABLE] = str(file)
    try:
        config_file()
        read_config(file)
        typed, environment = launch_with(file, *options)
        here = typed.num_processes // (typed.num_machines or 1)
        if typed.use_deepspeed or typed.use_fsdp or typed.multi_gpu or typed.use_megatron_lm:  # torchrun starts them
            world = {
                "WORLD_SIZE": here * (typed.num_machines or 1),
                "LOCAL_WORLD_SIZE": here,
                "RANK": 0,
                "LOCAL_RANK": 0,
            }
            environment |= {name: str(value) for name, value in world.items()}
        os.environ.update(environment)
        yield typed
    finally:
        os.environ.clear()
        os.environ.update(before)
