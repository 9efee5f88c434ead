"""Communication that nothing hides: where computation stands still until the other processes have sent something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acc_lm.runtime.strategy import asked_strategy

Standing = Callable[[], AbstractContextManager[None]]
"""Entered for as long as computation stands still; on a GPU, when what is asked of its stream does."""


@contextmanager
def watched(standing: Standing, on_gpu: bool) -> Iterator[None]:
    """Sees all that Python waits for, in the engines and in what this project sends itself.

    A CPU stands in `Work.wait`. So does a GPU's stream if that is called on it; engines with streams of their own for what
    they send let the one that computes wait for an event. What DDP waits for in C++ is `watch_backward`'s.
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


def watch_backward(model: nn.Module, standing: Standing) -> None:
    """Sees what DDP waits for: it asks autograd to call it when all gradients are there, and waits for its buckets then.

    Autograd calls in the order in which it was asked: at the beginning of the backward for the first of ours, in it for DDP's,
    and by our first for our second.
    """
    if asked_strategy() != "ddp":
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
