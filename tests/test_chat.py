"""Which ids are learned: exactly the assistant's, each behind the very ids that generation will see."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES, Family
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from acc_lm.chat import (
    PLAIN_TEMPLATE,
    ChatTemplate,
    Conversation,
    Item,
    ItemCounts,
    build_items,
    check,
    choose_train_on,
    describe,
    detect_format,
    load_template,
    read_conversation,
)
from acc_lm.config import TokenizerConfig
from acc_lm.errors import ConfigError, DataError, UserError
from acc_lm.tokenizer import make_tokenizer

LONG = 100_000
SAID = "the assistant and the user say: hello there,\n\nhello\n\n\nindeed\n the answer of the model is three\n"

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "What it is like outside.", "parameters": {"type": "object"}},
}
MARKERS = " ".join(
    dict.fromkeys(token for family in FAMILIES.values() for token in (family.bos_token, family.eos_token, *family.special))
)


def turns(*contents: str | dict[str, Any], system: str | None = None) -> list[dict[str, Any]]:
    """user, assistant, user, ... ; a dict stands for itself."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": "system", "content": system}] if system is not None else []
    for content in contents:
        messages.append(content if isinstance(content, dict) else {"role": next(roles), "content": content})
    return messages


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": turns("What is two and two?", "Four.")},
    "three turns": {"messages": turns("hello", "hello there", "and the model?", "the answer is three", "why", "indeed")},
    "a system turn": {"messages": turns("hello", "hello there", system="Say little.")},
    "a system turn before three": {"messages": turns("hello", "hi", "more", "no", "why", "so", system="Say little.")},
    "an empty system turn": {"messages": turns("hello", "hello there", system="")},
    "an empty user turn": {"messages": turns("", "You said nothing.", "", "Again.")},
    "an empty answer": {"messages": turns("Say nothing.", "", "Well done.", "Thanks.")},
    "tool turns": {
        "tools": [TOOL],
        "messages": turns(
            "How is the weather?",
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "weather", "content": '{"sky": "grey"}'},
            "Grey.",
            "Thanks.",
            "Any time.",
        ),
    },
    "characters over several tokens": {"messages": turns("日本語 naïve?", "🙂 e\u0301té 👩‍👩‍👧 漢字", "🙃", "𝔘nicode")},
    "special tokens in the question": {"messages": turns(f"What are {MARKERS}?", "Marks.", f"{MARKERS}{MARKERS}", "Yes.")},
    "special tokens in the answer": {"messages": turns("Which marks are there?", f"There are {MARKERS} and more.")},
    "thoughts": {
        "messages": turns("a?", "<think>\nfirst\n</think>\n\nOne.", "b?", "<think>\nsecond\n</think>\n\nTwo.", "c?", "Three.")
    },
    "line breaks around": {"messages": turns("say it", "\n\n  hello\n\n", "again\n\n", "\nindeed \n")},
    "the question repeats the answer": {"messages": turns("Say Four. Four.", "Four.", "Four.", "Four. Four.")},
    "the answer plays a role": {"messages": turns("go", "assistant\nuser\n[INST] x [/INST] <<SYS>>", "on", "### User:")},
    "the answer is a template": {"messages": turns("go", "{{ 1 + 1 }}{% if x %}{# no #}", "on", "{% endfor %}")},
}  # fmt: skip


# --- tokenizers ----------------------------------------------------------------------------------------------------


def with_tokens(tokenizer: PreTrainedTokenizerFast, family: Family) -> PreTrainedTokenizerFast:
    special = [AddedToken(token, special=True, normalized=False) for token in family.special]
    tokenizer.add_special_tokens({"bos_token": family.bos_token, "eos_token": family.eos_token})
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    tokenizer.chat_template = family.without_tags
    return tokenizer


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Spaces as ▁, one before the text, unknown characters in bytes; the bytes are special tokens, as in some conversions."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)  # type: ignore[assignment]
    backend.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    letters = sorted({chr(i) for i in range(33, 127)} | {"▁"})
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=names, initial_alphabet=letters, show_progress=False)
    backend.train_from_iterator([SAID] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@functools.cache
def tokenizer_of(kind: str, name: str) -> PreTrainedTokenizerFast:
    if kind == "metaspace":
        return with_tokens(sentencepiece_like(), FAMILIES[name])
    config = TokenizerConfig(kind=kind, vocab_size=400)  # type: ignore[arg-type]
    return with_tokens(make_tokenizer(config, [SAID] * 4), FAMILIES[name])  # type: ignore[arg-type]


@pytest.fixture
def chatml() -> tuple[PreTrainedTokenizerFast, ChatTemplate]:
    tokenizer = tokenizer_of("bpe", "chatml")
    return tokenizer, load_template(tokenizer)


def decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def runs_of(item: Item) -> list[tuple[int, int]]:
    """(start, end) of each unbroken run of targets."""
    edges = [i for i in range(len(item.ids) + 1) if ([False, *item.is_target, False][i] != [*item.is_target, False][i])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def expected_turn(family: Family, tokenizer: PreTrainedTokenizerBase, conversation: Conversation, number: int) -> str:
    """What the tags in the fixture say that the assistant writes in this turn."""
    so_far = [list(conversation.messages[: number + 1])]
    tools, names = list(conversation.tools) or None, tokenizer.special_tokens_map
    (text,), (spans,) = render_jinja_template(
        so_far, tools=tools, chat_template=family.template, return_assistant_tokens_mask=True, **names
    )
    assert ([text], []) == render_jinja_template(so_far, tools=tools, chat_template=family.without_tags, **names)
    start, end = spans[-1]
    return str(text[start:end])


def generation_prompt(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, number: int) -> list[int]:
    """The ids that a library user has before the model answers."""
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    if any(token in message["content"] for token in special for message in conversation.messages):
        if "sanitize_control_tokens" not in inspect.signature(tokenizer.apply_chat_template).parameters:
            pytest.skip("this transformers cannot take special tokens in a message for text")
        options["sanitize_control_tokens"] = True
    tools = list(conversation.tools) or None
    return list(tokenizer.apply_chat_template(list(conversation.messages[:number]), tools=tools, **options))


# --- targets -------------------------------------------------------------------------------------------------------

REFUSED = {  # what the fixtures themselves refuse, with the line on which they do
    ("llama2", "tool turns"): ":4 must write the conversation, got: there are no tools",
    ("gemma", "a system turn"): ":3 must write the conversation, got: there is no system turn",
    ("gemma", "a system turn before three"): ":3 must write the conversation, got: there is no system turn",
    ("gemma", "an empty system turn"): ":3 must write the conversation, got: there is no system turn",
    ("gemma", "tool turns"): ":7 must write the conversation, got: there are no tools",
    ("phi3", "tool turns"): ":2 must write the conversation, got: there are no tools",
}
DROPPED = {("zephyr", "tool turns"), ("deepseek", "thoughts")} | {
    (name, "tool turns") for name in ("chatml", "llama3", "deepseek")  # these do not write what tools there are
}  # fmt: skip


@pytest.mark.parametrize("kind", ["byte", "bpe", "metaspace"])
@pytest.mark.parametrize("name", FAMILIES)
def test_targets_are_what_the_assistant_writes_behind_what_generation_sees(name: str, kind: str) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(kind, name)
    template = load_template(tokenizer)
    for what, record in CONVERSATIONS.items():
        conversation = read_conversation(record, "messages", "x.jsonl:1")
        if (name, what) in REFUSED:
            with pytest.raises(DataError) as refusal:
                build_items(conversation, tokenizer, template, "assistant", LONG)
            assert str(refusal.value) == f"x.jsonl:1: the tokenizer's chat template{REFUSED[name, what]}"
            continue
        items, counts = build_items(conversation, tokenizer, template, "assistant", LONG)
        found = [(item, start, end) for item in items for start, end in runs_of(item)]
        numbers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        assert len(found) == len(numbers), (name, what)
        for (item, start, end), number in zip(found, numbers, strict=True):
            text = expected_turn(family, tokenizer, conversation, number)
            text = text.replace("▁", " ") if kind == "metaspace" else text  # its way to write a space
            assert decoded(tokenizer, item.ids[:end]) == decoded(tokenizer, item.ids[:start]) + text, (name, what)
            if kind != "metaspace":  # which does not decode the space that starts a text
                assert decoded(tokenizer, item.ids[start:end]) == text, (name, what)
            assert item.ids[end - 1] == tokenizer.convert_tokens_to_ids(template.end_token)
            assert item.ids[:start] == generation_prompt(tokenizer, conversation, number), (name, what)
        assert counts == ItemCounts(
            conversations=1,
            items=len(items),
            ids=sum(len(item.ids) for item in items),
            targets=sum(end - start for _, start, end in found),
            dropped_content=int((name, what) in DROPPED),
        ), (name, what)
