"""A causal language model, from scratch or pretrained, whose training forward returns a loss and never logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from acc_lm.config import AdapterConfig, ModelConfig
from acc_lm.errors import first_line
from acc_lm.modeling.activations import check_checkpointing, checkpoint_arguments
from acc_lm.modeling.adapter import NO_ADAPTER, choose_trained, convert_weights, weights_checksum
from acc_lm.modeling.attention import (
    CAUSAL_WITHOUT_MASK,
    attention_looked_at,
    choose_attention,
    register_attention,
    use_block_masks,
)
from acc_lm.modeling.checks import check_causal, check_packing, check_row_parts, must_run
from acc_lm.modeling.experts import use_autocast
from acc_lm.modeling.flops import Flops, count_flops, few_tokens
from acc_lm.modeling.loss_head import FUSED, install_loss, use_loss
from acc_lm.modeling.pretrained import check_length, dropout_of, load_pretrained, pretrained_config, scratch_config
from acc_lm.modeling.router import Router, find_router
from acc_lm.modeling.vocabulary import check_new_rows, fit_vocabulary
from acc_lm.text.tokenizer import new_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the built model, shown at start."""

    num_parameters: int
    num_trainable: int
    attention: str
    loss: str
    dropout: float
    flops: Flops
    base: str = ""
    """Checksum of a pretrained model's weights before training; empty for a model from scratch."""
    router: Router | None = None
    """Routing of a mixture of experts that is trained with its load-balancing loss; else None."""


def build_model(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    seed: int,
    adapter: AdapterConfig = NO_ADAPTER,
    packs: bool = False,
    device_type: str = "cpu",
    parts_of_rows: int = 1,
) -> tuple[PreTrainedModel, ModelFacts]:
    """Build the model on the CPU, ready to be prepared: `model(input_ids, targets)` returns the summed loss.

    From scratch, the weights depend on the seed alone: they are drawn on the CPU in float32, whatever engine trains them.

    Args:
        packs: True: rows hold several documents, with `position_ids` and `document_ids`.
        device_type: where the model will run.
        parts_of_rows: number of processes that will share each row.

    Raises:
        ConfigError: the model does not exist, or does not fit the tokenizer, the rows, the adapter or `freeze`.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    if config.config is not None:
        model_config = scratch_config(config, tokenizer)
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, trust_remote_code=config.trust_remote_code
        )
        for embedding in _train_every_row(model):
            model._init_weights(embedding)  # the padding row was zeroed
    else:
        model = load_pretrained(config)
    with must_run("model"):
        router = find_router(model, config.router_loss)
    base = weights_checksum(model) if config.config is None else ""  # as it is on disk, without rows for new tokens
    is_enlarged = config.resize_embeddings and not new_tokens(tokenizer)
    attention, loss = make_ready(model, config, tokenizer, sequence_length, packs, device_type)
    if parts_of_rows > 1:
        check_row_parts(model, sequence_length, parts_of_rows, attention, loss)
    if base and is_enlarged:  # its drawn rows have always belonged to the base
        base = weights_checksum(model)
    choose_trained(model, config, adapter, seed, base)
    check_new_rows(model, adapter, tokenizer)
    parameters = list(model.parameters())
    facts = ModelFacts(
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        attention=attention,
        loss=loss,
        dropout=dropout_of(model),
        flops=flops_of_model(model, attention),
        base=base,
        router=router,
    )
    model.train()
    return model, facts


def flops_of_model(model: PreTrainedModel, attention: str) -> Flops:
    """FLOP of the model per token; `attention` is the display name of its attention. The model is left unchanged."""
    if attention != CAUSAL_WITHOUT_MASK:
        return Flops(0.0, 0.0, f"the part of a row that {attention} attends to is not known here")
    ids = few_tokens(model.config.get_text_config().vocab_size, next(model.parameters()).device)
    was_training = model.training
    model.eval()
    try:
        with attention_looked_at(model) as seen:
            return count_flops(model, lambda: model(input_ids=ids, use_cache=False), ids.numel(), lambda: seen)
    except Exception as error:  # such as 4-bit weights, which exist only on their device
        return Flops(0.0, 0.0, f"the model does not run before it is on its device ({first_line(error)})")
    finally:
        model.train(was_training)


def make_ready(
    model: PreTrainedModel,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    packs: bool,
    device_type: str,
) -> tuple[str, str]:
    """Set vocabulary, dtype, attention and loss of a model that has its weights; returns the display names of the last two."""
    _fit_to_recipe(model, config, tokenizer, sequence_length)
    with must_run("model"):  # in the dtype that the weights were drawn or stored in, which may detect more
        check_causal(model, config, sequence_length)
        attention = choose_attention(model, sequence_length)
        loss = install_loss(model)
    if not hasattr(model, "peft_config"):  # else base and adapter have types of their own
        convert_weights(model, DTYPES[config.dtype])
    if packs:
        check_packing(model, sequence_length)
        attention = _prepare_packing(model, attention, device_type)
    return attention, loss


def build_empty_model(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    facts: ModelFacts,
    adapter: AdapterConfig = NO_ADAPTER,
    packs: bool = False,
    device_type: str = "cpu",
) -> PreTrainedModel:
    """Build the model of `build_model` with weights that are allocated but neither drawn nor touched.

    For processes that get their weights from the main one; `facts` is what the main one found with the real weights.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    model_config = pretrained_config(config) if config.config is None else scratch_config(config, tokenizer)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
        _fit_to_recipe(model, config, tokenizer, sequence_length)
    dtype = DTYPES[config.dtype]
    # An untouched tensor takes no memory: a process writes only the part that it will hold.
    model._apply(lambda t: torch.empty(t.shape, dtype=dtype) if t.is_meta else t)
    model.tie_weights()
    if facts.attention == CAUSAL_WITHOUT_MASK:
        model.set_attn_implementation(register_attention())
    elif packs:
        _prepare_packing(model, facts.attention, device_type)
    use_loss(model, fused=facts.loss == FUSED)
    choose_trained(model, config, adapter, 0, facts.base)
    model.train()
    return model


def _prepare_packing(model: PreTrainedModel, attention: str, device_type: str) -> str:
    """Avoid dense masks on a GPU where transformers' own attention stays; returns the display name of the attention."""
    return use_block_masks(model) if attention != CAUSAL_WITHOUT_MASK and device_type == "cuda" else attention


def _fit_to_recipe(
    model: PreTrainedModel, config: ModelConfig, tokenizer: PreTrainedTokenizerBase, sequence_length: int
) -> None:
    """Provide embeddings for every id, positions for every row, experts and activation checkpointing."""
    fit_vocabulary(model, config, tokenizer)
    check_length(model, sequence_length)
    if config.dtype == "float64":
        model.set_experts_implementation("eager")  # the grouped kernels of experts do not support it
    else:
        use_autocast(model)
    _train_every_row(model)
    check_checkpointing(model, config)
    if config.gradient_checkpointing:
        # transformers is renaming the switch; both names take the same keywords.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(checkpoint_arguments(config.gradient_checkpointing))


def _train_every_row(model: PreTrainedModel) -> list[nn.Embedding]:
    """Let the padding id's embedding get a gradient like any other; returns the embedding modules that excluded it.

    Rows mark padding by its targets and not by this id, which often is the end token that rows do hold.
    """
    exempting = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and module.padding_idx is not None
        # A custom forward that counts positions from padding_idx needs it.
        and (
            type(module).forward is nn.Embedding.forward or "padding_idx" not in type(module).forward.__code__.co_names
        )
    ]
    for module in exempting:
        module.padding_idx = None
    return exempting
