"""A recipe's model on fake tensors: shapes and types without data, so that any size runs in seconds and takes no memory.

The tensors are those of a CPU, because torch without CUDA cannot differentiate fake ones of a GPU; `losses.as_on_gpu`
lets the loss take the branches of a GPU. torch's attention keeps the same tensors on both.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from acc_lm.config import AdapterConfig, ModelConfig
from acc_lm.errors import ConfigError
from acc_lm.modeling.activations import checkpoint_arguments
from acc_lm.modeling.adapter import NO_ADAPTER, choose_trained
from acc_lm.modeling.attention import register_attention, run_probe
from acc_lm.modeling.checks import must_run
from acc_lm.modeling.experts import use_autocast
from acc_lm.modeling.loss_head import use_loss
from acc_lm.modeling.pretrained import pretrained_config, scratch_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class FakeModel:
    """A model without data, as the training would run it."""

    model: PreTrainedModel
    is_fused: bool
    """True if the loss is fused with the output head, False if it is computed on all logits."""


def fake_config(config: ModelConfig, vocab_size: int) -> PreTrainedConfig:
    """The transformers config of a recipe's model.

    Args:
        vocab_size: ids of a vocabulary that the recipe leaves out, or to which it enlarges an existing one.
    """
    with must_run("model.config" if config.config is not None else "model.name_or_path"):
        if config.config is not None:
            return scratch_config(config, None, vocab_size)
        found = pretrained_config(config)
        text = found.get_text_config()
        text.vocab_size = max(text.vocab_size, vocab_size)
        return found


def with_depth(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """The same config with other than its own number of layers, whose kinds repeat from the first on."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds:
        with contextlib.suppress(AttributeError):  # computed from the number of layers
            text.layer_types = [kinds[i % len(kinds)] for i in range(num_layers)]
    text.num_hidden_layers = num_layers
    return config


def period_of(config: PreTrainedConfig) -> int | None:
    """Number of layers after which their kinds repeat; None if they do not, or not in a way that is known here."""
    text = config.get_text_config()
    values = text.to_dict()
    if values.get("mlp_only_layers") or values.get("first_k_dense_replace") or values.get("moe_layer_freq", 1) != 1:
        return None
    if (values.get("decoder_sparse_step") or 1) != 1 or values.get("num_kv_shared_layers"):
        return None
    kinds = values.get("layer_types") or [""] * text.num_hidden_layers
    for period in range(1, len(kinds) // 2 + 1):
        if len(kinds) % period == 0 and kinds == kinds[:period] * (len(kinds) // period):
            return period
    return None


def build_fake_model(
    config: ModelConfig,
    model_config: PreTrainedConfig,
    sequence_length: int,
    dtype: torch.dtype,
    adapter: AdapterConfig = NO_ADAPTER,
) -> FakeModel:
    """Build the model as `build_model` does. Call it in torch's FakeTensorMode.

    Raises:
        ConfigError: the model needs the values of its tensors.
    """
    from transformers import AutoModelForCausalLM

    with must_run("model"):
        if adapter.kind == "none":
            model: Any = AutoModelForCausalLM.from_config(
                model_config, dtype=dtype, trust_remote_code=config.trust_remote_code
            )
        else:  # peft swaps tensors, which fake ones do not allow
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    model_config, dtype=dtype, trust_remote_code=config.trust_remote_code
                )
                choose_trained(model, config, adapter, 0, "")
            _replace_meta_tensors(model)
    own = model.config._attn_implementation
    ids = torch.zeros(1, 8, dtype=torch.int64)
    try:
        with torch.no_grad(), _without_kernels_of_experts(model):
            needs, _ = run_probe(model, ids, sequence_length)
            model.set_attn_implementation(register_attention() if set(needs) == {"called"} else own)
            is_fused = _has_plain_head(model, ids)
    except Exception as error:
        raise ConfigError(
            f"model must be one whose shapes do not depend on its tokens, got {model.config.model_type}: "
            f"{' '.join(str(error).split())[:100]}; measure it with --dry-run"
        ) from error
    use_autocast(model)
    use_loss(model, is_fused)
    if adapter.kind == "none":
        choose_trained(model, config, adapter, 0, "")
    if config.gradient_checkpointing:
        switch_checkpointing(model, config.gradient_checkpointing)
    model.train()
    return FakeModel(model, is_fused)


def switch_checkpointing(model: Any, which: bool | Literal["selective"]) -> None:
    """Let a model recompute what a recipe with `gradient_checkpointing: which` recomputes."""
    if which:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(checkpoint_arguments(which))
    else:
        (getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable)()


def _replace_meta_tensors(model: nn.Module) -> None:
    """Replace tensors on the meta device by fake ones of a CPU; tied ones stay tied."""
    replaced: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                new = replaced.setdefault(id(parameter), nn.Parameter(empty, parameter.requires_grad))
                module._parameters[name] = new
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


@contextlib.contextmanager
def _without_kernels_of_experts(model: Any) -> Iterator[None]:
    """Multiply experts one by one in this context, because their grouped product refuses fp32 on fake tensors."""
    text = model.config.get_text_config()
    own = getattr(text, "_experts_implementation", None)
    if own is not None:
        model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        if own is not None:
            model.set_experts_implementation(own)


def _has_plain_head(model: Any, ids: Tensor) -> bool:
    """Test that the head reads the base model's output, and that its own output is the logits, by where they are stored."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or model.base_model is model:
        return False
    seen: dict[str, Any] = {}

    def of_base(module: nn.Module, inputs: Any, output: Any) -> None:
        seen["last"] = output[0].untyped_storage()._cdata

    def of_head(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen["read"], seen["written"] = inputs[0].untyped_storage()._cdata, output.untyped_storage()._cdata

    hooks = [model.base_model.register_forward_hook(of_base), head.register_forward_hook(of_head)]
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return bool(seen.get("last", seen["read"]) == seen["read"] and seen["written"] == logits.untyped_storage()._cdata)
