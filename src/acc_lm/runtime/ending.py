"""How a run ends: a process group that no process leaves too early, and what an error beneath the code stands for."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from acc_lm.config import Config
from acc_lm.errors import DataError, MachineError, StorageError, UserError, storage_reason, unreadable_file
from acc_lm.runtime.memory import is_out_of_memory, out_of_memory
from acc_lm.runtime.peers import Peers

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
    """Let this process build another Accelerator; the process group stays. Every process calls."""
    from accelerate.state import AcceleratorState, GradientState

    accelerator.wait_for_everyone()
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def explain(error: Exception, config: Config | None) -> UserError | None:
    """Known cause of an error beneath the code: a file, a disk, memory, or another process of the run; else None."""
    if unreadable := unreadable_file(error):
        return DataError(f"{unreadable} must be readable, got: {error}; change its permissions")
    if storage := storage_reason(error):
        return StorageError(f"the disk must be writable, got: {storage} ({error}); free some space and start again")
    if config is None:
        return None
    if is_out_of_memory(error):
        return out_of_memory(error, config)
    if "connectFullMesh" in str(error):  # gloo tells the others the address of its machine's name, unless told better
        return MachineError(
            f"the processes must reach each other over gloo, got: {' '.join(str(error).split())}; set GLOO_SOCKET_IFNAME on every machine "
            "to the network interface that connects them (ip addr), on machines with GPUs too"
        )
    return None if Peers.current is None else Peers.current.explain(error)


def stop_watching() -> None:
    """This process is about to end: other processes that end before it are not lost."""
    if Peers.current is not None:
        Peers.current.stop()
