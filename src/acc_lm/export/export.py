"""Export: a folder that transformers loads like any other model, with its tokenizer and a model card."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from acc_lm.checkpointing.format import free_name
from acc_lm.checkpointing.loading import kept_pieces, kept_shapes, persistent_buffers
from acc_lm.config import Config
from acc_lm.config.loading import dump_config
from acc_lm.data import Data, DataFacts
from acc_lm.files import make_readable
from acc_lm.modeling.adapter import ADAPTER_NAME as ADAPTER
from acc_lm.modeling.adapter import base_checksum, save_adapter
from acc_lm.redaction import CONTROL
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

STEPS = "run.json"


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
        checksum = base_checksum(bare)
        if checksum is None:
            name_padding(bare, data.tokenizer)
            bare.save_pretrained(work, state_dict=weights)
        else:
            save_adapter(work, weights, bare.peft_config[ADAPTER], config.model, checksum)
        data.tokenizer.save_pretrained(work)
        num_parameters = sum(math.prod(shape) for shape in kept_shapes(model).values())
        card = model_card(config, data.facts, metrics, step, num_parameters)
        (work / "README.md").write_text(card, encoding="utf-8")
        write_steps(work, step, run_step)
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


def model_card(config: Config, facts: DataFacts, metrics: dict[str, float], step: int, num_parameters: int) -> str:
    """README.md of the exported model."""
    from huggingface_hub import ModelCardData

    adapter = config.adapter
    data = ModelCardData(
        library_name="transformers" if adapter.kind == "none" else "peft",
        pipeline_tag="text-generation",
        tags=["acc-lm"] if adapter.kind == "none" else ["acc-lm", "lora"],
        base_model=hub_id(config.model.name_or_path),
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
    return f"""---
{data.to_yaml()}
---

# {name}

{what} ({kind}, {num_parameters:,} parameters), trained with acc-lm for {step:,} optimizer steps
of {config.training.global_batch_size} rows of {config.data.sequence_length} tokens.

## Data

{_source_of(config)}: {amount}.
Held out from training: {facts.eval_documents:,} documents, {facts.eval_bytes:,} bytes.

## Held-out text

| loss (nats per token) | perplexity | token accuracy | bits per byte |
|---|---|---|---|
| {loss:.4f} | {perplexity:.2f} | {accuracy:.4f} | {bits} |

## Use

```python
from transformers import pipeline

generate = pipeline("text-generation", model="path/to/this/folder")
print(generate({(config.export.sample_prompt or "Once")!r}, max_new_tokens=50)[0]["generated_text"])
```

## Recipe

```yaml
{dump_config(config).rstrip().replace("```", "'''")}
```
"""


def hub_id(name: str | None) -> str | None:
    """Name of a model if it is one on the Hub, for the card's metadata; None for a local folder."""
    return None if name is None or os.path.isdir(name) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) else name


def base_name(name: str | None) -> str:
    """Name of a base model for a reader: its id on the Hub, or that it is a folder of the author's machine."""
    return f"`{_plain(name)}`" if name is not None and hub_id(name) else "a model in a local folder"


def merged_card(card: str | None, base: str, name: str, dtype: str) -> str:
    """README.md of a model that an adapter was merged into.

    Args:
        card: README.md of the adapter, whose data, figures and recipe stay valid; None if it has none.
    """
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["acc-lm"], base_model=hub_id(base)
    )
    about = f"{base_name(base)[0].upper()}{base_name(base)[1:]} with a LoRA adapter, merged into it in float32 and stored in {dtype}."
    rest = "## Data" + card.partition("\n## Data")[2] if card and "\n## Data" in card else ""
    return f"---\n{data.to_yaml()}\n---\n\n# {_plain(name)}\n\n{about}\n\n{rest}".rstrip() + "\n"


def _source_of(config: Config) -> str:
    """Description of a recipe's training text."""
    return {
        "python_stdlib": "the Python standard library's source",
        "synthetic": "a synthetic first-order Markov chain",
        "files": ", ".join(f"`{_plain(name)}`" for name in config.data.files),
        "hub": f"`{_plain(str(config.data.dataset))}`",
        "mixture": "a mixture of " + ", ".join(f"`{_plain(source.title)}`" for source in config.data.mixture),
    }[config.data.source]


def _plain(text: str) -> str:
    """Blank out characters of a user's text that end a code span, start HTML or move a cursor."""
    return "".join(" " if c in "`<>|[]\\" or CONTROL.match(c) else c for c in text)


def write_steps(folder: Path, step: int, run_step: int) -> None:
    """Record in an exported model the step of its weights, and the step that the run had reached."""
    (folder / STEPS).write_text(json.dumps({"step": step, "run_step": run_step}) + "\n")


def exported_steps(folder: Path) -> tuple[int, int] | None:
    """Step of an exported model's weights, and the step that the run had reached; None for a folder without a record."""
    try:
        found = json.loads((folder / STEPS).read_text())
        return int(found["step"]), int(found["run_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
