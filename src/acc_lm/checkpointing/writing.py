"""Write a checkpoint: snapshot, one part per process, manifest, rename."""

from __future__ import annotations

import json
import math
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acc_lm.checkpointing.crash_points import crash_point
from acc_lm.checkpointing.format import FORMAT, FORMAT_OF_BLOCKS, checksum, free_name
from acc_lm.checkpointing.loading import BUFFER, kept_pieces, kept_shapes, persistent_buffers
from acc_lm.checkpointing.rotation import rotate
from acc_lm.config import CheckpointConfig, Config
from acc_lm.errors import StorageError
from acc_lm.files import flush, make_readable, storage_errors
from acc_lm.modeling.adapter import base_checksum
from acc_lm.progress import Progress
from acc_lm.run_files.names import CHECKPOINTS, MANIFEST, STATE
from acc_lm.runtime import bare_model, count_updates, gather_objects, on_main, parts_of_layers, parts_of_rows

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Snapshot:
    """Tensors that this process writes of a checkpoint, and the state that the main process writes next to them."""

    tensors: dict[str, Tensor]
    """`kind/name` -> elements that this process writes, on the host."""
    pieces: dict[str, Any]
    """Position of the first written element of each tensor, and the complete shapes of all tensors, by name.

    A position among the elements of some columns comes with these.
    """
    state: dict[str, Any]


def state_of(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    progress: Progress,
    config: Config,
) -> dict[str, Any]:
    return {
        "format": FORMAT if parts_of_layers() == 1 else FORMAT_OF_BLOCKS,
        "progress": asdict(progress),
        "num_updates": count_updates(optimizer),
        "recipe": config.model_dump(mode="json"),
        "num_processes": accelerator.num_processes,
        "rows_in_parts": parts_of_rows(),
        "layers_in_parts": parts_of_layers(),
        "mixed_precision": accelerator.mixed_precision,
        "threads": torch.get_num_threads(),
        "loss_scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
        "base": base_checksum(bare_model(model)),
        "model_config": bare_model(model).config.to_dict(),  # type: ignore[union-attr, operator]
        "generation_config": _generation_config(bare_model(model)),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def _generation_config(model: Any) -> dict[str, Any] | None:
    """Generation config as it would be exported; None for a model without one."""
    found = getattr(model, "generation_config", None)
    return None if found is None else dict(json.loads(found.to_json_string()))


def take_snapshot(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, state: dict[str, Any], copies: dict[str, Tensor] | None
) -> Snapshot:
    """Bring this process's share of all tensors to the host.

    With `copies`, tensors are copied into these buffers, which every save reuses; without, only GPU tensors are copied.
    """
    tensors: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    columns: dict[str, tuple[int, int]] = {}

    def keep(key: str, tensor: Tensor) -> None:
        tensor = tensor.detach()
        if copies is None:
            # GPU tensors go into host memory that torch pins; the asynchronous copies are awaited below.
            tensors[key] = tensor.contiguous().to("cpu", non_blocking=tensor.is_cuda)
            return
        copy = copies.get(key)
        if copy is None:
            copy = copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        tensors[key] = copy.copy_(tensor, non_blocking=tensor.is_cuda)

    for piece in kept_pieces(model, optimizer):
        first, last = piece.share()
        if last > first:
            starts[piece.name] = piece.start + first
            if piece.columns is not None:
                columns[piece.name] = piece.columns
            for kind in piece.kinds:
                keep(f"{kind}/{piece.name}", piece.get(kind)[first:last])
    if accelerator.is_main_process:
        for name, buffer in persistent_buffers(bare_model(model)):
            keep(f"{BUFFER}/{name}", buffer)
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize(accelerator.device)
    pieces = {"starts": starts, "shapes": kept_shapes(model)} | ({"columns": columns} if columns else {})
    return Snapshot(tensors, pieces, state)


def write_checkpoint(
    accelerator: Accelerator, root: Path, snapshot: Snapshot, keep: CheckpointConfig, group: Any
) -> tuple[Path, int]:
    """Write the checkpoint and rotate older ones; return its folder and its size in bytes. Every process calls.

    Args:
        group: process group to communicate over; None: the one that training uses.
    """
    folder = root / f"step-{snapshot.state['progress']['step']:08d}"
    work = folder.with_name(f"tmp-{folder.name}")

    def make_room() -> None:
        crash_point("before_tmp")
        with storage_errors(root):
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)

    def commit() -> None:
        with storage_errors(root):
            _commit(work, folder, files, snapshot.state)
            crash_point("before_rotate")
            rotate(root, keep)
            crash_point("after_rotate")

    try:
        on_main(accelerator, make_room, group)
        written: Any
        try:
            with storage_errors(root, sum(tensor.nbytes for tensor in snapshot.tensors.values())):
                written = _write_mine(accelerator, work, snapshot)
            crash_point("after_first_file")
        except StorageError as error:
            written = error
        parts = gather_objects(accelerator, written, group)
        for part in parts:
            if isinstance(part, StorageError):
                raise part
        files = dict(parts)
        on_main(accelerator, commit, group)
    except BaseException:
        if accelerator.is_main_process:
            shutil.rmtree(work, ignore_errors=True)
        raise
    return folder, sum(file["size"] for file in files.values())


def _write_mine(accelerator: Accelerator, work: Path, snapshot: Snapshot) -> tuple[str, dict[str, Any]]:
    """Write this process's tensors; return the file's name and its entry in the manifest."""
    from safetensors.torch import save_file

    file = work / f"tensors-{accelerator.process_index:05d}-of-{accelerator.num_processes:05d}.safetensors"
    # A single metadata entry: safetensors writes several in arbitrary order, and equal runs must write equal bytes.
    save_file(snapshot.tensors, file, {"pieces": json.dumps(snapshot.pieces)})
    make_readable(file)
    return file.name, _sealed(file)


def _sealed(file: Path) -> dict[str, Any]:
    """Flush the file to disk and return its entry in the manifest: size and checksum."""
    with ThreadPoolExecutor(1) as background:  # compute the checksum while the disk flushes
        digest = background.submit(checksum, file)
        flush(file)
        return {"size": file.stat().st_size, "xxh3_128": digest.result()}


def _commit(work: Path, folder: Path, files: dict[str, Any], state: dict[str, Any]) -> None:
    """Write state and manifest, then rename the folder: from then on the checkpoint exists."""
    for name in files:
        if not (work / name).is_file():
            raise StorageError(
                f"{work.parent} must be on a file system that all machines share, got one on which the main process does not see {name}; "
                "choose another output_dir"
            )
    (work / STATE).write_text(json.dumps(state, indent=1))
    make_readable(work / STATE)
    files[STATE] = _sealed(work / STATE)
    crash_point("before_manifest")
    manifest = {"format": state["format"], "step": state["progress"]["step"], "files": files}
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1))
    make_readable(work / MANIFEST)
    flush(work / MANIFEST)
    flush(work)
    crash_point("after_manifest_before_rename")
    if folder.is_dir() and not folder.is_symlink():  # the step is saved again: replace the damaged or superseded one
        shutil.rmtree(folder)
    elif folder.exists() or folder.is_symlink():  # not written by any run: set it aside
        folder.rename(free_name(folder))
    work.rename(folder)
    crash_point("after_rename_before_fsync")
    flush(folder.parent)


def check_disk_space(
    output_dir: Path, model: nn.Module, config: CheckpointConfig, num_steps: int, first_step: int = 1
) -> None:
    """Refuse a run before its first step if its checkpoints will not fit on the disk.

    With AdamW's state, each checkpoint has the size of three models. A run without a step left saves none.

    Args:
        first_step: the next step to train.

    Raises:
        StorageError: names the space that is needed and the space that is free.
    """
    if first_step > num_steps:
        return
    root = output_dir / CHECKPOINTS
    planned = 1 + (num_steps // config.every if config.every else 0)
    kept = planned if config.keep_last is None else min(planned, config.keep_last + config.keep_best)
    widths = {name: p.element_size() for name, p in bare_model(model).named_parameters()}
    size = 3 * sum(math.prod(shape) * max(4, widths[name]) for name, shape in kept_shapes(model).items())
    there = sum(file.stat().st_size for file in root.glob("step-*/*"))
    needed = (kept + 1) * size - there  # one more than kept: a new one is completed before an old one is removed
    free = shutil.disk_usage(root if root.exists() else output_dir).free  # root may be a link to another disk
    if needed > free:
        raise StorageError(
            f"{root} must have room for {kept + 1} checkpoints of {size / 2**20:.1f} MiB, got {free / 2**20:.1f} MiB free "
            f"({needed / 2**20:.1f} needed); free some space, or lower checkpoint.keep_last or keep_best"
        )
