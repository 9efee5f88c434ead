"""Model and recipe that `acc-lm evaluate` scores: of a run, of its export, of another folder, or of the Hub."""

from __future__ import annotations

import glob
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acc_lm.config import Config
from acc_lm.config.loading import dump_config, load_config
from acc_lm.errors import CheckpointError, ConfigError, first_line
from acc_lm.run_files.names import ENVIRONMENT, FINAL, MANIFEST, RECIPE
from acc_lm.text.locations import is_remote

BATCH_SIZE = 16


LONGEST_ROW = 1024
"""Targets per row, in tokens, where no recipe sets them; fewer if the model reads fewer."""


OF_ROWS = (
    "text_column",
    "columns",
    "roles",
    "sequence_length",
    "packing",
    "attend_across_documents",
    "train_on",
    "max_lossy_share",
    "skip_bad_rows",
)
"""Keys of a recipe's `data` that also apply to the rows of another text, given by --data."""


SETTLED = (
    "model.name_or_path",
    "model.config",
    "model.revision",
    "adapter",
    "training.max_steps",
    "training.num_epochs",
)


OF_TASKS = ("model.dtype", "model.trust_remote_code", "training.mixed_precision", "training.allow_tf32", "seed")
"""Keys that apply to benchmarks, whose rows the harness builds."""


@dataclass(frozen=True)
class Tasks:
    """Benchmarks of the command line."""

    names: tuple[str, ...]
    include: tuple[Path, ...] = ()
    num_fewshot: int | None = None
    limit: int | None = None
    is_chat: bool = False


@dataclass(frozen=True)
class Request:
    """Options of the command line."""

    model: str
    data: tuple[str, ...] = ()
    predictions: Path | None = None
    generate: bool = False
    references_column: str | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    batch_size: int | None = None
    revision: str | None = None
    as_json: bool = False
    tasks: Tasks | None = None
    overrides: tuple[str, ...] = ()


def recipe_of(request: Request) -> tuple[Config, Path | None]:
    """Recipe for evaluating this model on this text, and the run whose held-out text it is (None for other text).

    Only keys that decide rows and numbers are taken from a run's own recipe, and a model's code is trusted only if the
    command line says so. Relative paths in that recipe are resolved from the folder in which the run was started.

    Raises:
        ConfigError: there is no such model, or no text to evaluate it on.
        CheckpointError: the run does not say which text it was trained on.
    """
    model, run = _find_model(request.model)
    if (
        not request.data
        and run is None
        and not any(o.startswith(("data.files=", "data.source=")) for o in request.overrides)
    ):
        is_there = "is not in a run" if Path(model).is_dir() else "is not a folder here, so not in a run"
        raise ConfigError(
            f"--data must name files to evaluate on, got none, and {request.model} {is_there} whose held-out text could be used; add --data"
        )
    recipe = load_config(run / RECIPE).model_dump(mode="json") if run else {}
    data: dict[str, Any] = dict(recipe.get("data", {})) | {
        "chat_template": None,
        "chat_template_date": None,
    }  # the tokenizer holds both
    if not request.data and (data.get("mixture") or data.get("streaming")):
        kind = "mixture" if data.get("mixture") else "stream"
        raise ConfigError(
            f"--data must name files to evaluate on, got none for the run of a {kind}; add its held-out files, or use train.py --eval-only"
        )
    if run is not None and not request.data:
        data |= _places_from(environment_of(run)["working_directory"], data)
    if request.data:
        data = {key: data[key] for key in OF_ROWS if key in data}
        data |= {"source": "files", "files": list(request.data)}
    if run is None and not any(override.startswith("data.sequence_length=") for override in request.overrides):
        data["sequence_length"] = _longest_row(model, request)
    return _resolved(request, _recipe_values(request, model, data, recipe)), None if request.data else run


def model_of(request: Request) -> tuple[Config, Path | None]:
    """Recipe for running benchmarks on this model, without any text, and the run that it belongs to (None without one).

    Raises:
        ConfigError: there is no such model.
    """
    model, run = _find_model(request.model)
    recipe = load_config(run / RECIPE).model_dump(mode="json") if run else {}
    return _resolved(request, _recipe_values(request, model, {}, recipe)), run


def _resolved(request: Request, values: dict[str, Any]) -> Config:
    """Recipe of these values with the overrides of the command line."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "evaluate.yaml")
        file.write_text(dump_config(Config.model_validate(values)))
        return load_config(file, request.overrides)


def _recipe_values(request: Request, model: str, data: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """Values of a recipe that evaluates this model; `recipe` is the run's, {} without one."""
    from acc_lm.runtime import world_size

    training = recipe.get("training", {})
    rows = request.batch_size or training.get("micro_batch_size", BATCH_SIZE)
    return {
        "seed": recipe.get("seed", 0),
        "model": {
            "name_or_path": model,
            "revision": request.revision,
            "dtype": recipe.get("model", {}).get("dtype", "float32"),
        },
        "data": data,
        "training": {
            "max_steps": 1,
            "micro_batch_size": rows,
            "global_batch_size": rows * world_size(),
            "mixed_precision": training.get("mixed_precision"),
            "allow_tf32": training.get("allow_tf32", False),
        },
        "schedule": {"warmup_steps": 0},
        "tracking": {"report_to": []},
    }


def environment_of(run: Path) -> dict[str, Any]:
    """`environment.json` of a run, with the folder in which it was started and the text it was trained on."""
    try:
        found = json.loads((run / ENVIRONMENT).read_text())
        if found["text_key"] and Path(found["working_directory"]).is_absolute():
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # damaged, or written by an earlier version
    raise CheckpointError(
        f"{run}/environment.json must name the text that the run was trained on, got no such entry; "
        "start the run again, which writes it even if there is nothing left to train, or name the text to score with --data"
    )


def _places_from(folder: str, data: dict[str, Any]) -> dict[str, Any]:
    """Files and folders that a recipe's `data` names, resolved from this folder."""
    places: dict[str, Any] = {
        key: [
            name if is_remote(name) else os.path.join(glob.escape(folder), os.path.expanduser(name))
            for name in data[key]
        ]
        for key in ("files", "eval_files")
    }
    dataset = os.path.join(folder, os.path.expanduser(data["dataset"] or ""))
    return places | ({"dataset": dataset} if data["dataset"] and os.path.isdir(dataset) else {})


def check_tokenizer(run: Path, tokenizer: Any) -> None:
    """Refuse a model whose tokenizer or chat template differs from the run's."""
    from acc_lm.data import tokenizer_key
    from acc_lm.text.tokenizer import read_tokenizer

    try:
        known = read_tokenizer(run / "tokenizer")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{run}/tokenizer must hold the tokenizer of the run, got: {first_line(error)}; restore its files, or name the text to score with --data"
        ) from None
    if (tokenizer_key(known), known.chat_template) != (tokenizer_key(tokenizer), tokenizer.chat_template):
        raise CheckpointError(
            f"the model's tokenizer and chat template must be those in {run}/tokenizer, with which the run was trained, got others; "
            "restore them, or name the text to score with --data"
        )


def _find_model(name: str) -> tuple[str, Path | None]:
    """Folder or Hub id of the model, and the run that it belongs to (None without one)."""
    from acc_lm.checkpointing.format import newest_step
    from acc_lm.export.export import exported_steps

    folder = Path(name).expanduser()
    if _is_run(folder):
        final = folder / FINAL
        if not final.is_dir():
            raise ConfigError(
                f"MODEL must be a run that has exported its model, got {name} without final/; evaluate its newest checkpoint with "
                "train.py --eval-only, or convert it: acc-lm checkpoint convert-to-hf"
            )
        steps, newest = exported_steps(final), newest_step(folder)
        if steps is not None and newest > steps[1]:
            raise ConfigError(
                f"MODEL must be a run whose final/ is its newest model, got {name}, which has since continued from step {steps[1]} to {newest}; "
                f"let it finish, name {final} anyway, or convert the newest checkpoint: acc-lm checkpoint convert-to-hf"
            )
        return str(final), folder
    if (folder / MANIFEST).is_file():
        raise ConfigError(
            f"MODEL must be the folder of a model, got the checkpoint {name}; convert it: acc-lm checkpoint convert-to-hf {name} OUTPUT"
        )
    if folder.is_dir():
        parent = folder.resolve().parent
        return str(folder), parent if _is_run(parent) else None
    return name, None


def _is_run(folder: Path) -> bool:
    return (folder / RECIPE).is_file() and (folder / ENVIRONMENT).is_file()


def _longest_row(model: str, request: Request) -> int:
    from acc_lm.config import ModelConfig
    from acc_lm.modeling.adapter import open_adapter
    from acc_lm.modeling.pretrained import longest_input

    adapter = open_adapter(Path(model))
    where, revision = (adapter.base, adapter.revision) if adapter else (model, request.revision)
    trusted = "model.trust_remote_code=true" in request.overrides
    limit = longest_input(ModelConfig(name_or_path=where, revision=revision, trust_remote_code=trusted))
    return min(limit or LONGEST_ROW, LONGEST_ROW)
