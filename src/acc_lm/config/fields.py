"""Types of a recipe's fields, with the errors that they raise."""

from __future__ import annotations

import json
import os
import re
from datetime import date
from enum import Enum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

PositiveInt = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def as_tuple(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _steps_or_share(value: Any) -> Any:
    if type(value) not in (int, float) or value < 0 or (type(value) is float and not value < 1):
        raise ValueError(
            f"must be a whole number of steps, or a share of the run below 1, got {value!r}; write e.g. 100 or 0.03"
        )
    return value


WarmupSteps = Annotated[
    int | float,
    BeforeValidator(_steps_or_share),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "number", "minimum": 0, "exclusiveMaximum": 1}]}
    ),
]


def no_number(value: Any) -> Any:
    if type(value) in (int, float):  # 1 == True
        raise ValueError(f"must be true, false or a word, got {value}; write true or false")
    return value


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        raise ValueError("must hold finite numbers, got one that is not; write a finite number") from None
    return value


Settings = Annotated[dict[str, Any], AfterValidator(_finite)]
"""Arguments of a library, by its own names; numbers must be finite, because a run stores them as JSON."""
_STRING_LIST = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}
Strings = Annotated[tuple[str, ...], BeforeValidator(as_tuple), WithJsonSchema(_STRING_LIST)]
Beta = Annotated[float, Field(ge=0, lt=1)]


def _at_home(value: str) -> str:
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        raise ValueError(f"must start with the home folder of an existing user, got {value!r}; write the path in full")
    return expanded


Place = Annotated[str, AfterValidator(_at_home)]
"""Path, in which ~ is the home folder, or name on the Hub."""
Folder = Annotated[Place, AfterValidator(os.path.normpath)]


def _as_day(value: Any) -> Any:
    return value.isoformat() if type(value) is date else value  # YAML has a date type of its own


def _day(value: str) -> str:
    try:
        return date.fromisoformat(value).isoformat()
    except ValueError:
        raise ValueError(f"must be a date as YYYY-MM-DD, got {value!r}; write it like 2026-01-31") from None


Day = Annotated[str, BeforeValidator(_as_day), AfterValidator(_day)]


def _name_in_tracker(value: str) -> str:
    if not 0 < len(value) <= 128:
        raise ValueError(f"must have 1 to 128 characters, as trackers require, got {len(value)}; choose another name")
    return value


def folder_name(value: str) -> str:
    if value in (".", "..") or set(value) & set("/\\#?%:"):
        raise ValueError(
            f"must be a name without / \\ # ? % and :, got {value!r}; choose another (TensorBoard uses it as a folder name)"
        )
    return value


def _name_on_hub(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]{0,95}", value):
        raise ValueError(f"must be owner/name on the Hub, got {value!r}; write it like me/my-model")
    return value


NameOnHub = Annotated[str, AfterValidator(_name_on_hub)]
NAME_OF_SET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
EVALUATION_METRICS = ("loss", "perplexity", "token_accuracy", "bits_per_byte")
"""Metrics of the held-out text and of each evaluation set."""
NameInTracker = Annotated[str, AfterValidator(_name_in_tracker)]


class Marker(Enum):
    """Note on a field or a section: whether its value changes what is learned. Fields without one do.

    Fields that are not learned may change on resume: they decide where and how a run is carried out. They include places
    whose content is compared instead: the text and the tokenizer by the key of the rows, the base model by the checksum of
    its weights.
    """

    NOT_LEARNED = "not learned"
    LEARNED = "learned, in a section that is not"


NotLearned, Learned = Marker.NOT_LEARNED, Marker.LEARNED


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


def nearest_multiples(number: int, of: int) -> str:
    """Multiples of `of` just below and above `number`, for an error message."""
    below = number // of * of
    return ", ".join(str(n) for n in (below, below + of) if n > 0)
