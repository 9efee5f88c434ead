"""Grouped matrix products of a mixture of experts, computed in the dtype of autocast.

`torch.nn.functional.grouped_mm` ignores autocast, so float32 weights under bf16 autocast are multiplied in float32. On a
GPU that is a loop over the experts that waits for the device, instead of one bfloat16 kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "grouped_mm_in_autocast"


def use_autocast(model: PreTrainedModel) -> None:
    """Apply autocast to experts that transformers multiplies in groups; leave other models unchanged."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if getattr(model.config.get_text_config(), "_experts_implementation", None) != "grouped_mm":
        return
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
    experts = [
        p for module in model.modules() if hasattr(module, "down_proj") for p in module.parameters(recurse=False)
    ]
    # The grouped product requires rows of a multiple of 16 bytes: 8 numbers of 16 bits.
    fits = all(size % 8 == 0 for p in experts if p.dim() == 3 for size in p.shape[1:])
    model.set_experts_implementation(IMPLEMENTATION if fits else "eager")


def _forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    device = hidden_states.device.type
    if (
        torch.amp.is_autocast_available(device)
        and torch.is_autocast_enabled(device)
        and hidden_states.dtype != torch.float64
    ):
        experts = _Cast(experts, torch.get_autocast_dtype(device))
    result: Tensor = grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    return result


class _Cast:
    """View of a module's attributes, with its floating-point tensors cast to another dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
