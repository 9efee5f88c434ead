"""`acc-lm evaluate`: score a text with an existing model, document by document, and its answers to prompts."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc_lm.cli import stdout_on_stderr
from acc_lm.cli.evaluated_model import BATCH_SIZE, SETTLED, Request, Tasks, check_tokenizer, environment_of, recipe_of
from acc_lm.cli.evaluated_tasks import check_tasks, evaluate_tasks
from acc_lm.config import Config
from acc_lm.errors import ConfigError, OutOfMemoryError
from acc_lm.redaction import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelerate import Accelerator

    from acc_lm.evaluation.completions import Prompt
    from acc_lm.evaluation.scoring import ScoredText, Scores
    from acc_lm.runtime import Identity

ANSWER_METRICS = {"exact_match": "ExactMatch", "bleu": "Bleu", "rouge": "Rouge"}
"""Modules of `acc_lm.evaluation.metrics`, and their classes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="final/ of a run, the run, another model's folder, or a Hub id")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE",
        help="file or glob of text or conversations; repeat it for several (default: what the run held out)",
    )
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="write one line of JSON per document")
    parser.add_argument(
        "--generate", action="store_true", help="answer each prompt, and compare with the reference answer"
    )
    parser.add_argument(
        "--references-column",
        metavar="NAME",
        help="column of the records with other correct answers: a text or a list of texts",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="maximum number of tokens of an answer (default 100)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature of an answer (default 0: always the likeliest token)",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="rows or prompts per batch; affects memory, never a figure"
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of the Hub id")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument(
        "--tasks",
        metavar="NAME,...",
        help="run benchmarks of lm-eval instead, and record their figures in the run's summary.json and in the model card",
    )
    parser.add_argument(
        "--include-path",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder with YAML files of your own tasks; repeat it for several",
    )
    parser.add_argument(
        "--num-fewshot", type=int, metavar="N", help="solved examples before each question (default: the task's own)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="first N samples of each task, for a trial")
    parser.add_argument(
        "--chat", action="store_true", help="ask each question of a task as a user's turn, in the model's chat template"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="keys of the recipe to override, e.g. data.sequence_length=512",
    )


def run(known: argparse.Namespace) -> int:
    for word in known.overrides:
        if "=" not in word:
            raise ConfigError(
                f"command line: must be an option or section.key=value, got {word!r}; pass data as --data {word}"
            )
    tasks = None
    if known.tasks is not None:
        names = tuple(name.strip() for name in known.tasks.split(","))
        tasks = Tasks(names, tuple(known.include_path), known.num_fewshot, known.limit, known.chat)
    of_tasks = {"include-path": known.include_path, "num-fewshot": known.num_fewshot is not None}
    for name, option in (of_tasks | {"limit": known.limit is not None, "chat": known.chat}).items():
        if option and tasks is None:
            raise ConfigError(f"--{name} must come with --tasks, got it alone; add --tasks")
    return evaluate_model(
        Request(
            known.model,
            tuple(known.data),
            known.predictions,
            known.generate,
            known.references_column,
            known.max_new_tokens,
            known.temperature,
            known.batch_size,
            known.revision,
            known.json,
            tasks,
            tuple(known.overrides),
        )
    )


def evaluate_model(request: Request) -> int:
    """Score a text with a model, on every process of the launch; returns the exit code."""
    from acc_lm.runtime import explain

    _check(request)
    config: Config | None = None
    try:
        if request.tasks is not None:
            return evaluate_tasks(request, request.tasks)
        with stdout_on_stderr(request.as_json):
            config, run = recipe_of(request)
            found = _run(request, config, run)
        if found is not None:
            _report(*found, request.as_json)
    except OSError as error:
        if explained := explain(error, None):
            raise explained from None
        raise
    except RuntimeError as error:
        explained = explain(error, config)
        if isinstance(explained, OutOfMemoryError):
            size = request.batch_size or (config.training.micro_batch_size if config else BATCH_SIZE)
            raise OutOfMemoryError(
                f"a forward pass must fit into memory, got {size} rows that do not; lower --batch-size, which changes no result"
            ) from None
        if explained is not None:
            raise explained from None
        raise
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def _check(request: Request) -> None:
    """Check for mistakes that are visible in the command line alone."""
    numbers = (
        ("--max-new-tokens", request.max_new_tokens, 1, "", "raise it"),
        ("--batch-size", request.batch_size, 1, "", "raise it"),
        ("--temperature", request.temperature, 0, " and finite", "use 0 for instance"),
    )
    for name, given, least, more, action in numbers:
        if given is not None and not least <= given < math.inf:
            raise ConfigError(f"{name} must be at least {least}{more}, got {given}; {action}")
    of_answers = {
        "--references-column": request.references_column,
        "--max-new-tokens": request.max_new_tokens,
        "--temperature": request.temperature,
    }
    for name, option in of_answers.items():
        if option is not None and not request.generate:
            raise ConfigError(f"{name} must come with --generate, got it alone; add --generate")
    for override in request.overrides:
        key = override.partition("=")[0]
        if key in ("training.micro_batch_size", "training.global_batch_size"):
            raise ConfigError(
                f"the rows of a forward pass must be given as --batch-size, got {override}; use that option instead"
            )
        if any(key == name or key.startswith(f"{name}.") for name in SETTLED):
            raise ConfigError(f"{key} must be left out, got {override}; remove it, MODEL decides what is evaluated")
    if request.tasks is not None:
        check_tasks(request, request.tasks)
    if request.predictions is not None:
        _check_new_file(request.predictions)


def _check_new_file(file: Path) -> None:
    if file.exists() or file.is_symlink():
        raise ConfigError(f"--predictions must be a new file, got {file}, which already exists; name another")
    trial = file.with_name(f".tmp-{file.name}-{os.getpid()}")
    try:
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ConfigError(
            f"--predictions must be in a writable folder, got {file}: {error.strerror}; name another"
        ) from None


# --- what is evaluated ---------------------------------------------------------------------------------------------


# --- the evaluation ------------------------------------------------------------------------------------------------


def _run(request: Request, config: Config, run: Path | None) -> tuple[dict[str, Any], list[str]] | None:
    """Figures of the evaluation and notes on them; None on all processes but the main one."""
    from tqdm import tqdm

    from acc_lm import runtime
    from acc_lm.chat.template import day_of
    from acc_lm.evaluation.scoring import build_scored_model, read_documents, score, write_rows
    from acc_lm.optimization.optimizer import build_optimizer
    from acc_lm.text.tokenizer import load_tokenizer

    runtime.quiet_libraries()
    accelerator = runtime.build_accelerator(config)
    is_main = accelerator.is_main_process
    tokenizer = load_tokenizer(config.tokenizer, config.model)
    assert tokenizer is not None
    if run is not None:
        check_tokenizer(run, tokenizer)

    def bar(what: str, total: int | None, unit: str) -> Any:
        return tqdm(total=total, desc=what, unit=unit, unit_scale=unit == "B", disable=None if is_main else True)

    day = runtime.on_main(accelerator, lambda: day_of(tokenizer) or date.today().isoformat())
    with bar("tokenise", None, "B") as shown:
        text = read_documents(
            config.data,
            tokenizer,
            config.seed,
            held_out=not request.data,
            trained_on=environment_of(run)["text_key"] if run else None,
            references_column=request.references_column,
            progress=shown.update,
            day=day,
        )
    if request.generate and text.plan is None:
        raise ConfigError(
            "--generate must have prompts, got plain text; leave it out, or give conversations or prompts with completions"
        )
    model = build_scored_model(accelerator, config.model, tokenizer, config.data.sequence_length, text.packs)
    model, optimizer = runtime.prepare(accelerator, model, build_optimizer(model, config.optimizer))
    identity = runtime.identify(accelerator, model, optimizer, config)
    share = math.ceil(len(text.rows) / runtime.readers_of_whole_rows(accelerator)[1])
    with bar("score", share, "row") as shown:
        scores = score(accelerator, model, text, config.training.micro_batch_size, shown.update)
    figures = _figures(request, config, run, text, scores, identity)
    prompts: list[Prompt] = []
    answers: list[str | None] = []
    notes: list[str] = []
    if request.generate:
        del model, optimizer
        accelerator.free_memory()
        prompts, answers = _answers(request, config, accelerator, tokenizer, text, bar)
        if is_main:
            figures["generation"], notes = _grade(text, answers)
    if is_main and request.predictions is not None:
        write_rows(request.predictions, _rows(text, scores, prompts, answers, tokenizer))
        figures["predictions"] = str(request.predictions)
    runtime.close(accelerator)
    return (figures, notes) if is_main else None


def _figures(
    request: Request, config: Config, run: Path | None, text: ScoredText, scores: Scores, identity: Identity
) -> dict[str, Any]:
    """Figures that `--json` prints, by name, without those of --generate and --predictions."""
    from acc_lm.export.export import exported_steps

    result = scores.result()
    steps = exported_steps(Path(str(config.model.name_or_path)))
    return {
        "model": str(config.model.name_or_path),
        "step": steps[0] if steps else None,
        "data": list(request.data) or ("held out by the run" if run else "held out"),
        "text": text.about,
        "sequence_length": config.data.sequence_length,
        "strategy": identity.strategy,
        "num_processes": identity.num_processes,
        "precision": identity.precision,
        "documents": len(text.places),
        "targets": result.num_targets,
        "bytes": int(scores.num_bytes.sum()),
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "token_accuracy": result.token_accuracy,
    }


def _answers(
    request: Request, config: Config, accelerator: Accelerator, tokenizer: Any, text: ScoredText, bar: Any
) -> tuple[list[Prompt], list[str | None]]:
    """Prompts, and the answers of the model as transformers loads it, in full on every process."""
    from acc_lm.evaluation.completions import complete, scored_prompts
    from acc_lm.export.exported import load_exported
    from acc_lm.modeling.build import DTYPES

    prompts = scored_prompts(text, tokenizer)
    folder, section = Path(str(config.model.name_or_path)), config.model
    model = load_exported(folder, section.trust_remote_code, section.revision, DTYPES[section.dtype])
    model = model.to(accelerator.device)
    with bar("generate", math.ceil(len(prompts) / accelerator.num_processes), "prompt") as shown:
        answers = complete(
            accelerator,
            model,
            tokenizer,
            prompts,
            max_new_tokens=request.max_new_tokens or 100,
            batch_size=config.training.micro_batch_size,
            temperature=request.temperature or 0.0,
            seed=config.seed,
            progress=shown.update,
        )
    return prompts, answers


def _grade(text: ScoredText, answers: list[str | None]) -> tuple[dict[str, float], list[str]]:
    """Metrics of the answers compared with their references, and notes on answers and packages that are missing."""
    found: dict[str, float] = {}
    notes: list[str] = []
    missing = answers.count(None)
    if missing:
        notes.append(f"{missing} prompts leave no room for an answer in the model's positions; they count as wrong")
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in ANSWER_METRICS.items():
            try:
                module = importlib.import_module(f"acc_lm.evaluation.metrics.{name}")
            except ModuleNotFoundError as error:
                notes.append(f"no {name}: the package {error.name} is not installed; pip install 'acc-lm[metrics]'")
                continue
            metric = getattr(module, kind)(cache_dir=folder, keep_in_memory=True)
            found |= metric.compute(
                predictions=[answer or "" for answer in answers],
                references=[list(accepted) for accepted in text.references],
            )
    return found, notes


def _rows(
    text: ScoredText, scores: Scores, prompts: list[Prompt], answers: list[str | None], tokenizer: Any
) -> Iterator[dict[str, Any]]:
    for number, place in enumerate(text.places):
        row: dict[str, Any] = {"document": number, "place": place, **scores.of(number)}
        if answers:
            answer, accepted = answers[number], text.references[number]
            row |= {
                "prompt": tokenizer.decode(prompts[number].ids),
                "completion": answer,
                "references": list(accepted),
                "exact_match": answer is not None and answer.strip() in {one.strip() for one in accepted},
            }
        yield row


def _report(figures: dict[str, Any], notes: list[str], as_json: bool) -> None:
    for note in notes:
        print(printable(note), file=sys.stderr)
    if as_json:
        print(json.dumps(figures, ensure_ascii=False))
        return
    generation = figures.get("generation", {})
    bits = figures["bits_per_byte"]
    lines = {
        "model": figures["model"],
        **({} if figures["step"] is None else {"step": figures["step"]}),
        "text": figures["text"],
        "rows": f"of {figures['sequence_length']:,} tokens",
        "strategy": f"{figures['strategy']}, {figures['num_processes']} process{'es' * (figures['num_processes'] > 1)}, {figures['precision']}",
        "targets": f"{figures['targets']:,} in {figures['documents']:,} documents, {figures['bytes']:,} bytes",
        "loss": f"{figures['loss']:.6f} nats per target",
        "perplexity": f"{figures['perplexity']:.4f}",
        "bits per byte": "none: the targets stand for no text" if bits is None else f"{bits:.6f}",
        "token accuracy": f"{figures['token_accuracy']:.6f}",
        **{name.replace("_", " "): f"{value:.4f}" for name, value in generation.items()},
    }
    if "predictions" in figures:
        lines["predictions"] = figures["predictions"]
    for name, value in lines.items():
        print(printable(f"{name:<15} {value}"))
