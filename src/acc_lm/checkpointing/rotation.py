"""The checkpoints of a run on disk: which are whole, which one to go on from, which ones to keep.

checkpoints/step-00000200/   a checkpoint, see checkpoint.py
checkpoints/latest, best     relative links, for people
checkpoints/aside-*          what a resumed run did not go on from; never deleted, never found again
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from acc_lm import history
from acc_lm.config import CheckpointConfig
from acc_lm.errors import UNSUPPORTED, CheckpointError, ConfigError, warn_once
from acc_lm.history import gain
from acc_lm.progress import Progress
from acc_lm.runtime import on_main
from acc_lm.stop import crash_point

if TYPE_CHECKING:
    from accelerate import Accelerator

FORMAT = 2
STATE, MANIFEST = "state.json", "manifest.json"
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
"""What a run that goes on reads in `STATE`."""
NAME = re.compile(r"step-(\d{8,})")


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
    """Where a run goes on from, and the damaged checkpoints that were passed over on the way."""

    checkpoint: Checkpoint | None
    started_from: str | None = None
    """The path that `checkpoint.resume` named, remembered by every checkpoint of the run that it started."""
    damaged: tuple[tuple[Path, str], ...] = ()
    checked: str = ""
    """How they were looked at, and how long that took."""


def rotate(root: Path, config: CheckpointConfig) -> None:
    """Keep the newest `keep_last` and the best `keep_best`, by step number and `best_metric`; link both for people."""
    newest = [folder for _, folder in sorted(_step_folders(root), reverse=True)]
    best = [folder for _, folder in _ranking(root, config.best_metric)]
    _link(root / "latest", newest[0])
    _link_best(root, config.best_metric)
    if config.keep_last is None:
        return
    keep = {*newest[: config.keep_last], *best[: config.keep_best]}
    for folder in newest:
        if folder not in keep:
            remove_checkpoint(folder)


def remove_checkpoint(folder: Path) -> None:
    """Take the manifest first: a folder that is half removed is no checkpoint any more. What a link leads to stays."""
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    crash_point("mid_rotate")
    shutil.rmtree(folder)


def _link(link: Path, folder: Path) -> None:
    temporary = link.with_name(f"tmp-{link.name}")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(folder.name)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.EPERM):
            raise
        warn_once(
            f"output_dir is on a file system without links ({error.strerror}): checkpoints/latest and best will not be there"
        )
        return
    _remove_copy(link)
    temporary.replace(link)


def _remove_copy(link: Path) -> None:
    """Clear a link's place of the folder that is there in a run which was copied as if links were folders; what else is there stays."""
    if link.is_symlink() or not link.exists():
        return
    if (link / MANIFEST).is_file():
        shutil.rmtree(link)
    else:
        link.rename(free_name(link))


def free_name(path: Path) -> Path:
    """`aside-NAME` beside it, with a number where that is taken."""
    aside = path.with_name(f"aside-{path.name}")
    number = 1
    while aside.exists() or aside.is_symlink():
        number += 1
        aside = path.with_name(f"aside-{path.name}-{number}")
    return aside


def _step_folders(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    return [(int(match[1]), path) for path in root.iterdir() if (match := NAME.fullmatch(path.name)) and path.is_dir()]


def newest_step(output_dir: Path) -> int:
    """Step of the newest checkpoint of a run that nothing is missing of; 0 without any."""
    found = _step_folders(output_dir / "checkpoints")
    return max((step for step, folder in found if problem_with(folder, read_all=False) is None), default=0)


def _ranking(root: Path, metric: str) -> list[tuple[float, Path]]:
    """(gain, folder) of the checkpoints that were evaluated, the best first, of equal ones the oldest.

    A run that is stopped saves before an evaluation that is due: the one that goes on makes up for it, and then only the record has it.
    """
    values = {(step, folder): _value(folder, metric) for step, folder in _step_folders(root)}
    if None in values.values():
        record = dict(zip(*history.series(history.read(root.parent), metric), strict=True))
        values = {
            (step, folder): record.get(step) if value is None else value for (step, folder), value in values.items()
        }
    found = [(-gain(metric, v), *place) for place, v in values.items() if v is not None and math.isfinite(v)]
    return [(-loss, folder) for loss, _, folder in sorted(found)]


def _value(folder: Path, metric: str) -> float | None:
    try:
        state = json.loads((folder / STATE).read_text())
        measured = state.get("evaluation") or {"eval/loss": state["eval_loss"]}  # before there were other metrics
        return None if measured.get(metric) is None else float(measured[metric])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def is_among_best(
    accelerator: Accelerator, output_dir: Path, evaluation: dict[str, float], config: CheckpointConfig
) -> bool:
    """True when weights of this evaluation belong among the best `keep_best` checkpoints; the main process decides."""
    return on_main(accelerator, lambda: _beats_the_best(output_dir, evaluation[config.best_metric], config))


def _beats_the_best(output_dir: Path, value: float, config: CheckpointConfig) -> bool:
    gains = [kept for kept, _ in _ranking(output_dir / "checkpoints", config.best_metric)]
    if not config.keep_best or not math.isfinite(value):
        return False
    return len(gains) < config.keep_best or gain(config.best_metric, value) > gains[config.keep_best - 1]


def best_checkpoint(output_dir: Path, metric: str) -> Path | None:
    """The checkpoint whose evaluation was the best."""
    ranking = _ranking(output_dir / "checkpoints", metric)
    return ranking[0][1] if ranking else None


def link_best(accelerator: Accelerator, output_dir: Path, metric: str) -> Path | None:
    """The same, with `best` leading to it; the same answer on every process."""
    return on_main(accelerator, lambda: _link_best(output_dir / "checkpoints", metric))


def _link_best(root: Path, metric: str) -> Path | None:
    best = best_checkpoint(root.parent, metric)
    if best:
        _link(root / "best", best)
    else:
        _remove_copy(root / "best")
        (root / "best").unlink(missing_ok=True)
    return best


# --- finding -------------------------------------------------------------------------------------------------------


def find_checkpoint(accelerator: Accelerator, output_dir: Path, config: CheckpointConfig) -> Found:
    """The checkpoint to go on from, as the main process sees it; the same answer on every process.

    Raises:
        ConfigError: `resume: never` on a folder that has checkpoints.
        CheckpointError: there are checkpoints but none is whole, or the path is none.
    """
    began = time.monotonic()
    read_all = config.verify == "full"
    found = on_main(accelerator, lambda: _find(output_dir, config.resume, read_all), takes_long=read_all)
    how = "checked" if config.verify == "full" else "checked by size"
    return replace(found, checked=f"{how} in {time.monotonic() - began:.1f} s")


def _find(output_dir: Path, resume: str, read_all: bool = True) -> Found:
    root = output_dir / "checkpoints"
    folders = sorted(_step_folders(root), reverse=True)
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
        # A path starts a run; typed again, the same command goes on with what it started, wherever a link leads by now.
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
            *(f"{folder} must be a whole checkpoint, got: {problem}" for folder, problem in damaged),
            f"no checkpoint in {root} can be used; nothing was deleted; choose another output_dir to start from scratch",
        )
    return Found(None)


def _start(folder: Path) -> tuple[str | None, str | None]:
    """Where the run of this checkpoint started from, and how `checkpoint.resume` named that; a link may lead elsewhere since."""
    try:
        state = json.loads((folder / STATE).read_text())
        return state["started_from"], state["recipe"]["checkpoint"]["resume"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, None


def _problem_in_run(folder: Path, read_all: bool) -> str | None:
    """A run saves and removes its own folders only: one that a link stands for may be named, but is not found."""
    if folder.is_symlink():
        return f"a link to {os.readlink(folder)!r}; checkpoint.resume can name that"
    return problem_with(folder, read_all)


def open_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder.resolve(), json.loads((folder / STATE).read_text()))


def problem_with(folder: Path, read_all: bool = True) -> str | None:
    """Why the folder is not a whole checkpoint; None when it is.

    Nothing is read through a link, nor anything that the manifest does not name.

    Args:
        read_all: compare the checksums of the tensors too; else only their files' sizes and headers are looked at.
    """
    try:
        if not folder.is_dir():
            return "no such folder"
    except OSError as error:
        return str(error.strerror)
    if not (folder / MANIFEST).is_file():
        if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
            return "an exported model, not a checkpoint (model.name_or_path starts from one)"
        if (folder / "checkpoints").is_dir():
            return f"the folder of a run; its newest checkpoint is {folder / 'checkpoints' / 'latest'}"
        return f"{MANIFEST} is missing"
    from safetensors import SafetensorError, safe_open

    try:
        if link := next((file for file in sorted(folder.iterdir()) if file.is_symlink()), None):
            return f"{link.name!r} is a link to {os.readlink(link)!r}"
        manifest = _read_json(folder / MANIFEST)
        if manifest["format"] != FORMAT:
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
                    pass  # its header can be read
        state = _read_json(folder / STATE)
        if lacks := [key for key in NEEDED if key not in state]:
            return f"{STATE} lacks {', '.join(lacks)}"
        Progress(**state["progress"])
        if state["progress"]["step"] != manifest["step"]:
            return f"{STATE} is of step {state['progress']['step']!r}, {MANIFEST} of step {manifest['step']!r}"
    except SafetensorError as error:
        return f"{name} is no safetensors file ({error})"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


def _read_json(file: Path) -> Any:
    if (size := file.stat().st_size) > LARGEST_JSON:
        raise ValueError(f"{file.name} has {size} bytes, more than the {LARGEST_JSON} that one can need")
    return json.loads(file.read_text(), object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if again := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{again[0]!r} stands in it twice")
    return dict(pairs)


def set_aside(output_dir: Path, found: Found) -> list[Path]:
    """Rename checkpoints that do not lead to the one a run goes on from: newer, damaged, or of another course.

    Nothing is deleted, but they must neither be found again nor count as newest in the rotation. Of the record, which
    goes on from there too, a copy is kept where another course is left.
    """
    root = output_dir / "checkpoints"
    moved = []
    after_step = found.checkpoint.progress.step if found.checkpoint and is_own(output_dir, found.checkpoint) else -1
    for leftover in (*root.glob("tmp-step-*"), *root.glob("tmp-latest"), *root.glob("tmp-best")):
        shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
    left = [folder for step, folder in _step_folders(root) if step > after_step]
    if {*left} - {folder for folder, _ in found.damaged}:
        for file in (output_dir / history.FILE, output_dir / history.SAMPLES):
            if file.is_file():
                shutil.copyfile(file, free_name(file))
    for folder in left:
        target = free_name(folder)
        folder.rename(target)
        moved.append(target)
    return moved


def is_own(output_dir: Path, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is in the folder of the run, and not where `checkpoint.resume` has found it."""
    return checkpoint.folder.parent == (output_dir / "checkpoints").resolve()


def checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
