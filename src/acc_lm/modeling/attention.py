"""Causal attention without a mask, for every architecture whose attention needs nothing else.

transformers materialises a mask under torch.compile and synchronises the device to look at one in eager mode. A row
here is always full and causal, so attention is called with `is_causal` and no mask. Whether that is all that a model
needs is decided by what the model hands over and by comparing outputs, never by its name.

In a row of several documents nobody may look into another one. What says so is made once a batch: a mask on the CPU,
on a GPU the list of the blocks that FlexAttention has to compute, so that no mask of L x L exists there.
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

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedModel

CAUSAL_WITHOUT_MASK = "causal, no mask"
CAUSAL = "acc_lm_causal"
COUNTING = "acc_lm_counting"
PROBE = "acc_lm_probe"
LOOKED_AT = "acc_lm_looked_at"
LEAST_FLEX_HEAD = 16
# Keywords that say nothing about which positions may be seen.
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
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention.

    Args:
        query, key, value: float [B, heads, T, D]; key and value may have fewer heads.
        attention_mask: must be None.
        document_mask: what `document_mask` made of this batch; None: every row is one document.

    Returns:
        float [B, T, heads, D].
    """
    if query.shape[1] % key.shape[1]:  # the fused kernels see this only when they run, not on the meta device
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


def _lacks_grouped_kernel(query: Tensor) -> bool:
    """Whether no fused kernel of a GPU takes fewer key-value heads in this type: those that do have 16 bits.

    With as many heads of each the memory-efficient kernel takes float32; else scores of T x T would be kept for backward.
    """
    if not query.is_cuda:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    return dtype == torch.float32


def kernel_order(capability: tuple[int, int]) -> tuple[SDPBackend, ...]:
    """The order in which torch is to look for a fused attention on a GPU of NVIDIA; it takes the first that can.

    cuDNN's is the fastest on Hopper, and there torch prefers it in some of its versions only. What it cannot do, such as
    float32 or large heads, it refuses by itself, and the next one is asked.

    Args:
        capability: compute capability of the GPU.

    Returns:
        () for the order that torch has.
    """
    if capability[0] != 9:
        return ()
    return (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def prefer_kernels(capability: tuple[int, int], cudnn: bool = True) -> None:
    """Set `kernel_order` for the rest of this process, compiled models included.

    Args:
        cudnn: False: cuDNN's attention is never used.
    """
    order = kernel_order(capability)
    if not cudnn:
        torch.backends.cuda.enable_cudnn_sdp(False)
    elif order:
        # For the whole process and not around each call, which would cost as much time as a small kernel.
        chosen = sdpa_kernel(list(order), set_priority=True)
        chosen.__enter__()
        atexit.register(chosen.__exit__, None, None, None)  # held by nobody, it would be undone at once


def document_mask(document_ids: Tensor) -> Tensor | BlockMask:
    """Who may look at whom: every position at those of its own document that are not behind it.

    Args:
        document_ids: int64 [B, T].

    Returns:
        bool [B, 1, T, T]; on a GPU FlexAttention's blocks of it.
    """
    if document_ids.is_cuda:
        return block_mask(document_ids)
    return (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()


def block_mask(document_ids: Tensor) -> BlockMask:
    """The same for FlexAttention: which blocks to compute; only in those at an edge single positions are looked at."""
    from torch.nn.attention.flex_attention import create_block_mask

    def may_look(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_ids[batch, query] == document_ids[batch, key])

    # Uncompiled it would fill in the whole T x T mask first; inside a compiled model it is compiled with the rest.
    create = create_block_mask if torch.compiler.is_compiling() else torch.compile(create_block_mask)
    num_rows, length = document_ids.shape
    return create(may_look, num_rows, None, length, length, device=document_ids.device)


def own_masks(model: PreTrainedModel, position_ids: Tensor) -> Any:
    """transformers' masks for a model that keeps its own attention, windows and chunks included.

    A document begins where the positions restart. They are made here as `generate` makes them, because not every model
    looks at the positions when it makes its own.
    """
    from transformers.masking_utils import create_masks_for_generate

    return create_masks_for_generate(
        config=model.config,
        inputs_embeds=torch.empty(*position_ids.shape, 0, dtype=model.dtype, device=position_ids.device),
        attention_mask=None,
        past_key_values=None,
        position_ids=position_ids,
    )


def use_block_masks(model: PreTrainedModel) -> str:
    """On a GPU, for packed rows of an architecture that keeps transformers' own attention; returns the name for people.

    `own_masks` are lists of blocks then, and soft caps and sinks are handed on: no dense mask exists here either.
    """
    model.set_attn_implementation("flex_attention")
    return "transformers' flex_attention"


def register_attention() -> str:
    """Make `causal_attention` known to transformers; returns the name it goes by."""
    from transformers import AttentionInterface

    AttentionInterface.register(CAUSAL, causal_attention)
    return CAUSAL


def register_counting_attention() -> str:
    """One for the meta device, where only the graph counts: whatever parameter an attention is handed is used by it."""
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
    """Of each attention that runs meanwhile: heads x (size of a key + size of a value), and whether it has a gradient.

    For models on `causal_attention`, which stay on it.
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
    """Tokens of the probe: more than any window or chunk that the config names and that is shorter than a row."""
    sizes = [value for key, value in config.items() if isinstance(value, int) and ("window" in key or "chunk" in key)]
    return min(sequence_length, max([24, *(size for size in sizes if size < sequence_length)]) + 8)


def choose_attention(model: PreTrainedModel, sequence_length: int) -> str:
    """Switch the model to `causal_attention` if that is exact for it; returns the name of what is in use, for people.

    Two questions, on a small batch: does the attention ask for more than a causal flag (a window shorter than a row, a
    soft cap, sinks, a keyword unknown here), and are the hidden states the same as on transformers' own path?
    """
    from transformers import AttentionInterface

    own = model.config._attn_implementation
    asked: dict[str, Any] = {}

    def probe(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        asked.setdefault("called", True)
        for name, given in keywords.items():
            covers_row = name == "sliding_window" and given is not None and given >= sequence_length
            if given is not None and name not in (*HARMLESS, "dropout", "scaling") and not covers_row:
                asked[name] = given
        if attention_mask is not None:
            asked["attention_mask"] = True
        return causal_attention(module, query, key, value, scaling=keywords.get("scaling"))

    register_attention()
    AttentionInterface.register(PROBE, probe)
    device = next(model.parameters()).device
    text_config = model.config.get_text_config()
    length = probe_length(text_config.to_dict(), sequence_length)
    ids = (torch.arange(2 * length, device=device).reshape(2, length) * 7 + 1) % text_config.vocab_size
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            expected = model.base_model(input_ids=ids, use_cache=False)[0]
            try:
                model.set_attn_implementation(PROBE)
                got = model.base_model(input_ids=ids, use_cache=False)[0]
            except (ValueError, TypeError, KeyError, RuntimeError, AttributeError):
                asked = {}  # this architecture does not go through the interface
                got = expected
        tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
        scale = expected.abs().max().item() or 1.0
        same = (got - expected).abs().max().item() <= tolerance * scale
        exact = set(asked) == {"called"} and same
    finally:
        model.train(was_training)
    model.set_attn_implementation(CAUSAL if exact else own)
    if exact:
        return CAUSAL_WITHOUT_MASK
    needs = ", ".join(sorted(set(asked) - {"called"}))
    return f"transformers' {own}" + (f" ({needs})" if needs else "")
