"""Format of a checkpoint on disk: files and manifest; find the newest checkpoint, verify, set aside."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from acc_lm.config import CheckpointConfig
from acc_lm.errors import CheckpointError, ConfigError
from acc_lm.progress import Progress
from acc_lm.rows.order import ROW_ORDER
from acc_lm.run_files.names import CHECKPOINTS, MANIFEST, METRICS, SAMPLES, STATE
from acc_lm.runtime import on_main

if TYPE_CHECKING:
    from accelerate import Accelerator


FORMAT, FORMAT_OF_BLOCKS = 2, 3
"""Formats that are read; the second has blocks of columns, which older versions would take for something else."""
LARGEST_JSON = 1 << 26  # bytes
TENSORS = re.compile(r"tensors-(\d{5})-of-(\d{5})\.safetensors")
NEEDED = (
    "progress",
    "num_updates",
    "recipe",
    "data_key",
    "started_from",
    "num_processes",
    "mixed_precision",
    "threads",
    "loss_scaler",
)
"""Keys of `STATE` that a resumed run needs; a checkpoint that lacks one is not usable."""
FOLDER_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose manifest was verified."""

    folder: Path
    state: dict[str, Any]

    @property
    def progress(self) -> Progress:
        return Progress(**self.state["progress"])


@dataclass(frozen=True)
class Found:
    """Checkpoint that a run resumes from, and the damaged newer checkpoints that were skipped."""

    checkpoint: Checkpoint | None
    started_from: str | None = None
    """Resolved path that `checkpoint.resume` named, kept in every checkpoint of the run that it started."""
    damaged: tuple[tuple[Path, str], ...] = ()
    checked: str = ""
    """Kind of check of the checkpoints, and its duration; for the start block."""

    @property
    def progress(self) -> Progress:
        """Position at which the checkpoint was saved; without a checkpoint, the start of the run."""
        return self.checkpoint.progress if self.checkpoint else Progress()

    @property
    def row_order(self) -> int:
        """Version of the order of the rows, which a run keeps; checkpoints of the first version do not name it."""
        return int(self.state.get("row_order", 1)) if self.checkpoint else ROW_ORDER

    @property
    def state(self) -> dict[str, Any]:
        """State that the checkpoint holds; {} without a checkpoint."""
        return self.checkpoint.state if self.checkpoint else {}


def free_name(path: Path) -> Path:
    """Unused path `aside-NAME` next to `path`, with a number if that name is taken."""
    aside = path.with_name(f"aside-{path.name}")
    number = 1
    while aside.exists() or aside.is_symlink():
        number += 1
        aside = path.with_name(f"aside-{path.name}-{number}")
    return aside


def step_folders(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    return [
        (int(match[1]), path)
        for path in root.iterdir()
        if (match := FOLDER_NAME.fullmatch(path.name)) and path.is_dir()
    ]


def newest_step(output_dir: Path) -> int:
    """Step of the newest complete checkpoint of a run, without reading checksums of tensors; 0 without any."""
    found = step_folders(output_dir / CHECKPOINTS)
    return max((step for step, folder in found if problem_with(folder, read_all=False) is None), default=0)


def find_checkpoint(accelerator: Accelerator, output_dir: Path, config: CheckpointConfig) -> Found:
    """Find the checkpoint to resume from; the main process looks, and every process gets the same answer.

    Raises:
        ConfigError: `resume: never` on a folder that has checkpoints.
        CheckpointError: there are checkpoints but none is complete, or the path in `resume` is not a checkpoint.
    """
    began = time.monotonic()
    read_all = config.verify == "full"
    found = on_main(accelerator, lambda: _find(output_dir, config.resume, read_all), takes_long=read_all)
    how = "checked" if config.verify == "full" else "checked by size"
    return replace(found, checked=f"{how} in {time.monotonic() - began:.1f} s")


def _find(output_dir: Path, resume: str, read_all: bool = True) -> Found:
    root = output_dir / CHECKPOINTS
    folders = sorted(step_folders(root), reverse=True)
    if resume == "never":
        if folders:
            raise ConfigError(
                f"checkpoint.resume must be auto or a path for {output_dir}, which holds checkpoints up to step {folders[0][0]}, "
                "got never; choose another output_dir, or checkpoint.resume=auto"
            )
        return Found(None)
    if resume != "auto":
        path = Path(os.path.expanduser(resume))
        started_from = str(path.resolve())
        # A path starts a run; the same command again resumes that run, even if a link now leads elsewhere.
        starts = {folder: _start(folder) for _, folder in folders}
        known = {started_from, *(start for start, named in starts.values() if named == resume)} - {None}
        for folder, (start, _) in starts.items():
            if start in known and _problem_in_run(folder, read_all) is None:
                return Found(open_checkpoint(folder), start)
        problem = problem_with(path, read_all)
        if problem:
            raise CheckpointError(
                f"checkpoint.resume must be a checkpoint folder, got {resume}: {problem}; name a step-* folder"
            )
        return Found(open_checkpoint(path), started_from)
    damaged: list[tuple[Path, str]] = []
    for _, folder in folders:
        problem = _problem_in_run(folder, read_all)
        if problem is None:
            checkpoint = open_checkpoint(folder)
            return Found(checkpoint, checkpoint.state["started_from"], tuple(damaged))
        damaged.append((folder, problem))
    if damaged:
        raise CheckpointError(
            *(f"{folder} must be a complete checkpoint, got: {problem}" for folder, problem in damaged),
            f"no checkpoint in {root} can be used; nothing was deleted; choose another output_dir to start from scratch",
        )
    return Found(None)


def _start(folder: Path) -> tuple[str | None, str | None]:
    """Path that the run of this checkpoint started from, and its spelling in `checkpoint.resume`.

    Both are needed, because a link in the spelling may lead elsewhere by now.
    """
    try:
        state = json.loads((folder / STATE).read_text())
        return state["started_from"], state["recipe"]["checkpoint"]["resume"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, None


def _problem_in_run(folder: Path, read_all: bool) -> str | None:
    """Reason why a folder of the run is not a usable checkpoint; None when it is.

    A run saves and removes only its own folders, so a link is never found, though `checkpoint.resume` may name it.
    """
    if folder.is_symlink():
        return f"a link to {os.readlink(folder)!r}; checkpoint.resume can name its target"
    return problem_with(folder, read_all)


def open_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder.resolve(), json.loads((folder / STATE).read_text()))


def problem_with(folder: Path, read_all: bool = True) -> str | None:
    """Reason why the folder is not a complete checkpoint; None when it is.

    A folder that contains a link, or a tensor file that the manifest does not name, is refused.

    Args:
        read_all: also compare the checksums of the tensor files; otherwise check only their sizes and headers.
    """
    try:
        if not folder.is_dir():
            return "no such folder"
    except OSError as error:
        return str(error.strerror)
    if not (folder / MANIFEST).is_file():
        if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
            return "an exported model, not a checkpoint (model.name_or_path starts from one)"
        if (folder / CHECKPOINTS).is_dir():
            return f"the folder of a run; its newest checkpoint is {folder / 'checkpoints' / 'latest'}"
        return f"{MANIFEST} is missing"
    from safetensors import SafetensorError, safe_open

    try:
        if link := next((file for file in sorted(folder.iterdir()) if file.is_symlink()), None):
            return f"{link.name!r} is a link to {os.readlink(link)!r}"
        manifest = _read_json(folder / MANIFEST)
        if manifest["format"] not in (FORMAT, FORMAT_OF_BLOCKS):
            age = "newer" if manifest["format"] > FORMAT else "older"
            return f"it has format {manifest['format']!r}, {age} than the {FORMAT} that this version reads"
        files = manifest["files"]
        shards = {match[0]: match[2] for name in files if (match := TENSORS.fullmatch(name))}
        if set(files) != {STATE, *shards} or {int(count) for count in shards.values()} != {len(shards)}:
            return f"{MANIFEST} lists {sorted(files)}"
        if strangers := {file.name for file in folder.glob("tensors-*")} - {*files}:
            return f"{MANIFEST} does not list {sorted(strangers)}"
        for name, expected in files.items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            size = file.stat().st_size
            if size != expected["size"]:
                return f"{name} has {size} bytes instead of {expected['size']!r}"
            if (read_all or name not in shards) and checksum(file) != expected["xxh3_128"]:
                return f"{name} does not match its checksum"
            if name in shards:
                with safe_open(file, framework="numpy"):
                    pass  # opening the file reads its header
        state = _read_json(folder / STATE)
        if lacks := [key for key in NEEDED if key not in state]:
            return f"{STATE} lacks {', '.join(lacks)}"
        Progress(**state["progress"])
        if state["progress"]["step"] != manifest["step"]:
            return f"{STATE} is of step {state['progress']['step']!r}, {MANIFEST} of step {manifest['step']!r}"
    except SafetensorError as error:
        return f"{name} is not a safetensors file ({error})"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


def _read_json(file: Path) -> Any:
    if (size := file.stat().st_size) > LARGEST_JSON:
        raise ValueError(f"{file.name} has {size} bytes, more than the {LARGEST_JSON} that a checkpoint can need")
    return json.loads(file.read_text(), object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if again := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{again[0]!r} is in it twice")
    return dict(pairs)


def set_aside(output_dir: Path, found: Found) -> list[Path]:
    """Rename checkpoints that do not lead to the resumed one: newer, damaged, or of another lineage; return new paths.

    No checkpoint is deleted, but a renamed one is neither found again nor counted as newest in the rotation; unfinished
    `tmp-*` leftovers are deleted. The record (metrics and samples) is later cut at the resumed step, so it is copied first
    when intact checkpoints are set aside.
    """
    root = output_dir / CHECKPOINTS
    moved = []
    after_step = found.checkpoint.progress.step if found.checkpoint and is_own(output_dir, found.checkpoint) else -1
    for leftover in (*root.glob("tmp-step-*"), *root.glob("tmp-latest"), *root.glob("tmp-best")):
        shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
    left = [folder for step, folder in step_folders(root) if step > after_step]
    if {*left} - {folder for folder, _ in found.damaged}:
        for file in (output_dir / METRICS, output_dir / SAMPLES):
            if file.is_file():
                shutil.copyfile(file, free_name(file))
    for folder in left:
        target = free_name(folder)
        folder.rename(target)
        moved.append(target)
    return moved


def is_own(output_dir: Path, checkpoint: Checkpoint) -> bool:
    """True when the checkpoint is in the run's own folder; False when `checkpoint.resume` named one elsewhere."""
    return checkpoint.folder.parent == (output_dir / CHECKPOINTS).resolve()


def checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
