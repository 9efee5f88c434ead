"""`acc-lm evaluate --tasks`: benchmarks of lm-eval, recorded in the run's summary and in the model card."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from acc_lm.cli import stdout_on_stderr
from acc_lm.cli.evaluated_model import OF_TASKS, Request, Tasks, model_of
from acc_lm.errors import ConfigError, MachineError, first_line
from acc_lm.files import written_aside
from acc_lm.redaction import printable, redact


def check_tasks(request: Request, tasks: Tasks) -> None:
    """Check for mistakes that are visible in the command line alone."""
    wrong = {
        "--data": request.data,
        "--predictions": request.predictions,
        "--generate": request.generate,
    }
    for name, option in wrong.items():
        if option:
            raise ConfigError(f"{name} must be left out with --tasks, got both; the tasks have their own text")
    if not all(tasks.names):
        raise ConfigError(f"--tasks must be names with commas between them, got {','.join(tasks.names)!r}; correct it")
    for folder in tasks.include:
        if not folder.is_dir():
            raise ConfigError(f"--include-path must be a folder with YAML files of tasks, got {folder}; correct it")
    for name, number, least in (("--num-fewshot", tasks.num_fewshot, 0), ("--limit", tasks.limit, 1)):
        if number is not None and number < least:
            raise ConfigError(f"{name} must be at least {least}, got {number}; raise it")
    for override in request.overrides:
        if override.partition("=")[0] not in OF_TASKS:
            raise ConfigError(f"--tasks must come with no keys but {', '.join(OF_TASKS)}, got {override}; remove it")


def evaluate_tasks(request: Request, tasks: Tasks) -> int:
    """Run benchmarks on a model, print their figures and record them; returns the exit code."""
    from acc_lm.evaluation.benchmarks import HARNESS, check_harness

    version = check_harness()
    with stdout_on_stderr():
        figures, run, folder, step = _run(request, tasks)
    harness = f"{HARNESS} {version}"
    if request.as_json:
        print(json.dumps({"model": str(folder), "step": step, "harness": harness, "tasks": figures}))
    else:
        _print(figures, str(folder), step, harness)
    sys.stdout.flush()
    if tasks.limit is not None:
        notes = ["not recorded: --limit leaves out samples"]
    else:
        notes = _record(figures, run, folder, harness, step)
    for note in notes:
        print(printable(note), file=sys.stderr)
    return 0


def _run(request: Request, tasks: Tasks) -> tuple[dict[str, dict[str, Any]], Path | None, Path, int | None]:
    """Figures by task, the run (None without one), the model's folder, and the step of its weights."""
    from acc_lm import runtime
    from acc_lm.evaluation.benchmarks import open_tasks, run_benchmarks
    from acc_lm.export.export import exported_steps
    from acc_lm.export.exported import load_exported
    from acc_lm.modeling.build import DTYPES
    from acc_lm.text.tokenizer import load_tokenizer

    config, run = model_of(request)
    manager = open_tasks(list(tasks.names), list(tasks.include))
    if runtime.world_size() > 1:
        raise MachineError(
            f"--tasks must run in one process, got {runtime.world_size()}; start it without a launcher, or use lm_eval itself, which splits the samples"
        )
    runtime.quiet_libraries()
    accelerator = runtime.build_accelerator(config)
    folder, section = Path(str(config.model.name_or_path)), config.model
    tokenizer = load_tokenizer(config.tokenizer, config.model)
    if tasks.is_chat and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"--chat must have a model with a chat template, got {folder} without one; leave it out")
    try:
        model = load_exported(folder, section.trust_remote_code, section.revision, DTYPES[section.dtype])
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"MODEL must be a model that transformers loads, got {folder}: {first_line(error)}; check the name"
        ) from None
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    model = model.to(accelerator.device).eval()
    autocast = {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision)
    figures = run_benchmarks(
        model,
        tokenizer,
        list(tasks.names),
        manager,
        batch_size=config.training.micro_batch_size,
        num_fewshot=tasks.num_fewshot,
        limit=tasks.limit,
        is_chat=tasks.is_chat,
        seed=config.seed,
        autocast=autocast,
    )
    runtime.close(accelerator)
    steps = exported_steps(folder)
    return figures, run, folder, steps[0] if steps else None


def _record(
    figures: dict[str, dict[str, Any]], run: Path | None, folder: Path, harness: str, step: int | None
) -> list[str]:
    """Write the figures into the run's summary and the folder's model card; returns what was and was not written."""
    from acc_lm.export.card import card_with_benchmarks
    from acc_lm.export.export import CARD
    from acc_lm.run_files.summary import record_benchmarks

    notes = []
    if run is not None:
        kept = {name: {**task, "harness": harness, "step": step} for name, task in figures.items()}
        is_kept = record_benchmarks(run, kept)
        notes.append(f"recorded in {run}/summary.json" if is_kept else f"not recorded: {run} has no summary.json")
    card = folder / CARD
    if not card.is_file():
        return notes
    try:
        text = card_with_benchmarks(card.read_text(encoding="utf-8"), figures, harness)
    except UnicodeDecodeError:
        text = None
    if text is None:
        return [*notes, f"not recorded in {card}, which is not a model card of acc-lm"]
    with written_aside(card) as work:
        work.write_text(redact(text), encoding="utf-8")
    return [*notes, f"recorded in {card}"]


def _print(figures: dict[str, dict[str, Any]], folder: str, step: int | None, harness: str) -> None:
    print(printable(f"{'model':<15} {folder}"))
    if step is not None:
        print(f"{'step':<15} {step}")
    print(f"{'harness':<15} {harness}")
    for name, task in figures.items():
        for metric, value in task["metrics"].items():
            error = task["stderr"].get(metric)
            shown = f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")
            about = [f"{task['num_samples']:,} samples"] if task["num_samples"] is not None else []
            about += [f"{task['num_fewshot']} examples before"] if task["num_fewshot"] is not None else []
            print(printable(f"{name:<15} {metric:<12} {shown}  {', '.join(about)}".rstrip()))
