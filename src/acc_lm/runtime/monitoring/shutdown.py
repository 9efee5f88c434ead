"""End of a run: a process group that no process leaves too early, and the causes of low-level errors."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from acc_lm.config import Config
from acc_lm.errors import (
    DataError,
    MachineError,
    StorageError,
    UserError,
    is_out_of_memory,
    storage_reason,
    unreadable_file,
)
from acc_lm.runtime.monitoring.memory import out_of_memory
from acc_lm.runtime.monitoring.peers import Peers

if TYPE_CHECKING:
    from accelerate import Accelerator


def close(accelerator: Accelerator) -> None:
    """End the process group so that no process leaves while another still uses it."""
    accelerator.wait_for_everyone()
    stop_watching()
    gc.unfreeze()
    accelerator.free_memory()
    accelerator.end_training()


def forget(accelerator: Accelerator) -> None:
    """Let this process build another Accelerator; the process group stays. Every process must call it."""
    from accelerate.state import AcceleratorState, GradientState

    accelerator.wait_for_everyone()
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def explain(error: Exception, config: Config | None) -> UserError | None:
    """Known cause of a low-level error: a file, a disk, memory, or another process of the run; else None."""
    if unreadable := unreadable_file(error):
        return DataError(f"{unreadable} must be readable, got: {error}; change its permissions")
    if storage := storage_reason(error):
        return StorageError(f"the disk must be writable, got: {storage} ({error}); free some space and start again")
    if config is None:
        return None
    if is_out_of_memory(error):
        return out_of_memory(error, config)
    if "connectFullMesh" in str(error):  # by default gloo announces the address of the machine's host name
        return MachineError(
            f"the processes must reach each other over gloo, got: {' '.join(str(error).split())}; set GLOO_SOCKET_IFNAME on every machine "
            "to the network interface that connects them (ip addr), on machines with GPUs too"
        )
    return None if Peers.current is None else Peers.current.explain(error)


def stop_watching() -> None:
    """Stop watching because this process is about to end: processes that end before it are not lost."""
    if Peers.current is not None:
        Peers.current.stop()
