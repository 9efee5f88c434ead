"""Whether a run may go on from a checkpoint: the same recipe, the same text."""

from __future__ import annotations

import torch

from acc_lm.config import Config, learned_changes
from acc_lm.errors import CheckpointError
from acc_lm.retention import Checkpoint


def check_same_recipe(checkpoint: Checkpoint, config: Config, precision: str, num_processes: int) -> list[str]:
    """Refuse a checkpoint of another recipe; returns what is worth a line although it is allowed.

    Raises:
        CheckpointError: one line for each changed key, and the ways out.
    """
    old, new = checkpoint.state["recipe"], config.model_dump(mode="json")
    changes = learned_changes(old, new)
    if checkpoint.state["mixed_precision"] != precision:  # the recipe may leave it to the launch
        changes["training.mixed_precision"] = (checkpoint.state["mixed_precision"], precision)
    binding = [key for key in changes if key.split(".")[0] in ("model", "tokenizer")]
    notes = []
    if changes and (binding or not config.checkpoint.allow_changed_recipe):
        ways = f"another output_dir (output_dir={_next_name(config.output_dir)})"
        if not binding:
            ways += ", or checkpoint.allow_changed_recipe=true to go on with the new values"
        lines = [
            f"{checkpoint.folder} was made by another recipe: {key} was {was!r}, is {now!r}"
            for key, (was, now) in changes.items()
        ]
        raise CheckpointError(*lines, f"choose {ways}")
    if changes:
        notes.append(f"recipe changed, as checkpoint.allow_changed_recipe permits: {', '.join(changes)}")
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


def check_same_text(checkpoint: Checkpoint, config: Config, data_key: str) -> None:
    """Refuse a checkpoint that was trained on other rows.

    Raises:
        CheckpointError: with the ways out.
    """
    if checkpoint.state["data_key"] != data_key and not config.checkpoint.allow_changed_recipe:
        raise CheckpointError(
            f"{checkpoint.folder} must have been trained on this text, got other text (its content or its tokenizer changed); "
            f"choose another output_dir (output_dir={_next_name(config.output_dir)}), or checkpoint.allow_changed_recipe=true"
        )


def _next_name(output_dir: str) -> str:
    stem, dash, number = output_dir.rpartition("-")
    return f"{stem}-{int(number) + 1}" if dash and number.isdigit() else f"{output_dir}-2"
