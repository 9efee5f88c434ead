"""`acc-lm evaluate`: the figures of a run's own evaluation, document by document, and answers that do not depend on the batch."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import STRATEGY
from processes import (
    LAUNCH_VARIABLES,
    ROOT,
    Finished,
    Launch,
    launcher_environment,
    run_everywhere,
    run_training,
    start_training,
)
from test_conversations import exchanges, record_of
from test_conversations import write as write_exchanges
from test_readme import commands

from acc_lm.run_files.metrics_file import read

FIGURES = ("loss", "perplexity", "bits_per_byte", "token_accuracy")
ANSWER = "Ada."


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import before processes are forked, each of which would need seconds for it."""
    for name in ("evaluate", "peft"):
        importlib.import_module(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def text_run(tiny_recipe: Path, folder: Path) -> Path:
    run_training(["--config", str(tiny_recipe), f"output_dir={folder}/text"])
    return folder / "text"


@pytest.fixture(scope="module")
def chats(folder: Path) -> Path:
    """Questions that always have the same answer, so that a tiny model learns it."""
    file = folder / "chats.jsonl"
    records = [record_of("messages", question, ANSWER) for question, _ in exchanges()]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture(scope="module")
def chat_run(chats: Path, tiny_recipe: Path, folder: Path) -> Path:
    run_training([
        "--config", str(tiny_recipe), f"output_dir={folder}/chat", f"data.files={chats}", "data.sequence_length=96", "data.eval_fraction=0.2",
        "training.global_batch_size=6", "training.micro_batch_size=3", "training.max_steps=60", "training.eval_every=null",
        "checkpoint.every=null", "optimizer.learning_rate=2e-2", "model.config.num_key_value_heads=2",
    ])  # fmt: skip
    return folder / "chat"


@pytest.fixture(scope="module")
def adapter_run(chat_run: Path, chats: Path, tiny_recipe: Path, folder: Path) -> Path:
    run_training([
        "--config", str(tiny_recipe), f"output_dir={folder}/lora", f"data.files={chats}", "data.sequence_length=96", "data.eval_fraction=0.2",
        "model.config=null", f"model.name_or_path={chat_run}/final", "adapter.kind=lora", "adapter.rank=2", "optimizer.learning_rate=1e-2",
    ])  # fmt: skip
    return folder / "lora"


def evaluate(
    arguments: list[Any], num_processes: int = 1, environment: dict[str, str] | None = None, expect: int = 0
) -> Finished:
    """Run `acc-lm evaluate` with these arguments, as the processes of a launch would."""

    def function() -> int:
        from acc_lm.cli import main

        return main(["evaluate", *map(str, arguments)])

    finished = Launch(function, num_processes, environment).wait()
    assert finished.codes == [expect] * num_processes, "\n".join(finished.outputs)
    return finished


def figures(arguments: list[Any], *launch: Any) -> dict[str, Any]:
    finished = evaluate([*arguments, "--json"], *launch)
    (line,) = [line for output in finished.outputs for line in output.splitlines() if line.startswith("{")]
    return dict(json.loads(line))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def last_evaluation(run: Path) -> dict[str, float]:
    entry = next(entry for entry in reversed(read(run)) if "eval/loss" in entry)
    return {name: entry[f"eval/{name}"] for name in FIGURES}


def only_figures(found: dict[str, Any]) -> dict[str, float]:
    return {name: found[name] for name in FIGURES}


# --- the figures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text_run", "chat_run", "adapter_run"])
def test_the_figures_are_those_of_the_runs_last_evaluation(kind: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(kind)
    expected = last_evaluation(run)
    assert only_figures(figures([run])) == pytest.approx(expected, rel=1e-6)
    shown = evaluate([run / "final", "--batch-size", 2]).output
    assert re.search(rf"^loss +{expected['loss']:.6f} nats per target$", shown, re.MULTILINE)
    assert re.search(rf"^token accuracy +{expected['token_accuracy']:.6f}$", shown, re.MULTILINE)


@pytest.mark.parametrize("format", ["text", "text apart", "alpaca", "prompt_completion"])
def test_a_file_has_the_figures_that_eval_only_finds(
    format: str, text_run: Path, text_file: Path, tiny: list[str], folder: Path
) -> None:
    file = text_file if format.startswith("text") else write_exchanges(folder / f"{format}.jsonl", format)
    more = ["data.sequence_length=128"] + ["data.packing=false"] * (format == "alpaca")
    more += ["data.attend_across_documents=false"] * (format == "text apart")
    model = ["model.config=null", f"model.name_or_path={text_run}/final", "data.eval_fraction=0.05"]
    run = folder / f"eval-only-{format}"
    run_training(
        [*tiny, *model, *more, f"data.files={file}", f"data.eval_files={file}", f"output_dir={run}", "--eval-only"]
    )
    found = figures([text_run / "final", *more, "--data", file])
    assert only_figures(found) == pytest.approx(last_evaluation(run), rel=1e-6)
    assert found["documents"] == len(file.read_text().splitlines())


def test_a_merged_adapter_scores_as_the_adapter_does(adapter_run: Path, folder: Path) -> None:
    from acc_lm.cli import main

    assert main(["export", "--merge", str(adapter_run / "final"), str(adapter_run / "merged")]) == 0
    merged, apart = (only_figures(figures([adapter_run / name])) for name in ("merged", "final"))
    assert merged == pytest.approx(apart, rel=1e-5)


@pytest.mark.parametrize(
    ("config", "num_processes"),
    [
        ("ddp", 3),
        ("fsdp2", 2),
        ("tensor_parallel", 2),
        pytest.param("fsdp2_tensor_parallel", 4, marks=pytest.mark.slow),
        pytest.param("ddp_sequence", 2, marks=pytest.mark.slow),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        pytest.param("deepspeed_zero3", 2, marks=pytest.mark.slow),
        pytest.param("sequence_parallel", 4, marks=pytest.mark.slow),
    ],
)
def test_any_launch_writes_the_same_rows_once(
    config: str, num_processes: int, chat_run: Path, chats: Path, tmp_path: Path
) -> None:
    arguments = [chat_run / "final", "--data", chats, "--generate", "--max-new-tokens", 8, "--batch-size", 7]
    if "tensor" in config:  # sums in another order, of losses near 0: in float32, one process is as far from the truth
        arguments += ["model.dtype=float64"]
    one = figures([*arguments, "--predictions", tmp_path / "one.jsonl"])
    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", num_processes)
    several = figures([*arguments, "--predictions", tmp_path / "several.jsonl"], num_processes, environment)
    assert (several["strategy"], several["num_processes"]) == (STRATEGY[config][0], num_processes)
    assert only_figures(several) == pytest.approx(only_figures(one), rel=1e-6)
    assert several["generation"] == one["generation"]
    expected, rows = rows_of(tmp_path / "one.jsonl"), rows_of(tmp_path / "several.jsonl")
    assert [row["document"] for row in rows] == list(range(60))
    for mine, theirs in zip(rows, expected, strict=True):
        assert mine.pop("nll") == pytest.approx(theirs.pop("nll"), rel=1e-5)
        assert mine.pop("perplexity") == pytest.approx(theirs.pop("perplexity"), rel=1e-5)
        assert mine == theirs


def test_an_adapter_is_refused_where_layers_are_divided(adapter_run: Path) -> None:
    environment = launcher_environment(ROOT / "accelerate_configs/tensor_parallel.yaml", 2)
    finished = evaluate([adapter_run / "final"], 2, environment, expect=2)
    assert "MODEL must be complete with layers in 2 parts, got an adapter; merge it first" in finished.errors[0]


def test_the_row_of_each_document_matches_transformers(
    chat_run: Path, text_run: Path, chats: Path, text_file: Path, tmp_path: Path
) -> None:
    """Recomputed with transformers alone: conversations one by one, text row by row."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    figures([chat_run, "--data", chats, "--predictions", tmp_path / "chats.jsonl"])
    model = AutoModelForCausalLM.from_pretrained(chat_run / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(chat_run / "final")
    for row, line in zip(rows_of(tmp_path / "chats.jsonl"), chats.read_text().splitlines(), strict=True):
        question, answer = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
        before = tokenizer(prompt)["input_ids"]
        after = tokenizer(answer["content"] + tokenizer.eos_token)["input_ids"]
        with torch.no_grad():
            log_p = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].log_softmax(-1)
        nll = -log_p[range(len(after)), after].sum().item()
        assert row["nll"] == pytest.approx(nll, rel=1e-4, abs=1e-5)
        assert (row["targets"], row["bytes"]) == (len(after), len(answer["content"].encode()))
        assert row["correct"] == (log_p.argmax(-1) == torch.tensor(after)).sum()
        assert row["perplexity"] == pytest.approx(math.exp(nll / len(after)), rel=1e-4)

    figures([text_run, "--data", text_file, "--predictions", tmp_path / "text.jsonl"])
    model = AutoModelForCausalLM.from_pretrained(text_run / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(text_run / "final")
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    ids, owner = [], []
    for number, text in enumerate(texts):
        some = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        ids += some
        owner += [number] * len(some)
    nll_of = [0.0] * len(texts)
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 32):
            piece = ids[start : start + 33]
            log_p = model(torch.tensor([piece[:-1]])).logits[0].log_softmax(-1)
            for place, target in enumerate(piece[1:]):
                nll_of[owner[start + 1 + place]] -= log_p[place, target].item()
    rows = rows_of(tmp_path / "text.jsonl")
    assert [row["nll"] for row in rows] == pytest.approx(nll_of, rel=1e-5)
    assert [row["bytes"] for row in rows] == [len(text.encode()) - (n == 0) for n, text in enumerate(texts)]
    assert [row["place"] for row in rows] == [f"{text_file}:{n + 1}" for n in range(len(texts))]


@pytest.fixture(scope="module")
def run_from_a_folder(tiny_recipe: Path, text_file: Path, folder: Path) -> Path:
    """A run whose recipe names its text by a relative path; that folder is `here` next to it."""
    here = folder / "here"
    here.mkdir()
    shutil.copy(text_file, here / "t.jsonl")

    def train() -> int:
        from train import main

        os.chdir(here)
        return main(["--config", str(tiny_recipe), f"output_dir={folder}/from-a-folder", "data.files=t.jsonl"])

    assert Launch(train).wait().codes == [0]
    return folder / "from-a-folder"


def test_only_text_that_the_run_held_out_is_scored_as_held_out(
    run_from_a_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, text = run_from_a_folder, run_from_a_folder.parent / "here/t.jsonl"
    expected, known = pytest.approx(last_evaluation(run), rel=1e-6), text.read_text()
    (tmp_path / "t.jsonl").write_text(known.replace("red", "wet"))
    monkeypatch.chdir(tmp_path)
    found = figures([run])
    assert (only_figures(found), found["data"]) == (expected, "held out by the run"), "of where it was started"
    other = "the run must have been trained on this text, got other text"
    assert other in evaluate([run, "data.eval_fraction=0.3"], expect=5).errors[0]
    text.write_text(known + json.dumps({"text": "one more document " * 200}) + "\n")
    assert other in evaluate([run], expect=5).errors[0]
    text.unlink()
    assert f"data.files must name an existing file or folder, got '{text}'" in evaluate([run], expect=3).errors[0]
    (tmp_path / "t.jsonl").write_text(known)
    assert only_figures(figures([run, "data.files=t.jsonl"])) == expected, "moved"
    text.write_text(known)

    changed = tmp_path / "changed"
    shutil.copytree(run, changed, ignore=shutil.ignore_patterns("checkpoints"))
    (changed / "final/chat_template.jinja").write_text("{{ messages }}")
    assert "must be those in" in evaluate([changed], expect=5).errors[0]
    (changed / "environment.json").write_text("{}")
    assert "must name the text that the run was trained on" in evaluate([changed], expect=5).errors[0]


def test_a_model_that_its_run_has_moved_past_is_not_taken_for_the_runs(
    run_from_a_folder: Path, tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.chdir(run_from_a_folder.parent / "here")
    shutil.copytree(run_from_a_folder, run, symlinks=True)
    assert re.search(r"^step +6$", evaluate([run]).output, re.MULTILINE)
    longer = ["--config", str(tiny_recipe), f"output_dir={run}", "data.files=t.jsonl", "training.max_steps=12"]
    killed = start_training(longer, 1, {"ACC_LM_CRASH_AT": "before_tmp@2"}).wait()
    assert killed.codes == [-9]
    (problem,) = evaluate([run], expect=2).errors
    assert f"whose final/ is its newest model, got {run}, which has since continued from step 6 to 8" in problem
    assert figures([run / "final"])["step"] == 6, "named, it is scored"


# --- answers -------------------------------------------------------------------------------------------------------


def test_answers_are_compared_with_their_references(chat_run: Path, chats: Path, tmp_path: Path) -> None:
    known = [json.loads(line) for line in chats.read_text().splitlines()]
    accepted: list[Any] = [["no", f" {ANSWER}\n"], "no", ANSWER, ["no", "neither"]]
    file = tmp_path / "some.jsonl"
    file.write_text(
        "".join(json.dumps(record | {"right": right}) + "\n" for record, right in zip(known, accepted, strict=False))
    )
    out = tmp_path / "out.jsonl"
    common = ["--data", file, "--generate", "--max-new-tokens", 12]
    found = figures([chat_run, *common, "--references-column", "right", "--predictions", out])
    assert found["generation"]["exact_match"] == 0.5
    rows = rows_of(out)
    assert [row["exact_match"] for row in rows] == [True, False, True, False]
    assert [row["references"] for row in rows] == [a if isinstance(a, list) else [a] for a in accepted]
    assert {row["completion"] for row in rows} == {ANSWER}
    assert rows[0]["prompt"].endswith("<|endoftext|>\nassistant:\n")
    assert figures([chat_run, *common])["generation"]["exact_match"] == 1.0, "the answers of the file itself"
    shown = evaluate([chat_run, *common]).output
    for package, name in (("sacrebleu", "bleu"), ("rouge_score", "rouge")):
        is_there = importlib.util.find_spec(package) is not None
        assert (f"no {name}: the package {package} is not installed" in shown) == (not is_there)
    drawn = [
        figures(
            [chat_run, *common, "--temperature", 3, "--batch-size", size, "--predictions", tmp_path / f"{size}.jsonl"],
            n,
        )
        for size, n in ((1, 1), (4, 2))
    ]
    assert drawn[0]["generation"] == drawn[1]["generation"]
    assert [r["completion"] for r in rows_of(tmp_path / "1.jsonl")] == [
        r["completion"] for r in rows_of(tmp_path / "4.jsonl")
    ]


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}


def untrained(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=64, bos_token_id=0, eos_token_id=0, pad_token_id=0, **MODELS[name])
    return AutoModelForCausalLM.from_config(config).eval()


class Letters:
    """Stand-in for a tokenizer whose tokens are letters."""

    def decode(self, ids: list[int], **keywords: Any) -> str:
        return "".join(chr(48 + id) for id in ids)


def answers_in_batches(name: str, sizes: tuple[int, ...], change: Callable[[Any], None] = lambda model: None) -> Any:
    """Answers of an untrained model for each batch size, and the number of calls to generate."""

    def run() -> Any:
        from accelerate import Accelerator

        from acc_lm.evaluation import completions

        accelerator, model = Accelerator(cpu=True), untrained(name)
        change(model)
        asked: list[int] = []
        generate = completions._generate
        completions._generate = lambda m, prompts, *more: asked.append(len(prompts)) or generate(m, prompts, *more)
        prompts = [completions.Prompt([1 + (n * k) % 63 for k in range(1, 2 + n % 7)], (0,)) for n in range(1, 15)]
        answers = []
        for size in sizes:
            asked.append(0)
            answers.append(
                completions.complete(accelerator, model, Letters(), prompts, max_new_tokens=24, batch_size=size)
            )
        one_by_one = [
            Letters().decode(out[len(p.ids) :].tolist()).split("0")[0]
            for p in prompts
            for out in model.generate(torch.tensor([p.ids]), max_new_tokens=24, do_sample=False)
        ]
        return answers, one_by_one, asked

    ((answers, one_by_one, asked),) = run_everywhere(run)
    return answers, one_by_one, asked


@pytest.mark.parametrize("name", MODELS)
def test_answers_do_not_depend_on_the_batch(name: str) -> None:
    answers, one_by_one, asked = answers_in_batches(name, (1, 4, 14))
    assert answers == [one_by_one] * 3
    if name != "mamba":
        assert asked[asked.index(0, 1) + 1] == 4
        assert asked.count(1) < 3 * 14, "most prompts are answered in batches"


def chain(tokens: list[int], near: float | None = None) -> Any:
    """A model that answers each token with the next of these; if `near`, ending after the last is a close call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=32, tie_word_embeddings=False, eos_token_id=0,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            parameter.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(16))
        model.lm_head.weight.zero_()
        for token, following in itertools.pairwise(tokens):
            model.lm_head.weight[following, token] = 1
        if near is not None:
            model.lm_head.weight[5, tokens[-2]] = 1 - near
    return model


def answer(
    model: Any, prompts: list[tuple[list[int], tuple[int, ...]]], size: int, most: int = 8
) -> tuple[Any, list[int]]:
    """Answers of the model to (ids, ends), and how many prompts it was given at a time."""

    def run() -> Any:
        from accelerate import Accelerator

        from acc_lm.evaluation import completions

        asked: list[int] = []
        generate = completions._generate
        completions._generate = lambda m, some, *more: asked.append(len(some)) or generate(m, some, *more)
        given = [completions.Prompt(ids, ends) for ids, ends in prompts]
        found = completions.complete(
            Accelerator(cpu=True), model, Letters(), given, max_new_tokens=most, batch_size=size
        )
        return found, asked

    ((found, asked),) = run_everywhere(run)
    return found, asked


def test_the_end_tokens_of_another_prompt_in_the_batch_end_no_answer() -> None:
    """The token that ends one answer is text in another, as where records with and without roles are in one file."""
    model = chain([1, 2, 3, 4, 0])
    prompts = [([1], (0,)), ([7, 1], (3, 0)), ([7, 7, 1], (0,))]
    alone, _ = answer(model, prompts, 1)
    assert alone == ["234", "2", "234"]
    together, asked = answer(model, prompts, 3)
    assert together == alone
    assert max(asked) == 2, "those with the same ends"


def test_where_stopping_is_a_close_call_a_prompt_is_answered_alone() -> None:
    prompts = [([1], (0,)), ([7, 1], (0,))]
    assert answer(chain([1, 2, 3, 0]), prompts, 2) == (["23", "23"], [2, 1])
    assert answer(chain([1, 2, 3, 0], near=1e-5), prompts, 2) == (["23", "23"], [2, 1, 1, 1])


def test_an_answer_may_use_all_the_positions_that_the_model_has_left() -> None:
    """28 of 32 positions taken: four tokens, the last of which needs no position to be read."""
    model = chain([1, 2, 3, 4, 6, 8, 9, 10, 0])
    answers, _ = answer(model, [([7] * 27 + [1], (0,)), ([7] * 32, (0,)), ([1], (0,))], 2)
    assert answers == ["2346", None, "234689:"]


def test_where_rounding_could_decide_a_prompt_is_answered_alone() -> None:
    def halve(model: Any) -> None:  # every token has a twin that is as likely
        weight = model.get_output_embeddings().weight
        weight.data[32:] = weight.data[:32]

    answers, one_by_one, asked = answers_in_batches("llama", (14,), halve)
    assert answers == [one_by_one]
    assert asked == [0, 14, 1, *[1] * 14]


def test_a_model_that_cannot_be_padded_answers_everything_alone() -> None:
    def look_at_padding(model: Any) -> None:
        forward = type(model).forward
        model.forward = lambda **given: forward(model, **{**given, "attention_mask": None})

    answers, one_by_one, asked = answers_in_batches("llama", (14,), look_at_padding)
    assert answers == [one_by_one]
    assert asked == [0, 14, 1, *[1] * 14]


@pytest.mark.parametrize("name", ["exact_match", "bleu", "rouge"])
def test_the_modules_are_those_of_the_evaluate_library(name: str, tmp_path: Path) -> None:
    if name != "exact_match":
        pytest.importorskip({"bleu": "sacrebleu", "rouge": "rouge_score"}[name])
    import evaluate as library

    path = ROOT / f"src/acc_lm/evaluation/metrics/{name}.py"
    metric = library.load(str(path), cache_dir=str(tmp_path), keep_in_memory=True)
    references = [["the cat sat on the mat", "a cat"], ["it rains today and tomorrow"]]
    best = metric.compute(predictions=[texts[0] for texts in references], references=references)
    worst = metric.compute(predictions=["dog", "dog"], references=references)
    assert set(best.values()) == ({100.0} if name == "bleu" else {1.0}) or best == pytest.approx({"bleu": 100})
    assert set(worst.values()) == {0.0}
    if name == "exact_match":
        assert metric.compute(predictions=[" a cat\n", "It rains"], references=references) == {"exact_match": 0.5}


# --- other tools, the page -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chat_run", "adapter_run"])
def test_final_answers_in_transformers_pipeline(kind: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(kind)

    def answer() -> Any:
        (cell,) = re.findall(
            r"^```python\n(.*?)^```", (ROOT / "docs/guides/evaluating.md").read_text(), re.DOTALL | re.MULTILINE
        )
        cell = cell.replace("runs/chat/final", f"{run}/final").replace("print(", "printed.append(")
        printed: list[Any] = []
        exec(cell, {"printed": printed})
        return printed

    assert run_everywhere(answer) == [[{"role": "assistant", "content": ANSWER}]]


def test_the_commands_of_the_page_work(chat_run: Path, chats: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/chat").symlink_to(chat_run)
    (tmp_path / "accelerate_configs").symlink_to(ROOT / "accelerate_configs")
    (tmp_path / "chats").mkdir()
    for file in ("more.jsonl", "chats/some.jsonl"):
        (tmp_path / file).write_text("".join(chats.read_text().splitlines(keepends=True)[:9]))
    # --tasks needs an extra and a network: tests/export/test_lm_eval.py
    found = [command for command in commands(ROOT / "docs/guides/evaluating.md") if "--tasks" not in command]
    assert len(found) == 6
    for command in found:
        words = shlex.split(command)
        count, environment = 1, {}
        if words[0] == "accelerate":
            count = int(words[words.index("--num_processes") + 1])
            environment = launcher_environment(ROOT / words[words.index("--config_file") + 1], count)
            words = words[words.index("-m") + 1 :]
        assert words[0] == ("acc-lm" if count == 1 else "acc_lm")
        assert words[1] == "evaluate"

        def run(arguments: list[str] = words[1:]) -> int:
            from acc_lm.cli import main

            os.chdir(tmp_path)
            return main(arguments)

        finished = Launch(run, count, environment).wait()
        assert finished.codes == [0] * count, "\n".join([command, *finished.outputs])
        assert "loss" in finished.output
        for written in re.findall(r"--predictions (\S+)", command):
            assert len(rows_of(tmp_path / written)) == (13 if count == 2 else 9)


@pytest.mark.slow
def test_a_hub_id_under_a_real_launcher(chat_run: Path, chats: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub/models--acme--chat"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs/main").write_text("0" * 40)
    (hub / "snapshots").mkdir()
    (hub / "snapshots" / ("0" * 40)).symlink_to(chat_run / "final")
    environment = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.match(name)}
    environment |= {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "accelerate_configs/ddp.yaml",
        "--num_processes",
        "2",
        "-m",
    ]
    arguments = [
        "acc_lm",
        "evaluate",
        "acme/chat",
        "--data",
        str(chats),
        "data.sequence_length=96",
        "--generate",
        "--max-new-tokens",
        "8",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, *command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["strategy"], found["num_processes"]) == ("ddp", 2)
    assert found["generation"]["exact_match"] == 1.0
    assert only_figures(found) == pytest.approx(only_figures(figures([chat_run, "--data", chats])), rel=1e-6)


def test_json_is_alone_on_stdout_whatever_an_engine_prints(chat_run: Path, chats: Path, tmp_path: Path) -> None:
    def run() -> int:
        from acc_lm import runtime
        from acc_lm.cli import main

        identify = runtime.identify

        def talk(*positional: Any) -> Any:
            os.write(1, b"built by C++\n")
            print("built by Python")
            return identify(*positional)

        runtime.identify = talk
        with (tmp_path / "stdout").open("wb") as file:
            os.dup2(file.fileno(), 1)
        return main(["evaluate", str(chat_run / "final"), "--data", str(chats), "--json"])

    finished = Launch(run).wait()
    assert finished.codes == [0]
    assert json.loads((tmp_path / "stdout").read_text())["documents"] == 60
    assert "built by C++\nbuilt by Python\n" in finished.output, "for people, on stderr"


# --- refusals ------------------------------------------------------------------------------------------------------

ODD: dict[str, tuple[list[str], int, str]] = {
    "no such folder": (["./nowhere", "--data", "CHATS"], 2, "must be an existing folder or a Hub id, got './nowhere'"),
    "no such Hub id": (["acme/none", "--data", "CHATS"], 2, "model.name_or_path must be a"),
    "no weights": (["HERE/no-weights", "--data", "CHATS"], 2, "must have its weights in safetensors"),
    "no tokenizer": (["HERE/no-tokenizer", "--data", "CHATS"], 2, "model.name_or_path must have a tokenizer"),
    "a run without final": (["HERE/no-final"], 2, "MODEL must be a run that has exported its model"),
    "a checkpoint": (["CHAT/checkpoints/latest", "--data", "CHATS"], 2, "MODEL must be the folder of a model, got the checkpoint"),
    "an adapter without its base": (["HERE/no-base", "--data", "CHATS"], 2, "must be at /nowhere/of/final, got nothing there; put it back"),
    "nothing to evaluate on": (["HERE/copy"], 2, "--data must name files to evaluate on, got none"),
    "a misspelt run": (["runs/nowhere"], 2, "got none, and runs/nowhere is not a folder here, so not in a run"),
    "a run without its tokenizer": (["HERE/no-run-tokenizer"], 5, "no-run-tokenizer/tokenizer must hold the tokenizer of the run, got: Couldn't"),
    "a mixture": (["HERE/mixture"], 2, "got none for the run of a mixture"),
    "no such data": (["CHAT", "--data", "none.jsonl"], 3, "must name an existing file or folder, got 'none.jsonl'"),
    "other columns": (["CHAT", "--data", "HERE/columns.jsonl"], 3, "must have a column 'text', got 'question', 'answer'"),
    "no column of references": (["CHAT", "--data", "CHATS", "--generate", "--references-column", "gold"], 3, "chats.jsonl:1: must have a column 'gold'"),
    "references of another kind": (["CHAT", "--data", "HERE/numbers.jsonl", "--generate", "--references-column", "gold"], 3, "'gold' must be a string or a list of strings, got a number"),
    "references alone": (["CHAT", "--references-column", "gold"], 2, "--references-column must come with --generate"),
    "prompts in text": (["TEXT", "--generate"], 2, "--generate must have prompts, got plain text"),
    "predictions that are there": (["CHAT", "--predictions", "HERE/columns.jsonl"], 2, "--predictions must be a new file, got"),
    "predictions nowhere": (["CHAT", "--predictions", "HERE/none/out.jsonl"], 2, "none/out.jsonl: No such file or directory"),
    "predictions where none can be": (["CHAT", "--predictions", "/proc/out.jsonl"], 2, "/proc/out.jsonl: No such file or directory"),
    "no token": (["CHAT", "--generate", "--max-new-tokens", "0"], 2, "--max-new-tokens must be at least 1, got 0"),
    "no temperature": (["CHAT", "--generate", "--temperature", "nan"], 2, "--temperature must be at least 0 and finite, got nan"),
    "a recipe's batch": (["CHAT", "training.micro_batch_size=2"], 2, "must be given as --batch-size"),
    "another model": (["CHAT", "model.name_or_path=x"], 2, "MODEL decides what is evaluated"),
    "a misspelt key": (["CHAT", "data.sequence_lenght=8"], 2, "did you mean sequence_length?"),
    "a bare file": (["CHAT", "more.jsonl"], 2, "pass data as --data more.jsonl"),
    "too long a row": (["CHAT", "data.sequence_length=99999"], 2, "data.sequence_length must be at most the model's max_position_embeddings"),
    "conversations that do not fit": (["CHAT", "data.sequence_length=8"], 3, "the conversations must have a target, got none in 13"),
}  # fmt: skip


@pytest.fixture(scope="module")
def odd(chat_run: Path, adapter_run: Path, folder: Path) -> Path:
    here = folder / "odd"
    shutil.copytree(chat_run / "final", here / "copy")
    for name, files in (("no-weights", "*.safetensors"), ("no-tokenizer", "tokenizer*")):
        shutil.copytree(chat_run / "final", here / name, ignore=shutil.ignore_patterns(files))
    shutil.copytree(chat_run, here / "no-final", ignore=shutil.ignore_patterns("final", "checkpoints"))
    shutil.copytree(chat_run, here / "no-run-tokenizer", ignore=shutil.ignore_patterns("checkpoints"))
    (here / "no-run-tokenizer/tokenizer/tokenizer.json").unlink()
    shutil.copytree(adapter_run / "final", here / "no-base")
    shutil.copytree(chat_run, here / "mixture", ignore=shutil.ignore_patterns("checkpoints"))
    recipe = here / "mixture/config.yaml"
    source = f"  source: mixture\n  mixture: [{{files: {folder}/chats.jsonl, weight: 1.0}}]\n"
    text = re.sub(r"(?m)^  (source|mixture): .*\n", "", recipe.read_text())
    text = re.sub(r"(?m)^  files:\n(  - .*\n)+", "  files: []\n", text)
    recipe.write_text(text.replace("data:\n", f"data:\n{source}"))
    settings = here / "no-base/adapter_config.json"
    settings.write_text(settings.read_text().replace(str(chat_run), "/nowhere/of"))
    (here / "columns.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (here / "numbers.jsonl").write_text(json.dumps(record_of("messages", "a", "b") | {"gold": 3}) + "\n")
    return here


@pytest.mark.parametrize("name", ODD)
def test_each_refusal_is_one_line(name: str, odd: Path, chat_run: Path, text_run: Path, chats: Path) -> None:
    words, code, says = ODD[name]
    names = {"HERE": odd, "CHATS": chats, "CHAT": chat_run, "TEXT": text_run}
    arguments = [re.sub(r"^(HERE|CHATS|CHAT|TEXT)\b", lambda found: str(names[found[0]]), word) for word in words]
    finished = evaluate(arguments, expect=code)
    assert len(finished.errors) == 1, finished.output
    assert says in finished.errors[0]
    assert "Traceback" not in finished.output


@pytest.mark.parametrize("verb", ["evaluate m", "parity", "scaling", "bench-comm", "doctor"])
def test_overrides_may_be_anywhere_among_the_options(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from acc_lm import cli

    name, *model = verb.split()
    seen = []
    monkeypatch.setattr(f"acc_lm.cli.{name.replace('-', '_')}.run", lambda known: seen.append(known.overrides) or 0)
    option = ["--data", "R"] if model else ["--config", "R"]
    assert cli.main([name, *model, "a=1", *option, "b=2", *option, "c=3"]) == 0
    assert seen == [["a=1", "b=2", "c=3"]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "HERE", "--prompt", "a\udcff"], "--prompt must be UTF-8, got 'a\\udcff'"),
        (["generate", "HERE", "--seed", "9" * 20], "--seed must be a number of 64 bits, got 99999999999999999999"),
        (["generate", "HERE", "--temperature", "nan"], "--temperature must be 0 or more, and finite, got nan"),
        (["keep-going", "--pause", "nan", "--", "x"], "--pause must be 0 or more, got nan"),
    ],
)
def test_arguments_that_no_verb_can_use_are_one_line(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from acc_lm.cli import main

    (tmp_path / "config.json").write_text("{}")
    assert main([str(tmp_path) if word == "HERE" else word for word in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
