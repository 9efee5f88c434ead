"""Recipe as text: file and command line -> one validated `Config`, and back."""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode

from acc_lm.config import Config, flatten
from acc_lm.config.data import KEYS_OF_RECORDS, KEYS_OF_SOURCES, SOURCES_OF_TEXT, implied_source
from acc_lm.config.messages import COMMAND, MAY_HAVE_LINES, explain_problem, place_in_recipe
from acc_lm.config.project import find_recipe
from acc_lm.errors import ConfigError
from acc_lm.redaction import CONTROL, HIDDEN, URL_LOGIN, is_secret


def load_config(file: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe file, or the named one of recipes/, apply `dotted.key=value` overrides to it and validate the result.

    Raises:
        ConfigError: with one line for each problem found.
    """
    try:
        return _load(file, overrides)
    except RecursionError:  # an alias inside its own anchor, or thousands of brackets
        raise ConfigError(
            f"{file} with its overrides must be a tree of keys, got a value that contains itself or is nested too deeply; write it out"
        ) from None


def _load(file: str | Path, overrides: Sequence[str]) -> Config:
    file = find_recipe(file)
    values, lines = _read(file)
    if "compute_environment" in values:
        raise ConfigError(
            f"{file} must be a recipe, got a config file of Accelerate; pass that to the launcher: "
            f"accelerate launch --config_file {file} train.py"
        )
    sources = {key: f"{file}:{line}" for key, line in lines.items()}
    before = _source_of(values)
    problems = [problem for override in overrides if (problem := _apply(values, sources, override))]
    _drop_what_is_replaced(values, sources, before)
    if other := next(_keys_that_are_no_text(values), None):
        where, key = other
        raise ConfigError(f"{file}: keys must be words, got {key!r} in {where or 'the recipe'}; remove it, or quote it")
    flat = flatten(values)
    secrets = [key for key in flat if is_secret(key.split(".")[-1]) and key.split(".")[0] != "model"]
    for key in secrets:
        problems.append(
            f"{place_in_recipe(sources, key)}{key} must not be in a recipe; use the environment, `hf auth login` or `wandb login`"
        )
    for key, value in flat.items():
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        if any(URL_LOGIN.search(text) for text in texts):
            problems.append(
                f"{place_in_recipe(sources, key)}{key} must not hold a login in a URL, which is written to the files of the run; "
                "use the environment, `hf auth login` or ~/.netrc"
            )
        if key not in MAY_HAVE_LINES and any(CONTROL.search(text) for text in texts):
            problems.append(
                f"{place_in_recipe(sources, key)}{key} must be one line without control characters, got {value!r}; remove them"
            )
    config = None
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            if ".".join(map(str, detail["loc"])) not in secrets:
                problems.append(explain_problem(detail, sources))
    model_config = values.get("model", {}).get("config") if isinstance(values.get("model"), dict) else None
    if isinstance(model_config, dict) and not problems:  # a misspelt key is answered before transformers is loaded
        problems += [
            f"{place_in_recipe(sources, f'model.config.{key}')}{problem}"
            for key, problem in model_config_problems(model_config)
        ]
    if problems or config is None:
        raise ConfigError(*dict.fromkeys(problems))
    return config


def dump_config(config: Config) -> str:
    """Resolved recipe as YAML, which `load_config` reads back to an equal `Config`."""
    return _dump(config.model_dump(mode="json"))


NO_PATHS = ("sample_prompt", "sample_prompts", "add_tokens", "add_special_tokens")
"""Keys whose text is no path."""


OF_THIS_MACHINE = re.compile(r"^(~\w*)?/|\b(file|local)://")
"""Start of an absolute path, or address of a local file."""


def shareable_recipe(config: Config) -> str:
    """Resolved recipe as YAML for other people: of each path of this machine, the last name alone."""

    def shared(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: inner if key in NO_PATHS else shared(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [shared(inner) for inner in value]
        return Path(value).name if isinstance(value, str) and OF_THIS_MACHINE.search(value) else value

    return _dump(shared(config.model_dump(mode="json")))


def _dump(values: dict[str, Any]) -> str:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 100
    text = io.StringIO()
    yaml.dump(values, text)
    return text.getvalue()


def model_config_problems(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Problems in `model.config` that transformers would ignore or fail on: [(field, message)].

    transformers accepts a misspelt field silently, so names are compared with the fields of the model type's config class
    and with those that its code reads without declaring them, because published configs contain these too.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        return []
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if model_type not in CAUSAL or model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, CAUSAL, n=1)
        hint = f"did you mean {near[0]}?" if near else "for example llama, gpt2 or qwen3"
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
        except Exception as error:  # each config class raises its own error types; all mean that the values do not fit
            text = " ".join(str(error).split())
            field = re.search(r"for field '(\w+)'", text)
            reason = text.split("Error: ", 1)[-1].rstrip(".")
            key = field[1] if field else ""
            name = f"model.config.{key}" if key else "model.config"
            problems.append((key, f"{name} must fit model type {model_type}: {reason}; correct the value"))
    return problems


def _undeclared_fields(config_class: Any) -> set[str]:
    """Names that a model type's own source reads from its config, whether or not the config class declares them."""
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
    """Mapping in a YAML file, and the line number of every dotted key."""
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


def _keys_that_are_no_text(values: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """(section, key) of each key that YAML reads as a number, a date, nothing and the like."""
    if isinstance(values, list | tuple):
        values = dict(zip(map(str, range(len(values))), values, strict=True))
    for key, value in values.items() if isinstance(values, dict) else ():
        if not isinstance(key, str):
            yield where, key
        else:
            yield from _keys_that_are_no_text(value, f"{where}.{key}".lstrip("."))


def _key_lines(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(node, MappingNode):
        for key, value in node.value:
            yield f"{prefix}{key.value}", key.start_mark.line + 1
            yield from _key_lines(value, f"{prefix}{key.value}.")


def _source_of(values: dict[str, Any]) -> str | None:
    """Source of a recipe's text, named or implied; None: not known."""
    data = values.get("data")
    if not isinstance(data, dict):
        return None
    return data.get("source") or implied_source(data)


def _drop_what_is_replaced(values: dict[str, Any], sources: dict[str, str], before: str | None) -> None:
    """Drop keys of the recipe that keys on the command line replace: another length of the run, model or text.

    A text named on the command line needs no `data.source`. It replaces the recipe's text, and the prompts that belong to that.

    Args:
        before: source of the recipe's own text.
    """

    def is_typed(key: str) -> bool:
        return sources.get(key) == COMMAND

    def drop(section: str, *names: str) -> None:
        for name in names:
            if isinstance(values.get(section), dict) and not is_typed(f"{section}.{name}"):
                values[section].pop(name, None)

    for section, *keys in (("training", "max_steps", "num_epochs"), ("model", "config", "name_or_path")):
        for key, other in (keys, reversed(keys)):
            value = values[section][key] if is_typed(f"{section}.{key}") else None
            if value is not None and not (isinstance(value, dict) and "model_type" not in value):
                drop(section, other)
    typed = [source for key, source in SOURCES_OF_TEXT.items() if is_typed(f"data.{key}")]
    if typed and before != typed[-1] and (not is_typed("data.source") or values["data"]["source"] == typed[-1]):
        drop("data", "source", "eval_files", *SOURCES_OF_TEXT, *KEYS_OF_SOURCES, *KEYS_OF_RECORDS)
        drop("export", "sample_prompt")
        drop("tracking", "sample_prompts")


def _apply(values: dict[str, Any], sources: dict[str, str], override: str) -> str | None:
    """Apply one `dotted.key=value` to the mapping; return the problem with it, if any."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals and key.endswith((".yaml", ".yml")):
        return f"command line: must be key=value, got {override!r}; pass a recipe with --config {override}"
    if not equals or not key:
        return f"command line: must be key=value, got {override!r}; write e.g. training.max_steps=100"
    try:
        value = _yaml().load(text) if text.strip() else None
    except YAMLError as error:
        got, why = (HIDDEN, "check its quotes") if is_secret(key) else (repr(text), " ".join(str(error).split())[:80])
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
            return f"command line: {key} must be inside a section, got {parent}, which is a value; set {parent} itself"
    old = place.get(last)
    if isinstance(value, dict) and isinstance(old, dict):
        same_type = value.get("model_type", old.get("model_type")) == old.get("model_type")
        value = {**old, **value} if same_type else value
    place[last] = value
    sources[key] = COMMAND
    return None
