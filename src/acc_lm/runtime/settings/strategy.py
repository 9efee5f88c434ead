"""The strategy that the launch requests, and the bare model inside that strategy's wrappers."""

from __future__ import annotations

import os

import torch
from torch import nn

from acc_lm.errors import MachineError
from acc_lm.runtime.settings.deepspeed import deepspeed_config
from acc_lm.runtime.settings.grid import requested_grid


def world_size() -> int:
    """Number of processes that the launcher started, from its variables; removes variables of another launch.

    Raises:
        MachineError: the variables cannot come from one launcher.
    """
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not os.environ.get(name, "0").isdigit():
            raise MachineError(
                f"{name} must be a whole number, as launchers set it, got {os.environ[name]!r}; unset it (env -u {name}), or start "
                "with accelerate launch"
            )
    if "WORLD_SIZE" not in os.environ:
        for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0")
    if size > 1 and "RANK" not in os.environ:
        raise MachineError(
            f"RANK must be set next to WORLD_SIZE={size}, as every launcher does, got none; start the processes with accelerate launch "
            "or torchrun, or unset WORLD_SIZE if it is left over from another launch"
        )
    if int(rank) >= size:
        raise MachineError(
            f"RANK must be below WORLD_SIZE={size}, got {rank}; unset both if they are left over from another launch"
        )
    return size


def has_accelerator() -> bool:
    """Return whether this launch runs on accelerators."""
    if flag("ACCELERATE_USE_CPU") or not torch.accelerator.is_available():
        return False
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    has_engine = flag("ACCELERATE_USE_FSDP") or flag("ACCELERATE_USE_DEEPSPEED")
    # No process group of torch reaches an Apple GPU: what needs one is rehearsed on the CPU, as on a machine without a GPU.
    return not is_apple_gpu() or (is_alone and not has_engine)


def is_apple_gpu() -> bool:
    """Return whether the accelerator of this machine is an Apple GPU, which torch calls mps."""
    return torch.backends.mps.is_available()


def requested_strategy() -> str:
    """Name of the strategy that the launch requests, as in `environment.json`.

    Raises:
        MachineError: the launch asks for an engine that this project does not run.
    """
    if flag("ACCELERATE_USE_MEGATRON_LM"):
        raise MachineError(
            "the Accelerate config must ask for one process, DDP, FSDP2 or DeepSpeed, got Megatron-LM; "
            "use accelerate_configs/fsdp2.yaml"
        )
    if flag("ACCELERATE_USE_DEEPSPEED"):
        stage = deepspeed_config().get("zero_optimization", {}).get("stage", 0)
        if stage not in (1, 2, 3):
            raise MachineError(
                f"the ZeRO stage of the Accelerate config must be 1, 2 or 3, got {stage!r}"
                f"{', which shards nothing; use accelerate_configs/ddp.yaml' if stage == 0 else '; write one of these numbers'}"
            )
        return f"deepspeed_zero{stage}"
    if flag("ACCELERATE_USE_FSDP"):
        if os.environ.get("FSDP_VERSION", "1") != "2":
            raise MachineError(
                "fsdp_version must be 2, got 1, which torch no longer develops; use accelerate_configs/fsdp2.yaml, hsdp.yaml for "
                "HYBRID_SHARD, ddp.yaml for NO_SHARD (accelerate to-fsdp2 would turn these two into full shards)"
            )
        return "hsdp" if requested_grid().copies > 1 else "fsdp2"
    if requested_grid().layers > 1:
        return "tensor_parallel"
    # Accelerate wraps torchrun's only process in DDP on a CPU, but not on a GPU.
    wraps_one = "WORLD_SIZE" in os.environ and "LOCAL_RANK" in os.environ and not has_accelerator()
    return "ddp" if wraps_one or os.environ.get("WORLD_SIZE", "1") != "1" else "single"


def flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes", "y", "on")


def is_deepspeed(model: nn.Module) -> bool:
    return type(model).__module__.startswith("deepspeed.")


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model without the wrappers of strategy and compiler, so its parameters have their original names.

    Accelerate's `unwrap_model` does the same, but imports DeepSpeed to check whether the model is one of its engines.
    """
    while True:
        if "_orig_mod" in model.__dict__:  # compiled by regions: a copy with compiled blocks, also of DDP's wrapper
            model = model.__dict__["_orig_mod"]
        elif "_orig_mod" in model._modules:  # compiled as a whole
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, nn.parallel.DistributedDataParallel) or is_deepspeed(model):
            model = model.get_submodule("module")
        else:
            return model


def requested_precision(by_recipe: str | None) -> str:
    """Precision of the recipe, else of the launch."""
    return by_recipe or os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
