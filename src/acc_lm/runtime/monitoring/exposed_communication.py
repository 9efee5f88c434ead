"""Exposed communication: stalls of computation until other processes have sent something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acc_lm.runtime.settings.strategy import requested_strategy

StallTimer = Callable[[], AbstractContextManager[None]]
"""Context that is entered while computation stalls; on a GPU, while the wait is queued on its stream."""


@contextmanager
def watched(standing: StallTimer, on_gpu: bool) -> Iterator[None]:
    """Enter `standing` for every wait for communication in Python, in the engines and in this project's own code.

    A CPU waits in `Work.wait`, and so does a GPU's stream if that is called on it. Engines that communicate on streams of
    their own make the compute stream wait for an event. The waits of DDP in C++ are seen by `watch_backward`.
    """
    work_wait, stream_wait = dist.Work.wait, torch.cuda.Stream.wait_event
    compute = torch.cuda.current_stream() if on_gpu else None

    def wait(work: dist.Work, *arguments: Any, **keywords: Any) -> Any:
        holds_up = compute is None or torch.cuda.current_stream() == compute
        with standing() if holds_up else nullcontext():
            return work_wait(work, *arguments, **keywords)

    def wait_event(stream: torch.cuda.Stream, event: Any) -> None:
        holds_up = compute is not None and stream == compute == torch.cuda.current_stream()
        with standing() if holds_up else nullcontext():
            stream_wait(stream, event)

    with patch.object(dist.Work, "wait", wait), patch.object(torch.cuda.Stream, "wait_event", wait_event):
        yield


def watch_backward(model: nn.Module, standing: StallTimer) -> None:
    """Enter `standing` while DDP waits for its buckets, in an autograd callback that runs when all gradients exist.

    Autograd runs callbacks in the order in which they were queued: our first at the beginning of the backward, DDP's
    during the backward, and our second by our first. So our two callbacks enclose DDP's.
    """
    if requested_strategy() != "ddp":
        return
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]

    def computed() -> None:
        with ExitStack() as stack:
            stack.enter_context(standing())
            engine.queue_callback(stack.pop_all().close)

    def begin(gradient: Tensor) -> None:
        engine.queue_callback(computed)

    def hook(module: nn.Module, inputs: Any, loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(begin)

    model.register_forward_hook(hook)
