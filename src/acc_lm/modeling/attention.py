"""Causal attention without a mask, for every architecture whose attention needs nothing else.

transformers materialises a mask under torch.compile, and in eager mode synchronises the device to inspect one. A row
here is always full and causal, so attention is called with `is_causal` and no mask. Whether a model needs more than that
is decided by the arguments it passes and by comparing outputs, never by its name.

In a row of several documents, no document may attend to another. The mask for that is built once per batch: a dense mask
on the CPU; on a GPU, the list of blocks that FlexAttention has to compute, so that no L x L mask exists there.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from acc_lm.errors import ConfigError
from acc_lm.modeling.row_parts import RowParts

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedModel

CAUSAL_WITHOUT_MASK = "causal, no mask"
CAUSAL = "acc_lm_causal"
COUNTING = "acc_lm_counting"
PROBE = "acc_lm_probe"
LOOKED_AT = "acc_lm_looked_at"
LEAST_FLEX_HEAD = 16
# Keywords that do not affect which positions are visible.
HARMLESS = {
    "is_causal",
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
}


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    document_mask: Tensor | BlockMask | None = None,
    row_parts: RowParts | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention.

    Args:
        query, key, value: float [B, heads, T, D]; key and value may have fewer heads.
        attention_mask: must be None.
        document_mask: result of `document_mask` for this batch; None: every row is one document.
        row_parts: division of the rows, if T are the positions of a part of them; None: the rows are complete.

    Returns:
        float [B, T, heads, D].
    """
    if row_parts is not None:
        dtype = _dtype_of_product(query) if document_mask is None or isinstance(document_mask, Tensor) else query.dtype
        query, key, value = (row_parts.to_heads(part.to(dtype)) for part in (query, key, value))
        output, _ = causal_attention(module, query, key, value, None, dropout, scaling, document_mask)
        return row_parts.to_positions(output), None
    if query.shape[1] % key.shape[1]:  # fused kernels check this only when they run, not on the meta device
        raise ValueError(f"{query.shape[1]} attention heads cannot share {key.shape[1]} key-value heads evenly")
    if document_mask is not None and not isinstance(document_mask, Tensor):
        from transformers.integrations.flex_attention import flex_attention_forward

        if dropout:
            raise ConfigError(
                f"the model's attention dropout must be 0 for packed rows on a GPU, got {dropout}; "
                "set it to 0, or data.packing: false"
            )
        if query.is_cuda and (size := min(query.shape[-1], value.shape[-1])) < LEAST_FLEX_HEAD:
            raise ConfigError(
                f"the model's attention heads must have {LEAST_FLEX_HEAD} or more elements for packed rows on a GPU, got {size}; "
                "use fewer heads, or data.packing: false"
            )
        output, _ = flex_attention_forward(module, query, key, value, document_mask, scaling=scaling)
        return output, None
    num_shared = query.shape[1] // key.shape[1]
    if num_shared > 1 and _lacks_grouped_kernel(query):
        key, value = key.repeat_interleave(num_shared, 1), value.repeat_interleave(num_shared, 1)
    output = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=document_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=document_mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


def _dtype_of_product(query: Tensor) -> torch.dtype:
    """Dtype in which torch's attention computes: autocast casts its inputs, which rotations leave in float32."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def _lacks_grouped_kernel(query: Tensor) -> bool:
    """Test whether no fused GPU kernel takes fewer key-value heads than query heads in this dtype: only 16-bit ones do.

    With equal numbers of heads the memory-efficient kernel takes float32; otherwise backward would keep T x T scores.
    """
    if not query.is_cuda:
        return False
    return _dtype_of_product(query) == torch.float32


def kernel_order(capability: tuple[int, int]) -> tuple[SDPBackend, ...]:
    """Order in which torch tries the fused attention kernels of an NVIDIA GPU; it takes the first that works.

    cuDNN's is the fastest on Hopper, where only some versions of torch prefer it. It refuses what it does not support, such
    as float32 or large heads, and torch then tries the next kernel.

    Args:
        capability: compute capability of the GPU.

    Returns:
        Kernels in order of preference; () keeps torch's own order.
    """
    if capability[0] != 9:
        return ()
    return (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def prefer_kernels(capability: tuple[int, int], cudnn: bool = True) -> None:
    """Set `kernel_order` for the rest of this process, compiled models included.

    Args:
        cudnn: False: never use cuDNN's attention.
    """
    order = kernel_order(capability)
    if not cudnn:
        torch.backends.cuda.enable_cudnn_sdp(False)
    elif order:
        # Set once for the process: a context around each call would cost as much time as a small kernel.
        chosen = sdpa_kernel(list(order), set_priority=True)
        chosen.__enter__()
        atexit.register(chosen.__exit__, None, None, None)  # keeps a reference: garbage collection would undo it


def document_mask(document_ids: Tensor) -> Tensor | BlockMask:
    """Attention mask: each position attends to itself and to earlier positions of its own document.

    Args:
        document_ids: int64 [B, T].

    Returns:
        bool [B, 1, T, T]; on a GPU, the same as FlexAttention's blocks.
    """
    if document_ids.is_cuda:
        return block_mask(document_ids)
    return (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()


def block_mask(document_ids: Tensor) -> BlockMask:
    """Build `document_mask` as FlexAttention's list of blocks; single positions are tested only in blocks at an edge."""
    from torch.nn.attention.flex_attention import create_block_mask

    def may_look(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_ids[batch, query] == document_ids[batch, key])

    # Uncompiled, it would first fill the full T x T mask; inside a compiled model it is compiled with the rest.
    create = create_block_mask if torch.compiler.is_compiling() else torch.compile(create_block_mask)
    num_rows, length = document_ids.shape
    return create(may_look, num_rows, None, length, length, device=document_ids.device)


def own_masks(model: PreTrainedModel, position_ids: Tensor) -> Any:
    """transformers' masks for a model that keeps its own attention, windows and chunks included.

    A document begins where the positions restart. The masks are built here as `generate` builds them, because not every
    model uses the positions when it builds its own.
    """
    from transformers.masking_utils import create_masks_for_generate

    return create_masks_for_generate(
        model.config,
        torch.empty(*position_ids.shape, 0, dtype=model.dtype, device=position_ids.device),
        None,  # of padding
        None,  # the cache, whose name differs between releases
        position_ids=position_ids,
    )


def use_block_masks(model: PreTrainedModel) -> str:
    """Switch a model that keeps transformers' own attention to FlexAttention, for packed rows on a GPU.

    `own_masks` then returns lists of blocks, and soft caps and sinks are passed on: no dense mask exists here either.

    Returns:
        Display name of the attention.
    """
    model.set_attn_implementation("flex_attention")
    return "transformers' flex_attention"


def register_attention() -> str:
    """Register `causal_attention` with transformers; returns its registered name."""
    from transformers import AttentionInterface

    AttentionInterface.register(CAUSAL, causal_attention)
    return CAUSAL


def register_counting_attention() -> str:
    """Register an attention for the meta device that uses every parameter it is given, so that the graph contains it.

    Returns:
        Its registered name.
    """
    from transformers import AttentionInterface

    def count(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        output, weights = causal_attention(module, query, key, value, scaling=keywords.get("scaling"))
        for given in (attention_mask, *keywords.values()):
            if isinstance(given, Tensor) and given.is_floating_point():
                output = output + given.sum() * 0
        return output, weights

    AttentionInterface.register(COUNTING, count)
    return COUNTING


@contextmanager
def attention_looked_at(model: PreTrainedModel) -> Iterator[list[tuple[int, bool]]]:
    """Record of each attention in this context: heads x (size of a key + size of a value), and if it has a gradient.

    For models that use `causal_attention`, which is restored afterwards.
    """
    from transformers import AttentionInterface

    seen: list[tuple[int, bool]] = []

    def look(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        has_gradient = query.requires_grad or key.requires_grad or value.requires_grad
        seen.append((query.shape[1] * (query.shape[-1] + value.shape[-1]), has_gradient))
        return causal_attention(module, query, key, value, attention_mask, **keywords)

    AttentionInterface.register(LOOKED_AT, look)
    model.set_attn_implementation(LOOKED_AT)
    try:
        yield seen
    finally:
        model.set_attn_implementation(CAUSAL)


def probe_length(config: dict[str, Any], sequence_length: int) -> int:
    """Tokens of the probe: more than any window or chunk in the config that is shorter than a row, at most a row."""
    sizes = [value for key, value in config.items() if isinstance(value, int) and ("window" in key or "chunk" in key)]
    return min(sequence_length, max([24, *(size for size in sizes if size < sequence_length)]) + 8)


def run_probe(model: PreTrainedModel, ids: Tensor, sequence_length: int) -> tuple[dict[str, Any], Tensor | None]:
    """Run the base model with `causal_attention`, which stays set.

    Returns:
        What else the model asked of its attention, with `called` if it asked for one at all; and its hidden states, None
        if this architecture does not use the attention interface.
    """
    from transformers import AttentionInterface

    required: dict[str, Any] = {}

    def probe(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        required.setdefault("called", True)
        for name, given in keywords.items():
            covers_row = name == "sliding_window" and given is not None and given >= sequence_length
            if given is not None and name not in (*HARMLESS, "dropout", "scaling") and not covers_row:
                required[name] = given
        if attention_mask is not None:
            required["attention_mask"] = True
        return causal_attention(module, query, key, value, scaling=keywords.get("scaling"))

    register_attention()
    AttentionInterface.register(PROBE, probe)
    try:
        model.set_attn_implementation(PROBE)
        return required, model.base_model(input_ids=ids, use_cache=False)[0]
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError):
        return {}, None


def choose_attention(model: PreTrainedModel, sequence_length: int) -> str:
    """Switch the model to `causal_attention` if that is exact for it; returns the display name of the attention in use.

    Two conditions are tested on a small batch. The attention needs no more than a causal flag: no window shorter than a row,
    no soft cap, no sinks, no keyword unknown here. And the hidden states are the same as on transformers' own path.
    """
    own = model.config._attn_implementation
    device = next(model.parameters()).device
    text_config = model.config.get_text_config()
    length = probe_length(text_config.to_dict(), sequence_length)
    ids = (torch.arange(2 * length, device=device).reshape(2, length) * 7 + 1) % text_config.vocab_size
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            expected = model.base_model(input_ids=ids, use_cache=False)[0]
            required, got = run_probe(model, ids, sequence_length)
        tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
        scale = expected.abs().max().item() or 1.0
        same = got is None or (got - expected).abs().max().item() <= tolerance * scale
        exact = set(required) == {"called"} and same
    finally:
        model.train(was_training)
    model.set_attn_implementation(CAUSAL if exact else own)
    if exact:
        return CAUSAL_WITHOUT_MASK
    needs = ", ".join(sorted(set(required) - {"called"}))
    return f"transformers' {own}" + (f" ({needs})" if needs else "")
