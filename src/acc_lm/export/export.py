"""What comes out: a folder that transformers loads like any other model, and a sample of its text."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acc_lm.adapter import NAME as ADAPTER
from acc_lm.adapter import SETTINGS as ADAPTER_SETTINGS
from acc_lm.adapter import base_checksum, open_adapter, put_beside, save_adapter
from acc_lm.chat import question_ids
from acc_lm.checkpoint import kept_pieces, kept_shapes, make_readable, persistent_buffers
from acc_lm.config import Config
from acc_lm.data import Data, DataFacts
from acc_lm.errors import ConfigError, StorageError, storage_reason
from acc_lm.evaluation import EvaluationResult
from acc_lm.model import refuse_kernels
from acc_lm.recipe import dump_config
from acc_lm.redaction import CONTROL
from acc_lm.retention import free_name
from acc_lm.runtime import (
    WEIGHT,
    Piece,
    bare_model,
    full_precision,
    gather_tensor,
    on_main,
)
from acc_lm.tokenizer import first_line

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
    result: EvaluationResult,
    step: int,
    run_step: int,
) -> Path:
    """Write `final/`: weights, config, tokenizer, generation config and model card. Every process calls.

    Of an adapter it holds the adapter alone, which names its base. The folder is written aside and renamed, so a half-written
    one is never taken for the model.

    Args:
        step: of the weights.
        run_step: how far the run has come; larger where the best weights are not the last.
    """
    folder = Path(config.output_dir) / "final"
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
        card = model_card(config, data.facts, result, step, num_parameters)
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
    """Whether a folder that is to be replaced holds files that the new one does not have, which somebody put there."""
    old, new = ({path.relative_to(each) for path in each.rglob("*") if path.is_file()} for each in (folder, made))
    return not old <= new


def name_padding(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Name what `generate` pads the shorter answers of a batch with, which it would otherwise guess with a warning."""
    generation = model.generation_config
    if generation is not None and generation.pad_token_id is None:
        padding = tokenizer.pad_token_id
        generation.pad_token_id = tokenizer.eos_token_id if padding is None else padding


def whole_weights(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Full-precision weights and buffers under the model's own names, on the main process; empty on the others.

    Only an adapter's own where there is one. Gathered one by one, so only the main process ever holds them all.
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


def model_card(config: Config, facts: DataFacts, result: EvaluationResult, step: int, num_parameters: int) -> str:
    """README.md of the exported model."""
    from huggingface_hub import ModelCardData

    adapter = config.adapter
    data = ModelCardData(
        library_name="transformers" if adapter.kind == "none" else "peft",
        pipeline_tag="text-generation",
        tags=["acc-lm"] if adapter.kind == "none" else ["acc-lm", "lora"],
        base_model=config.model.name_or_path,
    )
    source = {
        "python_stdlib": "the Python standard library's source",
        "synthetic": "a synthetic first-order Markov chain",
        "files": ", ".join(f"`{_plain(name)}`" for name in config.data.files),
        "hub": f"`{_plain(str(config.data.dataset))}`",
        "mixture": "a mixture of " + ", ".join(f"`{_plain(source.title)}`" for source in config.data.mixture),
    }[config.data.source]
    name = re.sub(r"([!-,./:-@^_{}~])", r"\\\1", _plain(Path(config.output_dir).resolve().name))
    kind = (
        config.model.config["model_type"]
        if config.model.config
        else f"fine-tuned from `{_plain(str(config.model.name_or_path))}`"
    )
    amount = f"{facts.train_documents:,} documents, {facts.train_bytes:,} bytes, {facts.train_tokens:,} tokens"
    amount = facts.source.get("streams", amount)
    what = "A causal language model"
    if adapter.kind != "none":
        what, kind = f"A LoRA adapter of rank {adapter.rank}", f"for `{_plain(str(config.model.name_or_path))}`"
    bits = "none" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
    return f"""---
{data.to_yaml()}
---

# {name}

{what} ({kind}, {num_parameters:,} parameters), trained with acc-lm for {step:,} optimizer steps
of {config.training.global_batch_size} rows of {config.data.sequence_length} tokens.

## Data

{source}: {amount}.
Held out from training: {facts.eval_documents:,} documents, {facts.eval_bytes:,} bytes.

## Held-out text

| loss (nats per token) | perplexity | token accuracy | bits per byte |
|---|---|---|---|
| {result.loss:.4f} | {result.perplexity:.2f} | {result.token_accuracy:.4f} | {bits} |

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


def _plain(text: str) -> str:
    """Text from a user without what ends a code span, starts HTML or moves a cursor."""
    return "".join(" " if c in "`<>|[]\\" or CONTROL.match(c) else c for c in text)


@contextmanager
def written_aside(output: Path) -> Iterator[Path]:
    """A place near `output` to write a file or a folder to, which becomes `output` as a whole at the end, or not at all.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".acc-lm-") as folder:
            work = Path(folder, output.name)
            yield work
            for file in [work, *work.rglob("*")]:
                if file.is_file():
                    make_readable(file)
            work.rename(output)
    except Exception as error:
        if reason := storage_reason(error):
            raise StorageError(
                f"{output} must be where there is room to write, got: {reason}; free some space, or name another place"
            ) from None
        raise


def write_steps(folder: Path, step: int, run_step: int) -> None:
    """Note in an exported model of which step its weights are, and how far the run had come."""
    (folder / STEPS).write_text(json.dumps({"step": step, "run_step": run_step}) + "\n")


def exported_steps(folder: Path) -> tuple[int, int] | None:
    """(step of the weights, how far the run had come) of an exported model; None for a folder that does not say."""
    try:
        found = json.loads((folder / STEPS).read_text())
        return int(found["step"]), int(found["run_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load_exported(folder: Path, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """The model in a folder or on the Hub; for an adapter peft's model, of its base with the adapter in it.

    Raises:
        ConfigError: its code would have to be trusted, or the adapter's base is another model now.
        OSError, ValueError: transformers cannot load it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    adapter = open_adapter(folder)
    where: str | Path = folder
    how: dict[str, Any] = {"revision": revision}
    if adapter is not None:
        where, how = adapter.base, {"revision": adapter.revision}
    try:
        found = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code, **how)
        refuse_kernels(found, trust_remote_code, "model")
        if adapter is not None:
            how["dtype"] = torch.bfloat16 if adapter.dtype == "bfloat16" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(
            where, use_safetensors=True, trust_remote_code=trust_remote_code, **how
        )
    except (OSError, ValueError) as error:
        if adapter is None or isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"the base of the adapter {folder} must be a model that transformers loads, got {adapter.base}: {first_line(error)}; "
            f"put it there, or correct base_model_name_or_path in {ADAPTER_SETTINGS}"
        ) from None
    return model if adapter is None else put_beside(adapter, model)


def merge(folder: Path, output: Path, dtype: torch.dtype = torch.float32) -> None:
    """One model of an exported adapter and its base, in a new folder that transformers loads like any other.

    Raises:
        ConfigError: the folder holds no adapter, the base is another model now, or the output is there already.
    """
    from transformers import AutoTokenizer

    if open_adapter(folder) is None:
        got = folder if folder.is_dir() else f"{folder}, which does not exist"
        raise ConfigError(
            f"FINAL must be the folder of an adapter, got {got}; name the final/ of a finished run with one"
        )
    if output.exists():
        raise ConfigError(f"OUTPUT must be a new folder, got {output}; name another")
    model = load_exported(folder).float().merge_and_unload().to(dtype)  # summed in float32, whatever comes of it
    tokenizer, steps = AutoTokenizer.from_pretrained(folder, trust_remote_code=False), exported_steps(folder)
    with written_aside(output) as work:
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        if steps is not None:
            write_steps(work, *steps)


def sample_text(
    folder: str | Path,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    is_question: bool = False,
    day: str | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Text that the exported model writes after `prompt`; the same for the same seed.

    Args:
        temperature: 0 always takes the likeliest token.
        is_question: the prompt is a user's turn in a conversation, and the text returned is the answer alone.
        day: date for a chat template that reads the clock, as YYYY-MM-DD; None: that of the run, else today's.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    model = load_exported(Path(folder), trust_remote_code)
    model.eval()
    ends = [tokenizer.eos_token_id]
    if is_question:
        found, end = question_ids(prompt, tokenizer, day)
        ids, ends = torch.tensor([found]), [end, *ends]
    else:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    if ids.shape[1] == 0:
        ids = torch.tensor([[tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id]])
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int):
        ids = ids[:, -max(1, limit - max_new_tokens) :]
        max_new_tokens = min(max_new_tokens, limit - ids.shape[1])
    choice: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature > 0 else {"do_sample": False}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            **({"eos_token_id": ends} if is_question else {}),
            **choice,
        )
    return str(tokenizer.decode(output[0][ids.shape[1] if is_question else 0 :], skip_special_tokens=True))
