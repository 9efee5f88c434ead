"""`acc-lm checkpoint`: list, verify, export and convert checkpoints without starting the run that wrote them."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc_lm.errors import CheckpointError, ConfigError, first_line
from acc_lm.run_files.names import CHECKPOINTS, STATE

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor

    from acc_lm.config import AdapterConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser(
        "list", help="list the checkpoints of a run: size, evaluation loss, writer, whether they are intact"
    )
    listing.add_argument("run", type=Path, help="folder of the run, e.g. runs/quickstart")
    verify = actions.add_parser(
        "verify", help="read every byte of a checkpoint against its checksums; exit code 5 if one is wrong"
    )
    verify.add_argument("folder", type=Path, help="e.g. runs/quickstart/checkpoints/latest")
    export = actions.add_parser(
        "export", help="write every tensor unsharded to one safetensors file: weights and the optimizer's moments"
    )
    export.add_argument("folder", type=Path)
    export.add_argument("output", type=Path, metavar="OUTPUT", help="a new file, *.safetensors")
    convert = actions.add_parser(
        "convert-to-hf", help="write a folder that transformers loads, from any checkpoint of any backend"
    )
    convert.add_argument("folder", type=Path)
    convert.add_argument("output", type=Path, metavar="OUTPUT", help="a new folder")
    convert.add_argument("--tokenizer", metavar="PATH", help="default: the tokenizer/ of the checkpoint's run")


def run(known: argparse.Namespace) -> int:
    if known.action == "list":
        return list_checkpoints(known.run)
    if known.action == "verify":
        return verify(known.folder)
    if known.action == "export":
        return export(known.folder, known.output)
    return convert_to_hf(known.folder, known.output, known.tokenizer)


def list_checkpoints(run: Path) -> int:
    """Print one line for each checkpoint of a run, the newest last; return the exit code."""
    from acc_lm.checkpointing.format import problem_with
    from acc_lm.checkpointing.rotation import best_checkpoint
    from acc_lm.redaction import printable

    root = run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run
    folders = sorted(path for path in root.glob("*step-*") if path.is_dir() and not path.name.startswith("tmp-"))
    if not folders:
        raise CheckpointError(f"{run} must hold checkpoints, got none; name the folder of a run")
    metric = _best_metric(folders)
    best = best_checkpoint(root.parent, metric)
    print(printable(f"{'':22}{'size':>10}  {metric:>10}  {'written by':24} state"))
    for folder in folders:
        problem = problem_with(folder)
        size = sum(file.lstat().st_size for file in folder.iterdir())
        try:
            state = dict(json.loads((folder / STATE).read_text()))
        except (OSError, ValueError, TypeError, RecursionError):
            state = {}
        measured = state.get("evaluation") or {"eval/loss": state.get("eval_loss")}
        value = measured.get(metric) if isinstance(measured, dict) else None
        count = state.get("num_processes", "?")
        writer = f"{count} process{'' if count == 1 else 'es'}, {state.get('mixed_precision', '?')}"
        marks = [problem or "intact", *(["the best"] if folder == best else [])]
        line = f"{folder.name:22}{size / 1e6:>7.1f} MB  {f'{value:.4f}' if isinstance(value, float) else '-':>{max(10, len(metric))}}  {writer:24} {', '.join(marks)}"
        print(printable(line))
    return 0


def _best_metric(folders: list[Path]) -> str:
    """Metric by which the newest readable checkpoint ranks evaluations, else eval/loss."""
    for folder in reversed(folders):
        try:
            metric = json.loads((folder / STATE).read_text())["recipe"]["checkpoint"]["best_metric"]
            if isinstance(metric, str):
                return metric
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # damaged, or older than `checkpoint.best_metric`
    return "eval/loss"


def verify(folder: Path) -> int:
    """Read every byte of a checkpoint; the exit code is 5 if one differs from what was written."""
    from acc_lm.checkpointing.format import open_checkpoint
    from acc_lm.checkpointing.loading import read_tensors

    began = time.monotonic()
    _whole(folder)
    checkpoint, num_tensors, elements = open_checkpoint(folder), 0, 0
    for _, tensor in read_tensors(folder):
        num_tensors, elements = num_tensors + 1, elements + tensor.numel()
    seconds = time.monotonic() - began
    print(
        f"{folder} is intact: step {checkpoint.progress.step}, {num_tensors} tensors, {elements:,} numbers, read in {seconds:.1f} s"
    )
    return 0


def export(folder: Path, output: Path) -> int:
    """Write every tensor in full, under its own name, to one safetensors file: weights, moments and buffers."""
    from safetensors.torch import save_file

    from acc_lm.checkpointing.loading import read_tensors
    from acc_lm.files import written_aside

    _whole(folder)
    if output.suffix != ".safetensors" or os.path.lexists(output):
        raise ConfigError(f"OUTPUT must be a new file that ends in .safetensors, got {output}; name another")
    tensors = dict(read_tensors(folder))
    with written_aside(output) as work:
        save_file(tensors, work, {"source": str(folder)})
    print(f"wrote {output}")
    return 0


def convert_to_hf(folder: Path, output: Path, tokenizer: str | None) -> int:
    """Write a folder that transformers loads like any other model."""
    from acc_lm.checkpointing.loading import BUFFER, read_tensors
    from acc_lm.config import AdapterConfig, ModelConfig
    from acc_lm.export.export import name_padding, write_steps
    from acc_lm.files import written_aside
    from acc_lm.modeling.adapter import save_adapter
    from acc_lm.runtime import WEIGHT, quiet_libraries
    from acc_lm.text.tokenizer import read_tokenizer

    _whole(folder)
    if os.path.lexists(output):
        raise ConfigError(f"OUTPUT must be a new folder, got {output}; name another")
    quiet_libraries()
    run = folder.resolve().parent.parent
    source = tokenizer or run / "tokenizer"
    if tokenizer is None and not Path(source).is_dir():
        raise ConfigError(
            f"the tokenizer must be in the run's folder, got nothing at {source}; pass its folder as --tokenizer"
        )
    state: dict[str, Any] = json.loads((folder / STATE).read_text())
    weights = {}
    for name, tensor in read_tensors(folder):
        kind, _, parameter = name.partition("/")
        if kind in (WEIGHT, BUFFER):
            weights[parameter] = tensor
    try:
        saved_tokenizer = read_tokenizer(source)
    except (OSError, ValueError) as error:
        refusal = CheckpointError if tokenizer is None else ConfigError
        raise refusal(
            f"{source} must hold a tokenizer that transformers loads without code of its own, got: {first_line(error)}; "
            "name the folder of an intact one with --tokenizer"
        ) from None
    with written_aside(output) as work:
        if state.get("base"):
            recipe = state["recipe"]
            adapter = AdapterConfig.model_validate_json(json.dumps(recipe["adapter"]))
            settings = _settings_of(folder, state, weights, adapter)
            model_section = ModelConfig.model_validate_json(json.dumps(recipe["model"]))
            save_adapter(work, weights, settings, model_section, state["base"])
        else:
            model = _whole_model(folder, state, weights)
            name_padding(model, saved_tokenizer)
            model.save_pretrained(work)
        saved_tokenizer.save_pretrained(work)
        step = state["progress"]["step"]
        write_steps(work, step, step)
    print(f"wrote {output}: AutoModelForCausalLM.from_pretrained({str(output)!r}) loads it")
    return 0


def _settings_of(folder: Path, state: dict[str, Any], weights: dict[str, Tensor], adapter: AdapterConfig) -> LoraConfig:
    """peft's settings of an adapter in a checkpoint; complete modules get the weights of all their names."""
    from acc_lm.modeling.adapter import lora_settings, saved_modules

    targets = sorted({name.partition(".lora_")[0] for name in weights if ".lora_" in name})
    settings = lora_settings(adapter, targets)
    complete = sorted({name.rpartition(".")[0] for name in weights if ".lora_" not in name})
    if complete:
        model = _empty_model(folder, state)
        settings.modules_to_save = saved_modules(model, complete)
        names = {id(parameter): name for name, parameter in model.named_parameters() if name in weights}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in names:
                weights[name] = weights[names[id(parameter)]]
    return settings


def _empty_model(folder: Path, state: dict[str, Any]) -> Any:
    """Build the model of a checkpoint on the meta device, without an adapter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(state.get("model_config", {}))
    if not sizes:
        raise CheckpointError(
            f"{folder} must describe its model, got no model_config in its state.json (an earlier version wrote it); "
            "resume its run for one step, and convert the checkpoint that it saves"
        )
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, attn_implementation="eager")


def _whole_model(folder: Path, state: dict[str, Any], weights: dict[str, Tensor]) -> Any:
    """Build the model of a checkpoint and load its weights."""
    from transformers import GenerationConfig

    model = _empty_model(folder, state)
    if state.get("generation_config") is not None:
        model.generation_config = GenerationConfig.from_dict(state["generation_config"])
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise CheckpointError(
            f"{folder} must hold every weight of the model, got none for {missing[0]} ({len(missing)} in all)"
        )
    return model


def _whole(folder: Path) -> None:
    from acc_lm.checkpointing.format import problem_with

    if problem := problem_with(folder):
        raise CheckpointError(f"{folder} must be an intact checkpoint, got: {problem}; name another step-* folder")
