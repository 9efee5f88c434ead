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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from acc_lm.errors import ConfigError, DataError
from acc_lm.sources import is_unicode, kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Format = Literal["text", "prompt_completion", "messages", "alpaca", "sharegpt"]
TrainOn = Literal["assistant", "last_assistant", "all", "completion"]
Message = dict[str, Any]
"""The record's own, but for keys without a value: role, content, and whatever else a template reads (tool_calls, name, ...)."""

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
"""Names under which transformers gives a message's thoughts to a template; the first that is there counts."""
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
    {{- message.role + ':\\n' + (message.content or '') }}
    {%- if message.tool_calls %}{{ '\\ncalls:\\n' + message.tool_calls | tojson }}{% endif %}
    {{- eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}
"""

OWN = "the tokenizer's chat template"
DAY = "chat_template_date"
"""Key of tokenizer_config.json that keeps the date of the run, for whoever uses what it exported."""
TRIAL_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}

# Around what a record writes like a special token; noncharacters, which Unicode keeps for such use.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    place: str
    """`file:line` of its record, for error messages."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """JSON schemas of the functions that the assistant can call; None: the record says nothing of tools."""
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
    plain: int = 0
    """Prompts and completions in plain text, which have no roles."""

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
    messages = _system(record, place) + _messages(
        record[columns[0]], columns[0], place, is_sharegpt=format == "sharegpt"
    )
    _check_order(messages, columns[0], place)
    return Conversation(messages, place, tools)


def _system(record: dict[str, Any], place: str) -> tuple[Message, ...]:
    """The turn that the column `system` stands for."""
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
                f"got {_shown(record[name])}"
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
            raise DataError(f"{place}: {name}.{role_key} must be {', '.join(roles)}, got {_shown(role)}")
        calls = _tool_calls(given.get("tool_calls"), roles[role], name, place)
        if content_key in given or not calls:
            _text(given.get(content_key), f"{name}.{content_key}", place)
        for key in THOUGHTS:
            _text(given.get(key, ""), f"{name}.{key}", place)
        if given.get("weight") == 0 or given.get("train") is False:
            raise DataError(f"{place}: {name} must be learned or not by data.train_on, got a weight of its own (0)")
        # Keys in the record's order, which a template may write.
        own = {names.get(key, key): inner for key, inner in given.items() if key in names or key not in names.values()}
        messages.append(own | {"role": roles[role]})
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


def _tools(value: Any, place: str) -> tuple[Mapping[str, Any], ...] | None:
    if isinstance(value, str) and value.strip():  # tables cannot hold schemas of different shapes otherwise
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise DataError(f"{place}: 'tools' must be JSON, got {_shown(value)}") from None
        check_unicode(json.dumps(value, ensure_ascii=False), "'tools'", place)  # JSON spells what UTF-8 cannot
    if not value and not isinstance(value, list):
        return None
    if not isinstance(value, list) or not all(isinstance(_function_name(tool), str) for tool in value):
        raise DataError(f"{place}: 'tools' must be a list of functions with names, got {_shown(value)}")
    for number, tool in enumerate(value):
        description = _function(tool).get("description")
        if not isinstance(description, str | None):
            raise DataError(
                f"{place}: tools[{number}] must have a string as its description, got {kind_of(description)}"
            )
    return tuple(value)


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool or a call without `{"type": "function", "function": ...}` around it."""
    inner: Mapping[str, Any] = call.get("function", call)
    return inner


def _function_name(call: Any) -> Any:
    """Name in a tool or a call; None where there is none."""
    inner = _function(call) if isinstance(call, dict) else None
    return inner.get("name") if isinstance(inner, dict) else None


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: {name} must be a string, got {kind_of(value)}")
    return check_unicode(value, name, place)


def check_unicode(text: str, name: str, place: str) -> str:
    """The text, which a tokenizer can take.

    Raises:
        DataError: there is a lone surrogate in it, or a noncharacter, which marks are made of.
    """
    if not is_unicode(text) or OPEN in text or CLOSE in text:
        raise DataError(f"{place}: {name} must be Unicode text, got half of a character or a noncharacter")
    return text


def _filled(value: Any, name: str, place: str) -> str:
    if not _text(value, name, place).strip():
        raise DataError(f"{place}: {name} must hold text, got an empty string")
    return str(value)


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
    day: str
    """Date that the template is told when it asks for the time, as YYYY-MM-DD."""
    tool_use: str | None = None
    """Jinja of the template that the tokenizer has for conversations with tools; None: this one."""

    @property
    def reads_clock(self) -> bool:
        """Whether what it writes can depend on the date."""
        return reads_clock(self.text + (self.tool_use or ""))


def reads_clock(text: str) -> bool:
    """Whether what a template writes can depend on the date."""
    return "strftime_now" in text


def load_template(tokenizer: PreTrainedTokenizerBase, file: str | None = None, day: str | None = None) -> ChatTemplate:
    """The template of a file, else the tokenizer's own, else `PLAIN_TEMPLATE`, tried on one exchange.

    Args:
        day: date for a template that reads the clock, as YYYY-MM-DD; None: that of the tokenizer's run, else today's.

    Raises:
        ConfigError: it is not there, is not Jinja, or does not write what can be learned exactly.
    """
    day = day or day_of(tokenizer) or date.today().isoformat()
    own = tokenizer.chat_template
    if file is not None:
        return _tried(read_template(file), file, day, tokenizer)
    if not own:
        return _tried(PLAIN_TEMPLATE, "acc-lm's chat template", day, tokenizer)
    if not isinstance(own, dict):
        return _tried(own, OWN, day, tokenizer)
    if "default" not in own:
        raise ConfigError(
            f"the tokenizer must have a chat template named default, got {', '.join(map(repr, sorted(own)))}; "
            "set data.chat_template to a file with the one that is meant"
        )
    return replace(_tried(own["default"], OWN, day, tokenizer), tool_use=own.get("tool_use"))


def day_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Date of the run that made or trained this tokenizer's model; None where its template reads no clock."""
    day: str | None = tokenizer.init_kwargs.get(DAY)
    return day


def _tried(
    text: str,
    origin: str,
    day: str,
    tokenizer: PreTrainedTokenizerBase,
    tools: tuple[Mapping[str, Any], ...] | None = None,
) -> ChatTemplate:
    """A template after one exchange, which shows how it ends a turn.

    Raises:
        ConfigError: it is not Jinja, or does not write what can be learned exactly.
    """
    added = [token for token in tokenizer.added_tokens_decoder.values() if not token.content.isspace()]
    draft = ChatTemplate(text, origin, "", "", _any_of([token.content for token in added if token.special]), day)

    # What an assistant's turn ends with is found by rendering one. The answer is a word that no template knows.
    answer = "answerofthetrial"
    asked: tuple[Message, ...] = ({"role": "user", "content": "question"},)
    trial = asked + ({"role": "assistant", "content": answer},)
    try:
        prompt = _render(trial[:1], tools, tokenizer, draft, add_generation_prompt=True)
        whole = _render(trial, tools, tokenizer, draft, add_generation_prompt=False)
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
    return ChatTemplate(text, origin, end[0], ending[end.end() :], _any_of(special), day)


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
    tools: tuple[Mapping[str, Any], ...] | None,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    *,
    add_generation_prompt: bool,
) -> str:
    def render(messages: list[Message]) -> Any:
        return tokenizer.apply_chat_template(
            messages,  # type: ignore[arg-type]
            tools=None if tools is None else list(tools),  # type: ignore[arg-type]
            chat_template=template.text,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )

    try:
        with _on_the_day(template):
            try:
                rendered = render(list(messages))
            except Exception:
                if all("content" in message for message in messages):
                    raise
                # Beside calls a content may be missing, which not every template can do without.
                rendered = render([{"content": ""} | message for message in messages])
    except Exception as error:  # a template is a program: what can go wrong in it is anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
        where = f"{template.origin}:{line}" if line else template.origin
        raise _TemplateError(
            f"{where} must write the conversation, got: {' '.join(str(error).split())[:200]}"
        ) from None
    return str(rendered)


@contextmanager
def _on_the_day(template: ChatTemplate) -> Iterator[None]:
    """Render with the template's day in place of today: its clock stands at midnight."""
    if not reads_clock(template.text):
        yield
        return
    from transformers.utils.chat_template_utils import _compile_jinja_template

    known = _compile_jinja_template(template.text).environment.globals
    now = known["strftime_now"]
    known["strftime_now"] = datetime.fromisoformat(template.day).strftime
    try:
        yield
    finally:
        known["strftime_now"] = now


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
        if conversation.tools is not None and template.tool_use is not None:
            template = _tried(template.tool_use, OWN + " for tools", template.day, tokenizer, (TRIAL_TOOL,))
        try:
            marked = _mark(conversation, template.control_tokens)
            if marked != conversation:
                _check_marks(marked, conversation, tokenizer, template)
            if train_on == "all":
                text = _render(marked.messages, marked.tools, tokenizer, template, add_generation_prompt=False)
                items = [_all_targets(_encode(text, tokenizer))]
                drops_content = _is_missing(_contents(marked.messages, marked.tools), text)
            else:
                items, drops_content = _chat_items(marked, tokenizer, template, train_on)
        except (_TemplateError, RecursionError) as error:
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
        plain=int(conversation.is_plain),
    )
    return kept, counts


def question_ids(question: str, tokenizer: PreTrainedTokenizerBase, day: str | None = None) -> tuple[list[int], int]:
    """Ids after which an answer to a user's question is learned and generated, and the token that ends an answer.

    Args:
        day: as in `load_template`.
    """
    turns = ({"role": "user", "content": question}, {"role": "assistant", "content": "an answer"})
    items, _ = build_items(
        Conversation(turns, "the question"),
        tokenizer,
        load_template(tokenizer, day=day),
        "assistant",
        max_length=1 << 62,
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

    # A role is the template's own word, whatever tokens there are.
    messages = tuple(mark(message) | {"role": message["role"]} for message in conversation.messages)
    tools = conversation.tools
    return replace(conversation, messages=messages, tools=None if tools is None else tuple(map(mark, tools)))


def _check_marks(
    marked: Conversation, conversation: Conversation, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate
) -> None:
    """Refuse a conversation that the template writes in another way because of the marks."""
    with_marks, without = (
        _render(some.messages, some.tools, tokenizer, template, add_generation_prompt=False)
        for some in (marked, conversation)
    )
    if re.sub(f"[{OPEN}{CLOSE}]", "", with_marks) != without:
        raise _TemplateError(
            f"{template.origin} must write special tokens in a text as it writes any text, got another text with them "
            f"({', '.join(sorted(set(template.control_tokens.findall(without)))[:3])} ...)"
        )


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


def _contents(messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] | None) -> list[str]:
    """Everything of these messages that a template must write somewhere."""
    found = []
    for message in messages:
        found.append(message.get("content", ""))
        found += [message[key] for key in THOUGHTS if key in message][:1]
        for call in message.get("tool_calls") or ():
            found += [_function_name(call), *_words_of(_function(call).get("arguments"))]
    for tool in tools or ():
        found += [_function_name(tool), _function(tool).get("description") or ""]
        parameters = _function(tool).get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        found += properties if isinstance(properties, dict) else []
    return found


def _words_of(arguments: Any) -> Iterator[str]:
    """Names and texts in the arguments of a call; numbers have several spellings."""
    if isinstance(arguments, str):
        yield arguments
    elif isinstance(arguments, dict):
        for name, inner in arguments.items():
            yield name
            yield from _words_of(inner)
    elif isinstance(arguments, list):
        for inner in arguments:
            yield from _words_of(inner)


def _is_missing(contents: list[str], text: str) -> bool:
    """Whether some content does not stand in the text, each at a place of its own; white space does not count."""
    left = "".join(text.split())
    for content in sorted(contents, key=len, reverse=True):
        spellings = content, json.dumps(content, ensure_ascii=False)[1:-1]  # templates quote what tools answer
        found = next((bare for bare in ("".join(spelling.split()) for spelling in spellings) if bare in left), None)
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
