"""Records of instruction data -> conversations -> items: ids, and which of them are targets.

    record ──► Conversation ──► for each assistant turn: ids of its generation prompt + ids of the turn ──► items

An item continues with the next turn only if its ids are the beginning of that turn's generation prompt. When a template
rewrites earlier turns (it drops their thoughts, moves the system turn, ...), the next turn starts a new item instead. So
the ids before every target are exactly those that generation will see, and no mask is ever found by searching a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from acc_lm.chat.records import CLOSE, OPEN, THOUGHTS, Conversation, Message, TrainOn, function_name, function_of, shown
from acc_lm.chat.template import OWN, TRIAL_TOOL, ChatTemplate, TemplateError, load_template, render, try_template
from acc_lm.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Item(NamedTuple):
    ids: list[int]
    is_target: list[bool]
    """Target flag of each id: True if it is learned, given all ids before it; never True for the first id."""


@dataclass(frozen=True)
class ItemCounts:
    """Numbers of conversations, items, ids, targets and losses; `sum(counts, ItemCounts())` adds them up."""

    conversations: int = 0
    items: int = 0
    ids: int = 0
    targets: int = 0
    cut: int = 0
    """Conversations with an item that was longer than allowed and lost its end."""
    cut_targets: int = 0
    """Targets lost by these cuts."""
    without_target: int = 0
    """Conversations without any target left."""
    dropped_content: int = 0
    """Conversations from which the template leaves something out."""
    plain: int = 0
    """Prompts with completions in plain text, which have no roles."""

    def __add__(self, other: ItemCounts) -> ItemCounts:
        return ItemCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(ItemCounts)))


# --- items ---------------------------------------------------------------------------------------------------------


def build_items(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate | None,
    train_on: TrainOn,
    max_length: int,
) -> tuple[list[Item], ItemCounts]:
    """Encode a conversation as the fewest items that the template allows; return the items and their counts.

    An item that is too long keeps its start, so its remaining targets are still learned after the exact ids of
    generation. It gets no end token, which would teach the model to stop in the middle of a sentence. Every item ends
    with its last target.

    Args:
        template: None is allowed for plain prompts and completions.
        max_length: maximum number of ids of an item.

    Raises:
        DataError: the template cannot write the conversation in a form that can be learned exactly.
    """
    if conversation.is_plain:
        items, drops_content = [_plain_item(conversation, tokenizer)], False
        if train_on == "all":
            items = [_all_targets(items[0].ids)]
    else:
        assert template is not None
        if conversation.tools is not None and template.tool_use is not None:
            template = try_template(template.tool_use, OWN + " for tools", template.day, tokenizer, (TRIAL_TOOL,))
        try:
            marked = _mark(conversation, template.control_tokens)
            if marked != conversation:
                _check_marks(marked, conversation, tokenizer, template)
            if train_on == "all":
                text = render(marked.messages, marked.tools, tokenizer, template, add_generation_prompt=False)
                items = [_all_targets(_encode(text, tokenizer))]
                drops_content = _is_missing(_contents(marked.messages, marked.tools), text)
            else:
                items, drops_content = _chat_items(marked, tokenizer, template, train_on)
        except (TemplateError, RecursionError) as error:
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
    """The first `max_length` ids of an item, cut after their last target; None if they have no target."""
    is_target = item.is_target[:max_length]
    if True not in is_target:
        return None
    end = len(is_target) - is_target[::-1].index(True)
    return Item(item.ids[:end], is_target[:end])


def _plain_item(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Item:
    """Item of prompt, completion and end token; a special token that is spelled in the text is text."""
    prompt, completion = (message["content"] for message in conversation.messages)
    bare = _encode_text(prompt, tokenizer)
    # Generation begins with the tokens that the tokenizer puts before a text (a start token), without those after it.
    dressed = list(tokenizer(prompt, split_special_tokens=True, verbose=False)["input_ids"])
    start = next(i for i in range(len(dressed) - len(bare) + 1) if dressed[i : i + len(bare)] == bare)
    turn = _continue(prompt, bare, completion, _encode_text, tokenizer)
    if turn is None:
        raise DataError(
            f"{conversation.place}: completion must be text that the tokenizer preserves, got different text back"
        )
    before = dressed[: start + len(bare)]
    return Item(before + turn + [tokenizer.eos_token_id], [False] * len(before) + [True] * (len(turn) + 1))


def _chat_items(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, train_on: TrainOn
) -> tuple[list[Item], bool]:
    """Items, and True if the template leaves something out of them."""
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
        prompt = render(messages[:number], tools, tokenizer, template, add_generation_prompt=True)
        whole = render(messages[: number + 1], tools, tokenizer, template, add_generation_prompt=False)
        turn = whole.removeprefix(prompt).removesuffix(template.after_end)
        if not whole.startswith(prompt) or not whole.endswith(template.end_token + template.after_end):
            raise DataError(
                f"{place}: {template.origin} must write turn {number} as its generation prompt, the turn and "
                f"{template.end_token!r}, got {shown(prompt[-30:])} and {shown(whole[-40:])}"
            )
        drops_content |= _is_missing(_contents(messages[number : number + 1], ()), turn)
        prompt_ids = _encode(prompt, tokenizer)
        turn_ids = _continue(prompt, prompt_ids, turn, _encode, tokenizer)
        if turn_ids is None:
            raise DataError(
                f"{place}: turn {number} must be text that the tokenizer preserves, got different text back"
            )
        if prompt_ids[: len(ids)] != ids:  # the template or the tokenizer now writes the earlier turns differently
            items.append(Item(ids, is_target))
            is_target = []
        is_target = is_target + [False] * (len(prompt_ids) - len(is_target)) + [True] * len(turn_ids)
        ids = prompt_ids + turn_ids
    # A template may change earlier answers on purpose (drop their thoughts); they were learned in their own turn.
    others = tuple(message for message in messages[: turns[-1]] if message["role"] != "assistant")
    return [*items, Item(ids, is_target)], drops_content or _is_missing(_contents(others, tools), prompt)


def _continue(
    prompt: str,
    prompt_ids: list[int],
    turn: str,
    encode: Callable[[str, PreTrainedTokenizerBase, bool], list[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[int] | None:
    """Ids of a turn after its prompt, whose ids must not change; None if the ids then decode to another text."""
    together = encode(prompt + turn, tokenizer, False)
    if together[: len(prompt_ids)] == prompt_ids:
        return together[len(prompt_ids) :]
    alone = encode(turn, tokenizer, True)  # the end of the prompt and the start of the turn would merge into one token
    return alone if _decode(prompt_ids + alone, tokenizer) == _decode(together, tokenizer) else None


def _decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


# --- special tokens in a record's text -----------------------------------------------------------------------------


def _mark(conversation: Conversation, control_tokens: re.Pattern[str]) -> Conversation:
    """The same conversation, with OPEN and CLOSE around all text that spells a special token."""

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            return control_tokens.sub(lambda found: OPEN + found[0] + CLOSE, value)
        if isinstance(value, dict):
            return {key: mark(inner) for key, inner in value.items()}
        return [mark(inner) for inner in value] if isinstance(value, list) else value

    # A role is a word of the template, even if it spells a special token.
    messages = tuple(mark(message) | {"role": message["role"]} for message in conversation.messages)
    tools = conversation.tools
    return replace(conversation, messages=messages, tools=None if tools is None else tuple(map(mark, tools)))


def _check_marks(
    marked: Conversation, conversation: Conversation, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate
) -> None:
    """Refuse a conversation that the template writes differently because of the marks."""
    with_marks, without = (
        render(some.messages, some.tools, tokenizer, template, add_generation_prompt=False)
        for some in (marked, conversation)
    )
    if re.sub(f"[{OPEN}{CLOSE}]", "", with_marks) != without:
        raise TemplateError(
            f"{template.origin} must treat special tokens in a text like any other text, got a different text with them "
            f"({', '.join(sorted(set(template.control_tokens.findall(without)))[:3])} ...)"
        )


def _encode(text: str, tokenizer: PreTrainedTokenizerBase, is_inside: bool = False) -> list[int]:
    """Ids of a template's output; everything between OPEN and CLOSE is text, whatever it spells."""
    pieces = re.split(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}|[{OPEN}{CLOSE}]", text)  # a template can separate a pair
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        if not piece:
            continue
        found = _encode_piece(piece, tokenizer, is_inside or number > 0, is_text=number % 2 == 1)
        if number % 2 == 1 and tokenizer.convert_tokens_to_ids(piece) in found:
            # An end-of-turn token that the tokenizer does not mark as special stays text only if encoded in two parts.
            found = _encode_piece(piece[:1], tokenizer, True, True) + _encode_piece(piece[1:], tokenizer, True, True)
        ids += found
    return ids


def _encode_text(text: str, tokenizer: PreTrainedTokenizerBase, is_inside: bool = False) -> list[int]:
    """Ids of plain text, in which nothing is a special token, whatever it spells."""
    return _encode_piece(text, tokenizer, is_inside, is_text=True)


def _encode_piece(text: str, tokenizer: PreTrainedTokenizerBase, is_inside: bool, is_text: bool) -> list[int]:
    def ids_of(piece: str) -> list[int]:
        encoding = tokenizer(piece, add_special_tokens=False, split_special_tokens=is_text, verbose=False)
        return list(encoding["input_ids"])

    # Some tokenizers put a space before a text, so it is encoded after an anchor with which it does not merge.
    for anchor in "\n.0" if is_inside else "":
        before, both = ids_of(anchor), ids_of(anchor + text)
        if both[: len(before)] == before:
            return both[len(before) :]
    return ids_of(text)


# --- report before training ----------------------------------------------------------------------------------------


def _contents(messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] | None) -> list[str]:
    """Everything in these messages and tools that a template must write somewhere."""
    found = []
    for message in messages:
        found.append(message.get("content", ""))
        found += [message[key] for key in THOUGHTS if key in message][:1]
        for call in message.get("tool_calls") or ():
            found += [function_name(call), *_words_of(function_of(call).get("arguments"))]
    for tool in tools or ():
        found += [function_name(tool), function_of(tool).get("description") or ""]
        parameters = function_of(tool).get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        found += properties if isinstance(properties, dict) else []
    return found


def _words_of(arguments: Any) -> Iterator[str]:
    """Names and strings in the arguments of a call, without numbers, which have several spellings."""
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
    """True if some content is not in the text, where each content needs its own place; white space is ignored."""
    left = "".join(text.split())
    for content in sorted(contents, key=len, reverse=True):
        spellings = content, json.dumps(content, ensure_ascii=False)[1:-1]  # templates quote the answers of tools
        found = next((bare for bare in ("".join(spelling.split()) for spelling in spellings) if bare in left), None)
        if found is None:
            return True
        if found:
            left = left.replace(found, "\n", 1)
    return False


def describe(counts: ItemCounts) -> str:
    """One-line summary for the start of a run."""
    return (
        f"{counts.conversations} conversations in {counts.items} items: {counts.targets} targets of {counts.ids} ids; "
        f"{counts.cut} cut ({counts.cut_targets} targets lost), {counts.without_target} without a target, "
        f"{counts.dropped_content} with content left out by the template"
    )


def check(counts: ItemCounts, threshold: float) -> None:
    """Refuse a corpus in which too many conversations would not be learned completely.

    Args:
        threshold: tolerated share of the conversations, for each kind of loss.

    Raises:
        DataError: there is no target, or a loss exceeds the threshold.
    """
    if counts.targets == 0:
        cut = f", {counts.cut} of them cut before their first target" if counts.cut else ""
        way = "raise data.sequence_length" if counts.cut else "see data.train_on"
        raise DataError(f"the conversations must have a target, got none in {counts.conversations}{cut}; {way}")
    losses = (
        (counts.cut, "fit into data.sequence_length", "cut", "raise data.sequence_length"),
        (counts.without_target, "have a target", "without one", "raise data.sequence_length"),
        (
            counts.dropped_content,
            "be written in full by the chat template",
            "with content left out",
            "set data.chat_template",
        ),
    )
    for count, expectation, got, remedy in losses:
        if count > threshold * counts.conversations:
            raise DataError(
                f"the conversations must {expectation}, got {count} of {counts.conversations} {got} "
                f"({count / counts.conversations:.1%}); {remedy}, or raise data.max_lossy_share {threshold:g}"
            )
