"""What a run says of its speed: tokens and FLOP per second, where the time of a step goes, and a profile where one is asked for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from acc_lm.config import Config
from acc_lm.profiling import Profile
from acc_lm.progress import Progress
from acc_lm.rows import Batch
from acc_lm.runtime import Identity, Memory, Pace
from acc_lm.throughput import Flops, peak_of

if TYPE_CHECKING:
    from accelerate import Accelerator


class Speed:
    """A clock that stands still while the run evaluates and saves; it starts where its context is entered, by all together.

    Args:
        flops: of the model that is trained.
        memory: of this process, up to here.
        progress: where the run begins.
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
        self._num_processes = identity.num_processes
        self._peak = peak_of(identity.device, identity.compute, config.tracking.peak_tflops)
        self._profile = Profile(accelerator, config.profile, Path(config.output_dir), progress.step, num_steps, memory)
        self._step = progress.step
        """The one that was begun last."""
        self._begun = self._seconds = 0.0
        """When it was, and what the others since the last look have taken."""
        self._tokens, self._num_steps = progress.tokens, 0
        self._computed = [0.0, 0.0]
        """FLOP of this process since the last look: with whole rows looked at, and with what a token may look at."""
        self.slow: str | None = None
        """A line, if the last look has found that a process holds up the others."""
        self._model = model

    def __enter__(self) -> Speed:
        self._memory.watch_first_step(self._model)
        self._accelerator.wait_for_everyone()  # what the main process writes before the first step is no time of it
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
        """The loader's batches, whose time and size are noted."""
        for batch in self._pace.reading(loader, self._profile.span):
            ids = batch["input_ids"]
            for i, causal in enumerate((False, True)):
                self._computed[i] += ids.numel() * self._flops.of_token(ids.shape[-1], causal)
            yield batch

    def begin_step(self) -> None:
        """The clock goes on, and the next step begins. Nothing is waited for."""
        self._step, self._num_steps, self._begun = self._step + 1, self._num_steps + 1, time.monotonic()
        self._profile.begin(self._step)
        self._pace.start_step()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Something else than training: its memory is noted apart, and no profile sees it."""
        with self._memory.phase("evaluation"), self._profile.looking_away():
            yield

    def pause(self) -> None:
        """The step is over. Every process calls."""
        self._seconds += time.monotonic() - self._begun
        if "first update" not in self._memory.phases:
            self._memory.note("first update")
        self._pace.end_step()
        self._profile.end(self._step)

    def metrics(self, tokens: int) -> dict[str, float]:
        """Since the last call, up to now, by the names of metrics.jsonl. When the device has done all; every process calls.

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
        }
        if self._peak is not None and not self._flops.unknown and self._computed[0]:
            values["mfu"] = look.total / (seconds * self._num_processes * self._peak.flops)
            values["mfu_causal"] = values["mfu"] * self._computed[1] / self._computed[0]
        self._tokens, self._num_steps, self._computed = tokens, 0, [0.0, 0.0]
        return {f"train/{name}": value for name, value in values.items()}
