"""Push of a model folder to the Hub, in one commit: complete there, or not at all."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

from acc_lm.errors import ConfigError, MachineError, Preempted, first_line
from acc_lm.redaction import printable, redact

MODEL_FILES = ("config.json", "adapter_config.json")
SILENCE_SECONDS = 120.0
"""Seconds for which the Hub may neither take nor send a byte; huggingface_hub itself would wait for ever."""


def hub_id(name: str | None) -> str | None:
    """Name of a model if it is one on the Hub, for the card's metadata; None for a local folder."""
    return None if name is None or os.path.isdir(name) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) else name


def check_push(folder: Path, name: str) -> None:
    """Refuse to push anything but a model folder, and to a name that the Hub cannot have.

    Raises:
        ConfigError: names what is wrong.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ConfigError(f"NAME must be owner/name, got {name!r}; write it like me/my-model")
    if not any((folder / file).is_file() for file in MODEL_FILES):
        raise ConfigError(
            f"FOLDER must be a model folder with {' or '.join(MODEL_FILES)}, got {folder}; name the final/ of a finished run"
        )


def push_folder(folder: Path, name: str, *, public: bool = False) -> str:
    """Upload a folder as a model on the Hub; return a line about it. A new repository is private unless `public`.

    Raises:
        MachineError: no login, no network, or the Hub refuses; the command that repeats the push is in it.
    """
    from huggingface_hub import HfApi, get_session

    try:
        get_session().timeout = SILENCE_SECONDS
        hub = HfApi()
        url = hub.create_repo(name, private=not public, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload with acc-lm")
        kind = "private" if hub.model_info(name, timeout=SILENCE_SECONDS).private else "public"
    except Exception as error:  # network, permissions, quota, damaged answers: none of them may become a traceback
        raise MachineError(
            f"the Hub must take {folder} as {name}, got: {redact(first_line(error))}; log in with `hf auth login`, or set HF_TOKEN to a token "
            f"that may write, then: {push_command(folder, name, public)}"
        ) from None
    line = f"pushed {folder} to {printable(str(url))} ({kind})"
    return line + _note_of_base(folder)


def push_command(folder: Path, name: str, public: bool = False) -> str:
    return f"acc-lm push {shlex.quote(str(folder))} {name}" + " --public" * public


def _note_of_base(folder: Path) -> str:
    """Note about an adapter whose base other people do not have; empty for anything else."""
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if hub_id(base) is not None:
        return ""
    return "; its base is a folder of this machine, which others lack: acc-lm export --merge writes a model without it"


def push_or_explain(folder: Path, name: str) -> str:
    """Line about a push at the end of a run, which neither a failure nor a signal fails."""
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    if "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        disable_progress_bars()
    try:
        return push_folder(folder, name)
    except MachineError as error:
        return f"warning: {printable(str(error))}; the run itself is complete"
    except (Preempted, KeyboardInterrupt):
        return f"warning: the push of {folder} was interrupted; the run itself is complete; to push: {push_command(folder, name)}"
    finally:
        if "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
            enable_progress_bars()
