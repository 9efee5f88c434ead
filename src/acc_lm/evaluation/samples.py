"""Samples: greedy continuations of prompts at each evaluation, in `samples.jsonl` and in the trackers.

Every process generates the same tokens with the prepared model, so sharded weights need not be gathered. The most
likely token is always taken: no random numbers are drawn, so the next steps are those of a run without samples.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from acc_lm.chat.items import question_ids
from acc_lm.config import Config
from acc_lm.evaluation.held_out import evaluating
from acc_lm.rows.packing import WIDTH
from acc_lm.run_files import metrics_file
from acc_lm.runtime import on_main

if TYPE_CHECKING:
    from accelerate import Accelerator

    from acc_lm.data import Data

PAUSE_TOKENS = 8
"""Number of tokens between two calls of `between`."""


def write_samples(
    accelerator: Accelerator,
    model: nn.Module,
    data: Data,
    config: Config,
    step: int,
    between: Callable[[], None] = lambda: None,
) -> dict[str, list[dict[str, Any]]]:
    """Continue each prompt and record the result; {} when the recipe wants no samples. Every process calls.

    Args:
        between: called by every process after every few tokens; if it raises, no samples are written.

    Returns:
        {"samples": [{"step", "prompt", "text"}]}, for trackers.
    """
    num_tokens = config.tracking.sample_tokens
    if not num_tokens:
        return {}
    prompts = [ids[num_tokens - config.data.sequence_length :] for ids in sample_prompts(data, config)]
    size = config.training.micro_batch_size
    answers: list[list[int]] = []
    with evaluating(model):
        for start in range(0, len(prompts), size):
            some, length = prompts[start : start + size], config.data.sequence_length
            answers += _continue(accelerator, model, some, num_tokens, length, data.packs, between)
    tokenizer = data.tokenizer
    samples = [
        {"step": step, "prompt": tokenizer.decode(prompt), "text": tokenizer.decode(_until_end(answer, tokenizer))}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    on_main(accelerator, lambda: metrics_file.replace_samples(Path(config.output_dir), step, samples))
    return {"samples": samples}


def sample_prompts(data: Data, config: Config) -> list[list[int]]:
    """Ids of the prompts: held-out text if the recipe has none; with roles, a user's turn in the chat template."""
    tokenizer: Any = data.tokenizer
    if not config.tracking.sample_prompts:
        return [data.prompt_ids()]
    if data.facts.has_roles:
        return [question_ids(prompt, tokenizer)[0] for prompt in config.tracking.sample_prompts]
    found = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in config.tracking.sample_prompts]
    return [ids or [tokenizer.eos_token_id] for ids in found]


def _until_end(ids: list[int], tokenizer: Any) -> list[int]:
    return ids[: ids.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in ids else ids


def _continue(
    accelerator: Accelerator,
    model: nn.Module,
    prompts: list[list[int]],
    num_tokens: int,
    length: int,
    packs: bool,
    between: Callable[[], None],
) -> list[list[int]]:
    """Most likely next ids of each prompt, with one forward pass per token.

    A causal model never sees what is to the right of a prompt's end, so it needs no mask.

    Args:
        length: tokens of a row in training.
        packs: True: the model was prepared for rows of several documents.
    """
    longest = max(map(len, prompts)) + num_tokens
    # Packed rows are as wide as in training, because their masks are built for that width.
    width = length if packs else min(length, -(-longest // WIDTH) * WIDTH)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    batch = {"input_ids": ids.to(accelerator.device)}
    if packs:
        batch["position_ids"] = torch.arange(width, device=accelerator.device).expand_as(ids)
        batch["document_ids"] = torch.zeros_like(batch["input_ids"])
    rows = torch.arange(len(prompts), device=accelerator.device)
    ends = torch.tensor([len(prompt) for prompt in prompts], device=accelerator.device)
    for number in range(num_tokens):
        batch["input_ids"][rows, ends + number] = model(**batch, last=ends + number - 1)
        if number % PAUSE_TOKENS == PAUSE_TOKENS - 1:
            between()
    found = batch["input_ids"].tolist()
    return [row[len(prompt) : len(prompt) + num_tokens] for row, prompt in zip(found, prompts, strict=True)]
