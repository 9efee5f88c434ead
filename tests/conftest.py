"""Import everything once, so that the processes forked by the tests start at once; make the small texts they train on."""

from __future__ import annotations

import functools
import importlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of compilers for each of the many processes
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are forked from this one
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
    "1"  # a process that asks CUDA itself whether there is a GPU cannot fork any more
)
os.environ.pop("WANDB_API_KEY", None)

import cpuinfo
import matplotlib
import processes
import pytest
import torch
from accelerate import PartialState
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

IMPORTED = [
    importlib.import_module(name)
    for name in (
        "accelerate", "accelerate.commands.launch", "datasets", "deepspeed", "matplotlib.pyplot", "torch._inductor.compile_fx",
        "torch.distributed.fsdp", "torch.distributed.tensor", "torch.profiler", "torch.utils.cpp_extension",
        "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama", "transformers.optimization", "transformers.trainer_pt_utils",
    )
]  # fmt: skip

IMPORTED += [importlib.import_module("train")]
IMPORTED += [
    importlib.import_module("acc_lm." + ".".join(file.relative_to(processes.ROOT / "src/acc_lm").with_suffix("").parts))
    for file in sorted((processes.ROOT / "src/acc_lm").rglob("[a-z]*.py"))
    if "metrics" not in file.parts
]
get_checkpoint_conversion_mapping("llama")  # compiled once for all exports
torch.set_num_threads(1)
matplotlib.use("Agg")
# DeepSpeed asks four times per start, and each answer takes a second.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that tests/deferred.txt names, with `slow` where a line begins so, else with `more`.

    A line that names no test is an error wherever its file was collected.
    """
    folder = processes.ROOT / "tests"
    lines = [line for line in (folder / "deferred.txt").read_text().splitlines() if not line.startswith("#")]
    ids = {item: f"{item.path.relative_to(folder)}::{item.name}" for item in items if item.path.is_relative_to(folder)}
    for words in lines:
        marker, line = ("slow", words.removeprefix("slow ")) if words.startswith("slow ") else ("more", words)
        named = [item for item, name in ids.items() if name == line or name.startswith(f"{line}[")]
        for item in named:
            item.add_marker(marker)
        is_collected = any(name.startswith(line.partition("::")[0]) for name in ids.values())
        if not named and is_collected and not any("::" in argument for argument in config.args):
            raise pytest.UsageError(f"tests/deferred.txt names no test: {line}")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token rows of the tests, separate from the user's own; compiled extensions are kept from one test run to the next."""
    folder = tmp_path_factory.mktemp("cache")
    compiled = processes.KEPT_CACHE / "torch_extensions"
    compiled.mkdir(parents=True, exist_ok=True)
    (folder / "torch_extensions").symlink_to(compiled)
    os.environ["ACC_LM_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def words() -> list[str]:
    return make_words()


def make_words() -> list[str]:
    """40 documents of a few hundred characters, all different."""
    choose = random.Random(0)
    lexicon = [
        "red",
        "green",
        "blue",
        "tree",
        "house",
        "river",
        "sings",
        "runs",
        "sleeps",
        "über",
        "naïve",
        "日本",
        "🙂",
        "and",
        "the",
    ]
    return [" ".join(choose.choices(lexicon, k=choose.randint(30, 90))) + f"\nnumber {i}." for i in range(40)]


@pytest.fixture(scope="session")
def hub(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models and data sets, in folders with the names that recipes use."""
    from hub import make_hub

    return make_hub(tmp_path_factory.mktemp("hub"), words)


@pytest.fixture(scope="session")
def text_file(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    import json

    file = tmp_path_factory.mktemp("text") / "words.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    return file


@pytest.fixture(scope="session")
def tiny_recipe(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that trains in a second: 4 documents' worth of steps, two evaluations, three checkpoints."""
    file = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    file.write_text(tiny_recipe_of(text_file))
    return file


def tiny_recipe_of(text_file: Path) -> str:
    return f"""
seed: 7
model:
  config: {{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1}}
tokenizer: {{kind: byte}}
data: {{source: files, files: [{text_file}], eval_fraction: 0.1, sequence_length: 32}}
training: {{max_steps: 6, global_batch_size: 12, micro_batch_size: 12, log_every: 2, eval_every: 3}}
optimizer: {{learning_rate: 1e-3}}
schedule: {{name: cosine, warmup_steps: 2}}
checkpoint: {{every: 2}}
tracking: {{report_to: []}}
export: {{sample_tokens: 0}}
"""


@pytest.fixture
def tiny(tiny_recipe: Path, tmp_path: Path) -> list[str]:
    """Arguments of `train.py` for a tiny run in its own folder, `tmp_path / "run"`."""
    return ["--config", str(tiny_recipe), f"output_dir={tmp_path / 'run'}"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    assert torch.get_num_threads() == 1, "forked processes inherit this; more threads would make sums differ"
    assert processes.ROOT.joinpath("train.py").is_file()


@pytest.fixture(autouse=True)
def no_accelerator_is_left() -> Iterator[None]:
    """An Accelerator made in this process would be inherited by every process that a later test forks, without its peers."""
    yield
    assert not PartialState._shared_state, "make Accelerators in a forked process only"


@pytest.fixture(autouse=True)
def the_environment_is_restored() -> Iterator[None]:
    """A benchmark that a test runs here sets variables (the cache, for one), which processes of later tests would inherit."""
    before = dict(os.environ)
    yield
    for name in (before.keys() | os.environ.keys()) - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, for pages that are looked at."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed; pip install -e '.[site-test]'"
    )
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine; on Debian: apt install chromium fonts-noto-cjk")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()
