"""AdamW with groups for decayed and other parameters, or Muon on the matrices between embeddings and head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from acc_lm.config import OptimizerConfig
from acc_lm.errors import ConfigError
from acc_lm.optimization.muon import MOMENTUM, MuonAndAdamW, hidden_matrices


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Build the recipe's optimizer for all trained parameters, with AdamW fused where the parameters allow it.

    Raises:
        ConfigError: the recipe chooses Muon, and no matrix of a hidden layer is trained.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = decayed_names(model) if config.weight_decay else set(parameters)  # one group fewer is one update fewer
    hidden = hidden_matrices(model) & parameters.keys() if config.name == "muon" else set()
    if config.name == "muon" and not hidden:
        raise ConfigError(
            "optimizer.name must be adamw when no matrix of a hidden layer is trained, got muon; set it to adamw, or shorten model.freeze"
        )
    others = {"lr_factor": (config.adamw_learning_rate or config.learning_rate) / config.learning_rate}
    groups: list[dict[str, Any]] = [
        {
            "params": [parameters[name] for name in parameters if name in hidden],
            "weight_decay": config.weight_decay,
            MOMENTUM: config.momentum,
        },
        {
            "params": [p for name, p in parameters.items() if name in decayed - hidden],
            "weight_decay": config.weight_decay,
            **others,
        },
        {"params": [p for name, p in parameters.items() if name not in decayed], "weight_decay": 0.0, **others},
    ]
    kind = MuonAndAdamW if hidden else torch.optim.AdamW
    return kind(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        fused=all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters.values()),
    )


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to: all but biases, norms, DoRA's lengths and marked ones.

    The choice depends on the name and the owning module, never on the shape: a sharded matrix may be one-dimensional.
    """
    decayed = set()
    for prefix, module in model.named_modules():
        # DoRA's lengths, like a norm's weights, are not better when they are small.
        is_norm = any(word in type(module).__name__.lower() for word in ("norm", "dora"))
        for name, parameter in module.named_parameters(recurse=False):
            if not is_norm and not name.endswith("bias") and not getattr(parameter, "_no_weight_decay", False):
                decayed.add(f"{prefix}.{name}" if prefix else name)
    return decayed


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_factor", 1.0)
