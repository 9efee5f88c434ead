"""GGUF, the file that llama.cpp reads: written by llama.cpp's own converter, completed with what it cannot know.

    final/ ──► folder with links and a completed config.json ──► convert_hf_to_gguf.py ──► model.gguf

The converter recognises a tokenizer by the ids of one text, so it knows published tokenizers only. Of a tokenizer that was
trained here the file itself says how it splits text, and that is what llama.cpp must know.

Run as a program, in a process of its own: `python gguf.py CONVERTER PRE_TOKENIZER [arguments of the converter]`.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ != "__main__":  # the process of the converter needs neither
    from acc_lm.errors import ConfigError
    from acc_lm.files import written_aside

CONVERTER = "convert_hf_to_gguf.py"
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Data types of weights, as the converter calls them."""


def convert_to_gguf(folder: Path, output: Path, llama_cpp: Path, dtype: str) -> None:
    """Write a complete exported model as a GGUF file.

    Args:
        llama_cpp: clone of llama.cpp, which has the converter.
        dtype: a key of `TYPES`.

    Raises:
        ConfigError: the converter is not there, or cannot take this model.
    """
    if not (llama_cpp / CONVERTER).is_file():
        raise ConfigError(
            f"--gguf must be a folder of llama.cpp with {CONVERTER}, got {llama_cpp}; git clone https://github.com/ggml-org/llama.cpp"
        )
    if not (folder / "config.json").is_file():
        is_adapter = (folder / "adapter_config.json").is_file()
        action = "merge it first: acc-lm export FINAL OUTPUT --merge" if is_adapter else "name the final/ of a run"
        raise ConfigError(f"FINAL must be the folder of a complete model, got {folder}; {action}")
    if os.path.lexists(output):
        raise ConfigError(f"OUTPUT must be a new file, got {output}; name another")
    pre_tokenizer = pre_tokenizer_of(folder) or ""
    with tempfile.TemporaryDirectory() as work, written_aside(output) as file:
        staged = Path(work, folder.resolve().parent.name or "model")
        _stage(folder.resolve(), staged)
        words = [staged, "--outfile", file, "--outtype", TYPES[dtype]]
        done = subprocess.run(
            [sys.executable, __file__, str(llama_cpp.resolve()), pre_tokenizer, *map(str, words)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode != 0 or not file.is_file():
            lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            said = lines[-1] if lines else f"exit code {done.returncode}"
            if "ModuleNotFoundError" in said:
                raise ConfigError(
                    f"--gguf must have the packages of the converter, got {said}; pip install 'acc-lm[serve]'"
                )
            raise ConfigError(
                f"FINAL must be a model and a tokenizer that llama.cpp's converter takes, got {folder}: {said}; "
                "docs/guides/serving.md says which"
            )


def _stage(folder: Path, staged: Path) -> None:
    """Folder with links to the files of the model, and with a config that has what the converter needs."""
    staged.mkdir()
    for file in folder.iterdir():
        if file.name != "config.json" and file.is_file():
            (staged / file.name).symlink_to(file)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        is_mapping = isinstance(config, dict)
    except ValueError:
        is_mapping = False
    if not is_mapping:
        raise ConfigError(f"{folder}/config.json must be a mapping in JSON, got something else; export the model again")
    if "n_positions" in config:  # GPT-2's: transformers no longer writes the second name of the same number
        config.setdefault("n_ctx", config["n_positions"])
    (staged / "config.json").write_text(json.dumps(config), encoding="utf-8")


def pre_tokenizer_of(folder: Path) -> str | None:
    """llama.cpp's name of the way in which a tokenizer splits text; None if that is not GPT-2's."""
    try:
        values: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        splits = values["pre_tokenizer"] or {}
        is_bytes = splits.get("type") == "ByteLevel" and not splits.get("add_prefix_space") and splits.get("use_regex")
        is_plain = values["model"]["type"] == "BPE" and not values["normalizer"] and values["model"]["merges"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return "gpt-2" if is_bytes and is_plain else None


def main(llama_cpp: str, pre_tokenizer: str, *arguments: str) -> None:
    """Run the converter with these arguments; `pre_tokenizer` is used where it does not know the tokenizer."""
    sys.path[:0] = [llama_cpp, os.path.join(llama_cpp, "gguf-py")]
    sys.argv = [os.path.join(llama_cpp, CONVERTER), *arguments]
    import importlib

    converter = importlib.import_module(CONVERTER.removesuffix(".py"))
    # Older versions are a single file.
    holder = converter if hasattr(converter, "TextModel") else importlib.import_module("conversion.base")
    known = holder.TextModel.get_vocab_base_pre

    def name_of(model: Any, tokenizer: Any) -> str:
        if not pre_tokenizer:
            return str(known(model, tokenizer))
        logging.disable(logging.WARNING)  # a page of warnings on a tokenizer that is not on its list
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            return pre_tokenizer
        finally:
            logging.disable(logging.NOTSET)

    holder.TextModel.get_vocab_base_pre = name_of
    converter.main()


if __name__ == "__main__":
    own = os.path.dirname(os.path.abspath(__file__))  # its modules must not be taken for others
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != own]
    main(*sys.argv[1:])
