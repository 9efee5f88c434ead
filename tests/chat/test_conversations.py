"""Complete runs on conversations: format detected from the columns, packed or padded, on every engine, killed and resumed."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
import torch
from backends import STRATEGY
from processes import ROOT, Finished, Launch, launcher_environment, run_training, start_training
from test_epochs import kill
from test_resume import assert_equal_logs, different, tensors_of
from test_stop import train_with, wrap
from transformers import PreTrainedTokenizerBase

from acc_lm.chat.template import DAY, PLAIN_TEMPLATE
from acc_lm.checkpointing import resuming
from acc_lm.checkpointing.format import Checkpoint, Found
from acc_lm.config import Config, TokenizerConfig
from acc_lm.config.loading import dump_config, load_config
from acc_lm.data import Data, build_data
from acc_lm.errors import CheckpointError, ConfigError, DataError
from acc_lm.evaluation.samples import sample_prompts
from acc_lm.run_files.differences import largest_differences, read_metrics
from acc_lm.run_files.metrics_file import read
from acc_lm.run_files.names import SAMPLES
from acc_lm.text.tokenizer import load_tokenizer, make_tokenizer

NAMES = ["Ada", "Bo", "Cy", "Dee", "Éva", "日本", "Gus", "Hal"]


def exchanges() -> list[tuple[str, str]]:
    """60 questions and answers of very different lengths, all different."""
    choose = random.Random(0)
    return [
        (f"{i}: what does {choose.choice(NAMES)} say?", " ".join(choose.choices(NAMES, k=choose.randint(1, 9))))
        for i in range(60)
    ]


def record_of(format: str, question: str, answer: str) -> dict[str, object]:
    turns = [("user", question), ("assistant", answer)]
    return {
        "messages": {"messages": [{"role": role, "content": text} for role, text in turns]},
        "sharegpt": {"conversations": [{"from": role, "value": text} for role, text in turns]},
        "alpaca": {"instruction": question, "input": "", "output": answer},
        "prompt_completion": {"prompt": question, "completion": " " + answer},
    }[format]


def write(file: Path, format: str) -> Path:
    file.write_text("".join(json.dumps(record_of(format, *pair)) + "\n" for pair in exchanges()))
    return file


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("conversations")
    return {f: write(folder / f"{f}.jsonl", f) for f in ("messages", "sharegpt", "alpaca", "prompt_completion")}


def arguments(tiny: list[str], file: Path, run: Path, *more: str) -> list[str]:
    return [
        *tiny, f"data.files={file}", f"output_dir={run}", "data.sequence_length=96", "data.eval_fraction=0.2", "training.global_batch_size=6",
        "training.micro_batch_size=3", "training.log_every=1", "checkpoint.keep_last=null", *more,
    ]  # fmt: skip


def curve(run: Path) -> list[tuple[float, float]]:
    return [(e["train/loss"], e["train/grad_norm"]) for e in read(run) if "train/loss" in e]


def final_loss(run: Path) -> float:
    return next(float(e["eval/loss"]) for e in reversed(read(run)) if "eval/loss" in e)


@pytest.mark.parametrize("format", ["messages", "sharegpt", "alpaca", "prompt_completion"])
def test_each_format_is_detected_by_its_columns_and_the_trained_model_answers(
    format: str, files: dict[str, Path], tiny: list[str], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    run = tmp_path / "run"
    finished = run_training(arguments(tiny, files[format], run, "export.sample_tokens=4"))
    learned = "completion" if format == "prompt_completion" else "assistant"
    assert f"{format}, trained on {learned}: " in finished.output
    assert " 0 cut (0 targets lost), 0 without a target, 0 with content left out" in finished.output
    assert " items a row, " in finished.output
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    sample = finished.output.split("sample:\n")[1]
    assert ("assistant:" in sample.split("held-out text")[0]) == (format != "prompt_completion")
    if format == "prompt_completion":
        assert tokenizer.chat_template is None, "it was trained on no roles"
        return
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert shown.endswith("assistant:\n")


def test_targets_are_the_answers_alone(files: dict[str, Path], tiny: list[str], tmp_path: Path) -> None:
    """Read back from the rows that the run trains on: decoded, they are the answers of the file and their ends, each once."""
    config = load_config(Path(tiny[1]), arguments([], files["messages"], tmp_path / "run"))
    data = build_data(config.data, config.tokenizer, None, config.seed, 6)
    learned = []
    for rows in (data.train, data.evaluation):
        for row in range(len(rows)):
            batch = rows[row]
            targets = batch["targets"][0].tolist()
            run: list[int] = []
            for target in [*targets, -100]:
                if target != -100:
                    run.append(target)
                elif run:
                    learned.append(data.tokenizer.decode(run))
                    run = []
    end = data.tokenizer.eos_token
    assert sorted(learned) == sorted(f"{answer}{end}" for _, answer in exchanges())


def test_packed_and_padded_rows_have_the_same_held_out_loss(
    files: dict[str, Path], tiny: list[str], tmp_path: Path
) -> None:
    """Untrained weights: the rows differ, what is learned from them does not."""
    losses = {}
    for packing in ("true", "false"):
        run = tmp_path / packing
        more = (f"data.packing={packing}", "optimizer.learning_rate=1e-12", "training.max_steps=2")
        run_training(arguments(tiny, files["messages"], run, *more))
        losses[packing] = final_loss(run)
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-6)


# --- training and questions agree ----------------------------------------------------------------------------------

CLOCK = "{{- strftime_now('%d %b %Y') + '\\n' }}" + PLAIN_TEMPLATE
WEST, EAST = "Etc/GMT+12", "Etc/GMT-14"  # it is never the same day in both


def in_zone(*zones: str) -> None:
    """Put each process into one of these time zones."""
    os.environ["TZ"] = zones[int(os.environ.get("RANK", "0"))]
    time.tzset()


def test_the_date_comes_from_the_recipe_else_from_the_run_else_from_today(tiny: list[str], tmp_path: Path) -> None:
    accelerator: Any = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True)
    run = tmp_path / "run"
    config = load_config(Path(tiny[1]), [f"output_dir={run}"])
    of_recipe, of_first = (resuming.with_day(config, day) for day in ("2020-02-03", "2019-01-02"))
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    tokenizer.init_kwargs[DAY] = "2018-01-02"

    def day(config: Config, found: Found = Found(None), *evaluated: PreTrainedTokenizerBase) -> str:
        return resuming.day_of_run(accelerator, config, found, *evaluated)

    assert day(config) == str(datetime.now().date())
    assert day(config, Found(None), tokenizer) == "2018-01-02"
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(of_first))  # of a start that reached no checkpoint
    assert day(config) == "2019-01-02"
    assert day(load_config(Path(tiny[1]), [f"output_dir={run}", "seed=8"])) == str(datetime.now().date()), (
        "another recipe"
    )
    state = {
        "recipe": of_recipe.model_dump(mode="json"),
        "mixed_precision": "no",
        "num_processes": 1,
        "threads": torch.get_num_threads(),
    }
    found = Found(Checkpoint(run, state))
    assert day(config, found) == "2020-02-03"
    assert day(of_first, found) == "2019-01-02"
    assert resuming.check_same_recipe(found.checkpoint, config, "no", 1) == []  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"data\.chat_template_date was '2020-02-03', is '2019-01-02'"):
        resuming.check_same_recipe(found.checkpoint, of_first, "no", 1)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_date_of_a_run_is_that_of_its_first_start(files: dict[str, Path], tiny: list[str], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from acc_lm.cli import main

    run, tokenizer = tmp_path / "run", tmp_path / "tokenizer"
    make_tokenizer(TokenizerConfig(kind="byte"), []).save_pretrained(tokenizer)
    (tmp_path / "clock.jinja").write_text(CLOCK)
    words = arguments(
        tiny, files["messages"], run, f"data.chat_template={tmp_path}/clock.jinja", f"tokenizer.name_or_path={tokenizer}",
        "data.sequence_length=120", "training.max_steps=2", "training.eval_every=2", "tracking.sample_tokens=2", "tracking.sample_prompts=[Hi]",
    )  # fmt: skip

    def start(more: list[str], prepare: Callable[[], object], num_processes: int = 1) -> Finished:
        return train_with([*words, *more], prepare, num_processes)

    west = datetime.now(ZoneInfo(WEST)).date()
    # Killed before the first checkpoint, on two machines in different zones: that of the main process counts.
    killed = start([], lambda: (in_zone(WEST, EAST), wrap("acc_lm.training.train_step", kill, 1)), 2)
    assert killed.codes == [-signal.SIGKILL] * 2, killed.outputs
    longer = "training.max_steps=4"
    for more in ([], [longer], [longer, "--eval-only"]):
        finished = start(more, lambda: in_zone(EAST))
        assert finished.code == 0, finished.output
        assert ("resumed from" in finished.output) == (more != [])
    other = start([longer, "data.chat_template_date=2020-02-03"], lambda: None)
    assert other.code == 5
    assert f"data.chat_template_date was '{west}', is '2020-02-03'" in other.output
    assert load_config(run / "config.yaml").data.chat_template_date == str(west)
    assert {entry["prompt"].split("\n")[0] for entry in read(run, SAMPLES)} == {f"{west:%d %b %Y}"}
    exported = AutoTokenizer.from_pretrained(shutil.copytree(run / "final", tmp_path / "moved"))
    assert exported.init_kwargs[DAY] == str(west)
    assert exported.chat_template == CLOCK

    def evaluate() -> int:
        in_zone(EAST)
        return main(["evaluate", str(run), "--json", "--generate", "--max-new-tokens=1"])

    evaluated = Launch(evaluate).wait()
    assert evaluated.code == 0, evaluated.output
    found = json.loads(next(line for line in evaluated.output.splitlines() if line.startswith("{")))
    assert found["loss"] == pytest.approx(final_loss(run), rel=1e-6)


def data_of(tiny: list[str], file: Path, tmp_path: Path, *more: str) -> tuple[Data, Config]:
    words = arguments([], file, tmp_path / "run", f"data.cache_dir={tmp_path / 'cache'}", *more)
    config = load_config(Path(tiny[1]), words)
    return build_data(config.data, config.tokenizer, load_tokenizer(config.tokenizer, config.model), 7, 1), config


def lines(file: Path, *records: dict[str, object]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_prompts_and_completions_with_roles_are_rendered_by_their_template(tiny: list[str], tmp_path: Path) -> None:
    pairs = [([{"role": "user", "content": f"q {i}"}], [{"role": "assistant", "content": "a"}]) for i in range(9)]
    file = lines(tmp_path / "x.jsonl", *({"prompt": prompt, "completion": answer} for prompt, answer in pairs))
    (tmp_path / "own.jinja").write_text("{{ '#' }}" + PLAIN_TEMPLATE)
    own = f"data.chat_template={tmp_path}/own.jinja"
    asked = "tracking.sample_tokens=2", "tracking.sample_prompts=[Hi]"
    data, config = data_of(tiny, file, tmp_path, own, *asked)
    assert data.tokenizer.chat_template == (tmp_path / "own.jinja").read_text()
    (prompt,) = sample_prompts(data, config)
    assert data.tokenizer.decode(prompt) == "#user:\nHi<|endoftext|>\nassistant:\n"
    plain = lines(tmp_path / "y.jsonl", *({"prompt": f"q {i}", "completion": "a"} for i in range(9)))
    data, config = data_of(tiny, plain, tmp_path, *asked)
    assert data.tokenizer.decode(sample_prompts(data, config)[0]) == "Hi"
    for file, key in ((plain, own), (plain, "data.chat_template_date=2020-02-03")):
        with pytest.raises(ConfigError, match=rf"{key.partition('=')[0]} must be null for "):
            data_of(tiny, file, tmp_path, key)


def test_both_templates_of_a_tokenizer_are_exported(files: dict[str, Path], tiny: list[str], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    both = {"default": PLAIN_TEMPLATE, "tool_use": "{{ '#' }}" + PLAIN_TEMPLATE}
    tokenizer.chat_template = both  # type: ignore[assignment]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data, _ = data_of(tiny, files["messages"], tmp_path, f"tokenizer.name_or_path={tmp_path}/tokenizer")
    data.tokenizer.save_pretrained(tmp_path / "final")
    assert AutoTokenizer.from_pretrained(tmp_path / "final").chat_template == both


def test_the_limit_on_lossy_records_holds_with_a_warm_cache_too(tiny: list[str], tmp_path: Path) -> None:
    record = partial(record_of, "messages")
    good, bad = (
        lines(tmp_path / f"{name}.jsonl", *(record(f"{i}", "a" * (i % 2 * length)) for i in range(20)))
        for name, length in (("good", 5), ("bad", 200))
    )
    for file, sets in ((bad, ()), (good, (f"data.evaluation_sets={{long: {bad}}}",))):
        for permissive in (False, True, False):
            if permissive:
                data_of(tiny, file, tmp_path, *sets, "data.max_lossy_share=1.0")
            else:
                with pytest.raises(DataError, match=r"must fit into data.sequence_length, got \d+ of \d+ cut"):
                    data_of(tiny, file, tmp_path, *sets)


def test_answers_without_text_have_no_bits_per_byte_and_cannot_be_best_by_them(tiny: list[str], tmp_path: Path) -> None:
    file = lines(tmp_path / "x.jsonl", *(record_of("messages", f"q {i}", "") for i in range(30)))
    words = arguments(tiny, file, tmp_path / "run", "training.max_steps=2")
    refused = run_training([*words, "checkpoint.best_metric=eval/bits_per_byte"], expect=2)
    assert refused.errors[0].startswith("error: checkpoint.best_metric must be a metric that the held-out text has")
    finished = run_training(words)
    assert "bits per byte none" in finished.output

    def no_number(name: str) -> None:
        raise AssertionError(name)

    written = [json.loads((tmp_path / "run/summary.json").read_text(), parse_constant=no_number)]
    written += [json.loads(line, parse_constant=no_number) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert written[0]["bits_per_byte"] == {}
    assert any("eval/loss" in entry for entry in written)
    assert not any("eval/bits_per_byte" in entry for entry in written)


# --- every pair of what is read, what is trained, how rows are made, and what it runs on --------------------------


class Case(NamedTuple):
    format: str
    trained: str
    rows: str
    engine: str

    def __str__(self) -> str:
        return ", ".join(self)


FORMATS, TRAINED, ENGINES = (
    ("text", "prompt_completion", "messages"), ("full", "LoRA"), ("single", "ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"),
)  # fmt: skip
CASES = [
    Case(format, TRAINED[(i + j) % 2], ("packed", "padded")[(2 * i + j) // 2 % 2], engine)
    for i, format in enumerate(FORMATS)
    for j, engine in enumerate(ENGINES)
]
"""Each value of an axis with each value of every other axis; padded text is text whose documents see each other."""
LAYERS = {"tensor_parallel": 2, "fsdp2_tensor_parallel": 4}
CASES_WITH_LAYERS_IN_PARTS = [
    Case("text", "full", "packed", "tensor_parallel"), Case("prompt_completion", "full", "padded", "tensor_parallel"),
    Case("messages", "full", "padded", "fsdp2_tensor_parallel"), Case("prompt_completion", "full", "packed", "fsdp2_tensor_parallel"),
]  # fmt: skip
"""They train no adapter, and need heads that divide."""
QUICK = [
    Case("text", "LoRA", "packed", "ddp"), Case("prompt_completion", "LoRA", "padded", "single"), Case("messages", "full", "padded", "fsdp2"),
]  # fmt: skip


def test_each_pair_of_values_is_among_the_cases() -> None:
    for one, other in itertools.combinations(range(4), 2):
        values = [{case[axis] for case in CASES} for axis in (one, other)]
        assert {(case[one], case[other]) for case in CASES} == set(itertools.product(*values))
    assert set(QUICK) <= set(CASES)
    assert [{case[axis] for case in QUICK} for axis in range(3)] == [
        {case[axis] for case in CASES} for axis in range(3)
    ]


class Outcome(NamedTuple):
    differences: dict[str, float]
    """Largest, relative, of any step from one process."""
    same_rows: bool
    same_after_kill: bool
    """All numbers and bytes of the killed run equal those of the uninterrupted one."""


def try_case(case: Case, tiny: list[str], base: Path, folder: Path) -> Outcome:
    """Run 10 steps on one process, 10 on the engine, and 10 that are killed at the save of step 8."""
    file = folder / "data.jsonl"
    if case.format == "text":
        file.write_text("".join(json.dumps({"text": f"{a} {b}"}) + "\n" for a, b in exchanges()))
        how = f"data.attend_across_documents={str(case.rows == 'padded').lower()}"
    else:
        write(file, case.format)
        how = f"data.packing={str(case.rows == 'packed').lower()}"
    words = [
        *tiny,
        how,
        "training.max_steps=10",
        "training.eval_every=5",
        "checkpoint.every=4",
        "checkpoint.keep_best=0",
    ]
    if case.trained == "LoRA":
        model = ["model.config=null", f"model.name_or_path={base}/final", "adapter.kind=lora", "adapter.rank=2"]
        words += [*model, "optimizer.learning_rate=3e-3"]  # with 1e-2 it jumps, and rounding of 1e-8 becomes 2e-5 there
    count, environment = 1, {}
    if case.engine in LAYERS:
        words.append("model.config={hidden_size: 32, num_attention_heads: 4, num_key_value_heads: 2}")
    if case.engine != "single":
        count = LAYERS.get(case.engine, 2)
        environment = launcher_environment(ROOT / f"accelerate_configs/{case.engine}.yaml", count)
    one, whole, run = (folder / name for name in ("one", "whole", "run"))
    run_training(arguments(words, file, one))
    run_training(arguments(words, file, whole), count, environment)
    assert json.loads((whole / "environment.json").read_text())["strategy"] == STRATEGY[case.engine][0]
    crash = {"ACC_LM_CRASH_AT": "before_tmp@2"}
    assert -signal.SIGKILL in start_training(arguments(words, file, run), count, environment | crash).wait().codes
    assert "at step 4" in run_training(arguments(words, file, run), count, environment).output
    ledgers = [json.loads((folder / "summary.json").read_text())["ledger"] for folder in (one, whole)]
    (final,) = [path.relative_to(whole) for path in (whole / "final").glob("*.safetensors")]
    assert_equal_logs(whole, run)
    same = different(tensors_of(whole, 10), tensors_of(run, 10)) == []
    same &= (whole / final).read_bytes() == (run / final).read_bytes()
    return Outcome(largest_differences(read_metrics(one), read_metrics(whole)), ledgers[0] == ledgers[1], same)


@pytest.fixture(scope="module")
def base(tiny_recipe: Path, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose final/ is the base model of the adapters."""
    run = tmp_path_factory.mktemp("base") / "run"
    run_training(arguments(["--config", str(tiny_recipe)], files["messages"], run))
    return run


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if case in QUICK else pytest.mark.slow)
        for case in (*CASES, *CASES_WITH_LAYERS_IN_PARTS)
    ],
)
def test_every_case_trains_the_same_everywhere(case: Case, tiny: list[str], base: Path, tmp_path: Path) -> None:
    outcome = try_case(case, tiny, base, tmp_path)
    assert {"train/loss", "train/grad_norm", "eval/loss"} <= outcome.differences.keys()
    assert max(outcome.differences.values()) <= 1e-5, outcome.differences
    assert outcome.same_rows
    assert outcome.same_after_kill


def test_an_adapter_is_tried_on_conversations_before_it_is_trained(
    files: dict[str, Path], tiny: list[str], base: Path, tmp_path: Path
) -> None:
    model = ["model.config=null", f"model.name_or_path={base}/final", "adapter.kind=lora", "adapter.rank=2"]
    tried = run_training([*arguments(tiny, files["messages"], tmp_path / "lora", *model), "--dry-run"])
    assert "dry run: everything works" in tried.output


MAMBA = "model.config={model_type: mamba, hidden_size: 16, num_hidden_layers: 1, state_size: 4}"


def test_a_model_that_cannot_keep_items_apart_is_refused_and_can_pad(
    files: dict[str, Path], tiny: list[str], tmp_path: Path
) -> None:
    finished = run_training(arguments(tiny, files["messages"], tmp_path / "packed", MAMBA), expect=2)
    assert "data.packing" in finished.errors[0]
    run_training(
        arguments(tiny, files["messages"], tmp_path / "padded", MAMBA, "data.packing=false", "training.max_steps=2")
    )


ODD = {
    "two formats": ([{"text": "a", "messages": []}], [], 3, "set data.format to text or messages"),
    "a txt file": (None, ["data.format=messages"], 3, "must have records (jsonl, json, csv, parquet, arrow, or a dataset)"),
    "another part": ([record_of("messages", "a", "b")] * 2, ["data.train_on=completion"], 2, "data.train_on must be assistant or last_assistant or all"),
    "roles": ([{"messages": [{"role": "assistant", "content": "a"}]}], [], 3, "odd.jsonl:1: messages[0] must be system or user at the start, got assistant"),
    "no answer": ([{"messages": [{"role": "user", "content": "a"}]}], [], 3, "odd.jsonl:1: messages must end with the assistant's turn, got user"),
    "one conversation": ([record_of("messages", "a", "b")] * 9, [], 3, "must include at least two different ones, got one"),
    "too long": ([record_of("messages", "a" * 300, str(i)) for i in range(9)], [], 3, "got none"),
    "a template for text": (None, ["data.chat_template=/nonexistent.jinja"], 2, "data.chat_template must be null for plain text, got /nonexistent.jinja; leave it out, or set data.format"),
    "a part of text": (None, ["data.train_on=assistant"], 2, "data.train_on must be all for data.format text, got assistant"),
    "a date that is none": ([record_of("messages", "a", "b")] * 2, ["data.chat_template_date=tomorrow"], 2, "data.chat_template_date must be a date as YYYY-MM-DD, got 'tomorrow'"),
    "a date without a clock": ([record_of("messages", str(i), "b") for i in range(60)], ["data.chat_template_date=2020-02-03"], 2, "data.chat_template_date must be null for a chat template that reads no clock, got 2020-02-03; leave it out"),
    "a template that is not there": ([record_of("messages", "a", "b")] * 2, ["data.chat_template=none.jinja"], 2, "data.chat_template must be a template file"),
    "a template that cannot": ([record_of("messages", "a", "b"), record_of("messages", "c", "d")], ["data.chat_template={folder}/odd.jinja", "data.eval_fraction=0.5"], 2, "odd.jinja:2"),
    "too long to hold out": ([record_of("messages", "a", "b"), record_of("messages", "c", "d")], [], 3, "data.eval_fraction must be at least 0.25"),
    "too few": ([record_of("messages", str(i), "b") for i in range(4)], [], 3, "must fill training.global_batch_size 6 rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_each_refusal_is_one_line(name: str, tiny: list[str], tmp_path: Path) -> None:
    records, more, code, says = ODD[name]
    file = tmp_path / ("odd.txt" if records is None else "odd.jsonl")
    file.write_text("words" if records is None else "".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "odd.jinja").write_text("{{ messages[0].content }}\n{{ raise_exception('no such thing') }}")
    more = [word.replace("{folder}", str(tmp_path)) for word in more]
    finished = run_training(arguments(tiny, file, tmp_path / "run", *more), expect=code)
    assert says in finished.errors[0], finished.errors
    assert "Traceback" not in finished.output
