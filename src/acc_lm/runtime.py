"""Where a run executes: the one room that knows Accelerate's launches and strategies by name.

Everything else sees an `Accelerator` that is what the launch asked for, or an error that says why it is not.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from acc_lm.config import DistributedConfig, TrainingConfig, nearest_multiples
from acc_lm.data import Batch
from acc_lm.errors import EXIT_INTERRUPTED, ConfigError, MachineError, is_main_process

if TYPE_CHECKING:
    from accelerate import Accelerator

PRECISIONS = {"no": "fp32", "bf16": "bf16 autocast", "fp16": "fp16 autocast with loss scaling", "fp8": "fp8"}


def build_accelerator(
    training: TrainingConfig,
    distributed: DistributedConfig,
    report_to: tuple[str, ...] = (),
    output_dir: Path | None = None,
) -> Accelerator:
    """The Accelerator of this launch, after everything that can be refused without it was refused.

    Raises:
        MachineError: the launch did not give what it asked for, or this machine cannot execute it.
        ConfigError: the global batch does not divide over the processes.
    """
    has_accelerator = torch.accelerator.is_available() and not _flag("ACCELERATE_USE_CPU")
    _refuse_silent_single_process()
    _refuse_other_engines()
    precision = _checked_precision(training, has_accelerator)
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    _refuse_missing_devices(has_accelerator)
    _, accumulation = split_global_batch(training, num_processes)

    from accelerate import Accelerator
    from accelerate.utils import (
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        InitProcessGroupKwargs,
        ProjectConfiguration,
    )
    from accelerate.utils.dataclasses import DDPCommunicationHookType

    ddp = DistributedDataParallelKwargs(
        find_unused_parameters=distributed.find_unused_parameters,
        gradient_as_bucket_view=distributed.gradient_as_bucket_view,
        bucket_cap_mb=distributed.bucket_cap_mb,
        static_graph=distributed.static_graph,
        comm_hook=DDPCommunicationHookType("no" if distributed.comm_hook == "none" else distributed.comm_hook),
    )
    group = InitProcessGroupKwargs(timeout=timedelta(seconds=distributed.timeout_seconds))
    project = ProjectConfiguration(str(output_dir), logging_dir=str(output_dir / "tensorboard")) if output_dir else None
    try:
        accelerator = Accelerator(
            cpu=not has_accelerator,
            mixed_precision=precision,
            kwargs_handlers=[ddp, group],
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False),
            log_with=list(report_to) or None,
            project_config=project,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = "is in use" if "EADDRINUSE" in str(error) or "in use" in str(error) else "could not be reached"
        raise MachineError(
            f"the rendezvous at {address} must be free and reachable, got: it {reason}; choose another --main_process_port"
        ) from None
    if accelerator.num_processes != num_processes:
        raise MachineError(
            f"the launcher must give what it started, got {num_processes} processes (WORLD_SIZE) where Accelerate sees "
            f"{accelerator.num_processes}; launch with accelerate_configs/ddp.yaml, or with one process"
        )
    _set_numerics(training, accelerator.device)
    return accelerator


def split_global_batch(training: TrainingConfig, num_processes: int) -> tuple[int, int]:
    """(micro-batch size, micro-batches per optimizer step) of each process.

    A process whose share of the global batch is smaller than the recipe's micro-batch takes its share at once.

    Raises:
        ConfigError: the global batch does not divide.
    """
    share, rest = divmod(training.global_batch_size, num_processes)
    micro = min(training.micro_batch_size, share)
    if rest or share % micro:
        per_round = training.micro_batch_size * num_processes
        raise ConfigError(
            f"training.global_batch_size must be a multiple of micro_batch_size {training.micro_batch_size} x {num_processes} "
            f"processes = {per_round}, got {training.global_batch_size}; nearest: "
            f"{nearest_multiples(training.global_batch_size, per_round)}; or change training.micro_batch_size"
        )
    return micro, share // micro


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes", "y", "on")


def _refuse_silent_single_process() -> None:
    """Three launches ask for several processes and silently get one; this trace is all that they leave."""
    if "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ:
        raise MachineError(
            "the launch must start the processes it was asked for, got one process (accelerate starts only one for "
            "MULTI_CPU, for --cpu with --num_processes, and for distributed_type NO); use --config_file "
            "accelerate_configs/ddp.yaml --num_processes N, which works without a GPU too, or --num_processes 1"
        )


def _refuse_other_engines() -> None:
    for variable, name in (
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_FSDP", "FSDP"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "a parallelism_config"),
    ):
        if _flag(variable):
            raise MachineError(
                f"the Accelerate config must ask for one process or DDP, got {name}, which this version does not run yet; "
                "use accelerate_configs/single_gpu.yaml, cpu.yaml or ddp.yaml"
            )


def _checked_precision(training: TrainingConfig, has_accelerator: bool) -> str:
    from_launch = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    precision = training.mixed_precision or from_launch
    key = "training.mixed_precision" if training.mixed_precision else "mixed_precision of the Accelerate config"
    if precision in ("fp16", "fp8") and not has_accelerator:
        raise MachineError(
            f"{key} must be bf16 or no on a CPU, got {precision}, which only accelerators execute; change it"
        )
    on_cuda = has_accelerator and torch.cuda.is_available()
    if precision == "bf16" and on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise MachineError(
            f"{key} must be fp16 or no on {torch.cuda.get_device_name()}, got bf16, which it does not have; change it"
        )
    return precision


def _refuse_missing_devices(has_accelerator: bool) -> None:
    asked = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    present = torch.accelerator.device_count() if has_accelerator else 0
    if 0 < present < asked and torch.cuda.is_available():
        raise MachineError(
            f"the launch must not start more processes than this machine has GPUs, got {asked} for {present}; "
            f"use --num_processes {present}"
        )


def _set_numerics(training: TrainingConfig, device: torch.device) -> None:
    torch.backends.cuda.matmul.allow_tf32 = training.allow_tf32
    torch.backends.cudnn.allow_tf32 = training.allow_tf32
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


# --- what really runs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """What runs, read from the live objects."""

    strategy: str
    engine: str
    num_processes: int
    precision: str
    device: str
    threads: int
    placement: str
    is_rehearsal: bool
    notes: tuple[str, ...] = ()


def identify(
    accelerator: Accelerator, model: nn.Module, training: TrainingConfig, distributed: DistributedConfig
) -> Identity:
    """Strategy, processes and placement of the prepared model.

    Raises:
        MachineError: several processes run without an engine that connects them.
    """
    num_processes = dist.get_world_size() if dist.is_initialized() else 1
    outer = getattr(model, "_orig_mod", model)
    is_ddp = isinstance(outer, nn.parallel.DistributedDataParallel)
    if (num_processes > 1) != is_ddp:
        raise MachineError(
            f"{num_processes} processes must train with DDP, got {type(outer).__name__}; launch with accelerate_configs/ddp.yaml"
        )
    parameters = list(model.parameters())
    size = sum(p.numel() * p.element_size() for p in parameters)
    device = accelerator.device
    notes = []
    is_rehearsal = device.type == "cpu" and num_processes > 1
    if is_rehearsal:
        notes.append("rehearsal: the real engine on CPU processes, for trust and not for speed")
        cores = os.cpu_count() or 1
        if num_processes > cores:
            notes.append(f"{num_processes} processes share {cores} cores")
    from_launch = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if training.mixed_precision and from_launch and from_launch != training.mixed_precision:
        notes.append(
            f"precision {training.mixed_precision} is the recipe's; the Accelerate config's {from_launch} is overruled"
        )
    if (
        device.type == "cuda"
        and accelerator.mixed_precision == "no"
        and torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        notes.append("fp32 on a GPU that can do bf16: training.mixed_precision=bf16 is several times faster")
    if is_ddp and "power_sgd" in distributed.comm_hook:
        notes.append(f"{distributed.comm_hook} keeps state that no checkpoint has: a resumed run is not bit-identical")
    return Identity(
        strategy="ddp" if is_ddp else "single",
        engine=type(outer).__name__,
        num_processes=num_processes,
        precision=PRECISIONS[accelerator.mixed_precision],
        device=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type} ({platform.processor() or platform.machine()})",
        threads=torch.get_num_threads(),
        placement=f"whole on each process: {sum(p.numel() for p in parameters):,} parameters, {size / 2**20:.1f} MiB",
        is_rehearsal=is_rehearsal,
        notes=tuple(notes),
    )


def environment(identity: Identity) -> dict[str, Any]:
    """`environment.json`: what ran, with which versions, from which commit, how it was launched."""
    from importlib.metadata import version

    names = ("torch", "accelerate", "transformers", "tokenizers", "datasets", "safetensors", "numpy")
    values = asdict(identity)
    notes = values.pop("notes")
    return {
        **values,
        "notes": list(notes),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        "git_commit": _git_commit(),
        "launch_command": _launch_command(),
        "host": platform.node(),
    }


def _git_commit() -> str | None:
    where = Path(sys.argv[0]).resolve().parent
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _launch_command() -> list[str]:
    """The launcher's own command line where there is one, else ours."""
    if "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ:
        try:
            raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
            return raw.decode(errors="replace").strip("\0").split("\0")
        except OSError:
            pass  # no /proc on this system
    return [sys.executable, *sys.argv]


# --- around the loop -----------------------------------------------------------------------------------------------


def quiet_libraries() -> None:
    """Keep the libraries' own progress bars and notices out of ours; their errors still show."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    # transformers imports DeepSpeed when it saves a model, and DeepSpeed announces the device that it will not use.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to" not in record.getMessage())


def bare_model(model: nn.Module) -> nn.Module:
    """The model itself, without the wrappers of strategy and compiler: its parameters have their own names.

    Accelerate's `unwrap_model` does the same, but imports DeepSpeed to ask whether it is one of its engines.
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model.__dict__:  # compiled by regions
            model = model.__dict__["_orig_mod"]
        elif "_orig_mod" in model._modules:  # compiled as a whole
            model = model.get_submodule("_orig_mod")
        else:
            return model


def warm_up(accelerator: Accelerator, model: nn.Module, batch: Batch) -> None:
    """One throw-away forward and backward, so that the first step adds gradients in the order of all others.

    DDP regroups its buckets after the first backward. Without this, the first step after a resume would add in another
    order than the same step of an uninterrupted run, and the run would not be bit-identical any more.
    """
    if accelerator.num_processes == 1:
        return
    with accelerator.autocast():
        loss = model(**{name: tensor.to(accelerator.device) for name, tensor in batch.items()})
    (loss * 0.0).backward()
    model.zero_grad()


class StopRequest:
    """Ctrl-C and SIGTERM as a flag that all processes agree on after a step.

    A second Ctrl-C leaves at once. Launchers pass a Ctrl-C on to processes that have already seen it, so two within a
    second are one.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._first_interrupt: float | None = None
        self._group: Any = None

    @contextmanager
    def listening(self, accelerator: Accelerator) -> Iterator[StopRequest]:
        """Flag the signals for as long as the context lasts."""
        if accelerator.num_processes > 1:
            # A group on the CPU: agreeing must not wait for the device.
            self._group = dist.new_group(backend="gloo") if dist.get_backend() != "gloo" else dist.group.WORLD
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            if self._first_interrupt is not None and now - self._first_interrupt > 1.0:
                os.write(2, b"\ninterrupted twice: leaving at once, nothing saved since the last checkpoint\n")
                os._exit(EXIT_INTERRUPTED)
            self._first_interrupt = self._first_interrupt or now
        if self.reason is None:
            self.reason = signal.Signals(number).name
            if is_main_process():
                os.write(
                    2, f"\n{self.reason}: finishing the step, then saving (Ctrl-C again leaves at once)\n".encode()
                )

    def agreed(self) -> str | None:
        """The reason to stop if any process has one; the same answer on every process. Called once a step by all."""
        if self._group is None:
            return self.reason
        numbers = torch.tensor([signal.Signals[self.reason].value if self.reason else 0])
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        number = int(numbers.numpy()[0])
        return signal.Signals(number).name if number else None


def peak_memory_gb(device: torch.device) -> float:
    """Most memory this process has used so far, in GB (1e9 bytes): of the accelerator, else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def close(accelerator: Accelerator) -> None:
    """End the process group so that no process leaves while another still uses it."""
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    accelerator.end_training()
