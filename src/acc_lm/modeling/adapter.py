"""Adapters: low-rank matrices beside a model that stays as it is, put there by peft.

peft changes the model in place, so what is trained is the base model itself, under its own class, with its own forward and
loss head; some of its linear layers have matrices beside them now, and nothing else has a gradient. A base is known by a
checksum of its weights: checkpoints and exports hold the adapter alone, and are of no use beside another model.

    model.layers.0.self_attn.q_proj.base_layer.weight          of the base, frozen
    model.layers.0.self_attn.q_proj.lora_A.default.weight      trained
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acc_lm.config import AdapterConfig, ModelConfig
from acc_lm.errors import ConfigError
from acc_lm.tokenizer import first_line

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
BASE = "base.json"
"""Checksum and type of the base's weights; apart, for peft drops settings that it does not know."""
ALL = "all-linear"
NAME = "default"
"""peft's name of an adapter that has none; stands in the names of its parameters."""


def add_adapter(model: PreTrainedModel, config: AdapterConfig, seed: int, base: str) -> None:
    """Freeze the model and put matrices beside its linear layers; equal ones for the same seed, on every engine.

    Args:
        base: checksum of the model's weights, which checkpoints and exports of the adapter will name.

    Raises:
        ConfigError: `target_modules` names something else than linear layers of the model, or they cannot be quantized.
    """
    from peft import get_peft_model

    lora = lora_settings(config, _targets(model, config))
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of layers that store their weight the other way round, which peft then respects
        try:
            get_peft_model(model, lora)
        except ValueError as error:
            raise ConfigError(
                f"adapter.target_modules must be layers that peft can adapt in a model of type {model.config.model_type}, got: "
                f"{first_line(error)}; name others"
            ) from None
    model.base_checksum = base  # type: ignore[assignment]
    if config.quantize_base != "none":
        _quantize(model, config.quantize_base)


def _quantize(model: nn.Module, kind: str) -> None:
    """Keep the layers that matrices are beside in 4 bits, from when they are moved to their device on.

    They compute in the type that they had. Each process quantizes the same weights, so all have the same ones.

    Raises:
        ConfigError: no bitsandbytes, or layers that it has no 4-bit kind of.
    """
    try:
        from bitsandbytes.nn.modules import Linear4bit, Params4bit
    except ImportError:
        raise ConfigError(
            f"adapter.quantize_base must be none without bitsandbytes, got {kind}; pip install bitsandbytes"
        ) from None
    for name, layer in model.named_modules():
        base = getattr(layer, "base_layer", None)
        if base is None:
            continue
        if not isinstance(base, nn.Linear):
            raise ConfigError(
                f"adapter.quantize_base must be none for {name}, a {type(base).__name__}, got {kind}, which is for torch's Linear only"
            )
        if base.weight.is_meta:  # a model without weights, of which only the shapes matter
            continue
        small = Linear4bit(
            base.in_features,
            base.out_features,
            base.bias is not None,
            base.weight.dtype,
            quant_type=kind,
            device="meta",
        )
        small.weight = Params4bit(base.weight.data, requires_grad=False, quant_type=kind)
        small.bias = base.bias
        # An evaluation on a CPU would pack the weights anew, in a way that training cannot read.
        small.support_avx512bf16_for_cpu = False
        layer.base_layer = small


def lora_settings(config: AdapterConfig, target_modules: list[str]) -> LoraConfig:
    """The recipe's section in peft's words."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=target_modules,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
    )


def base_checksum(model: nn.Module) -> str | None:
    """Checksum of the weights that an adapter was put beside; None for a model without one."""
    found: str | None = model.__dict__.get("base_checksum")
    return found


def _targets(model: PreTrainedModel, config: AdapterConfig) -> list[str]:
    """The recipe's `target_modules` as peft takes them, after a look at whether each is there.

    Raises:
        ConfigError: one of them is not, or is the output head.
    """
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, Conv1D))}
    there = {name for name, layer in linear.items() if layer is not head}
    if config.target_modules == (ALL,):
        # By full names: an end that another layer shares, the head's for one, must not bring that in.
        return sorted(there)
    for target in config.target_modules or ("nothing",):
        meant = {name for name in linear if name == target or name.endswith(f".{target}")}
        if not meant or meant - there:
            got = f"{target!r}, the output head" if meant else repr(target)
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in there}))
            raise ConfigError(f"adapter.target_modules must be {ALL} or among {ends or 'none'}, got {got}; change it")
    return list(config.target_modules)


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Train none of the parameters whose names match one of the patterns.

    Raises:
        ConfigError: a pattern matches nothing, or all of them together match everything.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = [p for name, p in named.items() if fnmatchcase(name, pattern)]
        if not matched:
            examples = ", ".join([*named][:: max(1, len(named) // 3)][:4])
            raise ConfigError(
                f"model.freeze must match names of parameters, got {pattern!r}, which matches none; they are like {examples}"
            )
        for parameter in matched:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in named.values()):
        raise ConfigError(f"model.freeze must leave something to train, got {list(patterns)}; remove a pattern")


def weights_checksum(model: nn.Module) -> str:
    """Of the names, shapes and values of all parameters, whatever type holds them; a second for some billions of them."""
    import xxhash

    digest = xxhash.xxh3_128()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().float().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- the folder of an adapter --------------------------------------------------------------------------------------


def save_adapter(
    folder: Path, weights: dict[str, Tensor], settings: LoraConfig, model: ModelConfig, checksum: str
) -> None:
    """Write what peft and transformers load: the adapter's own weights and settings, which name the base.

    Args:
        weights: whole, under the names that they have in the model.
        model: where the base is from.
        checksum: of the base's weights.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_name_in_file(name): tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / BASE).write_text(json.dumps({"checksum": checksum, "dtype": model.dtype}, indent=2) + "\n")
    where = str(model.name_or_path)
    values = {
        **settings.to_dict(),
        # A path that is here must still be found from elsewhere.
        "base_model_name_or_path": os.path.abspath(where) if Path(where).is_dir() else where,
        "revision": model.revision,
        "inference_mode": True,
    }
    # peft keeps names in sets, whose order is another one in every process.
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}
    (folder / SETTINGS).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _name_in_file(name: str) -> str:
    """model.x.lora_A.default.weight -> base_model.model.model.x.lora_A.weight"""
    stem, _, last = name.rpartition(f".{NAME}.")
    return f"base_model.model.{stem}" if stem.endswith("lora_magnitude_vector") else f"base_model.model.{stem}.{last}"


@dataclass(frozen=True)
class AdapterFolder:
    """Where an exported adapter says that it belongs."""

    folder: Path
    base: str
    """Path or Hub id of the model that it was trained beside."""
    revision: str | None
    checksum: str | None
    """Of that model's weights; None in an adapter that another tool wrote."""
    dtype: str
    """Type in which these were loaded."""


def open_adapter(folder: Path) -> AdapterFolder | None:
    """What an exported adapter says of itself; None for a folder that is none.

    Raises:
        ConfigError: it is an adapter, but not one to be used here.
    """
    if not (folder / SETTINGS).is_file():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        settings = json.loads((folder / SETTINGS).read_text())
        base = json.loads((folder / BASE).read_text()) if (folder / BASE).is_file() else {}
        where, kind = settings["base_model_name_or_path"], settings["peft_type"]
        # One that names code, of Megatron, would have it imported.
        if kind != "LORA" or settings.get("megatron_config") or not isinstance(where, str):
            raise ValueError(f"kind {kind}, base {where!r}")
        with safe_open(folder / WEIGHTS, framework="pt"):  # it is whole
            pass
        if os.path.isabs(where) and not os.path.isdir(where):
            raise ConfigError(
                f"the base of the adapter {folder} must be at {where}, got nothing there; put it back, or correct base_model_name_or_path "
                f"in {SETTINGS}"
            )
        return AdapterFolder(
            folder, where, settings.get("revision"), base.get("checksum"), base.get("dtype", "float32")
        )
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} must be a LoRA adapter with its weights in {WEIGHTS}, got: {first_line(error)}; export it anew"
        ) from None


def put_beside(adapter: AdapterFolder, base: Any) -> Any:
    """The base with the exported adapter in it, as peft's model, which can merge the two.

    Raises:
        ConfigError: it is not the model that the adapter was trained beside.
    """
    from peft import PeftModel

    if adapter.checksum is not None and weights_checksum(base) != adapter.checksum:
        raise ConfigError(
            f"{adapter.folder} must be used beside the model that it was trained beside, got other weights at {adapter.base}; put those back"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that transformers will change
        return PeftModel.from_pretrained(base, adapter.folder, use_safetensors=True)
