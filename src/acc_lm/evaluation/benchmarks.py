"""Benchmarks: tasks of EleutherAI's harness (lm-eval), run on a model that is loaded here."""

from __future__ import annotations

import difflib
import logging
import math
from pathlib import Path
from typing import Any

from acc_lm.errors import ConfigError, DataError, first_line, is_out_of_memory

HARNESS = "lm-eval"
"""Name of the harness's package and of its extra."""


def check_harness() -> str:
    """Version of the installed harness.

    Raises:
        ConfigError: it is not installed.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(HARNESS)
    except PackageNotFoundError:
        raise ConfigError(
            f"--tasks must have the package {HARNESS}, got none; pip install 'acc-lm[{HARNESS}]'"
        ) from None


def open_tasks(names: list[str], include: list[Path]) -> Any:
    """Task manager of the harness that knows these tasks, groups or tags; patterns such as `mmlu_*` are allowed.

    Args:
        include: folders with the YAML files of your own tasks.

    Raises:
        ConfigError: a name that the harness does not know.
        DataError: later, while it loads a task whose data cannot be had.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    class Manager(TaskManager):  # type: ignore[misc]
        def load(self, task_list: Any) -> Any:
            try:
                return super().load(task_list)
            except Exception as error:  # of the Hub, of the reader of its files, of the task's own code
                if is_out_of_memory(error):
                    raise
                raise DataError(
                    f"the data of the tasks {', '.join(names)} must be within reach, got: {first_line(error)}; "
                    "check the network and the task's dataset_path, or download the data first and set HF_HUB_OFFLINE=1"
                ) from None

    try:
        manager = Manager(include_path=[str(folder) for folder in include] or None)
    except Exception as error:  # a YAML file of the user's
        raise ConfigError(
            f"--include-path must hold tasks of {HARNESS}, got: {first_line(error)}; correct that file"
        ) from None
    for name in names:
        if not manager.match_tasks([name]):
            near = difflib.get_close_matches(name, manager.all_tasks, 1)
            action = f"did you mean {near[0]}?" if near else "list them with: lm-eval ls tasks"
            raise ConfigError(f"--tasks must name tasks that {HARNESS} knows, got {name!r}; {action}")
    return manager


def run_benchmarks(
    model: Any,
    tokenizer: Any,
    names: list[str],
    manager: Any,
    *,
    batch_size: int,
    num_fewshot: int | None = None,
    limit: int | None = None,
    is_chat: bool = False,
    seed: int = 0,
    autocast: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Figures by task: `metrics`, `stderr` (where there is one), `num_fewshot`, `num_samples`, `version`, `dataset`.

    Args:
        num_fewshot: solved examples before each question; None: what the task sets.
        limit: number of samples of each task; None: all.
        is_chat: ask each question as a user's turn, in the model's chat template.
        autocast: data type of autocast, or None.

    Raises:
        ConfigError: a task that the harness refuses to run.
        DataError: the data of a task cannot be had.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, mixed_precision_dtype=autocast)
    try:
        found = simple_evaluate(
            model=wrapped,
            tasks=manager.match_tasks(names),
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=is_chat,
            log_samples=False,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except ValueError as error:
        raise ConfigError(
            f"--tasks must be tasks that {HARNESS} can run on this model, got: {first_line(error)}; choose others"
        ) from None
    return {name: _figures(name, values, found) for name, values in found["results"].items()}


def _figures(name: str, values: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Figures of one task or group; a metric whose filter is not the default one is named `metric (filter)`."""
    metrics: dict[str, float] = {}
    errors: dict[str, float] = {}
    for key, value in values.items():
        metric, comma, kept_by = key.partition(",")
        if comma and isinstance(value, int | float) and math.isfinite(value):
            of_errors = metric.endswith("_stderr")
            shown = metric.removesuffix("_stderr") + ("" if kept_by == "none" else f" ({kept_by})")
            (errors if of_errors else metrics)[shown] = float(value)
    samples = found.get("n-samples", {}).get(name)
    return {
        "metrics": metrics,
        "stderr": errors,
        "num_fewshot": found.get("n-shot", {}).get(name),
        "num_samples": None if samples is None else samples["effective"],
        "version": found.get("versions", {}).get(name),
        "dataset": found.get("configs", {}).get(name, {}).get("dataset_path"),
    }
