"""Configs of models from scratch, and loading of pretrained models with an error for each thing that can be wrong."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from acc_lm.config import ModelConfig
from acc_lm.errors import ConfigError, first_line, is_out_of_memory
from acc_lm.modeling.adapter import SETTINGS
from acc_lm.text.tokenizer import count_ids

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def scratch_config(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int | None = None
) -> PreTrainedConfig:
    """Config of a model from scratch; vocabulary size and ids that the recipe leaves out come from the tokenizer.

    It has no padding id unless the recipe names one, because models treat that id's embedding as if no text held it.
    """
    from transformers import AutoConfig

    values = dict(config.config or {})
    values.setdefault("vocab_size", vocab_size if tokenizer is None else count_ids(tokenizer))
    for name in ("bos_token_id", "eos_token_id"):
        values.setdefault(name, 0 if tokenizer is None else getattr(tokenizer, name))
    padding = values.setdefault("pad_token_id", None)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given = values[name]
        if isinstance(given, int) and not 0 <= given < values["vocab_size"]:
            raise ConfigError(
                f"model.config.{name} must be an id below vocab_size {values['vocab_size']}, got {given}; leave it out"
            )
    if padding is not None and _is_in_text(padding, values, tokenizer):
        raise ConfigError(
            f"model.config.pad_token_id must be an id that no text uses, got {padding}; leave it out: no row is padded with it"
        )
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    refuse_kernels(made, config.trust_remote_code, "model.config")
    return made


def _is_in_text(token_id: int, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> bool:
    if token_id in (config["bos_token_id"], config["eos_token_id"]):
        return True
    return tokenizer is not None and token_id in set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)


def pretrained_config(config: ModelConfig) -> PreTrainedConfig:
    from transformers import AutoConfig

    name = str(config.name_or_path)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).expanduser().is_dir():
        raise ConfigError(
            f"model.name_or_path must be an existing folder or a Hub id, got {name!r}, which does not exist; check the path"
        )
    if Path(name, SETTINGS).is_file():
        raise ConfigError(
            f"model.name_or_path must be a full model, got the adapter {name!r}; merge it into its base: acc-lm export --merge {name} OUTPUT"
        )
    if Path(name).is_dir() and not Path(name, "config.json").is_file():
        raise ConfigError(
            f"model.name_or_path must be a folder with a config.json, got {name!r} without one; export the model first"
        )
    try:
        found = AutoConfig.from_pretrained(name, revision=config.revision, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # each failure of the Hub or the file has its own type; all mean: no usable model
        if is_of_machine(error):
            raise
        raise ConfigError(f"model.name_or_path {_why_not(name, error)}") from None
    refuse_kernels(found, config.trust_remote_code, "model.name_or_path")
    return found


def refuse_kernels(found: PreTrainedConfig, trust_remote_code: bool, key: str) -> None:
    """Refuse an attention named like a repository, which would be fetched from the Hub and run.

    Raises:
        ConfigError: the model requests one, and `trust_remote_code` is false.
    """
    kernel = str(getattr(found, "_attn_implementation", None) or "")
    if "/" in kernel and not trust_remote_code:
        raise ConfigError(
            f"{key} must be a model without code of its own, got the attention {kernel!r}, which is code from the Hub; "
            "read it, then set model.trust_remote_code=true"
        )


def load_pretrained(config: ModelConfig) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    name = str(config.name_or_path)
    pretrained_config(config)
    try:
        return AutoModelForCausalLM.from_pretrained(
            name,
            revision=config.revision,
            dtype=torch.float32 if config.dtype != "bfloat16" else torch.bfloat16,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
        )
    except Exception as error:  # as above
        if is_of_machine(error):
            raise
        raise ConfigError(f"model.name_or_path {_why_not(name, error)}") from None


def _why_not(name: str, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return f"must be a model without code of its own, got {name!r}, which contains some; read it, then set model.trust_remote_code=true"
    if Path(name).is_dir() and not list(Path(name).glob("*.safetensors")):
        return f"must have its weights in safetensors, got {name!r} without any; convert them (weights in pickle are not loaded)"
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    if not Path(name).exists():
        why = (
            "is not in the local cache and offline mode is on"
            if offline
            else "is not in the local cache and could not be fetched"
        )
        return f"must be a model that can be loaded, got {name!r}, which {why}; give a local folder, or check name and network"
    return f"must be a causal language model of transformers, got {name!r}: {first_line(error)}; check the folder"


def check_length(model: PreTrainedModel, sequence_length: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return
    # RoBERTa and models derived from it count positions from their padding id on.
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each.num_embeddings == limit]
    paddings = [each.padding_idx for each in tables if each is not model.get_input_embeddings()]
    counts_from = max((index + 1 for index in paddings if index is not None), default=0)
    if limit - counts_from < sequence_length:
        which = f"{limit}, of which it cannot use {counts_from}" if counts_from else limit
        raise ConfigError(
            f"data.sequence_length must be at most the model's max_position_embeddings {which}, got {sequence_length}; "
            "lower it, or raise the model's"
        )


def dropout_of(model: PreTrainedModel) -> float:
    """The largest dropout probability in the model's config or modules."""
    # GPT-2's `summary_first_dropout` belongs to a head that no language model has.
    found = model.config.to_dict().items()
    values = [v for k, v in found if "drop" in k and not k.startswith("summary") and isinstance(v, float)]
    values += [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return max(values, default=0.0)


def longest_input(config: ModelConfig) -> int | None:
    """Maximum number of ids that an existing model reads at once; None when its config names no limit."""
    limit = getattr(pretrained_config(config).get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def is_of_machine(error: Exception) -> bool:
    """Test for an error of the machine, not of the recipe: out of memory, or a full disk."""
    return is_out_of_memory(error) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
