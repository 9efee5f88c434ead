"""`final/` in servers: which files they need, GGUF files for llama.cpp, and (with `pytest -m serve`) the servers' answers."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import LAUNCH_VARIABLES, ROOT, run_training
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from acc_lm.cli import main
from acc_lm.export.exported import sample_text
from acc_lm.export.gguf import pre_tokenizer_of
from acc_lm.text.tokenizer import make_tokenizer

PAGE = (ROOT / "docs/guides/serving.md").read_text()
KINDS = ("llama", "gpt2", "chat")
QUESTION, ANSWER = "Who is there?", "Ada is there, and Grace."
GPT2 = "{model_type: gpt2, n_embd: 64, n_layer: 2, n_head: 2, n_positions: 96, resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0}"
LLAMA_CPP = os.environ.get("LLAMA_CPP")


@pytest.fixture(scope="module")
def runs(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run of each kind: text with a Llama and with a GPT-2, conversations with the Llama."""
    folder = tmp_path_factory.mktemp("served")
    chats = folder / "chats.jsonl"
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    records = [
        turns if n % 2 else [{"role": "user", "content": f"No {n}."}, {"role": "assistant", "content": f"Yes {n}."}]
        for n in range(60)
    ]
    chats.write_text("".join(json.dumps({"messages": record}) + "\n" for record in records))
    text = [
        "--config", str(tiny_recipe), "tokenizer={kind: bpe, vocab_size: 300}", "optimizer.learning_rate=1e-2", "training.max_steps=30",
        "training.eval_every=null", "checkpoint.every=null",
    ]  # fmt: skip
    llama = "model.config.hidden_size=64"  # heads of 32: vLLM takes no smaller ones on a CPU
    run_training([*text, llama, f"output_dir={folder}/llama"])
    run_training(
        [
            *text,
            f"model.config={GPT2}",
            f"output_dir={folder}/gpt2",
            "training.max_steps=80",
            "optimizer.learning_rate=3e-3",
        ]
    )
    chat = [f"data.files={chats}", "data.sequence_length=64", f"output_dir={folder}/chat"]
    run_training(
        [*text, llama, *chat, "data.eval_fraction=0.3", "optimizer.learning_rate=2e-2", "training.max_steps=60"]
    )
    return folder


def files_of_the_page() -> set[str]:
    """Files that the page says a server needs."""
    section = PAGE.partition("## Files that a server needs")[2].partition("\n## ")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    names = {name for cell in first_cells for name in re.findall(r"`([\w.]+)`", cell)}
    return names - {"model.safetensors.index.json"}  # of a large model


def ours(final: Path, num_tokens: int) -> str:
    """Greedy answer of `acc-lm generate`, without the prompt."""
    is_chat = final.parent.name == "chat"
    prompt = prompt_of(final)
    text = sample_text(final, prompt, max_new_tokens=num_tokens, temperature=0, is_question=is_chat)
    return text if is_chat else text[len(prompt) :]


def whole(text: str) -> str:
    """Answer without a last character that the limit of tokens has cut: vLLM leaves it out, others show a mark."""
    return text.rstrip("\ufffd")


def prompt_of(final: Path) -> str:
    return QUESTION if final.parent.name == "chat" else "the river "


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_final_has_the_files_of_the_page_and_answers_from_them_alone(kind: str, runs: Path, tmp_path: Path) -> None:
    final = runs / kind / "final"
    needed = files_of_the_page()
    assert len(needed) == 6
    if kind != "chat":
        needed -= {"chat_template.jinja"}
    assert {file.name for file in final.iterdir()} == needed | {"README.md", "run.json"}
    for name in needed:
        (tmp_path / name).symlink_to(final / name)
        if name.endswith(".json"):
            assert str(runs) not in (final / name).read_text(), "no path of this machine"
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] in (
        ["LlamaForCausalLM"],
        ["GPT2LMHeadModel"],
    )
    end = AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == end
    answer = ours(final, 12)
    assert len(whole(ours(final, 24))) > 8, "there is something to compare"
    prompt: Any = [{"role": "user", "content": QUESTION}] if kind == "chat" else prompt_of(final)
    generate = pipeline(
        "text-generation", model=AutoModelForCausalLM.from_pretrained(tmp_path), tokenizer=str(tmp_path)
    )
    found = generate(prompt, max_new_tokens=12, do_sample=False, return_full_text=False)[0]["generated_text"]
    assert found == answer
    assert kind != "chat" or answer == ANSWER, "it has learned to answer"


def test_the_commands_of_the_page_have_options_that_exist() -> None:
    from transformers.cli.serve import Serve

    (line,) = re.findall(r"^transformers serve .+", PAGE, re.M)
    options = {word[2:].replace("-", "_") for word in shlex.split(line) if word.startswith("--")}
    assert options <= set(inspect.signature(Serve.__init__).parameters)
    for body in re.findall(r"-d '(.+?)'$", PAGE, re.M):
        assert {"model", "temperature"} < set(json.loads(body))
    assert "acc-lm export runs/chat/final chat.gguf --gguf llama.cpp" in PAGE, "test_readme.py gives it to the parser"


# --- GGUF ----------------------------------------------------------------------------------------------------------

CONVERTER = """
import json, sys
from pathlib import Path
from {holder} import TextModel

class Model(TextModel):
    folder = Path(sys.argv[1])

def main():
    model, arguments = Model(), sys.argv[2:]
    config = json.loads((Model.folder / "config.json").read_text())
    found = [sorted(file.name for file in Model.folder.iterdir()), config.get("n_ctx"), model.get_vocab_base_pre(None), arguments[2:]]
    print("converted")
    Path(arguments[1]).write_text(json.dumps(found))

if __name__ == "__main__":
    main()
"""
MODEL = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        if {known!r} is None:
            raise NotImplementedError("BPE pre-tokenizer was not recognized")
        return {known!r}
"""


def fake_converter(folder: Path, known: str | None, is_one_file: bool = False) -> Path:
    """Stand-in with the places of llama.cpp's converter that ours touches; it knows every tokenizer by this name, or none."""
    (folder / "conversion").mkdir(parents=True)
    model = MODEL.format(known=known)
    main_file = CONVERTER.format(holder="conversion.base")
    if is_one_file:
        main_file = model + main_file.replace("from conversion.base import TextModel\n", "")
    (folder / "conversion/base.py").write_text("" if is_one_file else model)
    (folder / "conversion/__init__.py").write_text("")
    (folder / "convert_hf_to_gguf.py").write_text(main_file)
    return folder


@pytest.mark.parametrize(
    ("kind", "known", "name", "is_one_file"),
    [("gpt2", None, "gpt-2", False), ("llama", None, "gpt-2", True), ("chat", "qwen2", "qwen2", False)],
)
def test_the_converter_learns_what_it_cannot_know(
    kind: str, known: str | None, name: str, is_one_file: bool, runs: Path, tmp_path: Path
) -> None:
    final, output = runs / kind / "final", tmp_path / "model.gguf"
    before = {file.name: file.read_bytes() for file in final.iterdir()}
    converter = fake_converter(tmp_path / "llama.cpp", known, is_one_file)
    assert main(["export", str(final), str(output), "--gguf", str(converter), "--dtype", "bfloat16"]) == 0
    files, positions, found, arguments = json.loads(output.read_text())
    assert (files, positions, found) == (sorted(before), 96 if kind == "gpt2" else None, name)
    assert arguments == ["--outtype", "bf16"]
    assert {file.name: file.read_bytes() for file in final.iterdir()} == before, "final/ stays as it is"


def test_models_tokenizers_and_folders_that_cannot_be_converted_are_one_line(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    final, converter = tmp_path / "bytes", fake_converter(tmp_path / "llama.cpp", None)
    shutil.copytree(runs / "llama/final", final)
    from acc_lm.config import TokenizerConfig

    make_tokenizer(TokenizerConfig(kind="byte"), []).save_pretrained(final)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (tmp_path / "there.gguf").touch()
    broken = fake_converter(tmp_path / "broken", "x")
    (broken / "conversion/base.py").write_text("import no_such_package")
    good, new = runs / "llama/final", tmp_path / "new.gguf"
    cases = [
        (
            final,
            new,
            converter,
            "NotImplementedError: BPE pre-tokenizer was not recognized; docs/guides/serving.md says which",
        ),
        (adapter, new, converter, "merge it first: acc-lm export FINAL OUTPUT --merge"),
        (tmp_path, new, converter, "FINAL must be the folder of a complete model"),
        (good, tmp_path / "there.gguf", converter, "OUTPUT must be a new file"),
        (good, new, tmp_path, "--gguf must be a folder of llama.cpp with convert_hf_to_gguf.py"),
        (good, new, broken, "No module named 'no_such_package'; pip install 'acc-lm[serve]'"),
    ]
    for model, output, folder, line in cases:
        capfd.readouterr()
        assert main(["export", str(model), str(output), "--gguf", str(folder)]) == 2
        said = capfd.readouterr().err
        assert line in said
        assert said.count("\n") == 1, said
    assert not new.exists()
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".acc-lm-")]


def test_only_a_tokenizer_that_splits_as_gpt2_does_is_called_so(runs: Path, tmp_path: Path) -> None:
    values = json.loads((runs / "llama/final/tokenizer.json").read_text())
    assert pre_tokenizer_of(runs / "llama/final") == "gpt-2"
    changes: list[dict[str, Any]] = [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": values["pre_tokenizer"] | {"add_prefix_space": True}},
        {"pre_tokenizer": values["pre_tokenizer"] | {"use_regex": False}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}},
        {"pre_tokenizer": None},
        {"model": values["model"] | {"merges": []}},
        {"model": values["model"] | {"type": "Unigram"}},
    ]
    for change in changes:
        (tmp_path / "tokenizer.json").write_text(json.dumps(values | change))
        assert pre_tokenizer_of(tmp_path) is None, change
    for damaged in ("", "[]", "{}", '{"pre_tokenizer": []}'):
        (tmp_path / "tokenizer.json").write_text(damaged)
        assert pre_tokenizer_of(tmp_path) is None, damaged


# --- servers -------------------------------------------------------------------------------------------------------


@contextmanager
def serving(command: list[str], folder: Path) -> Iterator[str]:
    """Address of a server that runs inside the context, when it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.match(name)}
    environment |= {
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    log = folder / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, *command, "--port", str(port)],
            env=environment, cwd=folder, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    address = f"http://localhost:{port}"
    try:
        for _ in range(500):
            assert server.poll() is None, log.read_text()
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def ask(address: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def answered(address: str, final: Path, name: str, num_tokens: int) -> str:
    settings = {"model": name, "max_tokens": num_tokens, "temperature": 0}
    if final.parent.name == "chat":
        messages = [{"role": "user", "content": QUESTION}]
        found = ask(address, "/v1/chat/completions", messages=messages, **settings)
        return str(found["choices"][0]["message"]["content"])
    return str(ask(address, "/v1/completions", prompt=prompt_of(final), **settings)["choices"][0]["text"])


def needs(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"the package {' and '.join(missing)} is not installed: docs/guides/serving.md")


@pytest.mark.serve
def test_transformers_serve_answers_as_we_do(runs: Path, tmp_path: Path) -> None:
    needs("fastapi", "uvicorn", "openai")
    with serving(["-m", "transformers.cli.transformers", "serve", "--device", "cpu"], tmp_path) as address:
        for kind in KINDS:
            final = runs / kind / "final"
            assert whole(answered(address, final, str(final), 24)) == whole(ours(final, 24)), kind


@pytest.mark.serve
@pytest.mark.parametrize("kind", KINDS)
def test_vllm_answers_as_we_do(kind: str, runs: Path, tmp_path: Path) -> None:
    needs("vllm")
    final = runs / kind / "final"
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(final), "--dtype", "float32", "--enforce-eager"]
    with serving([*words, "--max-model-len", "96"], tmp_path) as address:
        assert whole(answered(address, final, str(final), 24)) == whole(ours(final, 24))


TEXTS = (
    "def f(x):\n\treturn x  +  1\n\n\n", "I'm he'LL we've 12345 3.14 ...!!??", "über naïve 日本語 🙂👩‍👩‍👧 \u00a0 \u3000x", "  lead", "trail   ",
    "a\r\nb\u2028c\u0301", "x²½Ⅻ१२३ ١٢", "'s't''re'", "\x00\x7f\ufeff", "<|endoftext|>a <|endoftext|>", "",
)  # fmt: skip


@pytest.mark.serve
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_answers_as_we_do(kind: str, runs: Path, tmp_path: Path) -> None:
    needs("xllamacpp", "gguf", "sentencepiece")
    if LLAMA_CPP is None:
        pytest.skip("LLAMA_CPP names no clone of llama.cpp, whose converter is in no package")
    import xllamacpp

    final, output = runs / kind / "final", tmp_path / "model.gguf"
    alone = subprocess.run(
        [sys.executable, f"{LLAMA_CPP}/convert_hf_to_gguf.py", str(final), "--outfile", str(tmp_path / "alone.gguf")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert alone.returncode != 0, "the page says that the converter alone does not know the tokenizer"
    assert "BPE pre-tokenizer was not recognized" in alone.stderr or "n_ctx" in alone.stderr
    assert main(["export", str(final), str(output), "--gguf", LLAMA_CPP]) == 0
    settings = xllamacpp.CommonParams()
    settings.model.path = str(output)
    settings.n_ctx, settings.n_parallel, settings.warmup = 96, 1, False
    server = xllamacpp.Server(settings)
    assert whole(answered(server.listening_address, final, "model", 24)) == whole(ours(final, 24))
    tokenizer = AutoTokenizer.from_pretrained(final)
    for text in TEXTS:
        found = ask(server.listening_address, "/tokenize", content=text, parse_special=True)["tokens"]
        assert found == tokenizer(text, add_special_tokens=False)["input_ids"], repr(text)
