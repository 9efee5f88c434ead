"""Arbitrary input, by the hundred thousand: each property takes one and returns the outcome, or raises.

`test_fuzz.py` tries a few hundred in every run of the tests, `make fuzz` as many as fit into its minutes.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
from conftest import make_words, tiny_recipe_of
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from processes import ROOT, Finished, Launch, run_training
from ruamel.yaml import YAML
from test_chat import FAMILIES, LONG, decoded, rendered, tokenizer_of

from acc_lm.chat.conversations import ChatPlan
from acc_lm.chat.items import build_items
from acc_lm.chat.template import load_template
from acc_lm.config import Config, DataConfig, OptimizerConfig, ScheduleConfig, Section, TokenizerConfig
from acc_lm.config.loading import dump_config, load_config
from acc_lm.data import build_data
from acc_lm.errors import DataError, UserError
from acc_lm.optimization.schedule import build_schedule
from acc_lm.text.documents import Document, Skipped
from acc_lm.text.files import RECORD_SUFFIXES


@dataclass(frozen=True)
class Property:
    """A statement that must hold for any input."""

    inputs: SearchStrategy[Any]
    check: Callable[[Any], str]
    """Outcome of an input in one word; raises where it must not happen."""
    outcomes: tuple[str, ...]
    """Outcomes that must each occur, or nothing has been shown."""
    starts_processes: bool = False
    """An input takes a second, so a failing one is not shrunk."""


def refusal(error: UserError, code: int, begins: tuple[str, ...] = ("",)) -> str:
    """One word for a proper error: lines that say something, with the exit code of their kind and a place."""
    assert str(error).startswith(begins), error
    assert error.exit_code == code, f"exit code {error.exit_code}: {error}"
    assert error.problems
    for problem in error.problems:
        assert problem.strip()
        assert len(problem) < 4000, f"{len(problem)} characters: {problem[:500]}"
    return "refused"


# --- anything ------------------------------------------------------------------------------------------------------

ANY_TEXT = st.text(max_size=20) | st.sampled_from(
    ["", " ", "~", "~nobody-here/x", "/", "..", "\x00", "\n", "\x1b[2J", "null", "true", "1e400", "nan", "=", ".", "a.b", "[", "{", "!!python/none", "&a", "*a", "\u2028", "\ufeff", "日本🙂"]
)  # fmt: skip
NUMBER = st.integers(-3, 300) | st.sampled_from([2**31, 2**63, 10**30, -1, 0]) | st.floats()
SCALAR = st.none() | st.booleans() | NUMBER | ANY_TEXT
ANYTHING = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3), max_leaves=6
)

# --- recipes -------------------------------------------------------------------------------------------------------


def _fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield prefix + name, None
            yield from _fields(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, kind


def _words(kind: Any) -> list[Any]:
    """The values that a Literal anywhere in an annotation allows."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [word for inner in get_args(kind) for word in _words(inner)]


KINDS = dict(_fields(Config))
WORDS = {key: _words(kind) for key, kind in KINDS.items()}
FIELDS = sorted(KINDS)


@cache
def written_recipes() -> tuple[str, ...]:
    return tuple(file.read_text() for file in sorted(ROOT.glob("recipes/*.yaml")))


@st.composite
def recipes(draw: st.DrawFn) -> tuple[str, list[str]]:
    """The text of a recipe of ours with one change, and the overrides of a command line."""
    text = draw(st.sampled_from(written_recipes()))
    key = draw(st.sampled_from(FIELDS))
    value = draw(st.sampled_from(WORDS[key]) if WORDS[key] and draw(st.booleans()) else ANYTHING)
    change = draw(st.sampled_from(["value", "value", "key", "characters", "override", "override text", "none"]))
    overrides = []
    if change == "value":
        text = _with_value(text, key, value)
    elif change == "key":
        text = _with_value(text, draw(ANY_TEXT.map(lambda name: f"{key}{name}") | ANY_TEXT), value)
    elif change == "characters":
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(ANY_TEXT) + text[start + draw(st.integers(0, 5)) :]
    elif change == "override":
        overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}"]
    elif change == "override text":
        overrides = [draw(ANY_TEXT), f"{key}={draw(ANY_TEXT)}"]
    return text, overrides


def _with_value(text: str, key: str, value: Any) -> str:
    values = YAML(typ="safe", pure=True).load(text)
    *sections, name = key.split(".")
    here = values
    for section in sections:
        if not isinstance(here.get(section), dict):
            here[section] = {}
        here = here[section]
    here[name] = value
    written = io.StringIO()
    with contextlib.suppress(Exception):  # YAML cannot write it, so it is in no file
        YAML(typ="safe", pure=True).dump(values, written)
        return written.getvalue()
    return text


def read_recipe(case: tuple[str, list[str]]) -> str:
    """Read a recipe and write it back as the same one, or refuse it."""
    text, overrides = case
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "recipe.yaml")
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            config = load_config(file, overrides)
        except UserError as error:
            return refusal(error, 2)
        file.write_text(dump_config(config))
        again = load_config(file)
    assert repr(again) == repr(config)  # nan is not equal to itself
    return "read"


# --- recipes, run --------------------------------------------------------------------------------------------------


@cache
def tiny_recipe() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="acc-lm-fuzz-"))
    texts = folder / "words.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in make_words()))
    file = folder / "tiny.yaml"
    file.write_text(tiny_recipe_of(texts))
    return file


PLACES = ("output_dir", "data.files", "data.cache_dir", "tracking.report_to")
"""Keys that would write elsewhere, or use a network."""
MODERATE = (
    st.none() | st.booleans() | st.integers(-2, 40) | st.floats() | st.sampled_from(["x", "", "fp16", "1e-3", "*"])
)
CHANGED = sorted(key for key, kind in KINDS.items() if kind is not None and key not in PLACES and "hub" not in key)


@st.composite
def runs(draw: st.DrawFn) -> list[str]:
    """One or two changes of a tiny recipe."""
    changes = []
    for key in draw(
        st.lists(st.sampled_from(CHANGED), min_size=1, max_size=draw(st.sampled_from([1, 1, 1, 2])), unique=True)
    ):
        value = draw(st.sampled_from(WORDS[key]) if WORDS[key] and draw(st.booleans()) else MODERATE)
        changes.append(f"{key}={json.dumps(value)}")
    return changes


def run_recipe(changes: list[str]) -> str:
    """Training ends with a code of docs/reference/files.md, and without a traceback."""
    with tempfile.TemporaryDirectory(prefix="acc-lm-fuzz-") as folder:
        arguments = ["--config", str(tiny_recipe()), f"output_dir={folder}/run", *changes]
        finished = run_training(arguments, expect=None, environment={"WANDB_MODE": "offline"})
        check_end(finished)
        return "trained" if finished.code == 0 else "refused"


CODES = {0, 2, 3, 4, 5, 6, 7, 8, 9, 70, 75}


def check_end(finished: Finished) -> None:
    """Require a documented code, and lines in place of a traceback."""
    assert finished.code in CODES, finished.output
    assert "Traceback" not in finished.output, finished.output
    assert finished.code in (0, 75) or finished.errors, finished.output
    assert all(len(line) < 4000 for line in finished.errors), finished.output


# --- records -------------------------------------------------------------------------------------------------------

SAID = st.text(max_size=12) | st.sampled_from(
    ["", " two\n\nlines\n", 'quo"ted \\ <&> \u2028', "<|im_start|>", "<|im_end|>", "<think>\nso\n</think>\n\nthat", "[INST]", "</s>", "\x00", "\r\n", "\ud83d", "\ufdd0", "{{ x }}"]
)  # fmt: skip
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | SAID,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(SAID, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["unit", "city", "b", "日"]) | SAID, VALUE, max_size=3)


def _shuffled(parts: dict[str, SearchStrategy[Any]], optional: dict[str, SearchStrategy[Any]]) -> SearchStrategy[Any]:
    """An object with its keys in any order."""
    whole = st.fixed_dictionaries(parts, optional=optional)
    return whole.flatmap(lambda given: st.permutations(list(given.items())).map(dict))


FUNCTION = _shuffled({"name": st.just("weather"), "arguments": ARGUMENTS | ARGUMENTS.map(json.dumps)}, {})
CALL = _shuffled({"function": FUNCTION}, {"type": st.just("function"), "id": st.just("c1")}) | FUNCTION
TOOL = _shuffled(
    {"type": st.just("function"),
     "function": _shuffled({"name": st.just("weather"), "parameters": ARGUMENTS}, {"description": st.none() | SAID, "default": VALUE})}, {},
)  # fmt: skip
USER = _shuffled({"role": st.just("user"), "content": SAID}, {"name": st.none() | SAID})
ASSISTANT = _shuffled(
    {"role": st.just("assistant"), "content": SAID},
    {"reasoning_content": SAID, "thinking": SAID, "tool_calls": st.none() | st.just([]), "weight": st.just(1)},
)
CALLING = _shuffled(
    {"role": st.just("assistant"), "tool_calls": st.lists(CALL, min_size=1, max_size=2)}, {"content": st.none() | SAID}
)
ANSWER = _shuffled(
    {"role": st.just("tool"), "content": SAID}, {"tool_call_id": st.just("c1"), "name": st.just("weather")}
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, Any]:
    """A template's name, and a record: one that is in order, or that has something odd in one place."""
    messages: list[Any] = draw(st.lists(_shuffled({"role": st.just("system"), "content": SAID}, {}), max_size=1))
    uses_tools = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        messages.append(draw(USER))
        if uses_tools and draw(st.booleans()):
            messages += [draw(CALLING), draw(ANSWER)]
        messages.append(draw(ASSISTANT))
    record: dict[str, Any] = {"messages": messages}
    if uses_tools or draw(st.booleans()):
        tools = draw(st.lists(TOOL, max_size=2))
        record["tools"] = json.dumps(tools) if draw(st.booleans()) else tools
    if draw(st.integers(0, 3)) == 0:  # something odd
        here: Any = record
        while isinstance(here, dict | list) and here:
            key = draw(st.sampled_from(sorted(here) if isinstance(here, dict) else range(len(here))))
            if not isinstance(here[key], dict | list) or not here[key] or draw(st.integers(0, 2)) == 0:
                here[key] = draw(VALUE)
                break
            here = here[key]
    return draw(st.sampled_from(sorted(FAMILIES))), record


def trained_as_rendered(case: tuple[str, Any]) -> str:
    """Trained text equals what the library renders of the record, byte for byte; or the record is refused by its place."""
    name, record = case
    tokenizer = tokenizer_of("byte", name)
    template = load_template(tokenizer)
    line = json.dumps(record)
    plan = ChatPlan("messages", "assistant", None, LONG)
    try:
        text = plan.read(json.loads(line), "x.jsonl:1", Skipped(0))
        assert text is not None
        conversation = plan.open(Document(text, None, "x.jsonl:1"))
        items, _ = build_items(conversation, tokenizer, template, "assistant", LONG)
        (whole,), _ = build_items(conversation, tokenizer, template, "all", LONG)
    except DataError as error:
        return refusal(error, 3, ("x.jsonl:1: ",))
    messages, tools = record["messages"], record.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools or None

    def library(messages: list[dict[str, Any]], **how: Any) -> str:
        return rendered(tokenizer, messages, tools, **how)

    assert decoded(tokenizer, whole.ids) == library(messages)
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    answers = [
        (item.ids[:start], item.ids[:end])
        for item in items
        for start, end in _runs(item.is_target)
    ]  # fmt: skip
    assert len(answers) == len(places)
    for (before, so_far), place in zip(answers, places, strict=True):
        assert decoded(tokenizer, before) == library(messages[:place], add_generation_prompt=True)
        assert decoded(tokenizer, so_far) + template.after_end == library(messages[: place + 1])
    return "trained"


def _runs(is_target: list[bool]) -> list[tuple[int, int]]:
    marks = "".join("x" if each else "." for each in is_target)
    return [found.span() for found in re.finditer("x+", marks)]


# --- files of text -------------------------------------------------------------------------------------------------

DOCUMENT = st.text(min_size=1, max_size=60).filter(lambda text: text.strip() and "\x00" not in text)
DAMAGES: dict[str, Callable[[bytes, int, bytes], bytes]] = {
    "none": lambda raw, at, new: raw,
    "cut": lambda raw, at, new: raw[:at],
    "changed": lambda raw, at, new: raw[:at] + new + raw[at + len(new) :],
    "inserted": lambda raw, at, new: raw[:at] + new + raw[at:],
    "removed": lambda raw, at, new: raw[:at] + raw[at + 1 + len(new) :],
    "gzip": lambda raw, at, new: gzip.compress(raw),
    "xz": lambda raw, at, new: lzma.compress(raw),
    "utf-16": lambda raw, at, new: raw.decode("utf-8", "replace").encode("utf-16"),
    "marked": lambda raw, at, new: b"\xef\xbb\xbf" + raw,
    "twice": lambda raw, at, new: raw + raw,
}


@st.composite
def text_files(draw: st.DrawFn) -> tuple[str, list[str], str, int, bytes]:
    """Suffix, documents, damage, its position as a share of a thousand, and what is put there."""
    suffix = draw(st.sampled_from([".txt", *RECORD_SUFFIXES, ".JSONL", ".md"]))
    documents = draw(st.lists(DOCUMENT, min_size=2, max_size=6, unique=True))
    damage = draw(st.sampled_from(["none", *DAMAGES]))
    return suffix, documents, damage, draw(st.integers(0, 1000)), draw(st.binary(min_size=1, max_size=4))


def write_texts(file: Path, documents: list[str]) -> None:
    import csv

    import pyarrow as pa
    import pyarrow.ipc
    import pyarrow.parquet

    records = [{"text": text} for text in documents]
    suffix = file.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif suffix == ".json":
        file.write_text(json.dumps(records))
    elif suffix == ".csv":
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, ["text"], quoting=csv.QUOTE_ALL)
            writer.writeheader()
            writer.writerows(records)
    elif suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(records), file, write_page_checksum=True)
    elif suffix == ".arrow":
        table = pa.Table.from_pylist(records)
        with pyarrow.ipc.new_file(file, table.schema) as stream:
            stream.write_table(table)
    else:
        file.write_bytes("\n".join(documents).encode())


def read_text(case: tuple[str, list[str], str, int, bytes]) -> str:
    """The rows hold each document as it was written, or those that are left of it; or the file is refused by its name."""
    suffix, documents, damage, share, new = case
    with tempfile.TemporaryDirectory(prefix="acc-lm-fuzz-") as folder:
        file = Path(folder, "x" + suffix)
        write_texts(file, documents)
        raw = file.read_bytes()
        file.write_bytes(DAMAGES[damage](raw, len(raw) * share // 1000, new))
        config = DataConfig(
            source="files", files=(str(file),), eval_fraction=0.3, sequence_length=2, cache_dir=f"{folder}/cache"
        )
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # its bar
                data = build_data(config, TokenizerConfig(kind="byte"), None, 0, 1)
        except UserError as error:
            return refusal(error, 3, (str(file), "data"))
        end = data.tokenizer.eos_token_id
        found = []
        for split in ("train", "eval"):
            (rows,) = Path(folder, "cache").rglob(f"{split}.bin")
            ids = np.frombuffer(rows.read_bytes(), np.uint16)
            assert ids[-1] == end
            parts = np.split(ids, np.flatnonzero(ids == end) + 1)[:-1]
            found += [decoded(data.tokenizer, part[:-1].tolist()) for part in parts]
    is_text = file.suffix.lower() not in RECORD_SUFFIXES
    meant = ["\n".join(documents)] if is_text else documents
    everything = "".join(meant)
    if damage in ("none", "marked", "cut") and not (is_text and damage == "cut"):
        assert all(any(part in text for text in meant) for part in found), (
            found,
            meant,
        )  # one is cut in two to hold a part of it out
    if damage in ("none", "marked"):
        assert sorted("".join(found)) == sorted(everything), (found, meant)
    elif damage == "twice" and not is_text:
        copies = 1 if suffix in (".parquet", ".arrow") else 2  # whose ends say where everything is, in the first copy
        with_header = everything * copies + "text" * (suffix == ".csv")
        assert sorted("".join(found)) == sorted(with_header), (found, meant)
    return "read"


# --- the files of a run --------------------------------------------------------------------------------------------

CONTENTS = (
    st.binary(max_size=30)
    | ANYTHING.map(lambda value: json.dumps(value).encode())
    | st.sampled_from([b"{}", b"[]", b"null", b"{", b"\n\n", b"0", b'"x"'])
)
VERBS = {
    "train": [],
    "eval": ["--eval-only"],
    "list": ["checkpoint", "list"],
    "verify": ["checkpoint", "verify"],
    "convert": ["checkpoint", "convert-to-hf"],
    "export": ["checkpoint", "export"],
    "evaluate": ["evaluate"],
    "generate": ["generate"],
}  # fmt: skip


@cache
def stopped_run() -> tuple[Path, Path, bytes]:
    """A run that was stopped in the middle, one that ended, and the weights that both must end with."""
    folder = Path(tempfile.mkdtemp(prefix="acc-lm-fuzz-"))
    arguments = ["--config", str(tiny_recipe())]
    run_training([*arguments, f"output_dir={folder}/whole/run"])
    run_training(
        [*arguments, f"output_dir={folder}/stopped/run"],
        expect=None,
        environment={"ACC_LM_CRASH_AT": "before_manifest@3"},
    )
    assert len(list((folder / "stopped/run/checkpoints").glob("step-*"))) == 2
    return folder / "stopped", folder / "whole", (folder / "whole/run/final/model.safetensors").read_bytes()


@st.composite
def damaged_runs(draw: st.DrawFn) -> tuple[bool, list[tuple[str, str, int, bytes]], str]:
    """A complete or a stopped run, damages by file, and what is then done with it."""
    is_whole = draw(st.booleans())
    stopped, whole, _ = stopped_run()
    folder = whole if is_whole else stopped
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))
    damage = st.tuples(
        st.sampled_from(files),
        st.sampled_from(
            ["cut", "changed", "removed", "content", "content", "gone", "folder", "dangling", "itself", "other", "file"]
        ),
        st.integers(0, 1000),
        CONTENTS,
    )
    return is_whole, draw(st.lists(damage, min_size=1, max_size=2)), draw(st.sampled_from(sorted(VERBS)))


def damage_file(file: Path, how: str, share: int, new: bytes, other: Path) -> None:
    raw = file.read_bytes() if file.is_file() and how in DAMAGES else b""
    if file.is_symlink() or file.is_file():
        file.unlink()
    elif file.is_dir():
        if how in ("cut", "changed", "removed"):
            return
        shutil.rmtree(file)
    if not file.parent.is_dir():
        return
    if how in DAMAGES:
        file.write_bytes(DAMAGES[how](raw, len(raw) * share // 1000, new))
    elif how in ("content", "file"):
        file.write_bytes(new)
    elif how == "folder":
        file.mkdir()
        (file / "x").write_bytes(new)
    elif how == "dangling":
        file.symlink_to("nowhere")
    elif how == "itself":
        file.symlink_to(file.name)
    elif how == "other" and other.exists():
        file.symlink_to(other)


def use_damaged_run(case: tuple[bool, list[tuple[str, str, int, bytes]], str]) -> str:
    """A damaged run ends with the weights of an undamaged one, or says what is wrong."""
    is_whole, damages, verb = case
    stopped, whole, weights = stopped_run()
    with tempfile.TemporaryDirectory(prefix="acc-lm-fuzz-") as folder:
        run = Path(folder, "run")
        shutil.copytree((whole if is_whole else stopped) / "run", run, symlinks=True)
        shutil.copytree(
            whole / "run", Path(folder, "other/run"), symlinks=True
        )  # one damage may link to it, and another write through the link
        for name, how, share, new in damages:
            damage_file(Path(folder, name), how, share, new, Path(folder, "other", name))
        if verb in ("train", "eval"):
            finished = run_training(["--config", str(tiny_recipe()), f"output_dir={run}", *VERBS[verb]], expect=None)
        else:
            place = run / "final" if verb in ("evaluate", "generate") else run / "checkpoints/latest"
            arguments = [*VERBS[verb], str(run if verb == "list" else place)]
            if verb in ("convert", "export"):
                arguments.append(f"{folder}/out" + ".safetensors" * (verb == "export"))
            finished = Launch(lambda: _acc_lm(arguments)).wait()
        check_end(finished)
        if finished.code == 0 and verb == "train":
            assert _same_weights(run / "final/model.safetensors", weights, damages), finished.output
        return "used" if finished.code == 0 else "refused"


def _same_weights(file: Path, weights: bytes, damages: list[Any]) -> bool:
    """A complete run is left as it is, with what was damaged in its own final/."""
    if any("final" in name for name, *_ in damages) or any(name == "run" for name, *_ in damages):
        return True
    return file.read_bytes() == weights


def _acc_lm(arguments: list[str]) -> int:
    from acc_lm.cli import main

    sys.argv = ["acc-lm", *arguments]
    return main(arguments)


# --- schedules -----------------------------------------------------------------------------------------------------

RATE = st.floats(0, 1e-2) | st.floats(0, 1) | st.sampled_from([1e-3, 1e-300, 5e-324, 0.0])
SCHEDULE = st.fixed_dictionaries(
    {"name": st.sampled_from(WORDS["schedule.name"]), "warmup_steps": st.integers(0, 60) | st.integers(0, 5)},
    optional={
        "min_learning_rate": RATE,
        "arguments": st.dictionaries(
            st.sampled_from(["num_decay_steps", "num_stable_steps", "min_lr_ratio", "min_lr_rate", "num_cycles", "power", "lr_end", "timescale", "decay_type", "warmup_type", "min_lr", "num_warmup_steps", "x"]),
            RATE | st.integers(-5, 100) | st.sampled_from(["linear", "cosine", "1-sqrt", "x"]) | st.none() | st.lists(RATE, max_size=2),
            max_size=3,
        ),
    },
)  # fmt: skip


def schedule_rates(case: tuple[dict[str, Any], float, int, int, int]) -> str:
    """The rate is finite and within [0, peak] at every step, or the schedule is refused before the first."""
    values, peak, num_steps, batch, lag = case
    try:
        schedule = ScheduleConfig.model_validate(values)
        optimizer = OptimizerConfig(learning_rate=peak)
    except ValueError:
        return "refused"
    try:
        rate_of = build_schedule(schedule, optimizer, num_steps, batch, lag * batch // 2)
    except UserError as error:
        return refusal(error, 2)
    first = 1 + math.ceil((lag * batch // 2) / batch)
    for step in range(first, num_steps + 1 + (first <= num_steps)):
        rate = rate_of(step)
        assert math.isfinite(rate), (step, rate)
        assert 0 <= rate <= peak * (1 + 1e-9), (step, rate)
    return "used"


PROPERTIES = {
    "recipes read": Property(recipes(), read_recipe, ("read", "refused")),
    "recipes run": Property(runs(), run_recipe, ("trained", "refused"), True),
    "conversations": Property(conversations(), trained_as_rendered, ("trained", "refused")),
    "files of text": Property(text_files(), read_text, ("read", "refused")),
    "files of a run": Property(st.deferred(damaged_runs), use_damaged_run, ("used", "refused"), True),
    "schedules": Property(
        st.tuples(SCHEDULE, RATE, st.integers(6, 120), st.integers(1, 8), st.integers(0, 10)),
        schedule_rates,
        ("used", "refused"),
    ),
}
