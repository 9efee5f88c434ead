"""fp8: 8-bit matrix products by torchao, through Accelerate; weights, sums and everything else stay as under bf16."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn

from acc_lm.config import Config
from acc_lm.errors import ConfigError, MachineError
from acc_lm.runtime.settings.grid import parts_of_rows

if TYPE_CHECKING:
    from accelerate.utils import AORecipeKwargs

CAPABILITY = (8, 9)
"""Minimum compute capability: Ada Lovelace, Hopper and later."""
MULTIPLE = 16
"""Divisor of the sizes of a layer whose products can run in 8 bits."""


def check_machine(key: str, strategy: str) -> None:
    """Check the requirements of fp8; without them Accelerate would use fp16 instead, with a warning.

    Raises:
        MachineError: torchao is not installed, or the GPU or the engine does not support fp8.
    """
    check_engine(key, strategy)
    if find_spec("torchao") is None:
        raise MachineError(
            f"{key} must be bf16 or no without torchao, got fp8; install it (pip install 'acc-lm[fp8]') or set it to bf16"
        )
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability()))
        raise MachineError(
            f"{key} must be bf16 or no on {torch.cuda.get_device_name()}, got fp8, which needs compute capability 8.9 and it has {found}; "
            "set it to bf16"
        )


def check_engine(key: str, strategy: str) -> None:
    """Check that the engine of a launch can run fp8.

    Raises:
        MachineError: it cannot.
    """
    if strategy.startswith("deepspeed"):
        raise MachineError(
            f"{key} must be bf16 or no under DeepSpeed, got fp8, which torchao supports for one GPU, DDP and FSDP2; use "
            "accelerate_configs/fsdp2.yaml"
        )


def check_recipe(config: Config) -> None:
    """Check that the rest of the recipe is compatible with fp8.

    Raises:
        ConfigError: it is not.
    """
    if config.adapter.kind != "none":
        raise ConfigError(
            f"adapter.kind must be none with training.mixed_precision fp8, got {config.adapter.kind}, whose matrices are too small to gain "
            "from it; use bf16"
        )
    if config.model.dtype != "float32":
        raise ConfigError(
            f"model.dtype must be float32 with training.mixed_precision fp8, got {config.model.dtype}; remove it"
        )


def check_rows(config: Config, micro_batch_size: int) -> None:
    """Check that the weight gradients, products over all positions of a micro-batch, can be computed in 8 bits.

    Raises:
        ConfigError: the number of positions is not a multiple of `MULTIPLE`, as the hardware requires.
    """
    rows = 1 if config.training.find_micro_batch_size else micro_batch_size  # the search may end at 1
    length = -(-config.data.sequence_length // parts_of_rows())
    if rows * length % MULTIPLE:
        raise ConfigError(
            f"data.sequence_length x training.micro_batch_size must be a multiple of {MULTIPLE} with training.mixed_precision fp8, got "
            f"{length} x {rows}; make data.sequence_length such a multiple"
        )


def recipe_kwargs(config: Config) -> AORecipeKwargs:
    """Arguments for Accelerate.

    The weights stay ordinary tensors under FSDP2 too, gathered in bf16, so that any engine can read what was saved.
    """
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    return AORecipeKwargs(config=Float8LinearConfig.from_recipe_name(config.training.fp8_recipe))


def check_layers(model: nn.Module) -> None:
    """Check, before the model is prepared, that it has layers whose products can run in 8 bits.

    Accelerate leaves out the first and the last linear layer.

    Raises:
        ConfigError: the model has no such layer, so fp8 would have no effect.
    """
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)][1:-1]
    if not any(m.in_features % MULTIPLE == m.out_features % MULTIPLE == 0 for m in linear):
        raise ConfigError(
            f"training.mixed_precision must be bf16 for {type(model).__name__}, got fp8, which is for linear layers with sizes that are "
            f"multiples of {MULTIPLE}, and it has none between its first and its last; use bf16"
        )
