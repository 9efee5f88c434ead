"""The first hour with acc-lm: own data trains at once, and a missing library or network gets one helpful line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT

from acc_lm.errors import LINE, first_line

WITHOUT = "import sys; sys.modules[{name!r}] = None; from acc_lm.cli import main; sys.exit(main(sys.argv[1:]))"


def test_another_librarys_error_is_cut_after_a_word() -> None:
    words = "We couldn't connect to 'https://huggingface.co/api' " * 9
    text = first_line(OSError(words))
    assert len(text) <= LINE + 4
    assert text.endswith(" ...")
    assert words.startswith(text.removesuffix(" ..."))
    assert text.removesuffix(" ...").split() == words.split()[: len(text.split()) - 1], "complete words"
    assert first_line(OSError("one\n two")) == "one two"
    assert first_line(OSError("x" * 300)) == "x" * LINE
    assert first_line(ValueError()) == "ValueError"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["train", "RECIPE", "--dry-run"], 0, "dry run: everything works"),
        (
            ["doctor", "--config_file", "deepspeed_zero2"],
            4,
            "error: deepspeed must be installed for this Accelerate config",
        ),
        (["--version"], 0, "torch "),
    ],
)
def test_without_deepspeed_only_its_configs_are_missing(
    arguments: list[str], code: int, says: str, tiny_recipe: Path, tmp_path: Path
) -> None:
    words = [str(tiny_recipe) if word == "RECIPE" else word for word in arguments]
    command = [sys.executable, "-c", WITHOUT.format(name="deepspeed"), *words]
    path = {
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "ACCELERATE_USE_CPU": "true",
    }
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr


@pytest.mark.parametrize("data", ["plain", "gzip", "csv", "folder", "chat"])
def test_ones_own_data_trains_the_quickstart_at_once(data: str, tmp_path: Path, words: list[str]) -> None:
    """With nothing but the files named: no source, no prompt, no warm-up has to be changed."""
    import gzip

    from processes import run_training

    lines = [json.dumps({"text": text}) for text in words]
    if data == "plain":
        (tmp_path / "a.txt").write_text("\n".join(words))
        given = tmp_path / "a.txt"
    elif data == "gzip":
        given = tmp_path / "a.jsonl.gz"
        given.write_bytes(gzip.compress("\n".join(lines).encode()))
    elif data == "csv":
        given = tmp_path / "a.csv"
        given.write_text("text\n" + "\n".join(f'"{text}"' for text in words))
    elif data == "folder":
        given = tmp_path / "corpus"
        given.mkdir()
        (given / "a.txt").write_text("\n".join(words))
    else:
        given = tmp_path / "a.jsonl"
        turns = [
            [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20:60]}] for text in words
        ]
        given.write_text("\n".join(json.dumps({"conversations": some}) for some in turns))
    small = [
        "model.config={hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}"
    ]
    finished = run_training([
        f"data.files=[{given}]", "training.max_steps=5", "data.sequence_length=64",
        f"output_dir={tmp_path}/run", "tracking.report_to=[]", "tokenizer.vocab_size=300", *small,
    ])  # fmt: skip
    assert (tmp_path / "run/final/model.safetensors").is_file()
    assert "def " not in finished.output.partition("step 5/5")[2], "no prompt of the quickstart"
