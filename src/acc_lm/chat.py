"""Records of people's instruction data -> conversations -> items: ids, and which of them are targets.

    record ──► Conversation ──► for each assistant turn: ids of its generation prompt + ids of the turn ──► items

An item goes on with the next turn only while its ids are the beginning of that turn's generation prompt; a template that
rewrites earlier turns (it drops their thoughts, moves the system turn, ...) makes an item of each turn instead. So every target
is preceded by the very ids that generation will see, and no mask is ever found by searching a text.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from acc_lm.errors import ConfigError, DataError
from acc_lm.sources import is_unicode, kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Format = Literal["text", "prompt_completion", "messages", "alpaca", "sharegpt"]
TrainOn = Literal["assistant", "last_assistant", "all", "completion"]
Message = dict[str, Any]
"""role, content, and what the record has beside them for the template: tool_calls, name, reasoning_content, ..."""

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
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}
FOLLOWERS: dict[str | None, tuple[str, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}

# The end token, which no text can spell, closes every turn, so that a role at the start of a turn cannot be forged. A start
# token is written where the model knows one of its own, as its tokenizer would for plain text.
PLAIN_TEMPLATE = """\
{%- if bos_token is defined and bos_token != eos_token %}{{ bos_token }}{% endif %}
{%- if tools %}{{ 'tools:\\n' + tools | tojson + eos_token + '\\n' }}{% endif %}
{%- for message in messages %}
    {{- message.role + ':\\n' + message.content }}
    {%- if message.tool_calls %}{{ '\\ncalls:\\n' + message.tool_calls | tojson }}{% endif %}
    {{- eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}
"""

# Around what a record writes like a special token; noncharacters, which Unicode keeps for such use.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    place: str
    """`file:line` of its record, for error messages."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the functions that the assistant can call."""
    num_prompt_messages: int = 0
    """Messages of the prompt, of a prompt with its completion."""
    is_plain: bool = False
    """A prompt and its completion as bare text: no template, no roles."""


class Item(NamedTuple):
    ids: list[int]
    is_target: list[bool]
    """Whether each id is to be learned, given all ids before it; never the first."""


@dataclass(frozen=True)
class ItemCounts:
    """What became of conversations; `sum(counts, ItemCounts())` over all of them."""

    conversations: int = 0
    items: int = 0
    ids: int = 0
    targets: int = 0
    cut: int = 0
    """Conversations of which an item was longer than allowed and lost its end."""
    cut_targets: int = 0
    """Targets that were lost by that."""
    without_target: int = 0
    """Conversations of which no target was left."""
    dropped_content: int = 0
    """Conversations of which the template leaves something out."""

    def __add__(self, other: ItemCounts) -> ItemCounts:
        return ItemCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(ItemCounts)))


# --- records -------------------------------------------------------------------------------------------------------


def detect_format(columns: Iterable[str], place: str, text_column: str = "text") -> Format:
    """The format that the columns of a file or data set show.

    Args:
        place: the file or data set, for the error message.

    Raises:
        DataError: they show none, or several.
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
        f"{place}: must have the columns of a known format ({known}), got {got}; rename them, or set data.text_column"
    )


def choose_train_on(format: Format, train_on: TrainOn | None) -> TrainOn:
    """What is learned of this format: what the recipe says, or the answers.

    Raises:
        ConfigError: the format has no such part.
    """
    possible = TRAIN_ON[format]
    if train_on is not None and train_on not in possible:
        raise ConfigError(
            f"data.train_on must be {' or '.join(possible)} for data.format {format}, got {train_on}; change one of them"
        )
    return train_on or possible[0]


def read_conversation(record: Any, format: Format, place: str) -> Conversation:
    """The conversation of one record, in roles that a chat template understands.

    Args:
        format: any but text.
        place: `file:line`.

    Raises:
        DataError: it is not a conversation; the line says where and why. (What to do about it, correct the record or tolerate
            it, is added by whoever counts the bad records.)
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
    messages = _messages(record[columns[0]], columns[0], place, is_sharegpt=format == "sharegpt")
    system = record.get("system")
    if system:
        messages = ({"role": "system", "content": _text(system, "system", place)}, *messages)
    _check_order(messages, columns[0], place)
    return Conversation(messages, place, tools)


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
    system = record.get("system")
    return ({"role": "system", "content": _text(system, "system", place)}, *messages) if system else messages


def _prompt_completion(record: dict[str, Any], place: str, tools: tuple[Mapping[str, Any], ...]) -> Conversation:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, "prompt", place)
        messages = before + _messages(completion, "completion", place)
        _check_order(messages, "prompt + completion", place)
        return Conversation(messages, place, tools, num_prompt_messages=len(before))
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
    role_key, content_key = ("from", "value") if is_sharegpt else ("role", "content")
    roles = SHAREGPT_ROLES if is_sharegpt else {role: role for role in FOLLOWERS if role}
    messages = []
    for number, raw in enumerate(value):
        name = f"{column}[{number}]"
        if not isinstance(raw, dict):
            raise DataError(f"{place}: {name} must be an object with {role_key} and {content_key}, got {kind_of(raw)}")
        given = _without_nulls(raw)  # tables give every message every key
        if role_key not in given:
            got = ", ".join(map(repr, given)) or "nothing"
            raise DataError(f"{place}: {name} must have {role_key} and {content_key}, got {got}")
        role = given.pop(role_key)
        if not isinstance(role, str) or role not in roles:
            raise DataError(f"{place}: {name}.{role_key} must be {', '.join(roles)}, got {_shown(role)}")
        calls = _tool_calls(given.get("tool_calls"), roles[role], name, place)
        content = given.pop(content_key, "" if calls else None)
        message = {"role": roles[role], "content": _text(content, f"{name}.{content_key}", place)}
        if given.get("weight") == 0 or given.get("train") is False:
            raise DataError(f"{place}: {name} must be learned or not by data.train_on, got a weight of its own (0)")
        messages.append(message | given)
    return tuple(messages)


def _check_order(messages: tuple[Message, ...], column: str, place: str) -> None:
    """Each turn follows one that it can follow, and the last is the assistant's."""
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
        if not isinstance(_function_name(call), str):
            raise DataError(f"{place}: {name}.tool_calls[{number}] must name its function, got {_shown(call)}")
    return calls


def _tools(value: Any, place: str) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str) and value.strip():  # tables cannot hold schemas of different shapes otherwise
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise DataError(f"{place}: 'tools' must be JSON, got {_shown(value)}") from None
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(_function_name(tool), str) for tool in value):
        raise DataError(f"{place}: 'tools' must be a list of functions with names, got {_shown(value)}")
    return tuple(_without_nulls(tool) for tool in value)


def _function_name(call: Any) -> Any:
    """Of a tool or a call, with or without `{"type": "function", "function": ...}` around it."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    return inner.get("name") if isinstance(inner, dict) else None


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: {name} must be a string, got {kind_of(value)}")
    if not is_unicode(value) or OPEN in value or CLOSE in value:
        raise DataError(f"{place}: {name} must be Unicode text, got half of a character or a noncharacter")
    return value


def _filled(value: Any, name: str, place: str) -> str:
    if not _text(value, name, place).strip():
        raise DataError(f"{place}: {name} must hold text, got an empty string")
    return str(value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."


# --- templates -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatTemplate:
    text: str
    """Jinja."""
    origin: str
    """Where it came from, for error messages: a file, or the tokenizer."""
    end_token: str
    """The token with which an assistant's turn ends."""
    after_end: str
    """What the template writes behind it at the end of a conversation; no target, generation has stopped before."""
    control_tokens: re.Pattern[str]
    """Special tokens, which only the template may write."""

    @property
    def reads_clock(self) -> bool:
        """Whether what it writes can depend on today's date."""
        return "strftime_now" in self.text


def load_template(tokenizer: PreTrainedTokenizerBase, file: str | None = None) -> ChatTemplate:
    """The template of a file, else the tokenizer's own, else `PLAIN_TEMPLATE`, tried on one exchange.

    Raises:
        ConfigError: it is not there, is not Jinja, or does not write what can be learned exactly.
    """
    if file is not None:
        text, origin = read_template(file), file
    elif tokenizer.chat_template:
        text, origin = tokenizer.get_chat_template(), "the tokenizer's chat template"
    else:
        text, origin = PLAIN_TEMPLATE, "acc-lm's chat template"
    added = [token for token in tokenizer.added_tokens_decoder.values() if not token.content.isspace()]
    draft = ChatTemplate(text, origin, "", "", _any_of([token.content for token in added if token.special]))

    # What an assistant's turn ends with is found by rendering one. The answer is a word that no template knows.
    answer = "answerofthetrial"
    asked: tuple[Message, ...] = ({"role": "user", "content": "question"},)
    trial = asked + ({"role": "assistant", "content": answer},)
    try:
        prompt = _render(trial[:1], (), tokenizer, draft, add_generation_prompt=True)
        whole = _render(trial, (), tokenizer, draft, add_generation_prompt=False)
    except _TemplateError as error:
        raise ConfigError(f"{error}; correct it, or set data.chat_template to another file") from None
    ending = whole.partition(answer)[2]
    end = _any_of([token.content for token in added]).search(ending)
    if end is None:
        raise ConfigError(
            f"{origin} must end an assistant's turn with a special token of the tokenizer, got {_shown(ending)}; "
            "set data.chat_template to a file that does"
        )
    if not whole.startswith(prompt):
        raise ConfigError(
            f"{origin} must begin an assistant's turn with the generation prompt, got {_shown(prompt)} and "
            f"{_shown(whole)}; set data.chat_template to a file that does"
        )
    special = {token.content for token in added if token.special} | {end[0]}
    return ChatTemplate(text, origin, end[0], ending[end.end() :], _any_of(special))


def read_template(file: str) -> str:
    """The text of a template file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"data.chat_template must be a template file, got {file!r} ({reason})") from None


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class _TemplateError(Exception):
    """The template cannot write a conversation; its text names the template's line."""


def _render(
    messages: tuple[Message, ...],
    tools: tuple[Mapping[str, Any], ...],
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    *,
    add_generation_prompt: bool,
) -> str:
    try:
        rendered = tokenizer.apply_chat_template(
            list(messages),  # type: ignore[arg-type]
            tools=list(tools) or None,  # type: ignore[arg-type]
            chat_template=template.text,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except Exception as error:  # a template is a program: what can go wrong in it is anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
        where = f"{template.origin}:{line}" if line else template.origin
        raise _TemplateError(
            f"{where} must write the conversation, got: {' '.join(str(error).split())[:200]}"
        ) from None
    return str(rendered)


# --- items ---------------------------------------------------------------------------------------------------------


def build_items(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate | None,
    train_on: TrainOn,
    max_length: int,
) -> tuple[list[Item], ItemCounts]:
    """The ids of a conversation, as few items as the template allows, and what was lost on the way.

    An item that is too long keeps its start, so that what is left of it is still learned behind the very ids of generation,
    and gets no end token, which would teach to stop in the middle of a sentence. An item ends with its last target.

    Args:
        template: None is enough for plain prompts and completions.
        max_length: most ids of an item.

    Raises:
        DataError: the template cannot write it, or not so that it can be learned exactly.
    """
    if conversation.is_plain:
        items, drops_content = [_plain_item(conversation, tokenizer)], False
        if train_on == "all":
            items = [_all_targets(items[0].ids)]
    else:
        assert template is not None
        marked = _mark(conversation, template.control_tokens)
        try:
            if train_on == "all":
                text = _render(marked.messages, marked.tools, tokenizer, template, add_generation_prompt=False)
                items = [_all_targets(_encode(text, tokenizer))]
                drops_content = _is_missing(_contents(marked.messages, marked.tools), text)
            else:
                items, drops_content = _chat_items(marked, tokenizer, template, train_on)
        except _TemplateError as error:
            raise DataError(f"{conversation.place}: {error}") from None
    kept = [item for item in (_cut(item, max_length) for item in items) if item is not None]
    targets, all_targets = (sum(sum(item.is_target) for item in some) for some in (kept, items))
    counts = ItemCounts(
        conversations=1,
        items=len(kept),
        ids=sum(len(item.ids) for item in kept),
        targets=targets,
        cut=int(targets < all_targets),
        cut_targets=all_targets - targets,
        without_target=int(targets == 0),
        dropped_content=int(drops_content),
    )
    return kept, counts


def question_ids(question: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Ids behind which an answer to a user's question is learned and generated, and the token that ends an answer."""
    turns = ({"role": "user", "content": question}, {"role": "assistant", "content": "an answer"})
    items, _ = build_items(
        Conversation(turns, "the question"), tokenizer, load_template(tokenizer), "assistant", max_length=1 << 62
    )
    (item,) = items
    return item.ids[: item.is_target.index(True)], item.ids[-1]


def _all_targets(ids: list[int]) -> Item:
    return Item(ids, [False] + [True] * (len(ids) - 1))


def _cut(item: Item, max_length: int) -> Item | None:
    """The start of an item up to its last target there; None when there is none."""
    is_target = item.is_target[:max_length]
    if True not in is_target:
        return None
    end = len(is_target) - is_target[::-1].index(True)
    return Item(item.ids[:end], is_target[:end])


def _plain_item(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Item:
    """Prompt, completion and end token; what looks like a special token in them is text."""
    prompt, completion = (message["content"] for message in conversation.messages)
    bare = _encode_text(prompt, tokenizer)
    # Generation begins with what the tokenizer puts before a text (a start token), but not with what it puts behind it.
    dressed = list(tokenizer(prompt, split_special_tokens=True, verbose=False)["input_ids"])
    start = next(i for i in range(len(dressed) - len(bare) + 1) if dressed[i : i + len(bare)] == bare)
    turn = _continue(prompt, bare, completion, _encode_text, tokenizer)
    if turn is None:
        raise DataError(f"{conversation.place}: completion must be text that the tokenizer keeps, got other text back")
    before = dressed[: start + len(bare)]
    return Item(before + turn + [tokenizer.eos_token_id], [False] * len(before) + [True] * (len(turn) + 1))


def _chat_items(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, train_on: TrainOn
) -> tuple[list[Item], bool]:
    """Items, and whether the template leaves something out of them."""
    messages, tools, place = conversation.messages, conversation.tools, conversation.place
    turns = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and number >= conversation.num_prompt_messages
    ]
    items: list[Item] = []
    ids: list[int] = []
    is_target: list[bool] = []
    drops_content = False
    for number in turns[-1:] if train_on == "last_assistant" else turns:
        prompt = _render(messages[:number], tools, tokenizer, template, add_generation_prompt=True)
        whole = _render(messages[: number + 1], tools, tokenizer, template, add_generation_prompt=False)
        turn = whole.removeprefix(prompt).removesuffix(template.after_end)
        if not whole.startswith(prompt) or not whole.endswith(template.end_token + template.after_end):
            raise DataError(
                f"{place}: {template.origin} must write turn {number} as its generation prompt, the turn and "
                f"{template.end_token!r}, got {_shown(prompt[-30:])} and {_shown(whole[-40:])}"
            )
        drops_content |= _is_missing(_contents(messages[number : number + 1], ()), turn)
        prompt_ids = _encode(prompt, tokenizer)
        turn_ids = _continue(prompt, prompt_ids, turn, _encode, tokenizer)
        if turn_ids is None:
            raise DataError(f"{place}: turn {number} must be text that the tokenizer keeps, got other text back")
        if prompt_ids[: len(ids)] != ids:  # the template or the tokenizer now sees the earlier turns differently
            items.append(Item(ids, is_target))
            is_target = []
        is_target = is_target + [False] * (len(prompt_ids) - len(is_target)) + [True] * len(turn_ids)
        ids = prompt_ids + turn_ids
    # Earlier answers may be changed on purpose (thoughts are dropped), and were learned in their own turn.
    others = tuple(message for message in messages[: turns[-1]] if message["role"] != "assistant")
    return [*items, Item(ids, is_target)], drops_content or _is_missing(_contents(others, tools), prompt)


def _continue(
    prompt: str,
    prompt_ids: list[int],
    turn: str,
    encode: Callable[[str, PreTrainedTokenizerBase, bool], list[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[int] | None:
    """Ids of a turn behind its prompt, whose ids must stay as they are; None when the tokenizer then spells another text."""
    together = encode(prompt + turn, tokenizer, False)
    if together[: len(prompt_ids)] == prompt_ids:
        return together[len(prompt_ids) :]
    alone = encode(turn, tokenizer, True)  # the end of the prompt and the start of the turn would be one token
    return alone if _decode(prompt_ids + alone, tokenizer) == _decode(together, tokenizer) else None


def _decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


# --- special tokens in a record's text -----------------------------------------------------------------------------


def _mark(conversation: Conversation, control_tokens: re.Pattern[str]) -> Conversation:
    """The same conversation, with what is written like a special token between OPEN and CLOSE."""

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            return control_tokens.sub(lambda found: OPEN + found[0] + CLOSE, value)
        if isinstance(value, dict):
            return {key: mark(inner) for key, inner in value.items()}
        return [mark(inner) for inner in value] if isinstance(value, list) else value

    messages = tuple(mark(message) for message in conversation.messages)
    return replace(conversation, messages=messages, tools=tuple(mark(tool) for tool in conversation.tools))


def _encode(text: str, tokenizer: PreTrainedTokenizerBase, is_inside: bool = False) -> list[int]:
    """Ids of what a template wrote; what stands between OPEN and CLOSE is text, whatever it spells."""
    pieces = re.split(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}|[{OPEN}{CLOSE}]", text)  # a template can tear a pair apart
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        if not piece:
            continue
        found = _encode_piece(piece, tokenizer, is_inside or number > 0, is_text=number % 2 == 1)
        if number % 2 == 1 and tokenizer.convert_tokens_to_ids(piece) in found:
            # An end of turn that the tokenizer does not call special is only kept from being one in two parts.
            found = _encode_piece(piece[:1], tokenizer, True, True) + _encode_piece(piece[1:], tokenizer, True, True)
        ids += found
    return ids


def _encode_text(text: str, tokenizer: PreTrainedTokenizerBase, is_inside: bool = False) -> list[int]:
    """Ids of a text in which there is no special token, whatever it spells."""
    return _encode_piece(text, tokenizer, is_inside, is_text=True)


def _encode_piece(text: str, tokenizer: PreTrainedTokenizerBase, is_inside: bool, is_text: bool) -> list[int]:
    def ids_of(piece: str) -> list[int]:
        encoding = tokenizer(piece, add_special_tokens=False, split_special_tokens=is_text, verbose=False)
        return list(encoding["input_ids"])

    # Some tokenizers put a space before a text that starts, so it is encoded behind another one, with which it does not merge.
    for anchor in "\n.0" if is_inside else "":
        before, both = ids_of(anchor), ids_of(anchor + text)
        if both[: len(before)] == before:
            return both[len(before) :]
    return ids_of(text)


# --- what is reported before training ------------------------------------------------------------------------------


def _contents(messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]) -> list[str]:
    """Everything of these messages that a template must write somewhere."""
    found = []
    for message in messages:
        found += [message["content"], message.get("reasoning_content") or ""]
        found += [_function_name(call) for call in message.get("tool_calls") or ()]
    for tool in tools:
        found += [_function_name(tool), tool.get("function", tool).get("description") or ""]
    return found


def _is_missing(contents: list[str], text: str) -> bool:
    """Whether some content does not stand in the text, each at a place of its own; white space does not count."""
    left = "".join(text.split())
    for content in sorted(("".join(content.split()) for content in contents), key=len, reverse=True):
        spellings = [content, json.dumps(content, ensure_ascii=False)[1:-1]]  # templates quote what tools answer
        found = next((spelling for spelling in spellings if spelling in left), None)
        if found is None:
            return True
        if found:
            left = left.replace(found, "\n", 1)
    return False


def describe(counts: ItemCounts) -> str:
    """One line for the start of a run."""
    return (
        f"{counts.conversations} conversations in {counts.items} items: {counts.targets} targets of {counts.ids} ids; "
        f"{counts.cut} cut ({counts.cut_targets} targets lost), {counts.without_target} without a target, "
        f"{counts.dropped_content} of which the template leaves something out"
    )


def check(counts: ItemCounts, threshold: float) -> None:
    """Refuse conversations of which too many would not be learned as they are.

    Args:
        threshold: share of the conversations, for each kind of loss, that is tolerated.

    Raises:
        DataError: there is nothing to learn, or more than that is lost.
    """
    if counts.targets == 0:
        raise DataError(f"the conversations must have a target, got none in {counts.conversations}; see data.train_on")
    losses = (
        (counts.cut, "fit into data.sequence_length", "cut", "raise data.sequence_length"),
        (counts.without_target, "have a target", "without one", "raise data.sequence_length"),
        (
            counts.dropped_content,
            "be written whole by the chat template",
            "with something left out",
            "set data.chat_template",
        ),
    )
    for count, expectation, got, remedy in losses:
        if count > threshold * counts.conversations:
            raise DataError(
                f"the conversations must {expectation}, got {count} of {counts.conversations} {got} "
                f"({count / counts.conversations:.1%}); {remedy}, or raise data.max_lossy_share {threshold:g}"
            )
