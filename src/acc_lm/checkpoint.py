"""Checkpoints that exist whole or not at all, written by any engine and read by any other.

    checkpoints/tmp-step-00000200/   every process writes its part here and flushes it to disk, the manifest comes last
    checkpoints/step-00000200/       after one rename; only then are old ones removed
        tensors-00000-of-00002.safetensors   of each process: pieces of param/<name>, exp_avg/<name>, exp_avg_sq/<name>
        state.json                           progress, recipe, data key, loss scale, versions
        manifest.json                        size and checksum of each of them

A tensor is stored as flat pieces in full precision, with the place where each begins, so no process ever holds more than
its own. Nothing here is pickled, so nothing in a checkpoint can be executed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acc_lm.config import CheckpointConfig, Config, learned_changes
from acc_lm.errors import CheckpointError, StorageError, storage_reason
from acc_lm.progress import Progress
from acc_lm.retention import FORMAT, MANIFEST, STATE, Checkpoint, checksum, rotate
from acc_lm.runtime import (
    WEIGHT,
    bare_model,
    count_updates,
    gather_objects,
    on_main,
    pieces_of,
    publish_weights,
    start_state,
    whole_shapes,
)
from acc_lm.stop import crash_point

if TYPE_CHECKING:
    from accelerate import Accelerator

BUFFER = "buffer"


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
    work = folder.with_name(f"tmp-{folder.name}")
    state = {
        "format": FORMAT,
        "progress": asdict(progress),
        "num_updates": count_updates(optimizer),
        "eval_loss": eval_loss,
        "recipe": config.model_dump(mode="json"),
        "data_key": data_key,
        "started_from": started_from,
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "threads": torch.get_num_threads(),
        "loss_scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
        "model_config": bare_model(model).config.to_dict(),  # type: ignore[union-attr, operator]
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }

    def make_room() -> None:
        crash_point("before_tmp")
        with storage_errors(root):
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)

    def commit() -> None:
        with storage_errors(root):
            _commit(work, folder, files, state)
            crash_point("before_rotate")
            rotate(root, config.checkpoint)
            crash_point("after_rotate")

    try:
        on_main(accelerator, make_room)
        written: Any
        try:
            with storage_errors(root):
                written = _write_mine(accelerator, work, model, optimizer)
            crash_point("after_first_file")
        except StorageError as error:
            written = error
        parts = gather_objects(accelerator, written)
        for part in parts:
            if isinstance(part, StorageError):
                raise part
        files = dict(parts)
        on_main(accelerator, commit)
    except BaseException:
        if accelerator.is_main_process:
            shutil.rmtree(work, ignore_errors=True)
        raise
    return folder


def _write_mine(accelerator: Accelerator, work: Path, model: nn.Module, optimizer: Any) -> tuple[str, dict[str, Any]]:
    """Write this process's pieces; returns the file's name and its line in the manifest."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    for piece in pieces_of(model, optimizer):
        first, last = piece.share()
        if last > first:
            starts[piece.name] = piece.start + first
            for kind in piece.kinds:
                tensors[f"{kind}/{piece.name}"] = piece.get(kind)[first:last].cpu().contiguous()
    if accelerator.is_main_process:
        for name, buffer in persistent_buffers(bare_model(model)):
            tensors[f"{BUFFER}/{name}"] = buffer.detach().cpu().contiguous()
    file = work / f"tensors-{accelerator.process_index:05d}-of-{accelerator.num_processes:05d}.safetensors"
    # One entry: safetensors writes several in any order, and equal runs must write equal bytes.
    save_file(tensors, file, {"pieces": json.dumps({"starts": starts, "shapes": whole_shapes(model)})})
    make_readable(file)
    flush(file)
    return file.name, {"size": file.stat().st_size, "xxh3_128": checksum(file)}


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    owners = {f"{path}." if path else "": module for path, module in model.named_modules()}
    for name, buffer in model.named_buffers():
        path, _, last = name.rpartition(".")
        if last not in owners[f"{path}." if path else ""]._non_persistent_buffers_set:
            yield name, buffer


def _commit(work: Path, folder: Path, files: dict[str, Any], state: dict[str, Any]) -> None:
    """Manifest last, then one rename: from here on the checkpoint exists."""
    for name in files:
        if not (work / name).is_file():
            raise StorageError(
                f"{work.parent} must be on a file system that all machines share, got none where the main process sees {name}; "
                "choose another output_dir"
            )
    (work / STATE).write_text(json.dumps(state, indent=1))
    files[STATE] = {"size": (work / STATE).stat().st_size, "xxh3_128": checksum(work / STATE)}
    crash_point("before_manifest")
    manifest = {"format": FORMAT, "step": state["progress"]["step"], "files": files}
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for name in (STATE, MANIFEST):
        make_readable(work / name)
        flush(work / name)
    flush(work)
    crash_point("after_manifest_before_rename")
    if folder.exists():  # the same step saved again: a damaged or superseded one gives way
        shutil.rmtree(folder)
    work.rename(folder)
    crash_point("after_rename_before_fsync")
    flush(folder.parent)


def make_readable(file: Path) -> None:
    """safetensors writes 0600 whatever the umask; give the file the mode that others have."""
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def storage_errors(root: Path) -> Iterator[None]:
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
    widths = {name: p.element_size() for name, p in bare_model(model).named_parameters()}
    size = 3 * sum(math.prod(shape) * max(4, widths[name]) for name, shape in whole_shapes(model).items())
    there = sum(file.stat().st_size for file in root.glob("step-*/*"))
    needed = (kept + 1) * size - there  # one more than is kept: the new one is whole before an old one goes
    free = shutil.disk_usage(output_dir).free
    if needed > free:
        raise StorageError(
            f"{root} must have room for {kept + 1} checkpoints of {size / 2**20:.1f} MiB, got {free / 2**20:.1f} MiB free "
            f"({needed / 2**20:.1f} needed); free some space, or lower checkpoint.keep_last or keep_best"
        )


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
    before = checkpoint.state["num_processes"]
    if before != num_processes:
        notes.append(
            f"the checkpoint was written by {before} process{'es' * (before != 1)}, now {num_processes}: "
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
    """Put the saved state into the prepared model and optimizer, each process its own pieces. Every process calls.

    Raises:
        CheckpointError: the tensors are not those of this model, or do not cover it.
    """
    state = checkpoint.state
    start_state(optimizer, state["num_updates"])
    with ExitStack() as stack, torch.no_grad():
        parts, shapes = _open_parts(stack, checkpoint.folder)
        _check_shapes(checkpoint.folder, shapes, whole_shapes(model))
        problem = None
        try:
            for piece in pieces_of(model, optimizer):
                for kind in piece.kinds:
                    key = f"{kind}/{piece.name}"
                    piece.put(kind, _assemble(checkpoint.folder, key, parts.get(key, []), piece.start, piece.length))
        except CheckpointError as error:
            problem = error
        for other in gather_objects(accelerator, problem):
            if other is not None:
                raise other
        for name, buffer in persistent_buffers(bare_model(model)):
            found = parts.get(f"{BUFFER}/{name}")
            if found is None:
                raise CheckpointError(f"{checkpoint.folder} must fit the model, got no buffer {name}")
            buffer.copy_(found[0][2][:])
    publish_weights(model)
    if accelerator.scaler is not None and state["loss_scaler"]:
        accelerator.scaler.load_state_dict(state["loss_scaler"])
    return checkpoint.progress


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(`kind/name`, whole tensor) of everything in a checkpoint, one after the other, without any model.

    Raises:
        CheckpointError: a tensor is not covered by the pieces that are there.
    """
    with ExitStack() as stack:
        parts, shapes = _open_parts(stack, folder)
        for key in sorted(parts):
            kind, _, name = key.partition("/")
            if kind == BUFFER:
                yield key, parts[key][0][2][:]
            else:
                whole = _assemble(folder, key, parts[key], 0, math.prod(shapes[name]))
                yield key, whole.view(tuple(shapes[name]))


def _open_parts(stack: ExitStack, folder: Path) -> tuple[dict[str, list[tuple[int, int, Any]]], dict[str, Any]]:
    """({key: [(first element, number of elements, slice to read)]}, {name: shape of the whole}) of all files."""
    from safetensors import safe_open

    parts: dict[str, list[tuple[int, int, Any]]] = {}
    shapes: dict[str, Any] = {}
    for path in sorted(folder.glob("tensors-*.safetensors")):
        file = stack.enter_context(safe_open(path, framework="pt"))
        pieces = json.loads(file.metadata()["pieces"])
        shapes |= pieces["shapes"]
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            part = file.get_slice(key)
            kind, _, name = key.partition("/")
            first = 0 if kind == BUFFER else pieces["starts"][name]
            parts.setdefault(key, []).append((first, math.prod(part.get_shape()), part))
    return parts, shapes


def _check_shapes(folder: Path, saved: dict[str, Any], wanted: dict[str, tuple[int, ...]]) -> None:
    for name in sorted({*saved, *wanted}):
        was, now = tuple(saved.get(name, ())), tuple(wanted.get(name, ()))
        if was != now or (name in saved) != (name in wanted):
            there = was if name in saved else "not there"
            raise CheckpointError(
                f"{folder} must fit the model: {name} is {there}, must be {now if name in wanted else 'absent'}"
            )


def _assemble(folder: Path, key: str, parts: list[tuple[int, int, Any]], start: int, length: int) -> Tensor:
    """Elements [start, start + length) of a tensor, from whatever pieces it was cut into."""
    values: Tensor | None = None
    covered = 0
    for first, size, part in parts:
        low, high = max(first, start), min(first + size, start + length)
        if low < high:
            chunk = part[low - first : high - first]
            if values is None:
                values = torch.empty(length, dtype=chunk.dtype)
            values[low - start : high - start] = chunk
            covered += high - low
    if covered != length or values is None:
        raise CheckpointError(f"{folder} must hold all of {key}, got {covered} of {length} elements of a part")
    return values


def weights_digest(accelerator: Accelerator, model: nn.Module, optimizer: Any, moments: bool = True) -> str:
    """Checksum of everything a checkpoint would hold of the tensors, on all processes together. Every process calls."""
    import xxhash

    digest = xxhash.xxh3_128()
    for piece in pieces_of(model, optimizer):
        for kind in piece.kinds if moments else (WEIGHT,):
            values = piece.get(kind).detach().cpu().contiguous()
            digest.update(f"{kind}/{piece.name}/{piece.start}".encode())
            digest.update(values.view(torch.uint8).numpy().data)
    return xxhash.xxh3_128("".join(gather_objects(accelerator, digest.hexdigest())).encode()).hexdigest()
