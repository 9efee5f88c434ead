"""AdamW over two groups: parameters that decay and parameters that do not."""

from __future__ import annotations

import torch
from torch import nn

from acc_lm.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW on everything that is trained, fused where the parameters allow it."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = decayed_names(model)
    groups = [
        {"params": [p for name, p in parameters.items() if name in decayed], "weight_decay": config.weight_decay},
        {"params": [p for name, p in parameters.items() if name not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        fused=all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters.values()),
    )


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to: all but biases and those of norms.

    By name and by the module that owns them, never by shape: a sharded matrix may be one-dimensional.
    """
    decayed = set()
    for prefix, module in model.named_modules():
        # Of DoRA's lengths, as of a norm's weights, none is better for being small.
        is_norm = any(word in type(module).__name__.lower() for word in ("norm", "dora"))
        for name, parameter in module.named_parameters(recurse=False):
            if not is_norm and not name.endswith("bias") and not getattr(parameter, "_no_weight_decay", False):
                decayed.add(f"{prefix}.{name}" if prefix else name)
    return decayed


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
