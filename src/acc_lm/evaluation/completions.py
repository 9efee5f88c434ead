"""Answers of a model to prompts: greedy decoding in batches that do not change the result, or sampling.

Prompts of a batch are padded on the left. Padding and the other prompts change a logit by rounding, which changes a choice
only where the two most likely tokens are equally close. Their distance is recorded at every step, and a prompt for which it
was too small anywhere is answered again, alone. Whether a model supports padding is tested with its own weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acc_lm.chat.conversations import template_of
from acc_lm.chat.items import build_items
from acc_lm.evaluation.scoring import ScoredText
from acc_lm.runtime import gather_objects

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Largest change of a logit by batching, as a share of the largest logit; 100 x the observed. Other dtypes: 5e-2."""


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    ends: tuple[int, ...]
    """Ids of the tokens that end an answer."""


def scored_prompts(text: ScoredText, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Prompt of each conversation: the ids before its last answer, exactly as they precede it in training."""
    assert text.plan is not None
    template = template_of(text.plan, tokenizer)
    prompts = []
    for conversation in text.conversations:
        items, _ = build_items(conversation, tokenizer, template, "last_assistant", max_length=1 << 62)
        ids, is_target = items[-1]
        end = tokenizer.eos_token_id if conversation.is_plain else ids[-1]
        prompts.append(Prompt(ids[: is_target.index(True)], tuple(dict.fromkeys([end, tokenizer.eos_token_id]))))
    return prompts


def complete(
    accelerator: Accelerator,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Callable[[int], object] = lambda num_prompts: None,
) -> list[str | None]:
    """Answer each prompt; None where a prompt leaves no room for an answer. Every process calls, and gets all answers.

    Args:
        model: as transformers loads it, on this process's device.
        batch_size: prompts per batch; never changes an answer.
        temperature: 0: always take the most likely token; else the draws for a prompt depend only on `seed` and its index.
    """
    model.eval()
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else math.inf
    rooms = [int(min(max_new_tokens, limit - len(prompt.ids))) for prompt in prompts]
    # Ordered by what all processes know, so that the batches do not depend on the number of processes.
    order = sorted(range(len(prompts)), key=lambda n: (-len(prompts[n].ids), n))
    together = [n for n in order if rooms[n] == max_new_tokens and temperature == 0]
    batches = []
    for ends in sorted({prompts[n].ends for n in together}):  # a token that ends one answer can be text in another
        alike = [n for n in together if prompts[n].ends == ends]
        batches += [alike[start : start + batch_size] for start in range(0, len(alike), batch_size)]
    batches += [[n] for n in order if rooms[n] > 0 and (rooms[n] < max_new_tokens or temperature > 0)]
    answers: dict[int, list[int]] = {}
    for batch in batches[accelerator.process_index :: accelerator.num_processes]:
        asked = [prompts[n] for n in batch]
        answers |= zip(batch, _answer(model, asked, rooms[batch[0]], temperature, (seed, batch[0])), strict=True)
        progress(len(batch))
    everywhere: dict[int, list[int]] = {}
    for part in gather_objects(accelerator, answers):
        everywhere |= part
    return [
        str(tokenizer.decode(everywhere[n], skip_special_tokens=True)) if n in everywhere else None
        for n in range(len(prompts))
    ]


def _answer(
    model: Any, prompts: list[Prompt], max_new_tokens: int, temperature: float, seed: tuple[int, int]
) -> list[list[int]]:
    """Ids of the answers, without the tokens that end them."""
    if len(prompts) == 1:
        return [_generate(model, prompts, max_new_tokens, temperature, seed).answers[0]]
    together = _generate(model, prompts, max_new_tokens)
    # Run the first step of the most padded prompt alone, to test whether this model supports padding.
    shortest = min(range(len(prompts)), key=lambda n: len(prompts[n].ids))
    alone = _generate(model, [prompts[shortest]], 1)
    moved = (together.first_scores[shortest] - alone.first_scores[0]).abs().max().item()
    rounding = ROUNDING.get(model.dtype, 5e-2) * alone.first_scores.abs().max().item()
    is_sure = [moved <= rounding and margin > 2 * rounding for margin in together.margins]
    return [
        answer if sure else _generate(model, [prompt], max_new_tokens).answers[0]
        for answer, sure, prompt in zip(together.answers, is_sure, prompts, strict=True)
    ]


@dataclass(frozen=True)
class _Generated:
    answers: list[list[int]]
    margins: list[float]
    """Smallest distance between the two highest logits over the steps of each answer."""
    first_scores: Tensor
    """Logits of the first token, float32 [B, V]."""


class _Watch:
    """Logits processor for transformers that records the logits of each step and does not change them."""

    def __init__(self) -> None:
        self.margins: list[Tensor] = []
        self.first: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.first is None:
            self.first = scores.float().clone()
        two = scores.float().topk(2, dim=-1).values
        self.margins.append(two[:, 0] - two[:, 1])
        return scores


def _generate(
    model: Any, prompts: list[Prompt], max_new_tokens: int, temperature: float = 0.0, seed: tuple[int, int] = (0, 0)
) -> _Generated:
    from transformers import GenerationConfig, LogitsProcessorList

    device = next(model.parameters()).device
    width = max(len(prompt.ids) for prompt in prompts)
    ends = sorted(prompts[0].ends)
    ids = torch.full((len(prompts), width), ends[0])
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
        mask[row, width - len(prompt.ids) :] = 1
    choice: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    )
    # Ignore the model's own settings: a penalty or a temperature in them would change the answers.
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[0], top_k=None, **choice)
    watch = _Watch()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed[0] * 1_000_003 + seed[1])
        output = model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max_new_tokens,
            logits_processor=LogitsProcessorList([watch]),
        )[:, width:].cpu()
    margins_BT = torch.stack(watch.margins, dim=1).cpu()
    answers, margins = [], []
    for new, margin_T in zip(output.tolist(), margins_BT, strict=True):
        length = next((n for n, id in enumerate(new) if id in ends), len(new))
        answers.append(new[:length])
        margins.append(margin_T[: length + 1].min().item())  # ending the answer was a choice, too
    assert watch.first is not None
    return _Generated(answers, margins, watch.first.cpu())
