"""Export: a folder that transformers loads like any other model, with its tokenizer and a model card."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from acc_lm.checkpointing.format import checksum, free_name
from acc_lm.checkpointing.loading import kept_pieces, kept_shapes, persistent_buffers
from acc_lm.config import Config
from acc_lm.data import Data
from acc_lm.export.card import model_card
from acc_lm.files import make_readable
from acc_lm.modeling.adapter import ADAPTER_NAME as ADAPTER
from acc_lm.modeling.adapter import base_checksum, save_adapter
from acc_lm.run_files.names import FINAL
from acc_lm.runtime import (
    WEIGHT,
    Piece,
    bare_model,
    full_precision,
    gather_tensor,
    on_main,
)

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase

CARD, STEPS = "README.md", "run.json"


def export_model(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    data: Data,
    config: Config,
    metrics: dict[str, float],
    step: int,
    run_step: int,
) -> Path:
    """Write `final/`: weights, config, tokenizer, generation config and model card. Every process calls.

    For an adapter it holds the adapter alone, which names its base. The folder is written under a temporary name and
    renamed, so an incomplete one is never taken for the model.

    Args:
        step: step of the weights.
        run_step: step that the run has reached; larger than `step` if the best weights are not the last.
    """
    folder = Path(config.output_dir) / FINAL
    work = folder.with_name("tmp-final")
    bare: Any = bare_model(model)
    weights = whole_weights(accelerator, model, optimizer)

    def write() -> None:
        shutil.rmtree(work, ignore_errors=True)
        base = base_checksum(bare)
        if base is None:
            name_padding(bare, data.tokenizer)
            bare.save_pretrained(work, state_dict=weights)
        else:
            save_adapter(work, weights, bare.peft_config[ADAPTER], config.model, base)
        data.tokenizer.save_pretrained(work)
        num_parameters = sum(math.prod(shape) for shape in kept_shapes(model).values())
        card = model_card(config, data.facts, metrics, step, num_parameters)
        (work / CARD).write_text(card, encoding="utf-8")
        write_steps(work, step, run_step, card=checksum(work / CARD))
        keep_edited_card(folder, work)
        for file in work.rglob("*"):
            if file.is_file():
                make_readable(file)
        if strangers(folder, work):
            folder.rename(free_name(folder))
        elif folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)

    on_main(accelerator, write, takes_long=True)
    return folder


def strangers(folder: Path, made: Path) -> bool:
    """Test whether the folder to be replaced holds files that the new one lacks, such as files of a user."""
    old, new = ({path.relative_to(each) for path in each.rglob("*") if path.is_file()} for each in (folder, made))
    return not old <= new


def has_edited_card(folder: Path) -> bool:
    """Test whether the card of an exported model was changed after it was written."""
    return (written := _card_written(folder)) is not None and checksum(folder / CARD) != written


def _card_written(folder: Path) -> str | None:
    """Checksum of the card as written; None: there is no card, or the record is missing, edited, or of an earlier version."""
    try:
        written = json.loads((folder / STEPS).read_text())["card"]
        return written if isinstance(written, str) and (folder / CARD).is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_edited_card(old: Path, new: Path) -> None:
    """Keep the edited card of the folder to be replaced: in the new one if that has the same card, else next to both."""
    if not has_edited_card(old):
        return
    if checksum(new / CARD) == _card_written(old):
        shutil.copyfile(old / CARD, new / CARD)
        return
    kept = free_name(old.with_name(CARD))
    shutil.copyfile(old / CARD, kept)
    print(f"{old / CARD} had been edited, and is kept as {kept}", flush=True)


def name_padding(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the id that `generate` pads shorter answers of a batch with; otherwise it guesses one, with a warning."""
    generation = model.generation_config
    if generation is not None and generation.pad_token_id is None:
        padding = tokenizer.pad_token_id
        generation.pad_token_id = tokenizer.eos_token_id if padding is None else padding


def whole_weights(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Full-precision weights and buffers under the model's own names, on the main process; empty on the others.

    With an adapter, only its weights. Tensors are gathered one by one, so only the main process ever holds them all.
    """
    bare = bare_model(model)
    pieces: dict[str, list[Piece]] = {}
    for piece in kept_pieces(model, optimizer):
        pieces.setdefault(piece.name, []).append(piece)
    weights: dict[str, Tensor] = {}
    dtypes = {name: full_precision(model, p) for name, p in bare.named_parameters()}
    for name, shape in kept_shapes(model).items():
        whole = gather_tensor(accelerator, pieces.get(name, []), WEIGHT, shape, dtypes[name])
        if accelerator.is_main_process:
            weights[name] = whole.cpu()
    if accelerator.is_main_process:
        tied = {id(p): name for name, p in bare.named_parameters()}
        for name, p in bare.named_parameters(remove_duplicate=False):
            if tied[id(p)] in weights:
                weights[name] = weights[tied[id(p)]]
        weights |= {name: buffer.detach().cpu() for name, buffer in persistent_buffers(bare)}
    return weights


def write_steps(folder: Path, step: int, run_step: int, card: str | None = None) -> None:
    """Record in an exported model the step of its weights, the step that the run had reached, and its card's checksum."""
    steps = {"step": step, "run_step": run_step} | ({} if card is None else {"card": card})
    (folder / STEPS).write_text(json.dumps(steps) + "\n")


def exported_steps(folder: Path) -> tuple[int, int] | None:
    """Step of an exported model's weights, and the step that the run had reached; None for a folder without a record."""
    try:
        found = json.loads((folder / STEPS).read_text())
        return int(found["step"]), int(found["run_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
