"""Going on from a checkpoint: whether a run may (the same recipe, the same text), and back to one in its middle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import nn

from acc_lm import history
from acc_lm.checkpoint import load_checkpoint
from acc_lm.config import CheckpointConfig, Config, learned_changes
from acc_lm.errors import CheckpointError, DivergedError
from acc_lm.recipe import dump_config
from acc_lm.retention import (
    Checkpoint,
    Found,
    best_checkpoint,
    find_checkpoint,
    open_checkpoint,
    problem_with,
    set_aside,
)
from acc_lm.runtime import on_main
from acc_lm.summary import write_json

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase


def check_same_recipe(
    checkpoint: Checkpoint, config: Config, precision: str, num_processes: int, *, evaluates: bool = False
) -> list[str]:
    """Refuse a checkpoint of another recipe; returns what is worth a line although it is allowed.

    Args:
        evaluates: it will not be trained, so how it was does not matter.

    Raises:
        CheckpointError: one line for each changed key, and the ways out.
    """
    old, new = _with_defaults(checkpoint.state["recipe"]), config.model_dump(mode="json")
    changes = learned_changes(old, new)
    if checkpoint.state["mixed_precision"] != precision:  # the recipe may leave it to the launch
        changes["training.mixed_precision"] = (checkpoint.state["mixed_precision"], precision)
    if evaluates:
        how = ("training", "optimizer", "schedule")
        changes = {key: values for key, values in changes.items() if key.split(".")[0] not in how}
    binding = [key for key in changes if key.split(".")[0] in ("model", "adapter", "tokenizer")]
    notes = []
    if changes and (binding or not config.checkpoint.allow_changed_recipe):
        ways = f"another output_dir (output_dir={_next_name(config.output_dir)})"
        if evaluates:
            ways = f"the recipe of the run (--config {config.output_dir}/config.yaml), or acc-lm evaluate with --data for other text"
        elif not binding:
            ways += ", or checkpoint.allow_changed_recipe=true to go on with the new values"
        lines = [
            f"{checkpoint.folder} was made by another recipe: {key} was {was!r}, is {now!r}"
            for key, (was, now) in changes.items()
        ]
        raise CheckpointError(*lines, f"choose {ways}")
    if changes:
        notes.append(f"recipe changed, as checkpoint.allow_changed_recipe permits: {', '.join(changes)}")
    if evaluates:
        return notes
    if "training.global_batch_size" in changes:
        was, now = changes["training.global_batch_size"]
        progress = checkpoint.progress
        notes.append(
            f"the global batch was {was} rows, is {now}: the run goes on after the {progress.samples_seen} rows that it has seen, each still "
            f"once per epoch, at the learning rates of a run that had {now} from the start, there at step {progress.samples_seen / now:g}"
        )
    if any(old["training"][key] != new["training"][key] for key in ("max_steps", "num_epochs")):
        notes.append("the length of the run changed: the schedule of the new length holds from here on")
    before = checkpoint.state["num_processes"]
    if before != num_processes:
        notes.append(
            f"the checkpoint was written by {before} process{'es' * (before != 1)}, now {num_processes}: "
            "the same rows and rates, losses equal to rounding, not bit for bit"
        )
    if checkpoint.state["threads"] != torch.get_num_threads():
        notes.append(
            f"the checkpoint was written with {checkpoint.state['threads']} threads per process, now {torch.get_num_threads()}: "
            "equal to rounding, not bit for bit"
        )
    return notes


def check_same_text(checkpoint: Checkpoint, config: Config, *data_keys: str | None) -> None:
    """Refuse a checkpoint that was trained on other rows.

    Args:
        data_keys: of the rows that there are, also as an earlier version would have it.

    Raises:
        CheckpointError: with the ways out.
    """
    if checkpoint.state["data_key"] not in data_keys and not config.checkpoint.allow_changed_recipe:
        raise CheckpointError(
            f"{checkpoint.folder} must have been trained on this text, got other text (its content or its tokenizer changed); "
            f"choose another output_dir (output_dir={_next_name(config.output_dir)}), or checkpoint.allow_changed_recipe=true"
        )


def _with_defaults(recipe: dict[str, Any]) -> dict[str, Any]:
    """Keys that came after this recipe was saved have the values that mean what was done before them."""
    try:
        return Config.model_validate_json(json.dumps(recipe)).model_dump(mode="json")
    except ValidationError:
        return recipe


def _next_name(output_dir: str) -> str:
    stem, dash, number = output_dir.rpartition("-")
    return f"{stem}-{int(number) + 1}" if dash and number.isdigit() else f"{output_dir}-2"


def begin(
    output_dir: Path, found: Found, step: int, config: Config, tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any]
) -> None:
    """On the main process: put aside what the run does not go on from, and write down what it is."""
    set_aside(output_dir, found)
    history.keep_until(output_dir, step)
    (output_dir / "config.yaml").write_text(dump_config(config))
    tokenizer.save_pretrained(output_dir / "tokenizer")
    write_json(output_dir / "environment.json", facts)


def load_best(accelerator: Accelerator, output_dir: Path, metric: str, model: nn.Module, optimizer: Any) -> int | None:
    """Put the weights of the best checkpoint into the model; returns its step, None when there is no whole one. Every process calls."""

    def find() -> Checkpoint | None:
        best = best_checkpoint(output_dir, metric)
        return open_checkpoint(best) if best and problem_with(best) is None else None

    checkpoint = on_main(accelerator, find)
    return load_checkpoint(accelerator, checkpoint, model, optimizer).step if checkpoint else None


def rewind(
    accelerator: Accelerator, output_dir: Path, model: nn.Module, optimizer: Any, config: CheckpointConfig
) -> Checkpoint:
    """Put the weights and moments of the newest whole checkpoint back; returns it. Every process calls.

    Raises:
        DivergedError: there is none yet.
    """
    checkpoint = find_checkpoint(accelerator, output_dir, config.model_copy(update={"resume": "auto"})).checkpoint
    if checkpoint is None:
        raise DivergedError(
            "the loss must not jump before the first checkpoint, got a jump and nothing to rewind to; lower checkpoint.every"
        )
    load_checkpoint(accelerator, checkpoint, model, optimizer)
    return checkpoint
