"""The launch and its engines: the one room that knows Accelerate's strategies by name.

    monitoring/   observation of a run: other processes, memory, time and traffic of its steps, and its end
    launch/       environment of the launcher -> Accelerator, or an error with the reason
    engines/      a model distributed over processes, its gradients, and the parts that each process holds
    settings/     Accelerate's settings: read, corrected, completed with the keys that the recipe owns

Each of these imports only from those below it.
The other rooms see an `Accelerator` that is what the launch requested, or an error with the reason why it is not.
"""

from acc_lm.runtime.engines.collectives import cpu_group, gather_objects, on_main
from acc_lm.runtime.engines.gradients import Gradients
from acc_lm.runtime.engines.identity import Identity, environment, identify
from acc_lm.runtime.engines.prepare import (
    check_replicas,
    initialise_once,
    keep_libraries,
    prepare,
    release_gathered,
    warm_up,
    whole_shapes,
)
from acc_lm.runtime.engines.rectangles import Rectangle, rectangles
from acc_lm.runtime.engines.shards import (
    WEIGHT,
    Piece,
    count_updates,
    full_precision,
    gather_tensor,
    pieces_of,
    publish_weights,
    start_state,
)
from acc_lm.runtime.engines.tensor_parallel import cut_fake_layers
from acc_lm.runtime.launch.accelerator import build_accelerator, quiet_libraries
from acc_lm.runtime.launch.doctor import check_config, check_run, machine, refusal, shares_layers
from acc_lm.runtime.launch.layout import (
    CONFIGS_BY_SIZE,
    KEPT,
    MAX_FLAT,
    MAX_LIVE,
    NOT_PLANNED,
    PREFETCHED,
    WITH_LAYERS_IN_PARTS,
    WITH_ROWS_IN_PARTS,
    Compute,
    Placement,
    can_compile,
    configs_for,
    current_placement,
    launch_words,
    placement_of,
)
from acc_lm.runtime.launch.ranks import Ranks, find_ranks
from acc_lm.runtime.launch.request import split_global_batch
from acc_lm.runtime.launch.threads import choose_threads, keep_threads
from acc_lm.runtime.monitoring.bandwidth import (
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
from acc_lm.runtime.monitoring.gpus import Gpus
from acc_lm.runtime.monitoring.live_bytes import LiveBytes, RehearsedBytes
from acc_lm.runtime.monitoring.memory import Memory, fit_micro_batch, peak_memory_gb
from acc_lm.runtime.monitoring.peers import Peers
from acc_lm.runtime.monitoring.shutdown import close, explain, forget, stop_watching
from acc_lm.runtime.monitoring.step_cost import MEASURED_FILE, measure_step
from acc_lm.runtime.monitoring.step_timing import Pace
from acc_lm.runtime.monitoring.traffic import VARIABLE as COUNT_TRAFFIC
from acc_lm.runtime.monitoring.traffic import Traffic, received_over_tcp, summarize_traffic
from acc_lm.runtime.settings.config_file import shareable_config, without_launch
from acc_lm.runtime.settings.fsdp import loaded_by_every_process
from acc_lm.runtime.settings.grid import parts_of_layers, parts_of_rows, readers, readers_of_whole_rows, repeats_losses
from acc_lm.runtime.settings.strategy import bare_model, has_accelerator, world_size

__all__ = [
    "BUCKETED_CONFIGS",
    "COLLECTIVES",
    "CONFIGS_BY_SIZE",
    "COUNT_TRAFFIC",
    "KEPT",
    "MAX_FLAT",
    "MAX_LIVE",
    "MEASURED_FILE",
    "NOT_PLANNED",
    "PREFETCHED",
    "WEIGHT",
    "WITH_LAYERS_IN_PARTS",
    "WITH_ROWS_IN_PARTS",
    "Compute",
    "Gpus",
    "Gradients",
    "Identity",
    "LiveBytes",
    "Memory",
    "Pace",
    "Peers",
    "Piece",
    "Placement",
    "Ranks",
    "Rectangle",
    "RehearsedBytes",
    "Traffic",
    "bare_model",
    "build_accelerator",
    "bus_bandwidth",
    "can_compile",
    "check_config",
    "check_replicas",
    "check_run",
    "choose_threads",
    "close",
    "configs_for",
    "count_updates",
    "cpu_group",
    "current_placement",
    "cut_fake_layers",
    "data_parallel",
    "environment",
    "explain",
    "find_ranks",
    "fit_micro_batch",
    "forget",
    "full_precision",
    "gather_objects",
    "gather_tensor",
    "has_accelerator",
    "identify",
    "initialise_once",
    "keep_gradients_home",
    "keep_libraries",
    "keep_threads",
    "launch_words",
    "loaded_by_every_process",
    "machine",
    "measure_step",
    "memory_held",
    "on_main",
    "parts_of_layers",
    "parts_of_rows",
    "peak_memory_gb",
    "pieces_of",
    "placement_of",
    "prepare",
    "publish_weights",
    "quiet_libraries",
    "readers",
    "readers_of_whole_rows",
    "received_over_tcp",
    "rectangles",
    "refusal",
    "release_gathered",
    "repeats_losses",
    "seconds_of_slowest",
    "shareable_config",
    "shares_layers",
    "split_global_batch",
    "start_state",
    "stop_watching",
    "summarize_traffic",
    "time_collective",
    "wait_for",
    "warm_up",
    "whole_shapes",
    "without_launch",
    "world_size",
]
