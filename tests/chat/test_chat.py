"""Learned ids: exactly the assistant's, each after the very ids that generation will see."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import json
import random
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES, Family
from releases import needs_transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from acc_lm.chat.conversations import ChatPlan
from acc_lm.chat.items import Item, ItemCounts, build_items, check, describe, question_ids
from acc_lm.chat.records import Conversation, choose_train_on, detect_format, read_conversation, shown
from acc_lm.chat.template import DAY, PLAIN_TEMPLATE, ChatTemplate, load_template
from acc_lm.config import DataConfig, TokenizerConfig
from acc_lm.errors import ConfigError, DataError, UserError
from acc_lm.text.corpus import open_corpus
from acc_lm.text.documents import Document, Skipped
from acc_lm.text.tokenizer import make_tokenizer

LONG = 100_000
SAID = "the assistant and the user say: hello there,\n\nhello\n\n\nindeed\n the answer of the model is three\n"

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "What it is like outside.", "parameters": {"type": "object"}},
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WITH_CITY = TOOL | {"function": {"name": "weather", "description": "Outside.", "parameters": PARAMETERS}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
CALLED_WITHOUT = CALLED | {"tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {}}}]}
MARKERS = " ".join(
    dict.fromkeys(
        token for family in FAMILIES.values() for token in (family.bos_token, family.eos_token, *family.special)
    )
)


def turns(*contents: str | dict[str, Any], system: str | None = None) -> list[dict[str, Any]]:
    """Alternating turns: user, assistant, user, ... ; a dict is used as it is."""
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
    """Text that the tags in the fixture mark as written by the assistant in this turn."""
    so_far = [list(conversation.messages[: number + 1])]
    tools, names = list(conversation.tools or ()) or None, tokenizer.special_tokens_map
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
    tools = list(conversation.tools or ()) or None
    return list(tokenizer.apply_chat_template(list(conversation.messages[:number]), tools=tools, **options))


# --- targets -------------------------------------------------------------------------------------------------------

REFUSED = {  # conversations that the fixtures themselves refuse, with the line of the error
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
def test_targets_are_what_the_assistant_writes_after_what_generation_sees(name: str, kind: str) -> None:
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


def items_of(
    record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, train_on: Any = "assistant", max_length: int = LONG
) -> list[Item]:
    conversation = read_conversation(record, "messages", "x.jsonl:1")
    return build_items(conversation, tokenizer, load_template(tokenizer), train_on, max_length)[0]


@pytest.mark.parametrize(
    ("name", "what", "num_items"),
    [
        ("chatml", "three turns", 1),
        ("phi3", "three turns", 1),
        ("llama2", "a system turn before three", 1),
        ("mistral", "a system turn before three", 3),
        ("qwen3", "one turn", 1),
        ("qwen3", "thoughts", 3),
    ],
)
def test_turns_share_an_item_while_the_template_writes_them_the_same_way(name: str, what: str, num_items: int) -> None:
    items = items_of(CONVERSATIONS[what], tokenizer_of("byte", name))
    assert len(items) == num_items
    assert sum(len(runs_of(item)) for item in items) == len(CONVERSATIONS[what]["messages"]) // 2


def test_a_token_across_the_start_of_an_answer_does_not_change_what_generation_sees() -> None:
    tokenizer = tokenizer_of("bpe", "chatml")
    two = tokenizer.encode("\n\n", add_special_tokens=False)
    assert len(two) == 1  # the prompt's line break and the answer's would be this token
    (item,) = items_of({"messages": turns("a", "\n\nb")}, tokenizer)
    assert two[0] not in item.ids
    # Once the answer is part of a prompt they are, so the next turn becomes a separate item.
    first, second = items_of({"messages": turns("a", "\n\nb", "c", "d")}, tokenizer)
    assert first == item
    assert two[0] in second.ids


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_is_rendered_as_the_library_renders_it(name: str) -> None:
    tokenizer = tokenizer_of("byte", name)
    ids, end = question_ids("what? <not special>", tokenizer)
    asked = Conversation(({"role": "user", "content": "what? <not special>"},), "here")
    assert ids == generation_prompt(tokenizer, asked, 1)
    assert tokenizer.convert_ids_to_tokens([end])[0] in (FAMILIES[name].eos_token, *FAMILIES[name].special)


def test_a_prompt_for_a_model_without_a_template_is_plain_text() -> None:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    ids, end = question_ids("what?", tokenizer)
    assert decoded(tokenizer, ids) == "user:\nwhat?<|endoftext|>\nassistant:\n"
    assert end == tokenizer.eos_token_id


def test_a_mask_found_by_searching_the_answers_text_is_wrong(
    chatml: tuple[PreTrainedTokenizerFast, ChatTemplate],
) -> None:
    tokenizer, _ = chatml
    record = CONVERSATIONS["the question repeats the answer"]
    text = str(tokenizer.apply_chat_template(record["messages"], tokenize=False))
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans, position = [], 0
    for message in record["messages"]:
        if message["role"] == "assistant":
            position = text.index(message["content"] + "<|im_end|>", position)
            spans.append((position, position + len(message["content"] + "<|im_end|>")))
            position += 1
    searched = [any(start <= a < end for start, end in spans) for a, _ in encoding["offset_mapping"]]
    (item,) = items_of(record, tokenizer)
    assert item.ids == encoding["input_ids"][: len(item.ids)]
    assert item.is_target != searched[: len(item.ids)]
    assert decoded(tokenizer, item.ids[: runs_of(item)[0][0]]).endswith("<|im_start|>assistant\n")


def test_learning_the_last_answer_alone(chatml: tuple[PreTrainedTokenizerFast, ChatTemplate]) -> None:
    tokenizer, _ = chatml
    (item,) = items_of(CONVERSATIONS["three turns"], tokenizer, "last_assistant")
    ((start, end),) = runs_of(item)
    assert decoded(tokenizer, item.ids[start:]) == "indeed<|im_end|>"
    assert end == len(item.ids)
    assert item.ids == items_of(CONVERSATIONS["three turns"], tokenizer)[0].ids


@pytest.mark.parametrize("name", FAMILIES)
def test_learning_everything_gives_one_item_with_all_that_the_template_writes(name: str) -> None:
    tokenizer = tokenizer_of("bpe", name)
    record = CONVERSATIONS["thoughts"]
    (item,) = items_of(record, tokenizer, "all")
    assert item.ids == tokenizer.apply_chat_template(record["messages"], return_dict=False)
    assert item.is_target == [False] + [True] * (len(item.ids) - 1)


def test_only_the_completion_of_messages_with_a_prompt_is_learned(
    chatml: tuple[PreTrainedTokenizerFast, ChatTemplate],
) -> None:
    tokenizer, template = chatml
    said = turns("a", "b", "c", "d", "e", "f")
    record = {"prompt": said[:3], "completion": said[3:]}
    conversation = read_conversation(record, "prompt_completion", "x.jsonl:1")
    (item,), _ = build_items(conversation, tokenizer, template, "completion", LONG)
    assert [decoded(tokenizer, item.ids[a:b]) for a, b in runs_of(item)] == ["d<|im_end|>", "f<|im_end|>"]


@pytest.mark.parametrize("kind", ["byte", "bpe", "metaspace"])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("Two and two is", " four."),
        ("a\n", "\nb"),
        ("naïve 日", "本 🙂"),
        (f"{MARKERS} is", f" {MARKERS}"),
        ("x", "indeed"),
    ],
)
def test_a_plain_completion_follows_the_ids_of_its_prompt(prompt: str, completion: str, kind: str) -> None:
    tokenizer = tokenizer_of(kind, "zephyr")
    conversation = read_conversation({"prompt": prompt, "completion": completion}, "prompt_completion", "x.jsonl:1")
    (item,), counts = build_items(conversation, tokenizer, None, "completion", LONG)
    ((start, end),) = runs_of(item)
    assert item.ids[:start] == tokenizer(prompt, split_special_tokens=True)["input_ids"]
    assert item.ids[end - 1 :] == [tokenizer.eos_token_id]
    spoken = (prompt + completion).replace("▁", " ") if kind == "metaspace" else prompt + completion
    assert decoded(tokenizer, item.ids[:-1]) == spoken
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.content in MARKERS.split()}
    assert not special & set(item.ids[:-1])
    assert counts == ItemCounts(conversations=1, items=1, ids=end, targets=end - start, plain=1)
    (whole,), _ = build_items(conversation, tokenizer, None, "all", LONG)
    assert whole == Item(item.ids, [False] + [True] * (end - 1))


def test_a_plain_prompt_starts_with_the_tokenizers_start_token_and_never_with_an_end() -> None:
    tokenizer = with_tokens(make_tokenizer(TokenizerConfig(kind="byte"), []), FAMILIES["zephyr"])  # type: ignore[arg-type]
    names = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=names)
    conversation = read_conversation({"prompt": "ab", "completion": "c"}, "prompt_completion", "x.jsonl:1")
    (item,), _ = build_items(conversation, tokenizer, None, "completion", LONG)
    assert decoded(tokenizer, item.ids) == "<s>abc</s>"
    assert item.is_target == [False, False, False, True, True]


@pytest.mark.parametrize("name", ["chatml", "qwen3", "phi3"])
def test_an_item_that_is_too_long_keeps_its_start(name: str) -> None:
    tokenizer = tokenizer_of("byte", name)
    template = load_template(tokenizer)
    conversation = read_conversation(CONVERSATIONS["three turns"], "messages", "x.jsonl:1")
    whole, all_counts = build_items(conversation, tokenizer, template, "assistant", LONG)
    for max_length in range(2, max(len(item.ids) for item in whole) + 1):
        kept, counts = build_items(conversation, tokenizer, template, "assistant", max_length)
        expected = [item for item in whole if True in item.is_target[:max_length]]
        assert len(kept) == len(expected)
        for item, longer in zip(kept, expected, strict=True):
            assert len(item.ids) <= max_length
            assert item.is_target[-1]
            assert True not in longer.is_target[len(item.ids) : max_length]
            assert (item.ids, item.is_target) == (longer.ids[: len(item.ids)], longer.is_target[: len(item.ids)])
        assert counts.targets + counts.cut_targets == all_counts.targets
        assert counts.cut == (counts.cut_targets > 0)
        assert counts.without_target == (not kept)
    assert (counts, kept) == (all_counts, whole)


# --- what the record says ----------------------------------------------------------------------------------------


def shuffled(values: dict[str, Any], choose: random.Random) -> dict[str, Any]:
    keys = list(values)
    choose.shuffle(keys)
    return {key: values[key] for key in keys}


def generated_records(number: int) -> list[dict[str, Any]]:
    """Records as users write them: keys in any order, extra nulls, special tokens, with or without tools, with or without thoughts."""
    choose = random.Random(5)
    texts = [
        "hello",
        "",
        " two\n\nlines\n",
        'quo"ted \\ <&> \u2028',
        "日本 🙂",
        *MARKERS.split(),
        "<think>\nso\n</think>\n\nthat",
    ]

    def value(depth: int = 0) -> Any:
        kinds = [None, True, 0, -1.5, 1e20, choose.choice(texts), choose.choice(texts)]
        kinds += [[value(2), None], arguments(depth + 1)] if depth < 2 else []
        return choose.choice(kinds)

    def arguments(depth: int = 0) -> dict[str, Any]:
        return {name: value(depth) for name in choose.sample(["unit", "city", "b", "a", "日"], choose.randint(0, 3))}

    def call() -> dict[str, Any]:
        given = arguments()
        function = {"name": "weather", "arguments": json.dumps(given) if choose.random() < 0.2 else given}
        return shuffled({"type": "function", "id": "c1", "function": shuffled(function, choose)}, choose)

    def tool() -> dict[str, Any]:
        schema = {"type": "object", "properties": arguments(), "required": [], "strict": None}
        function = {
            "name": "weather",
            "description": "Outside.",
            "parameters": shuffled(schema, choose),
            "default": None,
        }
        return shuffled({"type": "function", "function": shuffled(function, choose)}, choose)

    records = []
    for _ in range(number):
        uses_tools, messages = choose.random() < 0.5, []
        if choose.random() < 0.3:
            messages.append({"role": "system", "content": choose.choice(texts)})
        for _ in range(choose.randint(1, 3)):
            messages.append({"role": "user", "content": choose.choice(texts), "name": choose.choice(["Ada", None])})
            if uses_tools:
                said = choose.choice([{"content": None}, {}, {"content": ""}, {"content": choose.choice(texts)}])
                messages.append(
                    {"role": "assistant", **said, "tool_calls": [call() for _ in range(choose.randint(1, 2))]}
                )
                messages.append({"role": "tool", "content": choose.choice(texts), "tool_call_id": "c1"})
            thoughts = choose.choice(
                [{}, {}, {"reasoning_content": "first"}, {"thinking": "second"}, {"reasoning": None}]
            )
            messages.append({"role": "assistant", "content": choose.choice(texts), "tool_calls": None} | thoughts)
        tools = [tool() for _ in range(choose.randint(1, 2))]
        about = (
            choose.choice([{"tools": tools}, {"tools": json.dumps(tools)}])
            if uses_tools
            else choose.choice([{}, {"tools": []}])
        )
        records.append({"messages": [shuffled(message, choose) for message in messages], **about})
    return records


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Any, **how: Any) -> str:
    """Text that the library renders; a template that needs a content is given an empty one."""

    def text(messages: list[dict[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **how))

    try:
        return text(messages)
    except Exception:
        return text([{**message, "content": message.get("content") or ""} for message in messages])


@pytest.mark.parametrize("name", [*FAMILIES, "ours"])
def test_the_trained_text_is_byte_for_byte_what_the_library_renders(name: str) -> None:
    if name == "chatml":
        needs_transformers("5.23", "a message without content is rendered as None")
    tokenizer = copy.deepcopy(tokenizer_of("byte", name if name in FAMILIES else "zephyr"))
    template = load_template(tokenizer) if name in FAMILIES else load_template(tokenizer, None)
    if name == "ours":
        tokenizer.chat_template = PLAIN_TEMPLATE
        template = load_template(tokenizer)
    compared = 0
    for record in generated_records(30):
        tools = record.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools

        def library(messages: list[dict[str, Any]], tools: Any = tools, **how: Any) -> str:
            return rendered(tokenizer, messages, tools, **how)

        plan = ChatPlan("messages", "assistant", None, LONG)
        document = plan.read(json.loads(json.dumps(record)), "x.jsonl:1", Skipped(0))
        assert document is not None
        conversation = plan.open(Document(document, None, "x.jsonl:1"))
        try:
            expected = library(record["messages"])
        except Exception:
            with pytest.raises(DataError):
                build_items(conversation, tokenizer, template, "all", LONG)
            continue
        compared += 1
        (whole,), _ = build_items(conversation, tokenizer, template, "all", LONG)
        assert decoded(tokenizer, whole.ids) == expected
        items, _ = build_items(conversation, tokenizer, template, "assistant", LONG)
        found = [(item, start, end) for item in items for start, end in runs_of(item)]
        numbers = [i for i, message in enumerate(record["messages"]) if message["role"] == "assistant"]
        for (item, start, end), number in zip(found, numbers, strict=True):
            before, so_far = record["messages"][:number], record["messages"][: number + 1]
            assert decoded(tokenizer, item.ids[:start]) == library(before, add_generation_prompt=True)
            assert decoded(tokenizer, item.ids[:end]) + template.after_end == library(so_far)
    assert compared >= 10


def test_nulls_that_only_a_table_added_are_ignored(tmp_path: Path) -> None:
    """A table gives each struct every key; a line of JSON is taken literally."""
    import pyarrow as pa
    import pyarrow.ipc
    import pyarrow.parquet

    def record(arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        return {"messages": turns("a", {"role": "assistant", "content": None, "tool_calls": [call]}), "tools": [TOOL]}

    records = [record({"unit": "K", "city": "A"}), record({"days": [{"at": 1}, {"of": 2}]})]
    table = pa.Table.from_pylist(records)
    (tmp_path / "hub").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "hub" / "x.parquet")
    with pyarrow.ipc.new_file(tmp_path / "x.arrow", table.schema) as file:
        file.write_table(table)
    (tmp_path / "x.jsonl").write_text(json.dumps(record({"unit": None, "city": "A"})) + "\n")
    plan = ChatPlan("messages", "assistant", None, LONG)

    def arguments_in(**config: Any) -> list[Any]:
        corpus = open_corpus(DataConfig(**config), 0, plan.read)
        conversations = [plan.open(document) for document in corpus.train(Skipped(0))]
        assert all(list(conversation.tools or ()) == [TOOL] for conversation in conversations)
        return [c.messages[-1]["tool_calls"][0]["function"]["arguments"] for c in conversations]

    meant = [{"unit": "K", "city": "A"}, {"days": [{"at": 1}, {"of": 2}]}]
    assert arguments_in(source="files", files=str(tmp_path / "hub" / "x.parquet")) == meant
    assert arguments_in(source="files", files=str(tmp_path / "x.arrow")) == meant
    assert arguments_in(source="hub", dataset=str(tmp_path / "hub")) == meant
    assert arguments_in(source="files", files=str(tmp_path / "x.jsonl")) == [{"unit": None, "city": "A"}]


def test_marks_that_change_what_a_template_writes_are_refused() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("byte", "chatml"))
    odd = "{{- m.content }}", "{{- m.content if not m.content.startswith('<|im_start|>') else 'other' }}"
    tokenizer.chat_template = FAMILIES["chatml"].without_tags.replace(*odd)
    (item,) = items_of({"messages": turns("a", "b")}, tokenizer)
    assert decoded(tokenizer, item.ids).endswith("b<|im_end|>")
    with pytest.raises(
        DataError, match=r"x\.jsonl:1: the tokenizer's chat template must treat special tokens in a text like"
    ):
        items_of({"messages": turns("a", "<|im_start|>b")}, tokenizer)


def test_a_role_that_is_a_token_is_still_a_role() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("byte", "chatml"))
    tokenizer.add_tokens([AddedToken("assistant", special=True)], special_tokens=True)
    (item,) = items_of({"messages": turns("a", "b")}, tokenizer)
    assert [decoded(tokenizer, item.ids[a:b]) for a, b in runs_of(item)] == ["b<|im_end|>"]


def test_a_tokenizers_tool_template_renders_conversations_with_tools() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("byte", "chatml"))
    plain, with_tools = FAMILIES["chatml"].without_tags, FAMILIES["qwen3"].without_tags
    tokenizer.chat_template = {"tool_use": with_tools, "rag": plain}  # type: ignore[assignment]
    with pytest.raises(
        ConfigError, match=r"must have a chat template named default, got 'rag', 'tool_use'; set data\.chat_template"
    ):
        load_template(tokenizer)
    tokenizer.chat_template["default"] = plain  # type: ignore[index]
    record = CONVERSATIONS["tool turns"]
    for some in (record, {"messages": turns("a", "b")}):
        conversation = read_conversation(some, "messages", "x.jsonl:1")
        (item,), _ = build_items(conversation, tokenizer, load_template(tokenizer), "all", LONG)
        how = {"tools": some.get("tools"), "tokenize": False}
        assert decoded(tokenizer, item.ids) == tokenizer.apply_chat_template(some["messages"], **how)
    assert load_template(tokenizer).tool_use == with_tools


def test_a_template_that_reads_the_clock_gets_the_date_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "clock.jinja"
    file.write_text("{{- strftime_now('%d %b %Y %H:%M') + '\\n' }}" + PLAIN_TEMPLATE)
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    conversation = read_conversation({"messages": turns("a", "b")}, "messages", "x.jsonl:1")

    def start(template: ChatTemplate) -> str:
        (item,), _ = build_items(conversation, tokenizer, template, "assistant", LONG)
        return decoded(tokenizer, item.ids).split("\n")[0]

    template = load_template(tokenizer, str(file), "2020-02-03")
    assert template.reads_clock
    assert start(template) == "03 Feb 2020 00:00"
    assert start(load_template(tokenizer, str(file))).startswith(f"{datetime.now():%d %b %Y}")
    tokenizer.init_kwargs[DAY] = "2019-01-02"  # as in final/ of a run
    assert start(load_template(tokenizer, str(file))) == "02 Jan 2019 00:00"
    tokenizer.chat_template = file.read_text()
    assert decoded(tokenizer, question_ids("a", tokenizer)[0]).startswith("02 Jan 2019 00:00")
    assert decoded(tokenizer, question_ids("a", tokenizer, "2020-02-03")[0]).startswith("03 Feb 2020 00:00")
    now = str(tokenizer.apply_chat_template(turns("a"), tokenize=False))
    assert not now.startswith("0") or f"{datetime.now():%Y}" in now, "the library's own clock keeps running"


def test_everything_that_a_template_reads_is_in_the_key(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(tokenizer_of("byte", "llama3"))
    plan = ChatPlan("messages", "assistant", None, LONG, "2020-02-03")
    keys = [plan.key(tokenizer)]
    tokenizer.bos_token = "<|start_header_id|>"
    keys.append(plan.key(tokenizer))
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": PLAIN_TEMPLATE}  # type: ignore[dict-item]
    keys.append(plan.key(tokenizer))
    assert replace(plan, day="2020-02-04").key(tokenizer) == keys[-1], "no clock is read"
    tokenizer.chat_template["tool_use"] += "{% if false %}{{ strftime_now('%d') }}{% endif %}"  # type: ignore[index]
    keys += [plan.key(tokenizer), replace(plan, day="2020-02-04").key(tokenizer)]
    (tmp_path / "clock.jinja").write_text("{{ strftime_now('%d') }}")
    made = replace(plan, template_file=str(tmp_path / "clock.jinja"))  # with a tokenizer that is still to be trained
    keys += [made.key(None), replace(made, day="2020-02-04").key(None)]
    assert len(set(map(str, keys))) == len(keys)


# --- what the template leaves out ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "record", "drops"),
    [
        ("", {"messages": turns("a", "b", system="Say little.")}, False),
        ("m.role != 'system'", {"messages": turns("a", "b", system="Say little.")}, True),
        ("m.role != 'system'", {"messages": turns("Say a.", "b", system="Say")}, True),
        ("m.role != 'system'", {"messages": turns("a", "b", system=" ")}, False),
        ("not loop.first", {"messages": turns("Say a.", "b", "c", "d")}, True),
        ("", {"tools": [TOOL], "messages": turns("a", "b")}, True),
        ("", {"messages": turns("a", {"role": "assistant", "content": "b", "reasoning_content": "because"})}, True),
        ("", {"messages": turns("a", {"role": "assistant", "content": "", "tool_calls": [CALL]})}, False),
        ("names alone", {"messages": turns("a", {"role": "assistant", "content": "", "tool_calls": [CALL]})}, True),
        ("names alone", {"messages": turns("a", CALLED_WITHOUT)}, False),
        ("", {"messages": turns(f"a {MARKERS}", "b")}, False),
        ("tools", {"tools": [WITH_CITY], "messages": turns("a", "b")}, False),
        ("tools without parameters", {"tools": [WITH_CITY], "messages": turns("a", "b")}, True),
    ],
)
def test_what_a_template_leaves_out_is_counted(template: str, record: dict[str, Any], drops: bool) -> None:
    tokenizer = tokenizer_of("byte", "chatml")
    text = FAMILIES["chatml"].without_tags
    text = text.replace("for m in messages", f"for m in messages if {template}") if "m." in template else text
    text = (
        text.replace("{{- m.content + '<", "{{- (m.content if not loop.first else '') + '<")
        if "loop" in template
        else text
    )
    text = text.replace("call.function | tojson", "call.function.name") if template == "names alone" else text
    if template.startswith("tools"):
        written = "t" if template == "tools" else "t.function.name + ' ' + t.function.description"
        text = "{% for t in tools or () %}{{ (" + written + ") | tojson }}{% endfor %}" + text
    conversation = read_conversation(record, "messages", "x.jsonl:1")
    for train_on in ("assistant", "last_assistant", "all"):
        _, counts = build_items(conversation, tokenizer, replace(load_template(tokenizer), text=text), train_on, LONG)  # type: ignore[arg-type]
        assert counts.dropped_content == drops


def test_a_long_value_is_shown_in_eighty_characters() -> None:
    assert shown("a" * 78) == repr("a" * 78)
    assert shown("a" * 79) == "'" + "a" * 76 + "..."


def test_what_a_template_quotes_is_not_left_out() -> None:
    tokenizer = tokenizer_of("byte", "llama3")
    record = {"messages": turns("a", CALLED, {"role": "tool", "content": 'two\n "lines"'}, "b", "c")}
    record["messages"][3:] = [{"role": "assistant", "content": "b"}]
    conversation = read_conversation(record, "messages", "x.jsonl:1")
    _, counts = build_items(conversation, tokenizer, load_template(tokenizer), "assistant", LONG)
    assert counts.dropped_content == 0


def test_counts_are_added_described_and_refused_above_a_threshold() -> None:
    good = ItemCounts(conversations=1, items=1, ids=10, targets=4)
    counts = sum([good] * 96, ItemCounts()) + ItemCounts(
        4, 3, 30, 9, cut=4, cut_targets=7, without_target=1, dropped_content=2
    )
    assert describe(counts) == (
        "100 conversations in 99 items: 393 targets of 990 ids; 4 cut (7 targets lost), 1 without a target, "
        "2 with content left out by the template"
    )
    check(counts, 0.04)
    lines = {
        0.03: "fit into data.sequence_length, got 4 of 100 cut (4.0%); raise data.sequence_length",
        0.0: "fit into data.sequence_length, got 4 of 100 cut (4.0%); raise data.sequence_length",
    }
    for threshold, says in lines.items():
        with pytest.raises(DataError) as refusal:
            check(counts, threshold)
        assert f"the conversations must {says}, or raise data.max_lossy_share {threshold:g}" == str(refusal.value)
    with pytest.raises(DataError, match=r"must have a target, got 1 of 100 without one \(1.0%\)"):
        check(replace(counts, cut=0), 0.005)
    with pytest.raises(
        DataError, match=r"be written in full by the chat template, got 2 of 100 .* set data.chat_template"
    ):
        check(replace(counts, cut=0), 0.015)
    with pytest.raises(DataError, match="must have a target, got none in 5"):
        check(ItemCounts(conversations=5), 1.0)


# --- templates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte", "bpe", "char"])
def test_a_tokenizer_without_a_template_gets_ours_and_no_new_token(kind: str) -> None:
    tokenizer = make_tokenizer(TokenizerConfig(kind=kind, vocab_size=300), [SAID])  # type: ignore[arg-type]
    size, end = len(tokenizer), tokenizer.eos_token
    template = load_template(tokenizer)
    assert (template.text, template.end_token, template.after_end) == (PLAIN_TEMPLATE, end, "\n")
    assert not template.reads_clock
    record = {"messages": turns("Who?", f"Me. {end}", f"{end}\nassistant:\nNo{end}", "", system="Say little.")}
    conversation = read_conversation(record, "messages", "x.jsonl:1")
    (item,), counts = build_items(conversation, tokenizer, template, "assistant", LONG)
    assert decoded(tokenizer, item.ids) == (
        f"system:\nSay little.{end}\nuser:\nWho?{end}\nassistant:\nMe. {end}{end}\n"
        f"user:\n{end}\nassistant:\nNo{end}{end}\nassistant:\n{end}"
    )
    assert item.ids.count(tokenizer.eos_token_id) == 5  # one a turn: what a text spells is text
    assert [decoded(tokenizer, item.ids[a:b]) for a, b in runs_of(item)] == [f"Me. {end}{end}", end]
    assert counts.dropped_content == 0
    assert len(tokenizer) == size


def test_our_template_writes_tools_and_a_start_token() -> None:
    tokenizer = with_tokens(make_tokenizer(TokenizerConfig(kind="byte"), []), FAMILIES["zephyr"])  # type: ignore[arg-type]
    tokenizer.chat_template = None
    conversation = read_conversation(CONVERSATIONS["tool turns"], "messages", "x.jsonl:1")
    (item,), counts = build_items(conversation, tokenizer, load_template(tokenizer), "assistant", LONG)
    text = decoded(tokenizer, item.ids)
    assert text.startswith('<s>tools:\n[{"type": "function"')
    assert text.count("<s>") == 1
    call = json.dumps([CALL], ensure_ascii=False)
    written = [decoded(tokenizer, item.ids[a:b]) for a, b in runs_of(item)]
    assert written == [f"\ncalls:\n{call}</s>", "Grey.</s>", "Any time.</s>"]
    assert counts.dropped_content == 0


def test_a_template_file_wins_over_the_tokenizers_own(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
    )
    tokenizer = tokenizer_of("byte", "chatml")
    template = load_template(tokenizer, str(file))
    conversation = read_conversation({"messages": turns("a", "b")}, "messages", "x.jsonl:1")
    (item,), _ = build_items(conversation, tokenizer, template, "assistant", LONG)
    assert decoded(tokenizer, item.ids) == "user: a<|im_end|>assistant: b<|im_end|>"
    assert runs_of(item) == [(len(item.ids) - 2, len(item.ids))]


TEMPLATES = {  # text, what the line says after the file's name
    "no jinja": ("a\nb {% if %}\n", ":2 must write the conversation, got: Expected an expression"),
    "an unknown block": ("\n\n{% repeat %}", ":3 must write the conversation, got: Encountered unknown tag 'repeat'"),
    "an undefined name": ("{{ bos_token }}\n{{ person.name }}", ":2 must write the conversation, got: 'person' is undefined"),
    "a mistake of types": ("\n{{ messages + 1 }}", ":2 must write the conversation, got: can only concatenate list"),
    "a way out of the sandbox": ("\n\n\n{{ messages.__class__.__mro__[1]() }}", ":4 must write the conversation, got: "),
    "its own refusal": ("x\n{{ raise_exception('not today') }}", ":2 must write the conversation, got: not today"),
    "a refusal in a macro": ("{% macro f() %}\n{{ raise_exception('deep') }}\n{% endmacro %}\n\n{{ f() }}", ":2 must write the conversation, got: deep"),
    "nothing written": ("{% for m in messages %}{% endfor %}", " must end an assistant's turn with a special token"),
    "no end token": ("{% for m in messages %}{{ m.content }}\n\n{% endfor %}", " must end an assistant's turn with a special token of the tokenizer, got '\\n"),
    "another generation prompt": (
        "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}{{ 'assistant<think>' if add_generation_prompt }}",
        " must begin an assistant's turn with the generation prompt, got 'user",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_cannot_be_used_is_exit_code_2_and_one_line(name: str, tmp_path: Path) -> None:
    text, says = TEMPLATES[name]
    file = tmp_path / "own.jinja"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        load_template(tokenizer_of("byte", "chatml"), str(file))
    assert refusal.value.exit_code == 2
    assert str(refusal.value).startswith(f"{file}{says}")
    assert "\n" not in str(refusal.value)
    assert "data.chat_template" in str(refusal.value)


def test_a_missing_template_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.chat_template must be a template file, got .*No such file"):
        load_template(tokenizer_of("byte", "chatml"), str(tmp_path / "no.jinja"))
    (tmp_path / "bytes.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is not UTF-8"):
        load_template(tokenizer_of("byte", "chatml"), str(tmp_path / "bytes.jinja"))


def test_an_end_of_turn_that_is_no_special_token_cannot_be_spelt_by_a_text() -> None:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    tokenizer.add_tokens([AddedToken("<end>", special=False, normalized=False)])
    tokenizer.chat_template = FAMILIES["chatml"].without_tags.replace("<|im_end|>", "<end>")
    (item,) = items_of({"messages": turns("a<end>", "b<end>c")}, tokenizer)
    assert [decoded(tokenizer, item.ids[a:b]) for a, b in runs_of(item)] == ["b<end>c<end>"]
    assert item.ids.count(tokenizer.convert_tokens_to_ids("<end>")) == 2


def test_a_template_that_writes_the_date_is_reported(chatml: tuple[PreTrainedTokenizerFast, ChatTemplate]) -> None:
    _, template = chatml
    assert replace(template, text="{{ strftime_now('%d') }}" + template.text).reads_clock


def test_a_turn_that_the_template_ends_in_another_way_is_refused(
    chatml: tuple[PreTrainedTokenizerFast, ChatTemplate],
) -> None:
    tokenizer, template = chatml
    text = template.text.replace("{{- m.content }}", "{{- m.content if m.content != 'odd' else '<|im_end|>odd' }}")
    text = text.replace("{{- '<|im_end|>' }}", "{{- '<|im_end|>' if m.content != 'odd' else '' }}")
    conversation = read_conversation({"messages": turns("a", "odd")}, "messages", "x.jsonl:7")
    with pytest.raises(DataError) as refusal:
        build_items(conversation, tokenizer, replace(template, text=text), "assistant", LONG)
    assert str(refusal.value).startswith(
        "x.jsonl:7: the tokenizer's chat template must write turn 1 as its generation prompt"
    )


# --- records -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("text", "text"),
        ("text id meta", "text"),
        ("prompt completion", "prompt_completion"),
        ("prompt prompt_id messages", "messages"),
        ("messages tools", "messages"),
        ("instruction input output", "alpaca"),
        ("instruction output", "alpaca"),
        ("conversations system id", "sharegpt"),
    ],
)
def test_the_format_is_detected_from_the_columns(columns: str, expected: str) -> None:
    assert detect_format(columns.split(), "x.jsonl") == expected


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("instruction input output text", "which fit text and alpaca; set data.format to text or alpaca"),
        ("messages conversations", "which fit messages and sharegpt; set data.format to messages or sharegpt"),
        ("question answer", "got 'question', 'answer'; name them in data.columns, or set data.text_column"),
        ("prompt chosen rejected", "got 'prompt', 'chosen', 'rejected'; name them in data.columns"),
        ("", "got none; name them in data.columns"),
    ],
)
def test_columns_of_no_known_format_are_named(columns: str, says: str) -> None:
    with pytest.raises(DataError) as refusal:
        detect_format(columns.split(), "x.jsonl")
    assert says in str(refusal.value)
    assert str(refusal.value).startswith("x.jsonl: must have the columns of ")


def test_a_configured_text_column_is_detected() -> None:
    assert detect_format(["body", "id"], "x.jsonl", text_column="body") == "text"


def test_what_is_learned_by_default_and_what_is_refused() -> None:
    assert choose_train_on("prompt_completion", None) == "completion"
    assert choose_train_on("sharegpt", None) == "assistant"
    assert choose_train_on("messages", "last_assistant") == "last_assistant"
    assert choose_train_on("text", None) == "all"
    with pytest.raises(
        ConfigError, match=r"must be assistant or last_assistant or all for data.format alpaca, got completion"
    ):
        choose_train_on("alpaca", "completion")


@pytest.mark.parametrize(
    ("format", "record", "messages"),
    [
        ("alpaca", {"instruction": "Add.", "input": "2, 2", "output": "4"}, turns("Add.\n\n2, 2", "4")),
        ("alpaca", {"instruction": "Sing.", "input": "", "output": "La."}, turns("Sing.", "La.")),
        ("alpaca", {"instruction": "Sing.", "input": None, "output": "La.", "system": "Loud."}, turns("Sing.", "La.", system="Loud.")),
        (
            "sharegpt",
            {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            turns("a", "b", system="s"),
        ),
        (
            "sharegpt",
            {"system": "s", "conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]},
            turns("a", "b", system="s"),
        ),
        ("messages", {"conversations": turns("a", "b")}, turns("a", "b")),
        ("messages", {"messages": turns("a", CALLED | {"content": None, "name": None})}, turns("a", {"role": "assistant", "tool_calls": [CALL]})),
        ("prompt_completion", {"prompt": "a", "completion": "b"}, turns("a", "b")),
        ("prompt_completion", {"prompt": turns("a"), "completion": turns("a", "b")[1:]}, turns("a", "b")),
        ("prompt_completion", {"prompt": turns("a"), "completion": turns("a", "b")[1:], "system": "s"}, turns("a", "b", system="s")),
    ],
)  # fmt: skip
def test_each_format_becomes_roles(format: Any, record: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert list(read_conversation(record, format, "x.jsonl:1").messages) == messages


def test_tools_may_be_written_as_json() -> None:
    for tools in ([TOOL], json.dumps([TOOL])):
        conversation = read_conversation({"messages": turns("a", "b"), "tools": tools}, "messages", "x.jsonl:1")
        assert list(conversation.tools or ()) == [TOOL]


def one(**message: Any) -> dict[str, Any]:
    return {"messages": [message]}


BAD: dict[str, tuple[str, Any, str]] = {
    "no object": ("messages", [1], "must be an object with messages, got a list"),
    "a missing column": ("alpaca", {"instruction": "a", "input": "b"}, "must have instruction + output for data.format alpaca, got 'instruction', 'input'"),
    "a null column": ("messages", {"messages": None, "id": 3}, "must have messages for data.format messages, got 'id'"),
    "no list": ("messages", {"messages": "a"}, "'messages' must be a list of messages, got a string"),
    "no messages": ("messages", {"messages": []}, "'messages' must hold messages, got an empty list"),
    "a message that is text": ("messages", {"messages": ["a"]}, "messages[0] must be an object with role and content, got a string"),
    "no role": ("messages", one(text="a"), "messages[0] must have role and content, got 'text'"),
    "sharegpt's names": ("messages", one(**{"from": "human", "value": "a"}), "messages[0] must have role and content, got 'from', 'value'"),
    "both names": ("sharegpt", {"conversations": [*turns("a"), {"from": "gpt", "value": "b"}]}, "conversations[1] must have role and content, got 'from', 'value'"),
    "a bad role": ("messages", one(role="bot", content="a"), "messages[0].role must be system, user, assistant, tool or named in data.roles, got 'bot'"),
    "a role of the wrong type": ("messages", one(role=["user"], content="a"), "messages[0].role must be system, user, assistant, tool or named in data.roles, got ['user']"),
    "a bad sharegpt role": ("sharegpt", {"conversations": [{"from": "bing", "value": "a"}]}, "conversations[0].from must be system, human, user, gpt, assistant, tool or named in data.roles, got 'bing'"),
    "content of the wrong type": ("messages", one(role="user", content=5), "messages[0].content must be a string, got a number"),
    "content in parts": ("messages", one(role="user", content=[{"type": "text"}]), "messages[0].content must be a string, got a list"),
    "no content": ("messages", one(role="user"), "messages[0].content must be a string, got null"),
    "half a character": ("messages", one(role="user", content="a \ud83d"), "messages[0].content must be Unicode text, got a lone surrogate"),
    "a noncharacter": ("messages", one(role="user", content="a \ufdd0"), "messages[0].content must be Unicode text, got a lone surrogate or a noncharacter"),
    "two users": ("messages", {"messages": turns("a", {"role": "user", "content": "b"})}, "messages[1] must be assistant after user, got user"),
    "the assistant first": ("messages", one(role="assistant", content="a"), "messages[0] must be system or user at the start, got assistant"),
    "system in between": ("messages", {"messages": turns("a", "b", {"role": "system", "content": "c"})}, "messages[2] must be user or tool after assistant, got system"),
    "no answer": ("messages", {"messages": turns("a", system="s")}, "messages must end with the assistant's turn, got user"),
    "an unanswered end": ("sharegpt", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]}, "conversations must end with the assistant's turn, got user"),
    "a user's call": ("messages", one(role="user", content="a", tool_calls=[CALL]), "messages[0].tool_calls must be the assistant's, got user"),
    "a call that is text": ("messages", {"messages": turns("a", CALLED | {"tool_calls": "weather()"})}, "messages[1].tool_calls must be a list, got a string"),
    "a call of nothing": ("messages", {"messages": turns("a", CALLED | {"tool_calls": [{"function": {}}]})}, "messages[1].tool_calls[0] must name its function, got {'function': {}}"),
    "half a character in tools": (
        "messages",
        {"messages": turns("a", "b"), "tools": '[{"name": "w", "parameters": {"\\ud83d": 1}}]'},
        "'tools' must be Unicode text, got a lone surrogate",
    ),
    "tools that are no JSON": ("messages", {"messages": turns("a", "b"), "tools": "[{"}, "'tools' must be JSON, got '[{'"),
    "tools without names": ("messages", {"messages": turns("a", "b"), "tools": [{}]}, "'tools' must be a list of functions with names, got [{}]"),
    "thoughts of the wrong type": ("messages", one(role="assistant", content="a", reasoning_content=["b"]), "messages[0].reasoning_content must be a string, got a list"),
    "a description of the wrong type": ("messages", {"messages": turns("a", "b"), "tools": [{"name": "f", "description": ["c"]}]}, "tools[0] must have a string as its description, got a list"),
    "a system turn with plain text": ("prompt_completion", {"prompt": "a", "completion": "b", "system": "be rude"}, "'system' must be empty where prompt and completion are plain text, which has no roles, got 'be rude'"),
    "tools with plain text": ("prompt_completion", {"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}, "'tools' must be empty where prompt and completion are plain text"),
    "two system turns": ("prompt_completion", {"prompt": turns("a", system="s"), "completion": turns("a", "b")[1:], "system": "t"}, "prompt + completion[1] must be user after system, got system"),
    "a weight of its own": ("messages", one(role="user", content="a", weight=0), "messages[0] must be selected for training by data.train_on"),
    "not to be trained": ("messages", one(role="user", content="a", train=False), "messages[0] must be selected for training by data.train_on"),
    "an empty instruction": ("alpaca", {"instruction": " ", "output": "a"}, "instruction must hold text, got an empty string"),
    "an output of the wrong type": ("alpaca", {"instruction": "a", "output": 4}, "output must be a string, got a number"),
    "earlier turns in alpaca": ("alpaca", {"instruction": "a", "output": "b", "history": [["c", "d"]]}, "'history' must be empty in data.format alpaca"),
    "an empty completion": ("prompt_completion", {"prompt": "a", "completion": ""}, "completion must hold text, got an empty string"),
    "a prompt in messages, a completion in text": ("prompt_completion", {"prompt": turns("a"), "completion": "b"}, "prompt must be a string, got a list"),
    "a completion by the user": ("prompt_completion", {"prompt": turns("a"), "completion": turns("b")}, "prompt + completion[1] must be assistant after user, got user"),
    "a prompt that is already answered": ("prompt_completion", {"prompt": turns("a", "b"), "completion": turns("a", "b")[1:]}, "prompt + completion[2] must be user or tool after assistant, got assistant"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_exit_code_3_and_one_line_with_its_place(name: str) -> None:
    format, record, says = BAD[name]
    with pytest.raises(UserError) as refusal:
        read_conversation(record, format, "x.jsonl:12")  # type: ignore[arg-type]
    assert isinstance(refusal.value, DataError)
    assert refusal.value.exit_code == 3
    (line,) = refusal.value.problems
    assert line.startswith(f"x.jsonl:12: {says}")
    assert "\n" not in line


def test_a_lone_surrogate_anywhere_is_a_bad_record_that_can_be_tolerated() -> None:
    plan = ChatPlan("messages", "assistant", None, LONG)
    for odd in ("\ud800", "\ufdd0"):
        call = {"function": {"name": "f", "arguments": {"a": odd}}}
        for messages in (
            turns("a", {"role": "assistant", "tool_calls": [call]}),
            turns({"role": "user", "content": "a", "name": odd}, "b"),
        ):
            skipped = Skipped(1)
            assert plan.read({"messages": messages[-2:]}, "x.jsonl:1", skipped) is None
            assert skipped.count == 1
