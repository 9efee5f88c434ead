"""Rows of the embeddings and of the output head for every id of a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from acc_lm.config import AdapterConfig, ModelConfig
from acc_lm.errors import ConfigError
from acc_lm.text.tokenizer import count_ids, new_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def fit_vocabulary(model: PreTrainedModel, config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add rows for the ids that the model lacks, if the recipe adds tokens or permits it otherwise.

    A row for a new token is drawn as transformers does by default: close to the mean of the rows that exist. It depends on
    these and on torch's seed alone, because one thread computes the mean.

    Raises:
        ConfigError: the model lacks an id that is not one of the recipe's new tokens.
    """
    vocab_size, weight = count_ids(tokenizer), model.get_input_embeddings().weight
    rows = weight.shape[0]
    if vocab_size <= rows:
        return
    added = new_tokens(tokenizer)
    only_new = config.config is None and all(
        token in added for token, number in tokenizer.get_vocab().items() if number >= rows
    )
    if not only_new and not config.resize_embeddings:
        raise ConfigError(
            f"model vocab_size must be at least the tokenizer's {vocab_size} ids, got {rows}; "
            "use the model's own tokenizer, or set model.resize_embeddings=true"
        )
    if not only_new or weight.is_meta:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model.resize_token_embeddings(vocab_size, mean_resizing=True)
    finally:
        torch.set_num_threads(num_threads)


def check_new_rows(model: PreTrainedModel, adapter: AdapterConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse an adapter for new tokens whose rows would be neither trained nor exported.

    Raises:
        ConfigError: the embeddings or the output head are frozen.
    """
    if adapter.kind == "none" or not new_tokens(tokenizer):
        return
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    frozen = {
        name.rpartition(".")[2]: module
        for name, module in model.named_modules()
        if module in ends and not module.weight.requires_grad
    }
    if len({id(module.weight) for module in frozen.values()}) < len(frozen):  # tied: one of the names is enough
        frozen = dict([*frozen.items()][:1])
    if frozen:
        raise ConfigError(
            f"adapter.also_train must have the embeddings and the output head for new tokens, whose rows would otherwise be neither trained "
            f"nor exported, got {list(adapter.also_train)}; add {', '.join(frozen)}, or leave tokenizer.add_tokens out"
        )
