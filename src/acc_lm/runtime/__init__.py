"""The launch and its engines: the one room that knows Accelerate's strategies by name.

    config_file   settings in Accelerate's yaml that Accelerate itself would silently ignore
    launch        environment of the launcher -> Accelerator, or an error with the reason
    strategy      the strategy that the launch asks for, and the bare model inside its wrappers
    fp8           requirements of fp8 matmuls, and Accelerate's arguments for them
    fsdp          FSDP2 and HSDP: arguments for Accelerate
    deepspeed     DeepSpeed: arguments for Accelerate, and its settings from the recipe
    extensions    DeepSpeed's C++ extensions, built ahead of their use
    engines       model and optimizer -> distributed over the processes by the engine that the launch asks for
    gradients     norm and clipping of the gradients, names of the non-finite ones
    identity      strategy, engine, placement and precision, read from the live objects
    peers         the other processes: same code and recipe, deaths, hangs
    pace          time spent waiting for data and for other processes, stragglers
    exposed       stalls of computation until other processes have sent something
    traffic       count of what a step communicates
    communication  measurements of what the processes can exchange
    pieces        parts of each tensor on this process, for checkpoints and exports of every engine
    doctor        description of this machine, and whether a config can run on it
    memory        peak memory, a micro-batch that fits, remedies when there is not enough
    ending        clean end of the process group, causes of low-level errors

The other rooms see an `Accelerator` that is what the launch asked for, or an error with the reason why it is not.
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
from acc_lm.runtime.memory import Memory, fit_micro_batch, peak_memory_gb
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
