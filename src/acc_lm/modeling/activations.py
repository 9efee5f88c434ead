"""What a block keeps of its forward pass for the backward pass, and what it computes again."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm", "transformers::grouped_mm_fallback")
"""Of weights and activations, those of experts too. Those of activations alone are an attention's scores: large, and cheap."""
ATTENTION = ("aten::_scaled_dot_product_", "flex_attention")


def checkpoint_arguments(which: bool | Literal["selective"]) -> dict[str, Any]:
    """Arguments of `torch.utils.checkpoint.checkpoint`: compute everything again, or all but the products."""
    if which != "selective":
        return {"use_reentrant": False}
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, _keep_products)}


def _keep_products(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Keep what takes long to compute and little to hold; norms, activations, rotations and residuals are computed again."""
    name = operation.name()
    is_kept = name.partition(".")[0] in PRODUCTS or (
        name.startswith(ATTENTION) and not _drops(operation, arguments, keywords)
    )
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _drops(operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether it draws random numbers. The second time they come from the same state, if all that draw are called again."""
    names = [argument.name for argument in operation._schema.arguments] if hasattr(operation, "_schema") else []
    given = {**dict(zip(names, arguments, strict=False)), **keywords}
    return bool(given.get("dropout_p"))
