"""Records of instruction data, in every common format -> conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from acc_lm.config import MESSAGE_KEYS, Format
from acc_lm.errors import ConfigError, DataError
from acc_lm.text.documents import is_unicode, kind_of

TrainOn = Literal["assistant", "last_assistant", "all", "completion"]
Message = dict[str, Any]
"""A record's message without empty keys: role, content, and all else a template reads (tool_calls, name, ...)."""
COLUMNS: dict[Format, tuple[str, ...]] = {
    "prompt_completion": ("prompt", "completion"),
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
}
TRAIN_ON: dict[Format, tuple[TrainOn, ...]] = {  # the first is the default
    "text": ("all",),
    "prompt_completion": ("completion", "all"),
    "messages": ("assistant", "last_assistant", "all"),
    "alpaca": ("assistant", "last_assistant", "all"),
    "sharegpt": ("assistant", "last_assistant", "all"),
}
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which transformers passes a message's thoughts to a template; the first one present counts."""
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}
OPTIONAL = ("system", "tools", "input")
"""Columns that some records may lack."""
LISTS_OF_MESSAGES = ("messages", "conversations", "prompt", "completion")
FOLLOWERS: dict[str | None, tuple[str, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
# Marks around text that spells a special token; noncharacters, which Unicode reserves for such use.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    place: str
    """`file:line` of its record, for error messages."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """JSON schemas of the functions that the assistant can call; None: the record does not mention tools."""
    num_prompt_messages: int = 0
    """Number of messages that belong to the prompt, in the format prompt_completion; 0 in the others."""
    is_plain: bool = False
    """True for a prompt and its completion as plain text: no template, no roles."""


def detect_format(columns: Iterable[str], place: str, text_column: str = "text") -> Format:
    """Detect the format from the columns of a file or dataset.

    Args:
        place: the file or dataset, for the error message.

    Raises:
        DataError: the columns fit no format, or several.
    """
    present = list(columns)
    wanted: dict[Format, tuple[str, ...]] = {"text": (text_column,), **COLUMNS}
    found = [name for name, needed in wanted.items() if set(needed) <= set(present)]
    if len(found) == 1:
        return found[0]
    got = ", ".join(map(repr, present)) or "none"
    if found:
        raise DataError(
            f"{place}: must have the columns of one format, got {got}, which fit {' and '.join(found)}; "
            f"set data.format to {' or '.join(found)}"
        )
    known = "; ".join(f"{name}: {' + '.join(needed)}" for name, needed in wanted.items())
    raise DataError(
        f"{place}: must have the columns of a known format ({known}), got {got}; name them in data.columns, or set data.text_column"
    )


def refuse_preferences(columns: Iterable[str], mapped: Mapping[str, str], place: str) -> None:
    """Refuse pairs of a chosen and a rejected answer, unless `data.columns` names the one to train on.

    Raises:
        DataError: the columns are those of preference data.
    """
    present = set(columns)
    if {"chosen", "rejected"} <= present and not {"chosen", "rejected"} & set(mapped.values()):
        answer = "completion" if "prompt" in present else "messages"
        other = ", or data.columns={messages: chosen} if it holds the whole conversation" if "prompt" in present else ""
        raise DataError(
            f"{place}: must be answers to learn, got preference data (chosen and rejected), which is not compared here; "
            f"train on the chosen ones with data.columns={{{answer}: chosen}}{other}"
        )


def usual_columns(columns: Iterable[str], mapped: Mapping[str, str], place: str) -> list[str]:
    """Columns of a record under the names that the formats use.

    Raises:
        DataError: a column that `data.columns` names is missing.
    """
    present = list(columns)
    theirs = {name: column for name, column in mapped.items() if name not in MESSAGE_KEYS}
    for name, column in theirs.items():
        if column not in present and name not in OPTIONAL:
            got = ", ".join(map(repr, present)) or "none"
            raise DataError(f"{place}: must have a column {column!r}, got {got}; correct data.columns.{name}")
    return [*theirs, *(name for name in present if name not in theirs and name not in theirs.values())]


def with_usual_names(record: Any, columns: Mapping[str, str], roles: Mapping[str, tuple[str, ...]], place: str) -> Any:
    """A record whose columns, message keys and roles have the usual names, with its messages as a list.

    Tables without nested columns, such as CSV, hold messages as JSON text.

    Raises:
        DataError: the text in place of messages is not JSON.
    """
    if not isinstance(record, dict):
        return record
    theirs = {column: name for name, column in columns.items() if name not in MESSAGE_KEYS}
    # A column that has a usual name but is not the mapped one is dropped.
    record = {theirs.get(name, name): value for name, value in record.items() if name in theirs or name not in columns}
    keys = {columns[name]: name for name in MESSAGE_KEYS if name in columns}
    usual = {name: role for role, names in roles.items() for name in names}
    for name in LISTS_OF_MESSAGES:
        value = record.get(name)
        if isinstance(value, str) and name in ("messages", "conversations") and value.strip():
            value = _json_in(value, name, place)
        if isinstance(value, list) and (keys or usual):
            value = [_with_usual_keys(message, keys, usual) for message in value]
        if value is not None:
            record[name] = value
    return record


def _with_usual_keys(message: Any, keys: Mapping[str, str], roles: Mapping[str, str]) -> Any:
    if not isinstance(message, dict):
        return message
    renamed = {
        keys.get(name, name): value for name, value in message.items() if name in keys or name not in keys.values()
    }
    for key in ("role", "from"):
        if isinstance(renamed.get(key), str):
            renamed[key] = roles.get(renamed[key], renamed[key])
    return renamed


def _json_in(text: str, name: str, place: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{place}: {name!r} must be a list of messages, or one as JSON, got {shown(text)}") from None
    check_unicode(json.dumps(value, ensure_ascii=False), repr(name), place)  # JSON can spell lone surrogates
    return value


def choose_train_on(format: Format, train_on: TrainOn | None) -> TrainOn:
    """Training targets for this format: the recipe's choice, or else the format's default.

    Raises:
        ConfigError: the format does not allow the recipe's choice.
    """
    possible = TRAIN_ON[format]
    if train_on is not None and train_on not in possible:
        raise ConfigError(
            f"data.train_on must be {' or '.join(possible)} for data.format {format}, got {train_on}; set it to one of these, or change data.format"
        )
    return train_on or possible[0]


def read_conversation(record: Any, format: Format, place: str) -> Conversation:
    """The conversation of one record, with roles that a chat template understands.

    Args:
        format: any but text.
        place: `file:line`.

    Raises:
        DataError: the record is not a conversation; the message has the place and the reason. (The caller that counts bad
            records adds the remedy: correct the record or tolerate it.)
    """
    if not isinstance(record, dict):
        raise DataError(f"{place}: must be an object with {' + '.join(COLUMNS[format])}, got {kind_of(record)}")
    columns = ("conversations",) if format == "messages" and "messages" not in record else COLUMNS[format]
    missing = [column for column in columns if record.get(column) is None]
    if missing:
        got = ", ".join(repr(name) for name, value in record.items() if value is not None) or "nothing"
        raise DataError(f"{place}: must have {' + '.join(COLUMNS[format])} for data.format {format}, got {got}")
    tools = _tools(record.get("tools"), place)
    if format == "alpaca":
        return Conversation(_alpaca_messages(record, place), place, tools)
    if format == "prompt_completion":
        return _prompt_completion(record, place, tools)
    listed = record[columns[0]]
    # Some data has the column of ShareGPT with messages of role and content.
    has_roles = isinstance(listed, list) and any(isinstance(one, dict) and "role" in one for one in listed)
    is_sharegpt = format == "sharegpt" and not has_roles
    messages = _system(record, place) + _messages(listed, columns[0], place, is_sharegpt=is_sharegpt)
    _check_order(messages, columns[0], place)
    return Conversation(messages, place, tools)


def _system(record: dict[str, Any], place: str) -> tuple[Message, ...]:
    """System turn from the column `system`; empty if the record has none."""
    system = record.get("system")
    return ({"role": "system", "content": _text(system, "system", place)},) if system else ()


def _alpaca_messages(record: dict[str, Any], place: str) -> tuple[Message, ...]:
    if record.get("history"):
        raise DataError(f"{place}: 'history' must be empty in data.format alpaca, got earlier turns")
    parts = [_filled(record["instruction"], "instruction", place)]
    if record.get("input"):
        parts.append(_text(record["input"], "input", place))
    messages = (
        {"role": "user", "content": "\n\n".join(parts)},
        {"role": "assistant", "content": _filled(record["output"], "output", place)},
    )
    return _system(record, place) + messages


def _prompt_completion(record: dict[str, Any], place: str, tools: tuple[Mapping[str, Any], ...] | None) -> Conversation:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _system(record, place) + _messages(prompt, "prompt", place)
        messages = before + _messages(completion, "completion", place)
        _check_order(messages, "prompt + completion", place)
        return Conversation(messages, place, tools, num_prompt_messages=len(before))
    for name, value in (("system", record.get("system")), ("tools", tools)):
        if value:
            raise DataError(
                f"{place}: {name!r} must be empty where prompt and completion are plain text, which has no roles, "
                f"got {shown(record[name])}"
            )
    pair = (
        {"role": "user", "content": _filled(prompt, "prompt", place)},
        {"role": "assistant", "content": _filled(completion, "completion", place)},
    )
    return Conversation(pair, place, num_prompt_messages=1, is_plain=True)


def _messages(value: Any, column: str, place: str, *, is_sharegpt: bool = False) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise DataError(f"{place}: {column!r} must be a list of messages, got {kind_of(value)}")
    if not value:
        raise DataError(f"{place}: {column!r} must hold messages, got an empty list")
    names = {"from": "role", "value": "content"} if is_sharegpt else {"role": "role", "content": "content"}
    role_key, content_key = names
    roles = SHAREGPT_ROLES if is_sharegpt else {role: role for role in FOLLOWERS if role}
    messages = []
    for number, raw in enumerate(value):
        name = f"{column}[{number}]"
        if not isinstance(raw, dict):
            raise DataError(f"{place}: {name} must be an object with {role_key} and {content_key}, got {kind_of(raw)}")
        given = {key: inner for key, inner in raw.items() if inner is not None}  # as apply_chat_template does
        if role_key not in given:
            got = ", ".join(map(repr, given)) or "nothing"
            raise DataError(f"{place}: {name} must have {role_key} and {content_key}, got {got}")
        role = given[role_key]
        if not isinstance(role, str) or role not in roles:
            raise DataError(
                f"{place}: {name}.{role_key} must be {', '.join(roles)} or named in data.roles, got {shown(role)}"
            )
        calls = _tool_calls(given.get("tool_calls"), roles[role], name, place)
        if content_key in given or not calls:
            _text(given.get(content_key), f"{name}.{content_key}", place)
        for key in THOUGHTS:
            _text(given.get(key, ""), f"{name}.{key}", place)
        if given.get("weight") == 0 or given.get("train") is False:
            raise DataError(f"{place}: {name} must be selected for training by data.train_on, got its own weight (0)")
        # Keys keep the order of the record, because a template may write them in that order.
        own = {names.get(key, key): inner for key, inner in given.items() if key in names or key not in names.values()}
        messages.append(own | {"role": roles[role]})
    return tuple(messages)


def _check_order(messages: tuple[Message, ...], column: str, place: str) -> None:
    """Check that each turn may follow the one before it and that the last turn is the assistant's."""
    previous = None
    for number, message in enumerate(messages):
        if message["role"] not in FOLLOWERS[previous]:
            where = f"after {previous}" if previous else "at the start"
            raise DataError(
                f"{place}: {column}[{number}] must be {' or '.join(FOLLOWERS[previous])} {where}, got {message['role']}"
            )
        previous = message["role"]
    if previous != "assistant":
        raise DataError(f"{place}: {column} must end with the assistant's turn, got {previous}")


def _tool_calls(calls: Any, role: str, name: str, place: str) -> list[Any]:
    if not calls:
        return []
    if role != "assistant":
        raise DataError(f"{place}: {name}.tool_calls must be the assistant's, got {role}")
    if not isinstance(calls, list):
        raise DataError(f"{place}: {name}.tool_calls must be a list, got {kind_of(calls)}")
    for number, call in enumerate(calls):
        if not isinstance(function_name(call), str):
            raise DataError(f"{place}: {name}.tool_calls[{number}] must name its function, got {shown(call)}")
    return calls


def _tools(value: Any, place: str) -> tuple[Mapping[str, Any], ...] | None:
    if isinstance(value, str) and value.strip():  # the only way for tables to hold schemas of different shapes
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise DataError(f"{place}: 'tools' must be JSON, got {shown(value)}") from None
        check_unicode(json.dumps(value, ensure_ascii=False), "'tools'", place)  # JSON can spell lone surrogates
    if not value and not isinstance(value, list):
        return None
    if not isinstance(value, list) or not all(isinstance(function_name(tool), str) for tool in value):
        raise DataError(f"{place}: 'tools' must be a list of functions with names, got {shown(value)}")
    for number, tool in enumerate(value):
        description = function_of(tool).get("description")
        if not isinstance(description, str | None):
            raise DataError(
                f"{place}: tools[{number}] must have a string as its description, got {kind_of(description)}"
            )
    return tuple(value)


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inner function of a tool or a call, without `{"type": "function", "function": ...}` around it."""
    inner: Mapping[str, Any] = call.get("function", call)
    return inner


def function_name(call: Any) -> Any:
    """Function name in a tool or a call; None if it has none."""
    inner = function_of(call) if isinstance(call, dict) else None
    return inner.get("name") if isinstance(inner, dict) else None


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: {name} must be a string, got {kind_of(value)}")
    return check_unicode(value, name, place)


def check_unicode(text: str, name: str, place: str) -> str:
    """Check that a tokenizer can encode the text, and return it.

    Raises:
        DataError: the text has a lone surrogate, or one of the noncharacters that serve as marks.
    """
    if not is_unicode(text) or OPEN in text or CLOSE in text:
        raise DataError(f"{place}: {name} must be Unicode text, got a lone surrogate or a noncharacter")
    return text


def _filled(value: Any, name: str, place: str) -> str:
    if not _text(value, name, place).strip():
        raise DataError(f"{place}: {name} must hold text, got an empty string")
    return str(value)


def shown(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
