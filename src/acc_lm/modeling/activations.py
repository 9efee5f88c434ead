"""Selective activation checkpointing: which results a block keeps for the backward pass, and which it recomputes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from acc_lm.config import ModelConfig
from acc_lm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm", "transformers::grouped_mm_fallback")
"""Products of weights and activations, experts included; products of two activations are scores, large and cheap."""
ATTENTION = ("aten::_scaled_dot_product_", "flex_attention")


def checkpoint_arguments(which: bool | Literal["selective"]) -> dict[str, Any]:
    """Arguments of `torch.utils.checkpoint.checkpoint`: recompute everything, or all but products and attention."""
    if which != "selective":
        return {"use_reentrant": False}
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, _keep_products)}


def _keep_products(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Keep results that are slow to compute and small to hold; recompute norms, activations, rotations and residuals."""
    name = operation.name()
    is_kept = name.partition(".")[0] in PRODUCTS or (
        name.startswith(ATTENTION) and not _drops(operation, arguments, keywords)
    )
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _drops(operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Test whether an operation draws random numbers (dropout).

    Recomputing repeats the same numbers only if every operation that draws some is recomputed.
    """
    names = [argument.name for argument in operation._schema.arguments] if hasattr(operation, "_schema") else []
    given = {**dict(zip(names, arguments, strict=False)), **keywords}
    return bool(given.get("dropout_p"))


def check_checkpointing(model: PreTrainedModel, config: ModelConfig) -> None:
    if config.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"model.gradient_checkpointing must be false for a model of type {model.config.model_type}, got "
            f"{str(config.gradient_checkpointing).lower()}, which transformers does not implement for it; set it to false"
        )
