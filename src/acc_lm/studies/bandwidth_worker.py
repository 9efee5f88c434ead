"""One process of `acc-lm bench-comm`: measure the parts of its plan together with the other processes.

python -m acc_lm.studies.bandwidth_worker PLAN RESULT
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acc_lm import runtime
from acc_lm.config import Config, TokenizerConfig
from acc_lm.config.loading import load_config
from acc_lm.errors import MachineError, UserError, print_problems
from acc_lm.launcher import die_with_launcher, is_main_process

if TYPE_CHECKING:
    from accelerate import Accelerator

SMALL_BYTES, SMALL_REPEATS, REPEATS = 2**20, 20, 7
WARM_UPS = 3
"""Number of steps before the first measured one; PowerSGD compresses from the third on."""
HOOKS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "power_sgd": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2},
    "batched_power_sgd": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2},
}
ALL_IN_ONE = 100_000
"""Bucket size in MiB that fits all gradients; on CPU processes PowerSGD works with only one bucket."""
ACCUMULATION = 8


@dataclass
class Trial:
    """A model, built and prepared as in a run."""

    config: Config
    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    strategy: str
    num_parameters: int
    batch: dict[str, Tensor]
    step: Callable[[], Any]
    """One optimizer step, always on the same rows."""
    gradient: Callable[[], Tensor]
    """Gradient of these rows, reduced over the processes, 1-D; the weights do not change."""


def _config_of(recipe: Path, overrides: Sequence[str], num_micro_batches: int) -> Config:
    """The recipe with a global batch of this many micro-batches, and a vocabulary size that needs no tokenizer."""
    config = load_config(recipe, overrides)
    sizes = [f"training.global_batch_size={config.training.micro_batch_size * num_micro_batches}"]
    if config.model.config is not None and "vocab_size" not in config.model.config and config.tokenizer.kind == "bpe":
        sizes.append(f"model.config.vocab_size={config.tokenizer.vocab_size}")
    return load_config(recipe, [*overrides, *sizes])


def build(recipe: Path, overrides: Sequence[str], num_processes: int, accumulation: int = 1) -> Trial:
    """Build a case with these settings.

    Raises:
        MachineError: this launch cannot execute them.
    """
    from acc_lm.modeling.build import build_empty_model, build_model
    from acc_lm.optimization.optimizer import build_optimizer
    from acc_lm.rows.batch import to_device
    from acc_lm.text.tokenizer import load_tokenizer, make_tokenizer
    from acc_lm.training.step import train_step

    config = _config_of(recipe, overrides, num_processes * accumulation)
    rows, length = config.training.micro_batch_size, config.data.sequence_length
    tokenizer = load_tokenizer(config.tokenizer, config.model) or make_tokenizer(TokenizerConfig(kind="byte"), [])
    accelerator = runtime.build_accelerator(config)
    model, facts = runtime.initialise_once(
        accelerator,
        lambda: build_model(config.model, tokenizer, length, config.seed, config.adapter),
        lambda facts: build_empty_model(config.model, tokenizer, length, facts, config.adapter),
    )
    built: Any = model
    vocabulary = int(built.config.vocab_size)
    try:
        model, optimizer = runtime.prepare(accelerator, model, build_optimizer(model, config.optimizer))
    except MachineError:
        runtime.forget(accelerator)
        raise
    draw = torch.Generator().manual_seed(accelerator.process_index)
    ids = torch.randint(0, vocabulary, (rows, length + 1), generator=draw)
    batch = {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    runtime.warm_up(accelerator, model, batch)
    gradients = runtime.Gradients(accelerator, model)
    num_targets = rows * length * num_processes * accumulation
    step = partial(
        train_step,
        accelerator,
        model,
        optimizer,
        [batch] * accumulation,
        step=1,
        seed=0,
        num_targets=num_targets,
        max_grad_norm=config.optimizer.max_grad_norm,
        gradients=gradients,
    )

    def gradient() -> Tensor:
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = model(**to_device(batch, accelerator.device))
        accelerator.backward(loss * num_processes / num_targets)
        found = [p.grad.detach().float().view(-1) for p in runtime.bare_model(model).parameters() if p.grad is not None]
        return torch.cat(found)

    strategy = runtime.identify(accelerator, model, optimizer, config).strategy
    return Trial(config, accelerator, model, optimizer, strategy, facts.num_parameters, batch, step, gradient)


def measure(case: Trial, repeats: int) -> dict[str, Any]:
    """Measure the time of a step, its communication and the peak memory. Every process calls."""
    device = case.accelerator.device
    for _ in range(WARM_UPS):
        case.step()
    case.accelerator.wait_for_everyone()
    received = runtime.received_over_tcp()
    with runtime.Traffic() as traffic:
        case.step()
    over_tcp = None
    if received is not None and torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        over_tcp = (runtime.received_over_tcp() or 0) - received
    seconds = []
    for _ in range(repeats):
        case.accelerator.wait_for_everyone()
        runtime.wait_for(device)
        began = time.perf_counter()
        case.step()
        runtime.wait_for(device)
        seconds.append(time.perf_counter() - began)
    seconds = runtime.seconds_of_slowest(seconds, device)
    return {
        "seconds": statistics.median(seconds),
        "fastest_seconds": min(seconds),
        "collectives": runtime.summarize_traffic(traffic.calls),
        "tcp_bytes": over_tcp,
        "num_parameters": case.num_parameters,
        "peak_memory_gb": runtime.gather_objects(case.accelerator, runtime.peak_memory_gb(device)),
    }


class Worker:
    """Parts of a plan, run one after the other; each yields its measurements as rows."""

    def __init__(self, plan: dict[str, Any], num_processes: int) -> None:
        self.recipe, self.overrides = Path(plan["recipe"]), list(plan["overrides"])
        self.plan, self.num_processes, self.repeats = plan, num_processes, int(plan["repeats"])
        self.facts: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        rows = {part: list(getattr(self, part.replace("-", "_"))()) for part in self.plan["parts"]}
        return {"facts": self.facts, "rows": rows}

    @contextmanager
    def case(self, *settings: str, accumulation: int = 1) -> Iterator[Trial]:
        case = build(self.recipe, [*self.overrides, *settings], self.num_processes, accumulation)
        self.facts |= {
            "strategy": case.strategy,
            "device": str(case.accelerator.device.type),
            "num_parameters": case.num_parameters,
        }
        yield case
        runtime.forget(case.accelerator)

    def say(self, line: str) -> None:
        if is_main_process():
            print(line, flush=True)

    def collectives(self) -> Iterator[dict[str, Any]]:
        """Measure collectives alone, by kind and size."""
        accelerator = runtime.build_accelerator(
            load_config(self.recipe, [*self.overrides, f"training.global_batch_size={self.num_processes}"])
        )
        self.facts |= {"device": str(accelerator.device.type)}
        for kind in runtime.COLLECTIVES:
            for size in self.plan["sizes"]:
                repeats = SMALL_REPEATS if size <= SMALL_BYTES else REPEATS
                num_bytes, seconds = runtime.time_collective(kind, size, accelerator.device, repeats)
                median = statistics.median(seconds)
                bus = runtime.bus_bandwidth(kind, num_bytes, self.num_processes, median)
                self.say(f"{kind:14} {num_bytes:>12,} bytes  {1000 * median:9.3f} ms  bus {bus / 1e9:8.3f} GB/s")
                yield {
                    "kind": kind,
                    "bytes": num_bytes,
                    "seconds": median,
                    "fastest_seconds": min(seconds),
                    "algorithm_bandwidth": num_bytes / median,
                    "bus_bandwidth": bus,
                }
        runtime.forget(accelerator)

    def buckets(self) -> Iterator[dict[str, Any]]:
        """Measure a step with buckets of several sizes and, where the engine allows it, a step that sends nothing."""
        for size in (None, *self.plan["buckets"]):
            with self.case(*([] if size is None else [f"distributed.bucket_cap_mb={size}"])) as case:
                if size is None and not runtime.keep_gradients_home(case.model):
                    continue
                row = {"strategy": case.strategy, "bucket_cap_mb": size, **measure(case, self.repeats)}
                what = "nothing is sent" if size is None else f"buckets of {size:g} MB"
                self.say(f"{case.strategy:14} {what:24} {1000 * row['seconds']:9.2f} ms a step")
                yield row

    def memory(self) -> Iterator[dict[str, Any]]:
        """Measure the memory held between backward and update: weights, gradients, buckets."""
        with self.case() as case:  # allocate what a process allocates only once
            case.gradient()
            device = case.accelerator.device
        del case
        for as_view in (False, True):
            before = runtime.memory_held(device)
            with self.case(f"distributed.gradient_as_bucket_view={str(as_view).lower()}") as case:
                case.gradient()
                after, num_bytes = runtime.memory_held(device), 4 * case.num_parameters
            del case
            held = None if before is None or after is None else after - before
            self.say(f"gradient_as_bucket_view {as_view!s:5}  {'-' if held is None else f'{held / 1e6:.1f} MB held'}")
            yield {"gradient_as_bucket_view": as_view, "held_bytes": held, "gradient_bytes": num_bytes}

    def hooks(self) -> Iterator[dict[str, Any]]:
        """Measure compressed gradients: time, bytes, and the relative error against the uncompressed gradient."""
        exact: Tensor | None = None
        for hook, arguments in HOOKS.items():
            settings = [
                f"distributed.comm_hook={hook}",
                f"distributed.comm_hook_arguments={json.dumps(arguments)}",
                f"distributed.bucket_cap_mb={ALL_IN_ONE}",
            ]
            try:
                with self.case(*settings) as case:
                    for _ in range(WARM_UPS):
                        gradient = case.gradient()
                    exact = gradient.clone() if exact is None else exact
                    error = float((gradient - exact).norm() / exact.norm())
                    row = {"hook": hook, "arguments": arguments, "error": error, **measure(case, self.repeats)}
                self.say(f"comm_hook {hook:18} {1000 * row['seconds']:9.2f} ms a step  gradient off by {error:.1e}")
            except MachineError as refusal:  # raised on every process, before anything is sent
                row = {"hook": hook, "problem": str(refusal)}
                self.say(f"comm_hook {hook:18} refused: {refusal}")
            yield row

    def accumulation(self) -> Iterator[dict[str, Any]]:
        """Measure what a step of many micro-batches sends, compared with a step of one."""
        for count in (1, ACCUMULATION):
            with self.case(accumulation=count) as case:
                row = {"accumulation": case.accelerator.gradient_accumulation_steps, **measure(case, self.repeats)}
                self.say(f"accumulation {count}  {1000 * row['seconds']:9.2f} ms a step of {count} micro-batches")
                yield row

    def data_parallel(self) -> Iterator[dict[str, Any]]:
        """Measure one process that drives all GPUs, with as many rows as all processes of the other launches together."""
        count = int(self.plan["devices"])
        rows = load_config(self.recipe, self.overrides).training.micro_batch_size * count
        with self.case(f"training.micro_batch_size={rows}") as case:
            model = runtime.data_parallel(case.model)
            for device in range(count):
                torch.cuda.reset_peak_memory_stats(device)
            seconds = []
            for number in range(WARM_UPS + self.repeats):
                runtime.wait_for(case.accelerator.device)
                began = time.perf_counter()
                with case.accelerator.autocast():
                    loss = model(**case.batch).sum() / (rows * case.batch["targets"].shape[1])
                case.accelerator.backward(loss)
                case.optimizer.step()
                case.optimizer.zero_grad()
                runtime.wait_for(case.accelerator.device)
                if number >= WARM_UPS:
                    seconds.append(time.perf_counter() - began)
            peaks = [runtime.peak_memory_gb(torch.device("cuda", device)) for device in range(count)]
        self.say(f"DataParallel on {count} GPUs  {1000 * statistics.median(seconds):9.2f} ms a step")
        yield {
            "devices": count,
            "seconds": statistics.median(seconds),
            "fastest_seconds": min(seconds),
            "peak_memory_gb": peaks,
        }


def main(arguments: Sequence[str]) -> int:
    """Measure the parts of the plan; the main process writes the result. Returns the exit code."""
    plan_file, result_file = map(Path, arguments)
    die_with_launcher()
    runtime.quiet_libraries()
    try:
        result = Worker(json.loads(plan_file.read_text()), runtime.world_size()).run()
    except UserError as error:
        print_problems(error)
        return error.exit_code
    if is_main_process():
        result_file.write_text(json.dumps(result) + "\n")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
