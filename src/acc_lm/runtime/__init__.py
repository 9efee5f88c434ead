"""Where a run executes: the one room that knows Accelerate's launches and strategies by name.

    config_file   what Accelerate's yaml says that Accelerate itself would ignore
    launch        environment of the launcher -> Accelerator, or an error that says why not
    strategy      the strategy that was asked for, the model inside what it made
    fp8           what has to be here for products of 8 bits, and what Accelerate is to be told
    fsdp          FSDP2 and HSDP: what Accelerate is to be told
    deepspeed     the same for DeepSpeed, and its settings from the recipe
    extensions    DeepSpeed's C++ extensions, built before anybody waits for them
    engines       model and optimizer -> spread over the processes by the engine that was asked for
    gradients     their norm, clipping, and which was no number
    identity      what really runs, read from the live objects
    peers         the other processes: whether they run the same, which of them died or hangs
    pace          how long they wait for data and for each other, and which of them holds up the others
    exposed       where computation stands still until the others have sent something
    traffic       what a step communicates, counted
    communication what the processes can exchange, measured
    pieces        which part of which tensor lives on this process: checkpoints and exports of every engine
    doctor        what this machine has, and whether a config can run on it
    memory        what was used, whether a micro-batch fits, what to do when there is not enough
    ending        a process group that ends cleanly

Everything else sees an `Accelerator` that is what the launch asked for, or an error that says why it is not.
"""

from acc_lm.runtime.communication import (
    BUCKETED_CONFIGS,
    COLLECTIVES,
    bus_bandwidth,
    data_parallel,
    keep_gradients_home,
    memory_held,
    seconds_of_slowest,
    time_collective,
    wait_for,
)
from acc_lm.runtime.config_file import without_launch
from acc_lm.runtime.doctor import check_config, check_run, machine, refusal
from acc_lm.runtime.ending import close, explain, forget, stop_watching
from acc_lm.runtime.engines import (
    check_replicas,
    gather_objects,
    initialise_once,
    keep_libraries,
    on_main,
    prepare,
    release_gathered,
    warm_up,
    whole_shapes,
)
from acc_lm.runtime.gradients import Gradients
from acc_lm.runtime.identity import Identity, environment, identify
from acc_lm.runtime.launch import build_accelerator, quiet_libraries, split_global_batch
from acc_lm.runtime.memory import Memory, fit_micro_batch, is_out_of_memory, peak_memory_gb
from acc_lm.runtime.pace import Pace
from acc_lm.runtime.peers import Peers
from acc_lm.runtime.pieces import (
    WEIGHT,
    Piece,
    count_updates,
    full_precision,
    gather_tensor,
    pieces_of,
    publish_weights,
    start_state,
)
from acc_lm.runtime.strategy import bare_model, world_size
from acc_lm.runtime.traffic import VARIABLE as COUNT_TRAFFIC
from acc_lm.runtime.traffic import Traffic, received_over_tcp, summary

__all__ = [
    "BUCKETED_CONFIGS",
    "COLLECTIVES",
    "COUNT_TRAFFIC",
    "WEIGHT",
    "Gradients",
    "Identity",
    "Memory",
    "Pace",
    "Peers",
    "Piece",
    "Traffic",
    "bare_model",
    "build_accelerator",
    "bus_bandwidth",
    "check_config",
    "check_replicas",
    "check_run",
    "close",
    "count_updates",
    "data_parallel",
    "environment",
    "explain",
    "fit_micro_batch",
    "forget",
    "full_precision",
    "gather_objects",
    "gather_tensor",
    "identify",
    "initialise_once",
    "is_out_of_memory",
    "keep_gradients_home",
    "keep_libraries",
    "machine",
    "memory_held",
    "on_main",
    "peak_memory_gb",
    "pieces_of",
    "prepare",
    "publish_weights",
    "quiet_libraries",
    "received_over_tcp",
    "refusal",
    "release_gathered",
    "seconds_of_slowest",
    "split_global_batch",
    "start_state",
    "stop_watching",
    "summary",
    "time_collective",
    "wait_for",
    "warm_up",
    "whole_shapes",
    "without_launch",
    "world_size",
]
