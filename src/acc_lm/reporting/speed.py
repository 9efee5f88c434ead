"""Speed of a run: tokens and FLOP per second, where the time of a step goes, and a profile on request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from acc_lm.config import Config
from acc_lm.modeling.flops import Flops, peak_of
from acc_lm.progress import Progress
from acc_lm.reporting.profiler import Profile
from acc_lm.rows.batch import Batch
from acc_lm.runtime import Gpus, Identity, Memory, Pace

if TYPE_CHECKING:
    from accelerate import Accelerator


class Speed:
    """Clock that pauses while the run evaluates and saves; it starts on all processes together, on entering its context.

    Args:
        flops: FLOP per token of the trained model.
        memory: memory record of this process, up to here.
        progress: position at which the run begins.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: Config,
        identity: Identity,
        model: nn.Module,
        flops: Flops,
        memory: Memory,
        progress: Progress,
        num_steps: int,
    ) -> None:
        self._accelerator = accelerator
        self._pace, self._memory, self._flops = Pace(accelerator, model), memory, flops
        self._num_processes, self._parts = identity.num_processes, identity.rows_in_parts * identity.layers_in_parts
        self._peak = peak_of(identity.device, identity.compute, config.tracking.peak_tflops)
        self._profile = Profile(accelerator, config.profile, Path(config.output_dir), progress.step, num_steps, memory)
        self._step = progress.step
        """Number of the step that was begun last."""
        self._begun = self._seconds = 0.0
        """Start time of that step, and seconds of the other steps since the last `metrics` call."""
        self._tokens, self._num_steps = progress.tokens, 0
        self._computed = [0.0, 0.0]
        """FLOP of this process since the last `metrics` call: with attention to full rows, and with causal attention."""
        self.slow: str | None = None
        """Line that names a straggler, if the last `metrics` call found a process that holds up the others."""
        self._model = model
        self.gpus = Gpus(accelerator)

    def __enter__(self) -> Speed:
        self._memory.watch_first_step(self._model)
        self._accelerator.wait_for_everyone()  # do not time what the main process writes before the first step
        self._pace.__enter__()
        self.begin_step()
        return self

    def __exit__(self, kind: Any, *more: Any) -> None:
        self._pace.__exit__(kind, *more)
        if kind is None:
            self._profile.finish()
        else:
            self._profile.stop()

    def reading(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches and record their time and size."""
        for batch in self._pace.reading(loader, self._profile.span):
            ids = batch["input_ids"]
            for i, causal in enumerate((False, True)):
                self._computed[i] += ids.numel() / self._parts * self._flops.of_token(ids.shape[-1], causal)
            yield batch

    def begin_step(self) -> None:
        """Resume the clock and begin the next step, without waiting for anything."""
        self._step, self._num_steps, self._begun = self._step + 1, self._num_steps + 1, time.monotonic()
        self._profile.begin(self._step)
        self._pace.start_step()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context for work other than training: its memory is recorded separately, and the profiler is paused."""
        with self._memory.phase("evaluation"), self._profile.looking_away():
            yield

    def pause(self) -> None:
        """End the step and pause the clock. Every process calls."""
        self._seconds += time.monotonic() - self._begun
        if "first update" not in self._memory.phases:
            self._memory.note("first update")
        self._pace.end_step()
        self._profile.end(self._step)

    def metrics(self, tokens: int) -> dict[str, float]:
        """Metrics since the last call, by the names of metrics.jsonl. Every process calls, when its device has finished.

        Args:
            tokens: targets that the run has trained on so far.
        """
        now = time.monotonic()
        seconds, self._seconds, self._begun = self._seconds + now - self._begun, 0.0, now
        look = self._pace.look(seconds, self._computed[0])
        self.slow = look.slow
        step = seconds / self._num_steps
        values = {
            "tokens_per_second": (tokens - self._tokens) / seconds,
            "seconds_per_step": step,
            "seconds_data": look.data,
            "seconds_waiting": look.waiting,
            "seconds_communication": look.communication,
            "seconds_compute": step - look.data - look.waiting - look.communication,
            "memory_gb": self._memory.peak_gb,
            **self.gpus.metrics(),
        }
        if self._peak is not None and not self._flops.unknown and self._computed[0]:
            values["mfu"] = look.total / (seconds * self._num_processes * self._peak.flops)
            values["mfu_causal"] = values["mfu"] * self._computed[1] / self._computed[0]
        self._tokens, self._num_steps, self._computed = tokens, 0, [0.0, 0.0]
        return {f"train/{name}": value for name, value in values.items()}
