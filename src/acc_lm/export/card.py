"""Model card of an exported model: metadata that the Hub reads, data, figures, recipe and Accelerate config."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc_lm.config import Config
from acc_lm.config.loading import shareable_recipe
from acc_lm.data import DataFacts
from acc_lm.export.hub import hub_id
from acc_lm.redaction import CONTROL, redact
from acc_lm.runtime import shareable_config

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

MEASURES = {
    "loss": "Loss (nats per token)",
    "perplexity": "Perplexity",
    "token_accuracy": "Token accuracy",
    "bits_per_byte": "Bits per byte",
}
"""Metrics of an evaluation, and their names in the model index."""

FILE_READERS = ("arrow", "csv", "json", "parquet", "text")
"""Data sets of a task that are files of the author's machine, by the name of their reader."""

HARNESS_URL = "https://github.com/EleutherAI/lm-evaluation-harness"
PIPELINE = """from transformers import pipeline

generate = pipeline("text-generation", model="path/to/this/folder")"""
WITH_PEFT = """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer, pipeline

folder = "path/to/this/folder"
model, tokenizer = AutoPeftModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
generate = pipeline("text-generation", model=model, tokenizer=tokenizer)"""
"""For an adapter with new tokens: transformers alone adds no rows to its base."""

BENCHMARKS = "## Benchmarks"
"""Heading of the table that `acc-lm evaluate --tasks` writes."""


def model_card(config: Config, facts: DataFacts, metrics: dict[str, float], step: int, num_parameters: int) -> str:
    """README.md of the exported model."""
    adapter = config.adapter
    data = _metadata(
        Path(config.output_dir).resolve().name,
        config.model.name_or_path,
        adapter.kind != "none",
        license=config.export.license,
        datasets=_datasets_of(config) or None,
        eval_results=_results(config, metrics),
    )
    name = re.sub(r"([!-,./:-@^_{}~])", r"\\\1", _plain(Path(config.output_dir).resolve().name))
    kind = (
        config.model.config["model_type"]
        if config.model.config
        else f"fine-tuned from {base_name(config.model.name_or_path)}"
    )
    amount = f"{facts.train_documents:,} documents, {facts.train_bytes:,} bytes, {facts.train_tokens:,} tokens"
    amount = facts.source.get("streams", amount)
    what = "A causal language model"
    if adapter.kind != "none":
        what, kind = f"A LoRA adapter of rank {adapter.rank}", f"for {base_name(config.model.name_or_path)}"
    loss, perplexity, accuracy = (metrics[f"eval/{name}"] for name in ("loss", "perplexity", "token_accuracy"))
    bits = f"{metrics['eval/bits_per_byte']:.4f}" if "eval/bits_per_byte" in metrics else "none"
    rows = (config.training.eval_batches or 0) * config.training.global_batch_size
    is_part = 0 < rows * config.data.sequence_length < facts.eval_tokens - 1
    part = f"\nMeasured on {rows:,} rows of it (`training.eval_batches`).\n" if is_part else ""
    where = shareable_config()
    launch = f"\n## Accelerate config\n\n{_block('yaml', where)}\n" if where else ""
    return _checked(
        data,
        f"""# {name}

{what} ({kind}, {num_parameters:,} parameters), trained with acc-lm for {step:,} optimizer steps
of {config.training.global_batch_size} rows of {config.data.sequence_length} tokens.

## Data

{_source_of(config)}: {amount}.
Held out from training: {facts.eval_documents:,} documents, {facts.eval_bytes:,} bytes.

## Held-out text

| loss (nats per token) | perplexity | token accuracy | bits per byte |
|---|---|---|---|
| {loss:.4f} | {perplexity:.2f} | {accuracy:.4f} | {bits} |
{part}
## Use

```python
{WITH_PEFT if adapter.kind != "none" and config.tokenizer.adds_tokens else PIPELINE}
print(generate({(config.export.sample_prompt or "Once")!r}, max_new_tokens=50)[0]["generated_text"])
```

## Recipe

{_block("yaml", shareable_recipe(config))}
{launch}""",
    )


def merged_card(card: str | None, base: str, name: str, dtype: str) -> str:
    """README.md of a model that an adapter was merged into.

    Args:
        card: README.md of the adapter, whose license, data, figures and recipe stay valid; None if it has none.
    """
    from huggingface_hub import ModelCard

    kept: dict[str, Any] = {}
    if card:
        with suppress(Exception):  # a user has edited it, and it is no YAML any more
            known = ModelCard(card, ignore_metadata_errors=True).data
            kept = {key: getattr(known, key, None) for key in ("license", "datasets", "eval_results")}
    about = f"{base_name(base)[0].upper()}{base_name(base)[1:]} with a LoRA adapter, merged into it in float32 and stored in {dtype}."
    rest = "## Data" + card.partition("\n## Data")[2] if card and "\n## Data" in card else ""
    rest = rest.replace(WITH_PEFT, PIPELINE)
    return _checked(_metadata(name, base, False, **kept), f"# {_plain(name)}\n\n{about}\n\n{rest}".rstrip() + "\n")


def card_with_benchmarks(card: str, figures: dict[str, dict[str, Any]], harness: str) -> str | None:
    """Card with the figures of these tasks in its model index and its table; those of other tasks stay as they are.

    Args:
        figures: by task, as `acc_lm.evaluation.benchmarks` returns them.
        harness: name and version of the harness.

    Returns:
        None: this is not a card of acc-lm, or its metadata is damaged.
    """
    from huggingface_hub import EvalResult, ModelCard

    try:
        data = ModelCard(card).data
        kept = [*(data.eval_results or ())]
    except Exception:  # a user has edited it, and it is no YAML any more
        return None
    if "acc-lm" not in (data.tags or []):
        return None
    kept = [entry for entry in kept if entry.source_name is None or entry.dataset_name not in figures]
    data.eval_results = kept + [
        EvalResult(
            task_type="text-generation",
            dataset_type="text" if task["dataset"] in FILE_READERS else hub_id(task["dataset"]) or "text",
            dataset_name=name,
            dataset_config=name,
            metric_type="accuracy" if metric == "acc" else metric,
            metric_name=metric,
            metric_value=round(value, 6),
            source_name=harness,
            source_url=HARNESS_URL,
        )
        for name, task in figures.items()
        for metric, value in task["metrics"].items()
    ]
    data.model_name = data.model_name or "model"
    lines: dict[str, list[str]] = {}
    for line in _benchmark_lines(card):
        lines.setdefault(line.split("|")[1].strip(), []).append(line)
    for name, task in figures.items():
        lines[f"`{_plain(name)}`"] = [_benchmark_line(name, metric, task, harness) for metric in task["metrics"]]
    rows = "\n".join(line for own in lines.values() for line in own)
    table = f"{BENCHMARKS}\n\n| task | metric | value | examples before | samples | by |\n|---|---|---|---|---|---|\n{rows}\n"
    body = str(ModelCard(card).text)
    before, is_there, rest = body.partition(f"\n{BENCHMARKS}\n")
    if is_there:
        _, heading, after = rest.partition("\n## ")
    else:
        before, heading, after = body.partition("\n## Use\n")
    return f"---\n{data.to_yaml()}\n---\n{before.rstrip()}\n\n{table}{heading}{after}"


def _benchmark_lines(card: str) -> list[str]:
    """Rows of the table of benchmarks in a card."""
    section = card.partition(f"\n{BENCHMARKS}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| `")]


def _benchmark_line(name: str, metric: str, task: dict[str, Any], harness: str) -> str:
    error = task["stderr"].get(metric)
    value = f"{task['metrics'][metric]:.4f}" + ("" if error is None else f" ± {error:.4f}")
    cells = [f"`{_plain(name)}`", _plain(metric), value, task["num_fewshot"], task["num_samples"], harness]
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def _metadata(name: str, base: str | None, is_adapter: bool, **more: Any) -> ModelCardData:
    from huggingface_hub import ModelCardData

    return ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["acc-lm", "lora"] if is_adapter else ["acc-lm"],
        base_model=hub_id(base),
        model_name=_plain(name) if more.get("eval_results") else None,
        **more,
    )


def _checked(data: ModelCardData, body: str) -> str:
    """Card of this metadata, read back as the Hub reads it."""
    from huggingface_hub import ModelCard

    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}"))


def _results(config: Config, metrics: dict[str, float]) -> list[EvalResult]:
    """Entries of the model index: the evaluation of the exported weights on the held-out text."""
    from huggingface_hub import EvalResult

    datasets = _datasets_of(config)
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=datasets[0] if len(datasets) == 1 else "text",
            dataset_name="held-out text",
            metric_type="accuracy" if measure == "token_accuracy" else measure,
            metric_name=shown,
            metric_value=round(metrics[f"eval/{measure}"], 6),
        )
        for measure, shown in MEASURES.items()
        if math.isfinite(metrics.get(f"eval/{measure}", math.nan))
    ]


def _datasets_of(config: Config) -> list[str]:
    """Ids on the Hub of the data sets that a recipe trains on; folders of this machine are left out."""
    names = [config.data.dataset] if config.data.source == "hub" else []
    names += [source.dataset for source in config.data.mixture]
    return [name for name in dict.fromkeys(map(hub_id, names)) if name is not None]


def _block(language: str, text: str) -> str:
    """Code block that its text cannot end."""
    return f"```{language}\n" + redact(text).rstrip().replace("```", "'''") + "\n```"


def base_name(name: str | None) -> str:
    """Name of a base model for a reader: its id on the Hub, or that it is a folder of the author's machine."""
    return f"`{_plain(name)}`" if name is not None and hub_id(name) else "a model in a local folder"


def _source_of(config: Config) -> str:
    """Description of a recipe's training text."""
    return {
        "python_stdlib": "the Python standard library's source",
        "synthetic": "a synthetic first-order Markov chain",
        "files": ", ".join(f"`{_plain(Path(name).name)}`" for name in config.data.files),
        "hub": f"`{_plain(hub_id(config.data.dataset) or Path(str(config.data.dataset)).name)}`",
        "mixture": "a mixture of " + ", ".join(f"`{_plain(source.title)}`" for source in config.data.mixture),
    }[config.data.source]


def _plain(text: str) -> str:
    """Blank out characters of a user's text that end a code span, start HTML or move a cursor."""
    return "".join(" " if c in "`<>|[]\\" or CONTROL.match(c) else c for c in text)
