"""Resume from a checkpoint: check that recipe and text are the same, and rewind to a checkpoint during a run."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from pydantic import ValidationError
from torch import nn

from acc_lm.chat.template import day_of
from acc_lm.checkpointing.format import (
    Checkpoint,
    Found,
    find_checkpoint,
    is_own,
    open_checkpoint,
    problem_with,
    set_aside,
)
from acc_lm.checkpointing.loading import load_checkpoint
from acc_lm.checkpointing.rotation import best_checkpoint
from acc_lm.config import CheckpointConfig, Config, learned_changes
from acc_lm.config.loading import dump_config, load_config
from acc_lm.errors import CheckpointError, ConfigError, DivergedError, UserError
from acc_lm.files import write_json
from acc_lm.run_files import metrics_file
from acc_lm.run_files.names import CHECKPOINTS, ENVIRONMENT, FINAL, RECIPE, STARTED_ON
from acc_lm.run_files.summary import read_json_file, read_summary
from acc_lm.runtime import Identity, close, environment, on_main, parts_of_layers, parts_of_rows

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

    from acc_lm.data import Data


def check_same_recipe(
    checkpoint: Checkpoint, config: Config, precision: str, num_processes: int, *, evaluates: bool = False
) -> list[str]:
    """Refuse a checkpoint of another recipe; return a line for each difference that is allowed but worth reporting.

    Args:
        evaluates: the model will not be trained, so differences in how it was trained do not matter.

    Raises:
        CheckpointError: one line for each changed key, and the possible solutions.
    """
    old, new = _with_defaults(checkpoint.state["recipe"]), config.model_dump(mode="json")
    if config.data.chat_template_date is None:  # null takes the run's date
        new["data"]["chat_template_date"] = old["data"].get("chat_template_date")
    changes = learned_changes(old, new)
    if checkpoint.state["mixed_precision"] != precision:  # the recipe may leave the precision to the launch
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
            ways += ", or checkpoint.allow_changed_recipe=true to continue with the new values"
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
            f"the global batch was {was} rows, is {now}: the run resumes after the {progress.samples_seen} rows that it has seen, each still "
            f"once per epoch, at the learning rates of a run that had {now} from the start and is at step {progress.samples_seen / now:g}"
        )
    if any(old["training"][key] != new["training"][key] for key in ("max_steps", "num_epochs")):
        notes.append("the length of the run changed: the schedule of the new length applies from here on")
    return notes + _notes_of_another_launch(checkpoint, num_processes)


def _notes_of_another_launch(checkpoint: Checkpoint, num_processes: int) -> list[str]:
    """Lines about differences of the launch that change the rounding."""
    notes = []
    before = checkpoint.state["num_processes"]
    if before != num_processes:
        notes.append(
            f"the checkpoint was written by {before} process{'es' * (before != 1)}, now {num_processes}: "
            "the same rows and rates, losses equal to rounding, not bit for bit"
        )
    for what, is_cut in (("row", parts_of_rows()), ("layer", parts_of_layers())):
        was_cut = checkpoint.state.get(f"{what}s_in_parts", 1)
        if was_cut != is_cut:
            notes.append(
                f"the checkpoint was written with each {what} on {was_cut} process{'es' * (was_cut != 1)}, now on {is_cut}: "
                "losses equal to rounding, not bit for bit"
            )
    if checkpoint.state["threads"] != torch.get_num_threads():
        notes.append(
            f"the checkpoint was written with {checkpoint.state['threads']} threads per process, now {torch.get_num_threads()}: "
            "equal to rounding, not bit for bit"
        )
    return notes


def origin_of(tokenizer: PreTrainedTokenizerBase, base: str) -> dict[str, str]:
    """Content hashes of the base model and the vocabulary that a run began with: paths may change, contents may not.

    Args:
        base: checksum of the weights at `model.name_or_path`; empty for a model from scratch.
    """
    ids = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return {"base_weights": base, "vocabulary": xxhash.xxh3_128_hexdigest(repr((ids, tokenizer.eos_token_id)).encode())}


def check_same_origin(
    checkpoint: Checkpoint, config: Config, data_key: str, origin: dict[str, str], former_key: str | None = None
) -> None:
    """Refuse a checkpoint that was trained on other rows, with other ids, or from another base model.

    Args:
        former_key: key that an earlier version gave the same rows; None when its rows differed.

    Raises:
        CheckpointError: names the difference and the possible solutions.
    """
    state, other = checkpoint.state, f"choose another output_dir (output_dir={_next_name(config.output_dir)})"
    if state.get("vocabulary", origin["vocabulary"]) != origin["vocabulary"]:
        raise CheckpointError(
            f"{checkpoint.folder} must have been trained with this tokenizer, got one in which ids stand for other tokens; put the old tokenizer back, or {other}"
        )
    if config.checkpoint.allow_changed_recipe:
        return
    if state["data_key"] not in (data_key, former_key):
        raise CheckpointError(
            f"{checkpoint.folder} must have been trained on this text, got other text (its content or its tokenizer changed); "
            f"{other}, or checkpoint.allow_changed_recipe=true"
        )
    # An adapter's checkpoint does not hold its base: `load_checkpoint` always refuses another base.
    if state.get("base") is None and state.get("base_weights", origin["base_weights"]) != origin["base_weights"]:
        raise CheckpointError(
            f"{checkpoint.folder} must have started from the base model at {config.model.name_or_path}, got one that started from other weights; "
            f"put the old weights back, {other}, or checkpoint.allow_changed_recipe=true"
        )


def day_of_run(
    accelerator: Accelerator, config: Config, found: Found, tokenizer: PreTrainedTokenizerBase | None = None
) -> str:
    """Date for a chat template that writes the current date, as YYYY-MM-DD; the same on every process.

    The recipe's date, else that of the checkpoint (without one: of an earlier start of the same recipe in `output_dir`),
    else the tokenizer's, else today's.

    Args:
        tokenizer: tokenizer of an evaluated model, which keeps the date of the run that trained it.
    """

    def find() -> str:
        recipe = found.checkpoint.state["recipe"] if found.checkpoint else _recipe_of_earlier_start(config)
        kept: str | None = recipe.get("data", {}).get("chat_template_date")
        return kept or (day_of(tokenizer) if tokenizer else None) or date.today().isoformat()

    return config.data.chat_template_date or on_main(accelerator, find)


def _recipe_of_earlier_start(config: Config) -> dict[str, Any]:
    """Recipe in `output_dir` of an earlier start that reached no checkpoint; empty when missing or different."""
    try:
        earlier = load_config(Path(config.output_dir) / RECIPE)
    except (UserError, OSError):
        return {}
    same = with_day(earlier, config.data.chat_template_date)
    changes = learned_changes(same.model_dump(mode="json"), config.model_dump(mode="json"))
    return {} if changes else earlier.model_dump(mode="json")


def with_day(config: Config, day: str | None) -> Config:
    """Copy of the recipe with the date that its chat template writes."""
    return config.model_copy(update={"data": config.data.model_copy(update={"chat_template_date": day})})


def _with_defaults(recipe: dict[str, Any]) -> dict[str, Any]:
    """Add the keys introduced after this recipe was saved, with their defaults, which mean the behaviour before them.

    A recipe that is no longer valid is returned unchanged.
    """
    try:
        return Config.model_validate_json(json.dumps(recipe)).model_dump(mode="json")
    except ValidationError:
        return recipe


def _next_name(output_dir: str) -> str:
    stem, dash, number = output_dir.rpartition("-")
    return f"{stem}-{int(number) + 1}" if dash and number.isdigit() else f"{output_dir}-2"


def is_complete(accelerator: Accelerator, output_dir: Path, config: Config) -> bool:
    """True when the run was finished and its checkpoints were removed since; then print that and close the accelerator.

    Without this check, the run would start from scratch and overwrite its own record and model.

    Raises:
        ConfigError: the run was finished, and `resume` is never.
        CheckpointError: final/ was made by another recipe, or by a run that is not known.
    """
    line = on_main(accelerator, lambda: _already_complete(output_dir, config))
    if line is None:
        return False
    if accelerator.is_main_process:
        print(line, flush=True)
    close(accelerator)
    return True


def _already_complete(output_dir: Path, config: Config) -> str | None:
    final, summary = output_dir / FINAL, read_summary(output_dir)
    if not final.is_dir() or not any(final.iterdir()) or any((output_dir / CHECKPOINTS).glob("step-*")):
        return None
    ways = f"choose another output_dir (output_dir={_next_name(config.output_dir)}), or remove {final} to start from scratch"
    if config.checkpoint.resume == "never":
        raise ConfigError(
            f"checkpoint.resume must be auto for {output_dir}, which holds a finished run, got never; {ways}"
        )
    try:
        if "exported_step" not in summary:
            raise ConfigError("summary.json does not mention it")
        finished = load_config(output_dir / RECIPE)
    except (UserError, OSError) as error:
        raise CheckpointError(
            f"{final} must belong to a known run, got one without checkpoints: {error}; {ways}"
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
            f"it has no checkpoint to resume from; {ways}",
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
    """Set aside checkpoints that the run does not resume from, and write its recipe, environment and tokenizer.

    Only the main process calls.

    Args:
        trains: False for a run that only evaluates, which changes no existing file.
    """
    step = found.checkpoint.progress.step if found.checkpoint else 0
    is_elsewhere = found.checkpoint is not None and not is_own(output_dir, found.checkpoint)
    if trains or not (output_dir / ENVIRONMENT).exists():
        earlier = [] if is_elsewhere else [other for other in resumed_at(output_dir) if other < step]
        launch = environment(identity)
        facts = {
            **launch,
            "text_key": data.text_key,
            # Only an evaluation of all held-out rows covers the text that the compressors read.
            "compressors": data.facts.compressed_bits_per_byte if config.training.eval_batches is None else {},
            "resumed_at": earlier + [step] * (step > 0),
            "starts": [*([] if is_elsewhere else _starts_before(output_dir, step)), _this_start(found, launch)],
        }
        write_json(output_dir / ENVIRONMENT, facts)  # first, because this file marks the folder as a run's
    if not trains:
        return
    set_aside(output_dir, found)
    # After a start from a checkpoint elsewhere, the record in this folder belongs to another lineage.
    metrics_file.keep_until(output_dir, -1 if is_elsewhere else step)
    (output_dir / RECIPE).write_text(dump_config(config), encoding="utf-8")
    for entry in (output_dir / "tokenizer").glob("*"):  # tokenizers would raise an error of its own at a folder
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
    data.tokenizer.save_pretrained(output_dir / "tokenizer")


def _this_start(found: Found, launch: dict[str, Any]) -> dict[str, Any]:
    """This start of the run: the checkpoint that it resumes from, and the engine that it runs on."""
    return {
        "step": found.progress.step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoint": found.checkpoint and str(found.checkpoint.folder),
        "checked": found.checkpoint and found.checked,
        "ledger": found.progress.ledger,
        **{name: launch.get(name) for name in STARTED_ON},
    }


def _starts_before(output_dir: Path, step: int) -> list[dict[str, Any]]:
    """Earlier starts whose steps the run keeps, in order."""
    starts = read_json_file(output_dir / ENVIRONMENT).get("starts")
    known = starts if isinstance(starts, list) else []
    return [
        start
        for start in known
        if isinstance(start, dict) and isinstance(start.get("step"), int) and start["step"] < step
    ]


def resumed_at(output_dir: Path) -> list[int]:
    """Steps after which the starts of this run resumed, in order."""
    steps = read_json_file(output_dir / ENVIRONMENT).get("resumed_at")
    return [step for step in steps if isinstance(step, int)] if isinstance(steps, list) else []


def load_best(accelerator: Accelerator, output_dir: Path, metric: str, model: nn.Module, optimizer: Any) -> int | None:
    """Load the best checkpoint into model and optimizer; return its step, None without an intact one.

    Every process calls.
    """

    def find() -> Checkpoint | None:
        best = best_checkpoint(output_dir, metric)
        return open_checkpoint(best) if best and problem_with(best) is None else None

    checkpoint = on_main(accelerator, find)
    return load_checkpoint(accelerator, checkpoint, model, optimizer).step if checkpoint else None


def rewind(
    accelerator: Accelerator, output_dir: Path, model: nn.Module, optimizer: Any, config: CheckpointConfig
) -> Checkpoint:
    """Load weights and moments of the newest complete checkpoint, and return it. Every process calls.

    Raises:
        DivergedError: there is no checkpoint yet.
    """
    checkpoint = find_checkpoint(accelerator, output_dir, config.model_copy(update={"resume": "auto"})).checkpoint
    if checkpoint is None:
        raise DivergedError(
            "the loss must not spike before the first checkpoint, got a spike and nothing to rewind to; lower checkpoint.every"
        )
    load_checkpoint(accelerator, checkpoint, model, optimizer)
    return checkpoint
