"""Adapters: low-rank matrices that peft adds to a model whose own weights stay frozen.

peft changes the model in place: the base model keeps its class, its forward and its loss head. Some of its linear layers
now have adapter matrices next to them, and only these matrices have a gradient, with the modules that the recipe trains
too. A base is identified by a checksum of its weights: checkpoints and exports hold what is trained alone, and are useless
with another base.

    model.layers.0.self_attn.q_proj.base_layer.weight          of the base, frozen
    model.layers.0.self_attn.q_proj.lora_A.default.weight      trained
    model.embed_tokens.weight                                  trained with adapter.also_train: [embed_tokens]
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acc_lm.config import AdapterConfig, ModelConfig
from acc_lm.errors import ConfigError, first_line

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

NO_ADAPTER = AdapterConfig()


WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
BASE = "base.json"
"""File with the checksum and dtype of the base's weights; separate, as peft drops settings that it does not know."""
ALL = "all-linear"
ADAPTER_NAME = "default"
"""peft's default name of an adapter, part of the names of the adapter's parameters."""


def add_adapter(model: PreTrainedModel, config: AdapterConfig, seed: int, base: str) -> None:
    """Freeze the model and add adapter matrices to its linear layers; the same for the same seed on every engine.

    Args:
        base: checksum of the model's weights, recorded in checkpoints and exports of the adapter.

    Raises:
        ConfigError: `target_modules` names something other than linear layers of the model, or they cannot be quantized.
    """
    from peft import get_peft_model

    also = _also_trained(model, config)
    lora = lora_settings(config, _targets(model, config, also))
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns of layers with a transposed weight, which peft then handles
        try:
            get_peft_model(model, lora)
        except ValueError as error:
            raise ConfigError(
                f"adapter.target_modules must be layers that peft can adapt in a model of type {model.config.model_type}, got: "
                f"{first_line(error)}; name others"
            ) from None
    model.base_checksum = base  # type: ignore[assignment]
    for module in map(model.get_submodule, also):
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(True)
    _widen(model, also)
    if also:  # named only now: peft would have wrapped the modules, and kept a copy of each as it was
        lora.modules_to_save = saved_modules(model, also)
    if config.quantize_base != "none":
        _quantize(model, config.quantize_base)


def _quantize(model: nn.Module, kind: str) -> None:
    """Quantize the layers under an adapter to 4 bits, effective when they are moved to their device.

    They compute in the dtype that they had. Each process quantizes the same weights, so all get the same result.

    Raises:
        ConfigError: bitsandbytes is missing, or has no 4-bit version of a layer.
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
        if base.weight.is_meta:  # a model without weights, where only the shapes matter
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
        # Evaluating on a CPU would repack the weights into a layout that training cannot read.
        small.support_avx512bf16_for_cpu = False
        layer.base_layer = small


def lora_settings(config: AdapterConfig, target_modules: list[str]) -> LoraConfig:
    """The recipe's `adapter` section as peft's LoraConfig."""
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
    """Checksum of the base weights under the model's adapter; None for a model without an adapter."""
    found: str | None = model.__dict__.get("base_checksum")
    return found


def _also_trained(model: PreTrainedModel, config: AdapterConfig) -> list[str]:
    """Names of the modules that the recipe's `also_train` means.

    Raises:
        ConfigError: one of them matches no module that has weights of its own.
    """
    owners = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters(False))]
    found: list[str] = []
    for wanted in config.also_train:
        meant = [name for name in owners if name == wanted or name.endswith(f".{wanted}")]
        if not meant:
            ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in owners))
            raise ConfigError(
                f"adapter.also_train must be among {ends}, modules of the model with weights of their own, got {wanted!r}; name some of these"
            )
        found += [name for name in meant if name not in found]
    return found


def convert_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert a model's parameters in place; buffers such as rotary frequencies stay in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _widen(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Hold the own weights of these modules in float32, as those of the adapter, where the model has 16 bits.

    The rest of the model keeps its type: what leaves a module with such a weight, shared or not, is narrowed again, as not
    every layer takes inputs wider than its weights, and what enters it is widened, unless autocast chooses the types. The
    head's loss or logits stay in float32.
    """
    own = {
        id(parameter): parameter
        for name in names
        for parameter in model.get_submodule(name).parameters(recurse=False)
        if parameter.dtype == torch.bfloat16
    }
    for parameter in own.values():
        parameter.data = parameter.data.float()

    def widen(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # A weight that an engine has gathered in 16 bits needs none.
        is_wide = all(parameter.dtype != torch.bfloat16 for parameter in module.parameters(recurse=False))
        return tuple(_widened(value) for value in inputs) if is_wide else inputs

    def narrow(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output.bfloat16() if isinstance(output, Tensor) and output.dtype == torch.float32 else output

    for module in model.modules():
        if any(id(parameter) in own for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(widen)
            if module is not model.get_output_embeddings():
                module.register_forward_hook(narrow)


def _widened(value: Any) -> Any:
    """16-bit tensor in float32, unless autocast chooses the types; anything else as it is."""
    is_narrow = isinstance(value, Tensor) and value.dtype == torch.bfloat16
    return value.float() if is_narrow and not torch.is_autocast_enabled(value.device.type) else value


def saved_modules(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Names under which peft must load these modules: their own, and those of the modules that share their weights.

    peft ties nothing by itself: it loads a head that shares the embeddings' weight only if the folder has it too.
    """
    shared = {id(parameter) for name in names for parameter in model.get_submodule(name).parameters(recurse=False)}
    return [
        name
        for name, module in model.named_modules()
        if any(id(parameter) in shared for parameter in module.parameters(recurse=False))
    ]


def _targets(model: PreTrainedModel, config: AdapterConfig, also: list[str]) -> list[str]:
    """Check the recipe's `target_modules` and return them as peft takes them.

    Args:
        also: modules that are trained completely, and need no adapter.

    Raises:
        ConfigError: one of them matches no linear layer, or matches the output head or one that is trained completely.
    """
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, Conv1D))}
    there = {name for name, layer in linear.items() if layer is not head}
    if config.target_modules == (ALL,):
        # Full names: a suffix could also match another layer, such as the head.
        return sorted(there - set(also))
    for target in config.target_modules or ("nothing",):
        meant = {name for name in linear if name == target or name.endswith(f".{target}")}
        if not meant or meant - there:
            got = f"{target!r}, the output head" if meant else repr(target)
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in there}))
            raise ConfigError(
                f"adapter.target_modules must be {ALL} or among {ends or 'none'}, got {got}; name some of these"
            )
        both = sorted(meant & set(also))
        if both:
            raise ConfigError(
                f"adapter.target_modules must be layers that adapter.also_train leaves out, got {target!r}, which is {both[0]} in both; "
                "remove it from one of them"
            )
    return list(config.target_modules)


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters whose names match one of the patterns.

    Raises:
        ConfigError: a pattern matches nothing, or all of them together match everything.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = [p for name, p in named.items() if fnmatchcase(name, pattern)]
        if not matched:
            examples = ", ".join([*named][:: max(1, len(named) // 3)][:4])
            raise ConfigError(
                f"model.freeze must match names of parameters, got {pattern!r}, which matches none; use names such as {examples}"
            )
        for parameter in matched:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in named.values()):
        raise ConfigError(f"model.freeze must leave something to train, got {list(patterns)}; remove a pattern")


def weights_checksum(model: nn.Module) -> str:
    """Checksum of all parameters' names, shapes and values, whatever their dtype; a second for some billions of them."""
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
    """Write a folder that peft and transformers load: the adapter's own weights and settings, which name the base.

    Args:
        weights: complete tensors, under their names in the model.
        model: the recipe's section that names the base.
        checksum: checksum of the base's weights.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    stored: set[int] = set()
    for name, tensor in weights.items():  # tied weights have two names; a file holds each by itself
        kept = tensor.contiguous()
        tensors[_name_in_file(name)] = kept.clone() if kept.data_ptr() in stored else kept
        stored.add(kept.data_ptr())
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / BASE).write_text(json.dumps({"checksum": checksum, "dtype": model.dtype}, indent=2) + "\n")
    where = str(model.name_or_path)
    values = {
        **settings.to_dict(),
        # A local path must be found from any working directory.
        "base_model_name_or_path": os.path.abspath(where) if Path(where).is_dir() else where,
        "revision": model.revision,
        "inference_mode": True,
    }
    # peft keeps names in sets, whose order differs from process to process.
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}
    (folder / SETTINGS).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _name_in_file(name: str) -> str:
    """model.x.lora_A.default.weight -> base_model.model.model.x.lora_A.weight; others only get the prefix."""
    if f".{ADAPTER_NAME}." not in f"{name}.":
        return f"base_model.model.{name}"
    stem, _, last = name.rpartition(f".{ADAPTER_NAME}.")
    return f"base_model.model.{stem}" if stem.endswith("lora_magnitude_vector") else f"base_model.model.{stem}.{last}"


@dataclass(frozen=True)
class AdapterFolder:
    """An exported adapter, and the base that it belongs to."""

    folder: Path
    base: str
    """Path or Hub id of the base model."""
    revision: str | None
    checksum: str | None
    """Checksum of the base's weights; None in an adapter that another tool wrote."""
    dtype: str
    """Dtype in which the base's weights were loaded."""


def open_adapter(folder: Path) -> AdapterFolder | None:
    """Read and check an exported adapter; None for a folder that is not an adapter.

    Raises:
        ConfigError: the folder holds an adapter that cannot be used here.
    """
    if not (folder / SETTINGS).is_file():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        settings = json.loads((folder / SETTINGS).read_text())
        base = json.loads((folder / BASE).read_text()) if (folder / BASE).is_file() else {}
        where, kind = settings["base_model_name_or_path"], settings["peft_type"]
        # With a Megatron config, peft would import the code that it names.
        if kind != "LORA" or settings.get("megatron_config") or not isinstance(where, str):
            raise ValueError(f"kind {kind}, base {where!r}")
        with safe_open(folder / WEIGHTS, framework="pt"):  # fails if the file is incomplete
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
            f"{folder} must be a LoRA adapter with its weights in {WEIGHTS}, got: {first_line(error)}; export it again"
        ) from None


def apply_adapter(adapter: AdapterFolder, base: Any, dtype: torch.dtype | None = None) -> Any:
    """Load the exported adapter into its base and return peft's model, which can merge the two.

    Args:
        dtype: type of the base's weights from then on; None: the one that it has. The adapter has at least 32 bits.

    Raises:
        ConfigError: the base is not the model that the adapter was trained with.
    """
    from peft import PeftModel

    if adapter.checksum is not None and weights_checksum(base) != adapter.checksum:
        raise ConfigError(
            f"{adapter.folder} must be used with the base that it was trained on, got other weights at {adapter.base}; put the old weights back"
        )
    saved = _saved_in(adapter.folder, base)
    num_ids = max(
        (shape[0] for name, shape in saved.items() if base.get_submodule(name) is base.get_input_embeddings()),
        default=0,
    )
    if num_ids > base.get_input_embeddings().weight.shape[0]:  # trained with new tokens, whose rows the adapter has
        base.resize_token_embeddings(num_ids, mean_resizing=False)
    if dtype is not None:
        convert_weights(base, dtype)
    _widen(base, saved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about names that transformers will change
        return PeftModel.from_pretrained(base, adapter.folder, use_safetensors=True)


def _saved_in(folder: Path, base: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name in the base -> shape of its weight, of each module that an exported adapter has completely."""
    from safetensors import safe_open

    names = {f"base_model.model.{name}.weight": name for name, _ in base.named_modules()}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return {names[key]: tuple(file.get_slice(key).get_shape()) for key in file.keys() if key in names}  # noqa: SIM118


def choose_trained(model: PreTrainedModel, config: ModelConfig, adapter: AdapterConfig, seed: int, base: str) -> None:
    """Choose the trained parameters: all except those that the recipe freezes, or only an adapter."""
    freeze(model, config.freeze)
    if adapter.kind != "none":
        add_adapter(model, adapter, seed, base)
