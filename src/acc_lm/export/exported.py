"""Exported models: load one, merge it with its adapter, generate a sample."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from acc_lm.chat.items import question_ids
from acc_lm.errors import ConfigError, UserError, first_line, is_out_of_memory
from acc_lm.export.card import merged_card
from acc_lm.export.export import exported_steps, write_steps
from acc_lm.files import written_aside
from acc_lm.modeling.adapter import ADAPTER_NAME, apply_adapter, convert_weights, open_adapter
from acc_lm.modeling.adapter import SETTINGS as ADAPTER_SETTINGS
from acc_lm.modeling.pretrained import refuse_kernels
from acc_lm.runtime import loaded_by_every_process
from acc_lm.text.tokenizer import read_tokenizer


def load_exported(
    folder: Path, trust_remote_code: bool = False, revision: str | None = None, dtype: torch.dtype | None = None
) -> Any:
    """Load the model in a folder or on the Hub; for an adapter, peft's model of its base with the adapter in it.

    Args:
        dtype: type of the weights, for an adapter those of its base; None: the one in which they were stored, or trained.

    Raises:
        ConfigError: the model needs code that is not trusted, or the adapter's base has changed.
        OSError, ValueError: transformers cannot load it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    adapter = open_adapter(folder)
    where: str | Path = folder
    how: dict[str, Any] = {"revision": revision}
    if adapter is not None:
        where, how = adapter.base, {"revision": adapter.revision}
    try:
        found = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **how)
        refuse_kernels(found, trust_remote_code, "model")
        if adapter is not None:
            how["dtype"] = torch.bfloat16 if adapter.dtype == "bfloat16" else torch.float32
        with loaded_by_every_process():
            model = AutoModelForCausalLM.from_pretrained(
                where, use_safetensors=True, trust_remote_code=trust_remote_code, **how
            )
    except Exception as error:  # damaged files lead to errors of any kind inside transformers
        if isinstance(error, UserError) or is_out_of_memory(error):
            raise
        if adapter is None:
            raise error if isinstance(error, OSError | ValueError) else ValueError(first_line(error)) from None
        raise ConfigError(
            f"the base of the adapter {folder} must be a model that transformers loads, got {adapter.base}: {first_line(error)}; "
            f"put it there, or correct base_model_name_or_path in {ADAPTER_SETTINGS}"
        ) from None
    if adapter is not None:
        return apply_adapter(adapter, model, dtype)
    if dtype is not None:
        convert_weights(model, dtype)
    return model


def _is_tied(base: Any) -> bool:
    """True if the base's head shares the weight of its embeddings, whatever peft has put in their places."""
    ends = base.get_input_embeddings(), base.get_output_embeddings()
    table, head = (getattr(getattr(module, "original_module", module), "weight", None) for module in ends)
    return table is not None and table is head


def with_trained_modules(adapted: Any) -> Any:
    """Base of peft's model with the adapter in it, and what that trained completely in the places of the base's modules.

    peft keeps both, and two copies of a tied table, which engines cannot tie again.
    """
    from peft.utils import ModulesToSaveWrapper

    base = adapted.get_base_model()
    is_tied = _is_tied(base)
    for name, module in [*base.named_modules()]:
        if isinstance(module, ModulesToSaveWrapper):
            base.set_submodule(name, module.modules_to_save[ADAPTER_NAME])
    if is_tied:
        base.get_output_embeddings().weight = base.get_input_embeddings().weight
    return base


def merge(folder: Path, output: Path, dtype: torch.dtype = torch.float32) -> None:
    """Merge an exported adapter and its base into one model, in a new folder that transformers loads like any other.

    Raises:
        ConfigError: the folder holds no adapter, the base has changed, or the output exists already.
    """
    if open_adapter(folder) is None:
        got = folder if folder.is_dir() else f"{folder}, which does not exist"
        raise ConfigError(
            f"FINAL must be the folder of an adapter, got {got}; name the final/ of a finished run with one"
        )
    if os.path.lexists(output):
        raise ConfigError(f"OUTPUT must be a new folder, got {output}; name another")
    model = load_exported(folder, dtype=torch.float32)  # to merge without rounding
    is_tied = _is_tied(model.get_base_model())
    model = model.merge_and_unload()
    if is_tied:  # peft has loaded a copy for each of the names
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = True
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    model = model.to(dtype)  # merged in float32, whatever the output dtype
    tokenizer, steps = read_tokenizer(folder), exported_steps(folder)
    with written_aside(output) as work:
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        if steps is not None:
            write_steps(work, *steps)
        card = folder / "README.md"
        text = card.read_text(encoding="utf-8") if card.is_file() else None
        base = str(json.loads((folder / ADAPTER_SETTINGS).read_text())["base_model_name_or_path"])
        merged = merged_card(text, base, output.resolve().name, str(dtype).removeprefix("torch."))
        (work / "README.md").write_text(merged, encoding="utf-8")


def sample_text(
    folder: str | Path,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    is_question: bool = False,
    day: str | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Generate text from `prompt` with the exported model and return both; the same for the same seed.

    Args:
        temperature: 0: always take the likeliest token.
        is_question: True: the prompt is a user's turn in a conversation, and only the answer is returned.
        day: date for a chat template that reads the clock, as YYYY-MM-DD; None: the run's date, else today's.
    """
    tokenizer = read_tokenizer(folder, trust_remote_code)
    model = load_exported(Path(folder), trust_remote_code)
    model.eval()
    ends = [tokenizer.eos_token_id]
    if is_question:
        found, end = question_ids(prompt, tokenizer, day)
        ids, ends = torch.tensor([found]), [end, *ends]
    else:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    if ids.shape[1] == 0:
        ids = torch.tensor([[tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id]])
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int):
        ids = ids[:, -max(1, limit - max_new_tokens) :]
        max_new_tokens = min(max_new_tokens, limit - ids.shape[1])
    choice: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature > 0 else {"do_sample": False}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            **({"eos_token_id": ends} if is_question else {}),
            **choice,
        )
    return str(tokenizer.decode(output[0][ids.shape[1] if is_question else 0 :], skip_special_tokens=True))
