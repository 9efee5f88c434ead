"""Save checkpoints atomically: synchronously, or in the background.

The steps of a save are in writing.py. For a background save the loop waits only while its tensors are copied to the host; a
thread of each process does the rest, and the threads communicate over a process group of their own.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from acc_lm.checkpointing.format import Found
from acc_lm.checkpointing.rotation import is_among_best
from acc_lm.checkpointing.writing import Snapshot, state_of, take_snapshot, write_checkpoint
from acc_lm.config import Config
from acc_lm.launcher import is_torchrun, shutdown_seconds
from acc_lm.progress import Progress
from acc_lm.run_files.names import CHECKPOINTS
from acc_lm.runtime import cpu_group, gather_objects
from acc_lm.stop import FAILED_SAVE, StopRequest

if TYPE_CHECKING:
    from accelerate import Accelerator

WORTH_A_SHARE, WORTH_SECONDS = 0.2, 2.0
"""Warn when saving blocks training for more than this share of the time since the last save, and a save takes this many
seconds."""
LAST_SECONDS = 60.0
"""Seconds that a run which ends with an error waits for a save in progress."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete on disk."""

    folder: Path
    num_bytes: int
    seconds: float
    """Seconds from the start of the snapshot to the end of the write, rotation included."""


class Saver:
    """Writer of one run's checkpoints, at most one at a time. Every process has a `Saver` and makes the same calls.

    Use it as a context manager: its exit waits for a save in progress, after an error at most `LAST_SECONDS`.
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
        """Newest checkpoint, which a restart would resume from, as far as this process knows."""
        self._accelerator, self._output_dir, self._config = accelerator, output_dir, config
        self._data_key, self._row_order = data_key, found.row_order
        self._started_from, self._stop_request = found.started_from, stop_request
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._outcome: Saved | BaseException | None = None
        self._news: list[str] = []
        self.seconds_held = self._held_before = 0.0
        """Seconds for which saving has blocked training so far."""
        self._last = time.monotonic()
        self._warned = False
        self._group = None
        if config.checkpoint.asynchronous:
            self._group = cpu_group(accelerator, config.distributed.timeout_seconds, shared=False)

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
        """Save the state of the run.

        A background save (`checkpoint.asynchronous`) returns when the state is copied; a synchronous one, or one with
        `at_once`, returns when the checkpoint exists.

        Args:
            evaluation: metrics of these weights, if they have just been evaluated; they decide `best`.
            memory: further state that a resumed run needs from the steps before.
            streams: positions of this process's streams; None on all processes of a run without streams.

        Raises:
            StorageError: this checkpoint or the previous one could not be written; older ones are untouched.
        """
        self.wait()
        began = time.monotonic()
        in_background = self._config.checkpoint.asynchronous and not at_once
        state = {
            **state_of(self._accelerator, model, optimizer, progress, self._config),
            "data_key": self._data_key,
            "row_order": self._row_order,
            "started_from": self._started_from,
            "eval_loss": evaluation and evaluation["eval/loss"],
            "evaluation": evaluation,
            **(memory or {}),
        }
        if streams is not None:
            parts = gather_objects(self._accelerator, streams)
            state["streams"] = {stream: where for part in parts for stream, where in part.items()}
        snapshot = take_snapshot(self._accelerator, model, optimizer, state, self._copies if in_background else None)
        if in_background:
            self._thread = threading.Thread(
                target=self._write_in_background, args=(snapshot, began), daemon=True, name="save"
            )
            self._thread.start()
            self.seconds_held += time.monotonic() - began
        else:
            self._outcome = self._write(snapshot, began)
            self.seconds_held += time.monotonic() - began
            self._collect()

    def _write(self, snapshot: Snapshot, began: float) -> Saved:
        root = self._output_dir / CHECKPOINTS
        folder, num_bytes = write_checkpoint(self._accelerator, root, snapshot, self._config.checkpoint, self._group)
        return Saved(folder, num_bytes, time.monotonic() - began)

    def _write_in_background(self, snapshot: Snapshot, began: float) -> None:
        try:
            self._outcome = self._write(snapshot, began)
        except BaseException as error:  # the loop raises it later, on all processes after the same step
            self._outcome = error
            if self._stop_request is not None:
                self._stop_request.ask(FAILED_SAVE)

    def wait(self) -> None:
        """Wait until no save is in progress.

        Raises:
            StorageError: the save failed, which all processes raise.
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
        """Lines about checkpoints completed since the last call, and warnings."""
        if self._thread is not None and not self._thread.is_alive() and isinstance(self._outcome, Saved):
            self._collect()
        lines, self._news = self._news, []
        return lines

    def is_among_best(self, evaluation: dict[str, float]) -> bool:
        """True when weights of this evaluation belong among the best checkpoints. Every process calls."""
        self.wait()  # a save in progress counts too
        return is_among_best(self._accelerator, self._output_dir, evaluation, self._config.checkpoint)

    def _look_at(self, seconds: float) -> None:
        """Warn once when a save is too slow for the launcher's grace period, or blocks training for too long."""
        now = time.monotonic()
        held, between = self.seconds_held - self._held_before, now - self._last
        self._held_before, self._last = self.seconds_held, now
        if self._warned or seconds < WORTH_SECONDS:
            return
        grace = shutdown_seconds()
        if is_torchrun() and seconds > grace / 2:
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
    """Save one checkpoint synchronously and return its folder. Every process calls.

    Raises:
        StorageError: the disk is full or not writable.
    """
    saver = Saver(accelerator, output_dir, config, data_key, Found(None))
    saver.save(model, optimizer, progress, at_once=True)
    assert saver.newest is not None
    return saver.newest
