"""A recipe as text: file and command line -> one validated `Config`, and back."""

from __future__ import annotations

import difflib
import io
import json
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode

from acc_lm.config import Config, Section, flatten
from acc_lm.errors import ConfigError
from acc_lm.redaction import CONTROL, HIDDEN, URL_LOGIN, is_secret

# Names that people bring from other tools, and what they are called here.
FOREIGN_NAMES = {
    "model_name_or_path": "model.name_or_path",
    "base_model": "model.name_or_path",
    "model_revision": "model.revision",
    "torch_dtype": "model.dtype",
    "activation_checkpointing": "model.gradient_checkpointing",
    "dataset_name": "data.dataset",
    "dataset_mixture": "data.mixture",
    "datasets": "data.mixture",
    "dataset_mixer": "data.mixture",
    "train_file": "data.files",
    "validation_file": "data.eval_files",
    "eval_dataset": "data.eval_files (data.evaluation_sets for several by name)",
    "eval_datasets": "data.evaluation_sets",
    "test_datasets": "data.evaluation_sets",
    "dataset_text_field": "data.text_column",
    "max_seq_length": "data.sequence_length",
    "max_length": "data.sequence_length",
    "sequence_len": "data.sequence_length",
    "block_size": "data.sequence_length",
    "dataloader_num_workers": "data.num_workers",
    "per_device_train_batch_size": "training.micro_batch_size",
    "per_device_eval_batch_size": "training.micro_batch_size",
    "batch_size": "training.global_batch_size (rows of all processes) or training.micro_batch_size (of one forward)",
    "train_batch_size": "training.global_batch_size",
    "global_train_batch_size": "training.global_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size (accumulation is derived from it)",
    "accumulate_grad_batches": "training.global_batch_size (accumulation is derived from it)",
    "num_train_epochs": "training.num_epochs",
    "max_epochs": "training.num_epochs",
    "epochs": "training.num_epochs",
    "max_train_steps": "training.max_steps",
    "max_iters": "training.max_steps",
    "logging_steps": "training.log_every",
    "log_every_n_steps": "training.log_every",
    "log_interval": "training.log_every",
    "eval_steps": "training.eval_every",
    "eval_interval": "training.eval_every",
    "val_check_interval": "training.eval_every",
    "eval_strategy": "training.eval_every",
    "evaluation_strategy": "training.eval_every",
    "precision": "training.mixed_precision",
    "tf32": "training.allow_tf32",
    "full_determinism": "training.deterministic",
    "lr": "optimizer.learning_rate",
    "optim": "optimizer.name",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.epsilon",
    "gradient_clip_val": "optimizer.max_grad_norm",
    "grad_clip": "optimizer.max_grad_norm",
    "lr_scheduler_type": "schedule.name",
    "lr_scheduler_kwargs": "schedule.arguments",
    "warmup_ratio": "schedule.warmup_steps",
    "warmup_iters": "schedule.warmup_steps",
    "min_lr": "schedule.min_learning_rate",
    "save_steps": "checkpoint.every",
    "save_strategy": "checkpoint.every",
    "checkpointing_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "save_top_k": "checkpoint.keep_best",
    "load_best_model_at_end": "export.weights (best)",
    "metric_for_best_model": "checkpoint.best_metric",
    "greater_is_better": "checkpoint.best_metric (its direction is known)",
    "early_stopping_threshold": "training.early_stopping_min_improvement",
    "early_stop_patience": "training.early_stopping_patience",
    "resume_from_checkpoint": "checkpoint.resume",
    "ckpt_path": "checkpoint.resume",
    "overwrite_output_dir": "checkpoint.resume",
    "default_root_dir": "output_dir",
    "data_seed": "seed",
    "wandb_project": "tracking.project",
    "with_tracking": "tracking.report_to",
    "ddp_timeout": "distributed.timeout_seconds",
    "ddp_find_unused_parameters": "distributed.find_unused_parameters",
    "ddp_bucket_cap_mb": "distributed.bucket_cap_mb",
    "bf16": "training.mixed_precision",
    "fp16": "training.mixed_precision",
    "dataset_config_name": "data.dataset_config",
    "validation_split_percentage": "data.eval_fraction",
    "max_tokens": "training.max_steps (tokens / (global batch x sequence length))",
    "eval_iters": "training.eval_batches",
    "limit_val_batches": "training.eval_batches",
    "num_warmup_steps": "schedule.warmup_steps",
    "lr_warmup_steps": "schedule.warmup_steps",
    "lr_decay_iters": "training.max_steps (the decay ends with the last step)",
    "max_norm": "optimizer.max_grad_norm",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "save_interval": "checkpoint.every",
    "always_save_checkpoint": "checkpoint.every",
    "out_dir": "output_dir",
    "logger_name": "tracking.report_to",
    "wandb_log": "tracking.report_to",
    "wandb_run_name": "tracking.run_name",
    "tokenizer_dir": "tokenizer.name_or_path",
    "tokenizer_name": "tokenizer.name_or_path",
    "ddp_backend": "distributed.backend",
    "ddp_broadcast_buffers": "distributed.broadcast_buffers",
    "ddp_static_graph": "distributed.static_graph",
    "use_peft": "adapter.kind (lora)",
    "use_lora": "adapter.kind (lora)",
    "peft_type": "adapter.kind (lora)",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_target": "adapter.target_modules",
    "lora_target_modules": "adapter.target_modules",
    "lora_target_linear": "adapter.target_modules (all-linear)",
    "peft_use_dora": "adapter.use_dora",
    "peft_use_rslora": "adapter.use_rslora",
    "freeze_parameters": "model.freeze",
}
COMMAND = "command line"
MAY_HAVE_LINES = ("export.sample_prompt", "tracking.sample_prompts")


def load_config(file: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe file, lay `dotted.key=value` overrides over it and validate the whole.

    Raises:
        ConfigError: with one line for each problem found.
    """
    values, lines = _read(Path(file))
    if "compute_environment" in values:
        raise ConfigError(
            f"{file} must be a recipe, got a config file of Accelerate; that one is given to the launcher: "
            f"accelerate launch --config_file {file} train.py"
        )
    sources = {key: f"{file}:{line}" for key, line in lines.items()}
    problems = [problem for override in overrides if (problem := _apply(values, sources, override))]
    flat = flatten(values)
    secrets = [key for key in flat if is_secret(key.split(".")[-1]) and key.split(".")[0] != "model"]
    for key in secrets:
        problems.append(
            f"{_where(sources, key)}{key} must not be in a recipe; use the environment, `hf auth login` or `wandb login`"
        )
    for key, value in flat.items():
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        if any(URL_LOGIN.search(text) for text in texts):
            problems.append(
                f"{_where(sources, key)}{key} must not hold a login in a URL, which is written to the files of the run; "
                "use the environment, `hf auth login` or ~/.netrc"
            )
        if key not in MAY_HAVE_LINES and any(CONTROL.search(text) for text in texts):
            problems.append(
                f"{_where(sources, key)}{key} must be one line without control characters, got {value!r}; remove them"
            )
    config = None
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            if ".".join(map(str, detail["loc"])) not in secrets:
                problems.append(_explain(detail, sources))
    model_config = values.get("model", {}).get("config") if isinstance(values.get("model"), dict) else None
    if isinstance(model_config, dict):
        problems += [
            f"{_where(sources, f'model.config.{key}')}{problem}" for key, problem in model_config_problems(model_config)
        ]
    if problems or config is None:
        raise ConfigError(*dict.fromkeys(problems))
    return config


def dump_config(config: Config) -> str:
    """The resolved recipe as YAML that `load_config` reads back to an equal `Config`."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 100
    text = io.StringIO()
    yaml.dump(config.model_dump(mode="json"), text)
    return text.getvalue()


def model_config_problems(values: dict[str, Any]) -> list[tuple[str, str]]:
    """What transformers would swallow or choke on in `model.config`: [(field, message)].

    transformers accepts a misspelt field silently, so names are compared with those of the model type's own class, and
    with those that its code reads without declaring them, as published configs have them too.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        return []
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if model_type not in CAUSAL or model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, CAUSAL, n=1)
        hint = f"did you mean {near[0]}?" if near else "llama, gpt2 and qwen3 are some"
        return [
            (
                "model_type",
                f"model.config.model_type must be a causal language model of transformers, got {model_type!r}; {hint}",
            )
        ]
    config_class = CONFIG_MAPPING[model_type]
    import inspect

    known = {name for name in inspect.signature(config_class.__init__).parameters if name not in ("self", "kwargs")}
    known |= set(config_class.attribute_map) | {"model_type", "rope_theta", "rope_scaling"}
    if not known.issuperset(values):
        known |= _undeclared_fields(config_class)
    problems = []
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see transformers' {config_class.__name__}"
            problems.append(
                (key, f"model.config.{key} must be a field of model type {model_type}, got {key!r}; {hint}")
            )
    if not problems:
        try:
            config_class(**{key: value for key, value in values.items() if key != "model_type"})
        except Exception as error:  # each config class raises its own kinds; all mean that the values do not fit
            text = " ".join(str(error).split())
            field = re.search(r"for field '(\w+)'", text)
            reason = text.split("Error: ", 1)[-1].rstrip(".")
            key = field[1] if field else ""
            name = f"model.config.{key}" if key else "model.config"
            problems.append((key, f"{name} must fit model type {model_type}: {reason}; change it"))
    return problems


def _undeclared_fields(config_class: Any) -> set[str]:
    """Names that a model type's own source reads from its config, whether the config's class declares them or not."""
    import inspect

    file = Path(inspect.getfile(config_class))
    files = (file, file.with_name(file.name.replace("configuration_", "modeling_")))
    source = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    read = r"""\bconfig\.([a-z]\w*)|\bgetattr\((?:self\.)?config, "([a-z]\w*)"|\bkwargs\.(?:pop|get)\("([a-z]\w*)\""""
    names = {name for found in re.findall(read, source) for name in found if name}
    return {name for name in names if not callable(getattr(config_class, name, None))}


# --- reading -------------------------------------------------------------------------------------------------------


def _yaml() -> YAML:
    return YAML(typ="safe", pure=True)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in a YAML file, and the line of every dotted key."""
    if not file.is_file():
        folder = file.parent if file.parent.is_dir() else Path("recipes")
        near = difflib.get_close_matches(str(file), [str(p) for p in sorted(folder.glob("*.yaml"))], n=1, cutoff=0.3)
        raise ConfigError(
            f"{file} must be a recipe file, got nothing there; " + (f"nearest: {near[0]}" if near else "check the path")
        )
    try:
        text = file.read_text(encoding="utf-8")
        values = _yaml().load(text)
        node = _yaml().compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(error.problem or error.context).split())
        raise ConfigError(f"{file}{line}: must be YAML, got {problem}; correct that line") from None
    except OSError as error:
        raise ConfigError(f"{file} must be readable, got: {error.strerror}; change its permissions") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} must be YAML in UTF-8, got {' '.join(str(error).split())}; correct the file"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must be a mapping of keys, got {type(values).__name__}; see recipes/quickstart.yaml")
    return values, dict(_key_lines(node))


def _key_lines(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(node, MappingNode):
        for key, value in node.value:
            yield f"{prefix}{key.value}", key.start_mark.line + 1
            yield from _key_lines(value, f"{prefix}{key.value}.")


def _apply(values: dict[str, Any], sources: dict[str, str], override: str) -> str | None:
    """Lay one `dotted.key=value` over the mapping; returns the problem with it, if any."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals and key.endswith((".yaml", ".yml")):
        return f"command line: must be key=value, got {override!r}; a recipe is named with --config {override}"
    if not equals or not key:
        return f"command line: must be key=value, got {override!r}; write e.g. training.max_steps=100"
    try:
        value = _yaml().load(text) if text.strip() else None
    except YAMLError as error:
        got, why = (HIDDEN, "see its quotes") if is_secret(key) else (repr(text), " ".join(str(error).split())[:80])
        return f"command line: {key} must have a YAML value, got {got}; {why}"
    *parents, last = key.split(".")
    place = values
    for depth, name in enumerate(parents):
        if place.get(name) is None:
            place[name] = {}
            sources.setdefault(".".join(parents[: depth + 1]), COMMAND)
        place = place[name]
        if not isinstance(place, dict):
            parent = ".".join(parents[: depth + 1])
            return f"command line: {key} must be inside a section, got {parent} which is a value; remove the rest"
    old = place.get(last)
    if isinstance(value, dict) and isinstance(old, dict):
        same_type = value.get("model_type", old.get("model_type")) == old.get("model_type")
        value = {**old, **value} if same_type else value
    place[last] = value
    sources[key] = COMMAND
    return None


# --- explaining ----------------------------------------------------------------------------------------------------


def _where(sources: dict[str, str], key: str) -> str:
    """`file:line: ` or `command line: ` of a key, or of the nearest section around it, which a command may have changed."""
    section = key.rpartition(".")[0]
    if key not in sources and COMMAND in (place for name, place in sources.items() if name.startswith(f"{section}.")):
        return f"{COMMAND}: "
    while key and key not in sources:
        key = key.rpartition(".")[0]
    return f"{sources[key]}: " if key else ""


EXPECTATIONS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "dict_type": "a mapping",
    "model_type": "a section of keys",
    "tuple_type": "a list",
    "too_long": "a shorter list",
    "missing": "given",
}


def _explain(detail: Any, sources: dict[str, str]) -> str:
    """One line for one pydantic error."""
    location = [str(part) for part in detail["loc"]]
    key, kind, context = ".".join(location), detail["type"], detail.get("ctx", {})
    where = _where(sources, key)
    if kind == "extra_forbidden":
        return f"{where}{key} must be a known key, got {location[-1]!r}; {_right_spelling(location)}"
    if kind == "value_error":
        message = str(context["error"])
        if not location:
            named = message.split(" ", 1)[0]
            return f"{_where(sources, named)}{message}"
        first = message.split(" ", 1)[0]
        inner = f"{key}.{first}"
        return f"{_where(sources, inner)}{key}.{message}" if first != "must" else f"{where}{key} {message}"
    if kind == "missing":
        return f"{where}{key} must be given, got nothing; add it to the recipe"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        sign = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}[kind]
        limit = next(iter(context.values()))
        expectation = f"a number {sign} {limit:g}"
    elif kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        choices = [{"True": "true", "False": "false"}.get(choice, choice) for choice in choices]
        expectation = f"one of {', '.join(choices)}"
    elif kind == "missing" or kind not in EXPECTATIONS:
        expectation = detail["msg"].removeprefix("Input should be ")
    else:
        expectation = EXPECTATIONS[kind]
    given = detail["input"]
    hint = "change it"
    if kind == "literal_error" and isinstance(given, str):
        near = difflib.get_close_matches(given, choices, n=1)
        hint = f"did you mean {near[0]}?" if near else hint
    return f"{where}{key} must be {expectation}, got {given!r} ({_type_name(given)}); {hint}"


def _type_name(value: Any) -> str:
    names = {"str": "a string", "int": "a whole number", "float": "a number", "bool": "a boolean", "NoneType": "null"}
    return names.get(
        type(value).__name__, {"dict": "a mapping", "list": "a list", "tuple": "a list"}.get(type(value).__name__, "?")
    )


def _right_spelling(location: list[str]) -> str:
    """The key that was meant: our name for another tool's, the right section, or the nearest spelling."""
    name = location[-1].replace("-", "_")
    if name in FOREIGN_NAMES:
        return f"{name} is another tool's name, here it is {FOREIGN_NAMES[name]}"
    in_list = any(part.isdigit() for part in location)
    location = [*".".join("[]" if part.isdigit() else part for part in location).replace(".[]", "[]").split(".")]
    keys = [key for key, *_ in describe_keys() if ("[]" in key) == in_list]
    same = [key for key in keys if key.split(".")[-1] == name]
    if same:
        return f"did you mean {' or '.join(same)}?"
    section = ".".join(location[:-1])
    siblings = [key.split(".")[-1] for key in keys if key.rpartition(".")[0] == section]
    siblings += list(Config.model_fields) if not section else []
    near = difflib.get_close_matches(name, siblings, n=1)
    if near:
        return f"did you mean {near[0]}?"
    anywhere = difflib.get_close_matches(name, [key.split(".")[-1] for key in keys], n=1)
    full = [key for key in keys if anywhere and key.split(".")[-1] == anywhere[0]]
    return f"did you mean {full[0]}?" if full else "see train.py --help"


# --- describing ----------------------------------------------------------------------------------------------------


def describe_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, type, default, description) of every key; those of a list's sections, `list[].key`, come last."""
    lists = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from describe_keys(field.annotation, f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else _as_yaml(field.get_default(call_default_factory=True))
            yield f"{prefix}{name}", _type_text(field), default, field.description or ""
            if (inner := _section_in_list(field.annotation)) is not None:
                lists.append((inner, f"{prefix}{name}[]."))
    for inner, inner_prefix in lists:
        yield from describe_keys(inner, inner_prefix)


def _section_in_list(annotation: Any) -> type[Section] | None:
    item = (*typing.get_args(annotation), None)[0] if typing.get_origin(annotation) is tuple else None
    return item if isinstance(item, type) and issubclass(item, Section) else None


def _title(section: str) -> str:
    """What the class of a section says of it."""
    if not section:
        return "The run."
    found: Any = Config
    for name in section.split("."):
        annotation = found.model_fields[name.removesuffix("[]")].annotation
        found = _section_in_list(annotation) or annotation
    return str(found.__doc__)


def _as_yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return json.dumps(list(value))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _type_text(field: FieldInfo) -> str:
    def text(annotation: Any) -> str:
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Literal:
            return " | ".join(map(_as_yaml, arguments))
        if origin is typing.Annotated:
            return text(arguments[0])
        if origin in (typing.Union, types.UnionType):
            return " | ".join(dict.fromkeys(text(a) for a in arguments))
        if origin is tuple:
            return f"[{', '.join(text(a) for a in arguments if a is not Ellipsis)}{', ...' if Ellipsis in arguments else ''}]"
        if origin is dict:
            return "mapping"
        if issubclass(annotation, Section):
            return "mapping"
        return {"NoneType": "null", "str": "string", "int": "int", "float": "float", "bool": "bool"}[
            annotation.__name__
        ]

    return text(field.annotation)


def help_text() -> str:
    """Every key with type, default and meaning, for `--help`."""
    out = []
    section = None
    for key, kind, default, description in describe_keys():
        name, _, _ = key.rpartition(".")
        if name != section:
            section = name
            out.append(f"\n{name or 'top level'}: {_title(name)}")
        shown = default if default == "required" else f"default {default}"
        out.append(f"  {key}  ({kind}; {shown})\n      {description}")
    return "\n".join(out)


def markdown() -> str:
    """`docs/recipe.md`: the reference of every key."""
    out = [
        "# The recipe, key by key",
        "",
        "Generated by `acc-lm recipe markdown`; the classes in `src/acc_lm/config.py` are the source.",
        "A key is set in a YAML file or on the command line as `section.key=value`.",
    ]
    section = None
    for key, kind, default, description in describe_keys():
        name = key.rpartition(".")[0]
        if name != section:
            section = name
            out += [
                "",
                f"## {name or 'top level'}",
                "",
                _title(name),
                "",
                "| key | type | default | meaning |",
                "|---|---|---|---|",
            ]
        cells = (f"`{key}`", kind, f"`{default}`", description)
        out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(out) + "\n"


def json_schema() -> str:
    """`recipes/schema.json`: lets an editor complete and check a recipe."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "acc-lm recipe"
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
