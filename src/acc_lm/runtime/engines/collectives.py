"""Collectives over Python objects, work that the main process does for all, and process groups on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from acc_lm.errors import Preempted, UserError

if TYPE_CHECKING:
    from accelerate import Accelerator


T = TypeVar("T")


PATIENCE = timedelta(days=1)
"""Timeout for work of the main process that takes longer for larger models; a dead process is still noticed at once."""


def on_main(accelerator: Accelerator, function: Callable[[], T], group: Any = None, *, takes_long: bool = False) -> T:
    """Run `function` on the main process; on every process return its result, or raise its user error or stop.

    Args:
        group: a separate group of all processes; None: the one that training uses.
        takes_long: `function` reads or writes a full model, so the others wait beyond `distributed.timeout_seconds`.
    """
    answer: list[Any] = [None, None]
    if takes_long and accelerator.num_processes > 1:
        group = _patient_group(dist.group.WORLD)
    if accelerator.is_main_process:
        try:
            answer[0] = function()
        except (UserError, Preempted) as error:
            answer[1] = error
    if accelerator.num_processes > 1:
        try:
            dist.broadcast_object_list(answer, src=0, group=group)
        except RuntimeError:  # of an error that they share, such as a stop, the others may be gone already
            if answer[1] is None:
                raise
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


@cache
def _patient_group(world: Any) -> Any:
    """Create a group of all processes of `world`, on the CPU, with timeout `PATIENCE`. Every process must call it."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def gather_objects(accelerator: Accelerator, local: T, group: Any = None) -> list[T]:
    """Return the objects `local` of all processes, by rank, on every process; `group` is as for `on_main`."""
    if accelerator.num_processes == 1:
        return [local]
    everyone: list[Any] = [None] * accelerator.num_processes
    dist.all_gather_object(everyone, local, group=group)
    return everyone


def cpu_group(accelerator: Accelerator, timeout_seconds: float, *, shared: bool) -> Any:
    """Return a group of all processes on the CPU, or None with one process. Every process must call it.

    Args:
        timeout_seconds: how long a collective of a new group waits for another process.
        shared: whether training's own group will do if that is on the CPU; a background thread needs one to itself.
    """
    if accelerator.num_processes == 1:
        return None
    if shared and dist.get_backend() == "gloo":
        return dist.group.WORLD
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
