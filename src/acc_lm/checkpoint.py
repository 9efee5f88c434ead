"""Checkpoints that exist whole or not at all.

    checkpoints/tmp-step-00000200/   everything is written here and flushed to disk, the manifest last
    checkpoints/step-00000200/       after one rename; only then are old ones removed
        tensors.safetensors          param/<name>, buffer/<name>, and every tensor of the optimizer's state by name
        state.json                   progress, recipe, data key, loss scale, versions
        manifest.json                size and checksum of both
    checkpoints/latest, best         relative links, for people

Nothing here is pickled, so nothing in a checkpoint can be executed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn

from acc_lm.config import CheckpointConfig, Config, learned_changes
from acc_lm.errors import CheckpointError, ConfigError, StorageError, storage_reason
from acc_lm.progress import Progress
from acc_lm.runtime import bare_model

if TYPE_CHECKING:
    from accelerate import Accelerator

FORMAT = 1
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
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


# --- saving --------------------------------------------------------------------------------------------------------


def save_checkpoint(
    accelerator: Accelerator,
    output_dir: Path,
    model: nn.Module,
    optimizer: Any,
    progress: Progress,
    config: Config,
    data_key: str,
    eval_loss: float | None,
    started_from: str | None,
) -> Path:
    """Write the whole state of the run, then remove what `config.checkpoint` no longer keeps. Every process calls.

    Args:
        eval_loss: of these weights, when they have just been evaluated; decides `best`.

    Raises:
        StorageError: the disk is full or cannot be written; older checkpoints are untouched.
    """
    root = output_dir / "checkpoints"
    folder = root / f"step-{progress.step:08d}"
    if accelerator.is_main_process:
        state = {
            "format": FORMAT,
            "progress": asdict(progress),
            "eval_loss": eval_loss,
            "recipe": config.model_dump(mode="json"),
            "data_key": data_key,
            "started_from": started_from,
            "num_processes": accelerator.num_processes,
            "mixed_precision": accelerator.mixed_precision,
            "threads": torch.get_num_threads(),
            "loss_scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }
        tensors = dict(_named_tensors(bare_model(model), optimizer))
        with _storage_errors(root):
            _write(folder, tensors, state)
            _rotate(root, config.checkpoint)
    accelerator.wait_for_everyone()
    return folder


def _named_tensors(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Everything that training changes, by name, on the CPU; a tied parameter once."""
    state = getattr(optimizer, "optimizer", optimizer).state
    for name, parameter in model.named_parameters():
        yield f"param/{name}", parameter.detach().cpu().contiguous()
        for key, value in state.get(parameter, {}).items():
            yield f"{key}/{name}", torch.as_tensor(value).cpu().contiguous()
    for name, buffer in _persistent_buffers(model):
        yield f"buffer/{name}", buffer.detach().cpu().contiguous()


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved:
            yield name, buffer


def _write(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    work = folder.with_name(f"tmp-{folder.name}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        save_file(tensors, work / TENSORS)
        (work / STATE).write_text(json.dumps(state, indent=1))
        files = {
            name: {"size": (work / name).stat().st_size, "xxh3_128": _checksum(work / name)}
            for name in (TENSORS, STATE)
        }
        (work / MANIFEST).write_text(
            json.dumps({"format": FORMAT, "step": state["progress"]["step"], "files": files}, indent=1)
        )
        for name in (TENSORS, STATE, MANIFEST):
            make_readable(work / name)
            _flush(work / name)
        _flush(work)
        if folder.exists():  # the same step saved again: a damaged or superseded one gives way
            shutil.rmtree(folder)
        work.rename(folder)
        _flush(folder.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def make_readable(file: Path) -> None:
    """safetensors writes 0600 whatever the umask; give the file the mode that others have."""
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _storage_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = storage_reason(error)
        if reason is None:
            raise
        free = shutil.disk_usage(root if root.exists() else root.parent).free
        raise StorageError(
            f"{root} must have room for a checkpoint, got: {reason} ({free / 2**20:.0f} MiB free); "
            "free some space and start again, the run goes on from the previous checkpoint"
        ) from None


def check_disk_space(output_dir: Path, model: nn.Module, config: CheckpointConfig, num_steps: int) -> None:
    """Refuse a run whose checkpoints will not fit, before its first step. AdamW's state makes each three models large.

    Raises:
        StorageError: with what is needed and what is free.
    """
    root = output_dir / "checkpoints"
    planned = 1 + (num_steps // config.every if config.every else 0)
    kept = planned if config.keep_last is None else min(planned, config.keep_last + config.keep_best)
    size = 3 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    there = sum(file.stat().st_size for file in root.glob("step-*/*"))
    needed = (kept + 1) * size - there  # one more than is kept: the new one is whole before an old one goes
    free = shutil.disk_usage(output_dir).free
    if needed > free:
        raise StorageError(
            f"{root} must have room for {kept + 1} checkpoints of {size / 2**20:.1f} MiB, got {free / 2**20:.1f} MiB free "
            f"({needed / 2**20:.1f} needed); free some space, or lower checkpoint.keep_last or keep_best"
        )


def _rotate(root: Path, config: CheckpointConfig) -> None:
    """Keep the newest `keep_last` and the best `keep_best`, by step number and evaluation loss; link both for people."""
    by_step = sorted(_step_folders(root), reverse=True)
    losses = {folder: loss for _, folder in by_step if (loss := _eval_loss(folder)) is not None}
    best = sorted(losses, key=lambda folder: losses[folder])
    newest = [folder for _, folder in by_step]
    _link(root / "latest", newest[0])
    if best:
        _link(root / "best", best[0])
    if config.keep_last is None:
        return
    keep = {*newest[: config.keep_last], *best[: config.keep_best]}
    for folder in newest:
        if folder not in keep:
            remove_checkpoint(folder)


def remove_checkpoint(folder: Path) -> None:
    """Take the manifest first: a folder that is half removed is no checkpoint any more."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _link(link: Path, folder: Path) -> None:
    temporary = link.with_name(f"tmp-{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.name)
    temporary.replace(link)


def _step_folders(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    return [(int(match[1]), path) for path in root.iterdir() if (match := NAME.fullmatch(path.name)) and path.is_dir()]


def _eval_loss(folder: Path) -> float | None:
    try:
        loss = json.loads((folder / STATE).read_text())["eval_loss"]
        return float(loss) if loss is not None and math.isfinite(loss) else None
    except (OSError, ValueError, KeyError):
        return None


def is_among_best(accelerator: Accelerator, output_dir: Path, eval_loss: float, keep_best: int) -> bool:
    """True when weights with this loss belong among the best `keep_best` checkpoints; the main process decides."""
    from accelerate.utils import broadcast_object_list

    answer = [_beats_the_best(output_dir, eval_loss, keep_best) if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        broadcast_object_list(answer)
    return bool(answer[0])


def _beats_the_best(output_dir: Path, eval_loss: float, keep_best: int) -> bool:
    losses = sorted(
        loss for _, folder in _step_folders(output_dir / "checkpoints") if (loss := _eval_loss(folder)) is not None
    )
    return keep_best > 0 and math.isfinite(eval_loss) and (len(losses) < keep_best or eval_loss < losses[keep_best - 1])


def best_checkpoint(output_dir: Path) -> Path | None:
    link = output_dir / "checkpoints" / "best"
    return link.parent / os.readlink(link) if link.is_symlink() else None


# --- finding -------------------------------------------------------------------------------------------------------


def find_checkpoint(accelerator: Accelerator, output_dir: Path, resume: str) -> Found:
    """The checkpoint to go on from, as the main process sees it; the same answer on every process.

    Raises:
        ConfigError: `resume: never` on a folder that has checkpoints.
        CheckpointError: there are checkpoints but none is whole, or the path is none.
    """
    from accelerate.utils import broadcast_object_list

    answer: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            answer[0] = _find(output_dir, resume)
        except (ConfigError, CheckpointError) as error:
            answer[0] = error
    if accelerator.num_processes > 1:
        broadcast_object_list(answer)
    if isinstance(answer[0], Exception):
        raise answer[0]
    found: Found = answer[0]
    return found


def _find(output_dir: Path, resume: str) -> Found:
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
        path = Path(resume).expanduser()
        started_from = str(path.resolve())
        # A path starts a run; typed again, the same command goes on with what it started.
        for _, folder in folders:
            if _problem_with(folder) is None and _open(folder).state["started_from"] == started_from:
                return Found(_open(folder), started_from)
        problem = _problem_with(path)
        if problem:
            raise CheckpointError(
                f"checkpoint.resume must be a checkpoint folder, got {resume}: {problem}; name a step-* folder"
            )
        return Found(_open(path), started_from)
    damaged: list[tuple[Path, str]] = []
    for _, folder in folders:
        problem = _problem_with(folder)
        if problem is None:
            checkpoint = _open(folder)
            return Found(checkpoint, checkpoint.state["started_from"], tuple(damaged))
        damaged.append((folder, problem))
    if damaged:
        raise CheckpointError(
            *(f"{folder} must be a whole checkpoint, got: {problem}" for folder, problem in damaged),
            f"no checkpoint in {root} can be used; nothing was deleted; choose another output_dir to start from scratch",
        )
    return Found(None)


def _open(folder: Path) -> Checkpoint:
    return Checkpoint(folder.resolve(), json.loads((folder / STATE).read_text()))


def _problem_with(folder: Path) -> str | None:
    """Why the folder is not a whole checkpoint; None when it is."""
    if not folder.is_dir():
        return "no such folder"
    if not (folder / MANIFEST).is_file():
        if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
            return "an exported model, not a checkpoint (model.name_or_path starts from one)"
        if (folder / "checkpoints").is_dir():
            return f"the folder of a run; its newest checkpoint is {folder / 'checkpoints' / 'latest'}"
        return f"{MANIFEST} is missing"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] > FORMAT:
            return f"it has format {manifest['format']}, newer than {FORMAT} that this version reads"
        files = manifest["files"]
        if set(files) != {TENSORS, STATE}:
            return f"{MANIFEST} lists {sorted(files)}"
        for name, expected in files.items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            size = file.stat().st_size
            if size != expected["size"]:
                return f"{name} has {size} bytes instead of {expected['size']}"
            if _checksum(file) != expected["xxh3_128"]:
                return f"{name} does not match its checksum"
        state = json.loads((folder / STATE).read_text())
        if state["progress"]["step"] != manifest["step"]:
            return f"{STATE} is of step {state['progress']['step']}, {MANIFEST} of step {manifest['step']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


# --- resuming ------------------------------------------------------------------------------------------------------


def check_same_recipe(checkpoint: Checkpoint, config: Config, precision: str, num_processes: int) -> list[str]:
    """Refuse a checkpoint of another recipe; returns what is worth a line although it is allowed.

    Raises:
        CheckpointError: one line for each changed key, and the ways out.
    """
    old, new = checkpoint.state["recipe"], config.model_dump(mode="json")
    changes = learned_changes(old, new)
    if checkpoint.state["mixed_precision"] != precision:  # the recipe may leave it to the launch
        changes["training.mixed_precision"] = (checkpoint.state["mixed_precision"], precision)
    binding = [key for key in changes if key.split(".")[0] in ("model", "tokenizer")]
    notes = []
    if changes and (binding or not config.checkpoint.allow_changed_recipe):
        ways = f"another output_dir (output_dir={_next_name(config.output_dir)})"
        if not binding:
            ways += ", or checkpoint.allow_changed_recipe=true to go on with the new values"
        lines = [
            f"{checkpoint.folder} was made by another recipe: {key} was {was!r}, is {now!r}"
            for key, (was, now) in changes.items()
        ]
        raise CheckpointError(*lines, f"choose {ways}")
    if changes:
        notes.append(f"recipe changed, as checkpoint.allow_changed_recipe permits: {', '.join(changes)}")
    if any(old["training"][key] != new["training"][key] for key in ("max_steps", "num_epochs")):
        notes.append("the length of the run changed: the schedule of the new length holds from here on")
    if checkpoint.state["num_processes"] != num_processes:
        notes.append(
            f"the checkpoint was written by {checkpoint.state['num_processes']} processes, now {num_processes}: "
            "the same rows and rates, losses equal to rounding, not bit for bit"
        )
    if checkpoint.state["threads"] != torch.get_num_threads():
        notes.append(
            f"the checkpoint was written with {checkpoint.state['threads']} threads per process, now {torch.get_num_threads()}: "
            "equal to rounding, not bit for bit"
        )
    return notes


def check_same_text(checkpoint: Checkpoint, config: Config, data_key: str) -> None:
    """Refuse a checkpoint that was trained on other rows.

    Raises:
        CheckpointError: with the ways out.
    """
    if checkpoint.state["data_key"] != data_key and not config.checkpoint.allow_changed_recipe:
        raise CheckpointError(
            f"{checkpoint.folder} must have been trained on this text, got other text (its content or its tokenizer changed); "
            f"choose another output_dir (output_dir={_next_name(config.output_dir)}), or checkpoint.allow_changed_recipe=true"
        )


def _next_name(output_dir: str) -> str:
    stem, dash, number = output_dir.rpartition("-")
    return f"{stem}-{int(number) + 1}" if dash and number.isdigit() else f"{output_dir}-2"


def load_checkpoint(accelerator: Accelerator, checkpoint: Checkpoint, model: nn.Module, optimizer: Any) -> Progress:
    """Put the saved state into the prepared model and optimizer, on every process.

    Raises:
        CheckpointError: the tensors are not those of this model.
    """
    from safetensors import safe_open

    bare = bare_model(model)
    inner = getattr(optimizer, "optimizer", optimizer)
    fused = {p: group.get("fused") or group.get("capturable") for group in inner.param_groups for p in group["params"]}
    with safe_open(checkpoint.folder / TENSORS, framework="pt") as file, torch.no_grad():
        keys = set(file.keys())
        for kind, named in (("param", bare.named_parameters()), ("buffer", _persistent_buffers(bare))):
            for name, target in named:
                key = f"{kind}/{name}"
                shape = tuple(file.get_slice(key).get_shape()) if key in keys else None
                if shape != tuple(target.shape):
                    raise CheckpointError(
                        f"{checkpoint.folder} must fit the model: {name} is {shape}, must be {tuple(target.shape)}"
                    )
                target.copy_(file.get_tensor(key))
                keys.discard(key)
        by_name = dict(bare.named_parameters())
        for key in sorted(keys):
            kind, _, name = key.partition("/")
            if name not in by_name or kind in ("param", "buffer"):
                raise CheckpointError(
                    f"{checkpoint.folder} must fit the model, got {key}, which the model does not have"
                )
            parameter = by_name[name]
            value = file.get_tensor(key)
            on_cpu = kind == "step" and not fused[parameter]
            inner.state[parameter][kind] = value if on_cpu else value.to(parameter.device)
    if accelerator.scaler is not None and checkpoint.state["loss_scaler"]:
        accelerator.scaler.load_state_dict(checkpoint.state["loss_scaler"])
    return checkpoint.progress


def set_aside(output_dir: Path, found: Found) -> list[Path]:
    """Rename checkpoints that do not lead to the one a run goes on from: newer, damaged, or of another course.

    Nothing is deleted, but they must neither be found again nor count as newest in the rotation.
    """
    root = output_dir / "checkpoints"
    moved = []
    after_step = -1
    if found.checkpoint and found.checkpoint.folder.parent == root.resolve():
        after_step = found.checkpoint.progress.step
    for leftover in root.glob("tmp-*"):
        shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
    for step, folder in _step_folders(root):
        if step > after_step:
            target = root / f"aside-{folder.name}"
            number = 1
            while target.exists():
                number += 1
                target = root / f"aside-{folder.name}-{number}"
            folder.rename(target)
            moved.append(target)
    return moved
