"""Going on from a checkpoint: whether a run may (the same recipe, the same text), and back to one in its middle."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from pydantic import ValidationError
from torch import nn

from acc_lm import history
from acc_lm.chat import day_of
from acc_lm.checkpoint import load_checkpoint
from acc_lm.config import CheckpointConfig, Config, learned_changes
from acc_lm.errors import CheckpointError, ConfigError, DivergedError, UserError
from acc_lm.recipe import dump_config, load_config
from acc_lm.retention import (
    Checkpoint,
    Found,
    best_checkpoint,
    find_checkpoint,
    is_own,
    open_checkpoint,
    problem_with,
    set_aside,
)
from acc_lm.runtime import Identity, close, environment, on_main
from acc_lm.summary import ENVIRONMENT, read_summary, write_json

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from acc_lm.data import Data


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
    if config.data.chat_template_date is None:  # that of the run
        new["data"]["chat_template_date"] = old["data"].get("chat_template_date")
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


def origin_of(tokenizer: PreTrainedTokenizerBase, base: str) -> dict[str, str]:
    """Content hashes of the base model and the vocabulary that a run began with: places may change, these may not.

    Args:
        base: checksum of the weights that `model.name_or_path` has; empty for a model from scratch.
    """
    ids = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return {"base_weights": base, "vocabulary": xxhash.xxh3_128_hexdigest(repr((ids, tokenizer.eos_token_id)).encode())}


def check_same_origin(
    checkpoint: Checkpoint, config: Config, data_key: str, origin: dict[str, str], former_key: str | None = None
) -> None:
    """Refuse a checkpoint that was trained on other rows, with other ids, or from another base model.

    Args:
        former_key: what an earlier version called the same rows; None when it had others.

    Raises:
        CheckpointError: with the ways out.
    """
    state, other = checkpoint.state, f"choose another output_dir (output_dir={_next_name(config.output_dir)})"
    if state.get("vocabulary", origin["vocabulary"]) != origin["vocabulary"]:
        raise CheckpointError(
            f"{checkpoint.folder} must have been trained with this tokenizer, got one in which ids stand for other tokens; put that back, or {other}"
        )
    if config.checkpoint.allow_changed_recipe:
        return
    if state["data_key"] not in (data_key, former_key):
        raise CheckpointError(
            f"{checkpoint.folder} must have been trained on this text, got other text (its content or its tokenizer changed); "
            f"{other}, or checkpoint.allow_changed_recipe=true"
        )
    # Of an adapter, whose base is not in its checkpoint, nothing else is ever loaded: `load_checkpoint` says so.
    if state.get("base") is None and state.get("base_weights", origin["base_weights"]) != origin["base_weights"]:
        raise CheckpointError(
            f"{checkpoint.folder} must have begun from the base model at {config.model.name_or_path}, got one that began from other weights; "
            f"put those back, {other}, or checkpoint.allow_changed_recipe=true"
        )


def day_of_run(
    accelerator: Accelerator, config: Config, found: Found, tokenizer: PreTrainedTokenizerBase | None = None
) -> str:
    """Date that a chat template which reads the clock writes, as YYYY-MM-DD; the same on every process.

    The recipe's, else that of the checkpoint or of an earlier start of the same recipe in `output_dir`, else the tokenizer's, else today's.

    Args:
        tokenizer: of a model that is evaluated, which knows the date of the run that trained it.
    """

    def find() -> str:
        recipe = found.checkpoint.state["recipe"] if found.checkpoint else _recipe_of_earlier_start(config)
        kept: str | None = recipe.get("data", {}).get("chat_template_date")
        return kept or (day_of(tokenizer) if tokenizer else None) or date.today().isoformat()

    return config.data.chat_template_date or on_main(accelerator, find)


def _recipe_of_earlier_start(config: Config) -> dict[str, Any]:
    """Recipe of an earlier start that came to no checkpoint, from `output_dir`; empty where it was another run's."""
    try:
        earlier = load_config(Path(config.output_dir) / "config.yaml")
    except (UserError, OSError):
        return {}
    same = with_day(earlier, config.data.chat_template_date)
    changes = learned_changes(same.model_dump(mode="json"), config.model_dump(mode="json"))
    return {} if changes else earlier.model_dump(mode="json")


def with_day(config: Config, day: str | None) -> Config:
    """The recipe with the date that its chat template wrote."""
    return config.model_copy(update={"data": config.data.model_copy(update={"chat_template_date": day})})


def _with_defaults(recipe: dict[str, Any]) -> dict[str, Any]:
    """Keys that came after this recipe was saved have the values that mean what was done before them."""
    try:
        return Config.model_validate_json(json.dumps(recipe)).model_dump(mode="json")
    except ValidationError:
        return recipe


def _next_name(output_dir: str) -> str:
    stem, dash, number = output_dir.rpartition("-")
    return f"{stem}-{int(number) + 1}" if dash and number.isdigit() else f"{output_dir}-2"


def is_complete(accelerator: Accelerator, output_dir: Path, config: Config) -> bool:
    """Whether the run was finished and has lost its checkpoints since: then that is said, and this start is over.

    Without a checkpoint it would begin anew, over its own record and its model.

    Raises:
        ConfigError, CheckpointError: it was finished by another recipe, or it is not known whether it was.
    """
    line = on_main(accelerator, lambda: _already_complete(output_dir, config))
    if line is None:
        return False
    if accelerator.is_main_process:
        print(line, flush=True)
    close(accelerator)
    return True


def _already_complete(output_dir: Path, config: Config) -> str | None:
    final, summary = output_dir / "final", read_summary(output_dir)
    if not final.is_dir() or not any(final.iterdir()) or any((output_dir / "checkpoints").glob("step-*")):
        return None
    ways = f"choose another output_dir (output_dir={_next_name(config.output_dir)}), or remove {final} to start from scratch"
    if config.checkpoint.resume == "never":
        raise ConfigError(
            f"checkpoint.resume must be auto for {output_dir}, which holds a finished run, got never; {ways}"
        )
    try:
        if "exported_step" not in summary:
            raise ConfigError("no word of it in summary.json")
        finished = load_config(output_dir / "config.yaml")
    except (UserError, OSError) as error:
        raise CheckpointError(
            f"{final} must be the end of a run that is known, got one without checkpoints: {error}; {ways}"
        ) from None
    same_day = with_day(config, config.data.chat_template_date or finished.data.chat_template_date)
    old, new = finished.model_dump(mode="json"), same_day.model_dump(mode="json")
    changes = learned_changes(old, new)
    for section, key in (("training", "max_steps"), ("training", "num_epochs"), ("checkpoint", "resume")):
        was, now = old[section][key], new[section][key]
        if was != now and now != "auto":
            changes[f"{section}.{key}"] = (was, now)
    if changes:
        raise CheckpointError(
            *(
                f"{final} was made by another recipe: {key} was {was!r}, is {now!r}"
                for key, (was, now) in changes.items()
            ),
            f"there is no checkpoint of it to go on from; {ways}",
        )
    return f"already complete: step {summary['exported_step']}, exported to {final}; its checkpoints are gone, and nothing was changed"


def begin(
    output_dir: Path,
    found: Found,
    config: Config,
    data: Data,
    identity: Identity,
    *,
    trains: bool,
) -> None:
    """On the main process: put aside what the run does not go on from, and write down what it is.

    Args:
        trains: else it only evaluates, and whatever is there stays as it is.
    """
    if trains or not (output_dir / ENVIRONMENT).exists():
        write_json(
            output_dir / ENVIRONMENT, {**environment(identity), "text_key": data.text_key}
        )  # first: a folder without it is not taken for that of a run
    if not trains:
        return
    set_aside(output_dir, found)
    step = found.checkpoint.progress.step if found.checkpoint else 0
    is_elsewhere = found.checkpoint is not None and not is_own(output_dir, found.checkpoint)
    history.keep_until(output_dir, -1 if is_elsewhere else step)  # what is recorded here is of another course then
    (output_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    data.tokenizer.save_pretrained(output_dir / "tokenizer")


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
