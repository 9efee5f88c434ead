"""Write a checkpoint, whole or not at all: while the training waits, or behind it.

The steps of a save are those of checkpoint.py. Behind the training, the loop waits only while its tensors are copied to the
host; a thread of each process does the rest, and the threads talk over a process group of their own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from acc_lm.adapter import base_checksum
from acc_lm.checkpoint import BUFFER, kept_pieces, kept_shapes, make_readable, persistent_buffers
from acc_lm.config import CheckpointConfig, Config
from acc_lm.errors import StorageError, storage_reason
from acc_lm.progress import Progress
from acc_lm.retention import FORMAT, MANIFEST, STATE, Found, checksum, free_name, is_among_best, rotate
from acc_lm.runtime import bare_model, count_updates, gather_objects, on_main
from acc_lm.stop import FAILED_SAVE, StopRequest, crash_point
from acc_lm.summary import flush

if TYPE_CHECKING:
    from accelerate import Accelerator

WORTH_A_SHARE, WORTH_SECONDS = 0.2, 2.0
"""A save that holds the training up for more than this share of the time since the last one, and takes this long, is told."""
LAUNCHER_SECONDS = 30.0
"""What torch's launcher gives its processes after a SIGTERM, unless $TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise."""
LAST_SECONDS = 60.0
"""How long a run that ends with an error waits for a save that is under way."""


@dataclass(frozen=True)
class Snapshot:
    """What this process writes of a checkpoint, and what the main process writes beside it."""

    tensors: dict[str, Tensor]
    """`kind/name` -> the elements of this process, on the host."""
    pieces: dict[str, Any]
    """Where each begins, and the shapes of the whole."""
    state: dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that exists."""

    folder: Path
    num_bytes: int
    seconds: float
    """From the snapshot to the rename."""


class Saver:
    """The checkpoints of one run, at most one of them in the making. Every process has one and calls it alike.

    As a context it ends with a save that is complete.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        output_dir: Path,
        config: Config,
        data_key: str,
        found: Found,
        stop_request: StopRequest | None = None,
    ) -> None:
        self.newest = found.checkpoint.folder if found.checkpoint else None
        """The checkpoint to go on from, as far as this process knows."""
        self._accelerator, self._output_dir, self._config = accelerator, output_dir, config
        self._data_key, self._started_from, self._stop_request = data_key, found.started_from, stop_request
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._outcome: Saved | BaseException | None = None
        self._news: list[str] = []
        self.seconds_held = self._held_before = 0.0
        """How long saving has held up the training so far."""
        self._last = time.monotonic()
        self._warned = False
        self._group: Any = None
        if config.checkpoint.asynchronous and accelerator.num_processes > 1:
            import torch.distributed as dist

            limit = timedelta(seconds=config.distributed.timeout_seconds)
            self._group = dist.new_group(backend="gloo", timeout=limit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: Any) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join(LAST_SECONDS)

    def save(
        self,
        model: nn.Module,
        optimizer: Any,
        progress: Progress,
        evaluation: dict[str, float] | None = None,
        memory: dict[str, Any] | None = None,
        *,
        streams: dict[str, list[int]] | None = None,
        at_once: bool = False,
    ) -> None:
        """Save the state of the run; returns when it is copied, or with `at_once` when the checkpoint exists.

        Args:
            evaluation: of these weights, when they have just been evaluated; decides `best`.
            memory: what else the run that goes on has to know of the steps before.
            streams: where this process's streams stand; None, on all processes, without any.

        Raises:
            StorageError: this checkpoint or the one before could not be written; older ones are untouched.
        """
        self.wait()
        began = time.monotonic()
        behind = self._config.checkpoint.asynchronous and not at_once
        state = {
            **_state_of(self._accelerator, model, optimizer, progress, self._config),
            "data_key": self._data_key,
            "started_from": self._started_from,
            "eval_loss": evaluation and evaluation["eval/loss"],
            "evaluation": evaluation,
            **(memory or {}),
        }
        if streams is not None:
            parts = gather_objects(self._accelerator, streams)
            state["streams"] = {stream: where for part in parts for stream, where in part.items()}
        snapshot = _take_snapshot(self._accelerator, model, optimizer, state, self._copies if behind else None)
        if behind:
            self._thread = threading.Thread(target=self._write_behind, args=(snapshot, began), daemon=True, name="save")
            self._thread.start()
            self.seconds_held += time.monotonic() - began
        else:
            self._outcome = self._write(snapshot, began)
            self.seconds_held += time.monotonic() - began
            self._collect()

    def _write(self, snapshot: Snapshot, began: float) -> Saved:
        root = self._output_dir / "checkpoints"
        folder, num_bytes = _write_checkpoint(self._accelerator, root, snapshot, self._config.checkpoint, self._group)
        return Saved(folder, num_bytes, time.monotonic() - began)

    def _write_behind(self, snapshot: Snapshot, began: float) -> None:
        try:
            self._outcome = self._write(snapshot, began)
        except BaseException as error:  # the loop raises it, on all processes after the same step
            self._outcome = error
            if self._stop_request is not None:
                self._stop_request.ask(FAILED_SAVE)

    def wait(self) -> None:
        """Until no save is under way.

        Raises:
            StorageError: it failed, on all processes alike.
        """
        if self._thread is not None:
            began = time.monotonic()
            self._thread.join()
            self.seconds_held += time.monotonic() - began
        self._collect()

    def _collect(self) -> None:
        outcome, self._outcome, self._thread = self._outcome, None, None
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome is not None:
            self.newest = outcome.folder
            self._news.append(f"saved {outcome.folder}: {outcome.num_bytes / 1e6:,.1f} MB in {outcome.seconds:.1f} s")
            self._look_at(outcome.seconds)

    def news(self) -> list[str]:
        """A line for each checkpoint that exists since the last call, and warnings."""
        if self._thread is not None and not self._thread.is_alive() and isinstance(self._outcome, Saved):
            self._collect()
        lines, self._news = self._news, []
        return lines

    def is_among_best(self, evaluation: dict[str, float]) -> bool:
        """True when weights of this evaluation belong among the best checkpoints. Every process calls."""
        self.wait()  # the one under way counts too
        return is_among_best(self._accelerator, self._output_dir, evaluation, self._config.checkpoint)

    def _look_at(self, seconds: float) -> None:
        """Warn, once, of a save that is too slow: for a launcher that ends the run, or for the time between two."""
        now = time.monotonic()
        held, between = self.seconds_held - self._held_before, now - self._last
        self._held_before, self._last = self.seconds_held, now
        if self._warned or seconds < WORTH_SECONDS:
            return
        grace = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", LAUNCHER_SECONDS))
        if "TORCHELASTIC_RUN_ID" in os.environ and seconds > grace / 2:
            self._warned = True
            self._news.append(
                f"warning: a save takes {seconds:.0f} s, and the launcher ends its processes {grace:.0f} s after a SIGTERM; "
                f"set TORCH_ELASTIC_SHUTDOWN_TIMEOUT={math.ceil(3 * seconds)}"
            )
        elif held > WORTH_A_SHARE * between:
            self._warned = True
            advice = "" if self._config.checkpoint.asynchronous else ", or set checkpoint.asynchronous=true"
            self._news.append(
                f"warning: saving took {held:.0f} of the last {between:.0f} s; raise checkpoint.every{advice}"
            )


def save_checkpoint(
    accelerator: Accelerator,
    output_dir: Path,
    model: nn.Module,
    optimizer: Any,
    progress: Progress,
    config: Config,
    data_key: str,
) -> Path:
    """One checkpoint, at once. Every process calls.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    saver = Saver(accelerator, output_dir, config, data_key, Found(None))
    saver.save(model, optimizer, progress, at_once=True)
    assert saver.newest is not None
    return saver.newest


def _state_of(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    progress: Progress,
    config: Config,
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "progress": asdict(progress),
        "num_updates": count_updates(optimizer),
        "recipe": config.model_dump(mode="json"),
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "threads": torch.get_num_threads(),
        "loss_scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
        "base": base_checksum(bare_model(model)),
        "model_config": bare_model(model).config.to_dict(),  # type: ignore[union-attr, operator]
        "generation_config": _generation_config(bare_model(model)),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def _generation_config(model: Any) -> dict[str, Any] | None:
    """Generation config as it would be exported; None for a model that has none."""
    found = getattr(model, "generation_config", None)
    return None if found is None else dict(json.loads(found.to_json_string()))


def _take_snapshot(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, state: dict[str, Any], copies: dict[str, Tensor] | None
) -> Snapshot:
    """This process's share of all tensors on the host: as they are, or copied into `copies`, whose memory is used again."""
    tensors: dict[str, Tensor] = {}
    starts: dict[str, int] = {}

    def keep(key: str, tensor: Tensor) -> None:
        tensor = tensor.detach()
        if copies is None:
            # From a GPU into memory that torch pins, all at once and awaited below.
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
            for kind in piece.kinds:
                keep(f"{kind}/{piece.name}", piece.get(kind)[first:last])
    if accelerator.is_main_process:
        for name, buffer in persistent_buffers(bare_model(model)):
            keep(f"{BUFFER}/{name}", buffer)
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize(accelerator.device)
    return Snapshot(tensors, {"starts": starts, "shapes": kept_shapes(model)}, state)


def _write_checkpoint(
    accelerator: Accelerator, root: Path, snapshot: Snapshot, keep: CheckpointConfig, group: Any
) -> tuple[Path, int]:
    """Write it and remove what is no longer kept; returns its folder and its size in bytes. Every process calls.

    Args:
        group: of the processes; None: the one that training uses.
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
    """Write this process's tensors; returns the file's name and its line in the manifest."""
    from safetensors.torch import save_file

    file = work / f"tensors-{accelerator.process_index:05d}-of-{accelerator.num_processes:05d}.safetensors"
    # One entry: safetensors writes several in any order, and equal runs must write equal bytes.
    save_file(snapshot.tensors, file, {"pieces": json.dumps(snapshot.pieces)})
    make_readable(file)
    return file.name, _sealed(file)


def _sealed(file: Path) -> dict[str, Any]:
    """The file's line in the manifest; it is on the disk when this returns."""
    with ThreadPoolExecutor(1) as beside:  # the disk and the checksum need not wait for each other
        digest = beside.submit(checksum, file)
        flush(file)
        return {"size": file.stat().st_size, "xxh3_128": digest.result()}


def _commit(work: Path, folder: Path, files: dict[str, Any], state: dict[str, Any]) -> None:
    """Manifest last, then one rename: from here on the checkpoint exists."""
    for name in files:
        if not (work / name).is_file():
            raise StorageError(
                f"{work.parent} must be on a file system that all machines share, got none where the main process sees {name}; "
                "choose another output_dir"
            )
    (work / STATE).write_text(json.dumps(state, indent=1))
    make_readable(work / STATE)
    files[STATE] = _sealed(work / STATE)
    crash_point("before_manifest")
    manifest = {"format": FORMAT, "step": state["progress"]["step"], "files": files}
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1))
    make_readable(work / MANIFEST)
    flush(work / MANIFEST)
    flush(work)
    crash_point("after_manifest_before_rename")
    if folder.is_dir() and not folder.is_symlink():  # the same step saved again: a damaged or superseded one gives way
        shutil.rmtree(folder)
    elif folder.exists() or folder.is_symlink():  # no run wrote that
        folder.rename(free_name(folder))
    work.rename(folder)
    crash_point("after_rename_before_fsync")
    flush(folder.parent)


@contextlib.contextmanager
def storage_errors(root: Path, needed: int = 0) -> Iterator[None]:
    """Errors of the disk in words, with what is free and what this process needs, in bytes."""
    try:
        yield
    except Exception as error:
        reason = storage_reason(error)
        if reason is None:
            raise
        free = shutil.disk_usage(root if root.exists() else root.parent).free
        wants = f", {needed / 2**20:.1f} MiB needed by one process" if needed else ""
        raise StorageError(
            f"{root} must have room for a checkpoint, got: {reason} ({free / 2**20:.0f} MiB free{wants}); "
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
    size = 3 * sum(math.prod(shape) * max(4, widths[name]) for name, shape in kept_shapes(model).items())
    there = sum(file.stat().st_size for file in root.glob("step-*/*"))
    needed = (kept + 1) * size - there  # one more than is kept: the new one is whole before an old one goes
    free = shutil.disk_usage(root if root.exists() else output_dir).free  # it may be a link to another disk
    if needed > free:
        raise StorageError(
            f"{root} must have room for {kept + 1} checkpoints of {size / 2**20:.1f} MiB, got {free / 2**20:.1f} MiB free "
            f"({needed / 2**20:.1f} needed); free some space, or lower checkpoint.keep_last or keep_best"
        )
