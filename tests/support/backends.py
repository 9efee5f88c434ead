"""Many short trainings in one launch: every backend on its real engine, with ragged targets, step by step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from processes import ROOT, launcher_environment, run_everywhere

GLOBAL_BATCH, LENGTH, STEPS, NUM_ROWS, NUM_EVALUATION_ROWS = 48, 16, 20, 240, 37
MODELS = {
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 1},
    "wide": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2},
    "mixtral": {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 1, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1},
    "gemma2": {"model_type": "gemma2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
               "num_key_value_heads": 1, "head_dim": 16},
}  # fmt: skip
TIED = {"gpt2": True, "llama": False}
BACKENDS = {
    "ddp x2": ("ddp", 2), "ddp x3": ("ddp", 3),
    "fsdp2 x2": ("fsdp2", 2), "fsdp2_grad_op x2": ("fsdp2_grad_op", 2), "fsdp2_offload x2": ("fsdp2_offload", 2), "hsdp 2x2": ("hsdp", 4),
    "deepspeed_zero1 x2": ("deepspeed_zero1", 2), "deepspeed_zero2 x2": ("deepspeed_zero2", 2),
    "deepspeed_zero2_offload x2": ("deepspeed_zero2_offload", 2), "deepspeed_zero3 x2": ("deepspeed_zero3", 2),
    "deepspeed_zero3_offload x2": ("deepspeed_zero3_offload", 2), "deepspeed_zero3_full x2": ("deepspeed_zero3_full", 2),
    "ddp_sequence x2": ("ddp_sequence", 2), "sequence_parallel 2x2": ("sequence_parallel", 4), "deepspeed_zero3_sequence x2": ("deepspeed_zero3_sequence", 2),
}  # fmt: skip
STRATEGY = {
    "single": ("single", "LM"), "ddp": ("ddp", "DistributedDataParallel"),
    "fsdp2": ("fsdp2", "FSDP"), "fsdp2_grad_op": ("fsdp2", "FSDP"), "fsdp2_offload": ("fsdp2", "FSDP"), "hsdp": ("hsdp", "FSDP"),
    "deepspeed_zero1": ("deepspeed_zero1", "DeepSpeedEngine"), "deepspeed_zero2": ("deepspeed_zero2", "DeepSpeedEngine"),
    "deepspeed_zero2_offload": ("deepspeed_zero2", "DeepSpeedEngine"), "deepspeed_zero3": ("deepspeed_zero3", "DeepSpeedEngine"),
    "deepspeed_zero3_offload": ("deepspeed_zero3", "DeepSpeedEngine"), "deepspeed_zero3_full": ("deepspeed_zero3", "DeepSpeedEngine"),
    "deepspeed_zero3_nvme": ("deepspeed_zero3", "DeepSpeedEngine"),
    "ddp_sequence": ("ddp", "DistributedDataParallel"), "sequence_parallel": ("fsdp2", "FSDP"), "deepspeed_zero3_sequence": ("deepspeed_zero3", "DeepSpeedEngine"),
    "tensor_parallel": ("tensor_parallel", "LM"), "fsdp2_tensor_parallel": ("fsdp2", "FSDP"),
    "fsdp2_tensor_sequence": ("fsdp2", "FSDP"),
}  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    model: str = "gpt2"
    accumulation: int = 1
    gradient_checkpointing: bool | str = False
    dtype: str = "float32"
    mixed_precision: str = "no"
    steps: int = STEPS
    overrides: tuple[str, ...] = ()
    fault: str | None = None
    seed_by_process: bool = False
    save: Path | None = None
    """Folder for a checkpoint after half of the steps."""
    load: Path | None = None
    """A checkpoint's folder to resume from."""

    def __str__(self) -> str:
        checkpointing = {False: "", True: " checkpointing"}.get(
            self.gradient_checkpointing, f" {self.gradient_checkpointing}"
        )  # type: ignore[call-overload]
        return f"{self.model} {self.dtype} {self.mixed_precision} accumulation {self.accumulation}{checkpointing}"


@dataclass
class Curve:
    """One training, as the main process saw it."""

    strategy: str
    engine: str
    num_processes: int
    precision: str
    metrics: dict[int, dict[str, float]]
    """By step, under the names of metrics.jsonl."""
    ledger: str
    start: str
    """Digest of the weights before the first step."""
    end: str
    """Digest of the weights after the last step."""
    rows_in_parts: int = 1
    layers_in_parts: int = 1
    extra: dict[str, Any] = field(default_factory=dict)


class RaggedRows(torch.utils.data.Dataset):
    """Rows with very different numbers of targets; some have no target."""

    sequence_length, packs, padded_lengths = LENGTH, False, None

    def __init__(self, num_rows: int, seed: int, num_ids: int = 257) -> None:
        self.ids = torch.randint(0, num_ids, (num_rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        self.ids[:, 1::2] = self.ids[:, 0:-1:2] // 2  # something to learn
        self.targets = self.ids[:, 1:].clone()
        for row in range(num_rows):
            self.targets[row, (row * 7) % (LENGTH + 1) :] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitems__(self, rows: Any) -> dict[str, torch.Tensor]:
        ids, targets = self.ids[rows, :-1], self.targets[rows].clone()
        targets[torch.as_tensor(rows) < 0] = -100
        return {"input_ids": ids, "targets": targets}

    def count_targets(self, rows: Any) -> int:
        return int((self.targets[rows] != -100).sum())

    def count_bytes(self, rows: Any) -> int:
        return sum(int((self.targets[row] != -100).sum()) for row in rows if row >= 0)


def make_config(scenario: Scenario, num_processes: int, seed: int = 0) -> Any:
    from acc_lm.config import Config
    from acc_lm.runtime import parts_of_layers, parts_of_rows

    micro = GLOBAL_BATCH * parts_of_rows() * parts_of_layers() // (num_processes * scenario.accumulation)
    values: dict[str, Any] = {
        "output_dir": "unused",
        "seed": seed,
        "model": {
            "config": MODELS[scenario.model],
            "dtype": scenario.dtype,
            "gradient_checkpointing": scenario.gradient_checkpointing,
        },
        "tokenizer": {"kind": "byte"},
        "data": {"source": "synthetic", "sequence_length": LENGTH},
        "training": {
            "max_steps": scenario.steps, "global_batch_size": GLOBAL_BATCH, "micro_batch_size": micro,
            "mixed_precision": scenario.mixed_precision,
        },
        "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.5},
        "schedule": {"name": "cosine", "warmup_steps": min(4, scenario.steps)},
        "tracking": {"report_to": []},
    }  # fmt: skip
    for override in scenario.overrides:
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = {"true": True, "false": False, "null": None}.get(value, value)
        if value.isdigit():
            values[section][name] = int(value)
        elif value[:1].isdigit():
            values[section][name] = float(value)
        elif value[:1] == "[":
            values[section][name] = value[1:-1].split(", ")
    return Config.model_validate(values)


def train_curve(scenario: Scenario, probe: Callable[..., dict[str, Any]] | None = None) -> Curve:
    """Train one scenario in this process group; called by every process of it."""
    from acc_lm import runtime
    from acc_lm.checkpointing.format import open_checkpoint
    from acc_lm.checkpointing.loading import load_checkpoint
    from acc_lm.checkpointing.saving import save_checkpoint
    from acc_lm.evaluation.held_out import evaluate_rows
    from acc_lm.modeling.build import build_empty_model, build_model
    from acc_lm.optimization.optimizer import build_optimizer, set_learning_rate
    from acc_lm.optimization.schedule import build_schedule
    from acc_lm.progress import Progress
    from acc_lm.rows.loader import MicroBatches, build_loader
    from acc_lm.rows.order import RowOrder
    from acc_lm.text.tokenizer import make_tokenizer
    from acc_lm.training.step import in_steps, train_step

    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    seed = int(os.environ.get("RANK", "0")) if scenario.seed_by_process else 0
    config = make_config(scenario, num_processes, seed)
    faults = Faults(scenario.fault)
    runtime.quiet_libraries()
    accelerator = runtime.build_accelerator(config)
    tokenizer = make_tokenizer(config.tokenizer, [])
    model, facts = runtime.initialise_once(
        accelerator,
        lambda: build_model(config.model, tokenizer, LENGTH, config.seed, config.adapter),
        lambda facts: build_empty_model(config.model, tokenizer, LENGTH, facts, config.adapter),
    )
    faults.before_prepare(accelerator)
    optimizer = build_optimizer(model, config.optimizer)
    model, optimizer = runtime.prepare(accelerator, model, optimizer)
    identity = runtime.identify(accelerator, model, optimizer, config)
    faults.after_prepare(model, optimizer)
    progress = Progress()
    if scenario.load:
        progress = load_checkpoint(accelerator, open_checkpoint(scenario.load), model, optimizer)
        faults.after_load(accelerator, model, optimizer)
    start = digest(accelerator, model, optimizer)
    order = RowOrder(3 + faults.other_order(accelerator.process_index), NUM_ROWS, GLOBAL_BATCH)
    rows, held_out = (RaggedRows(size, i, len(tokenizer)) for size, i in ((NUM_ROWS, 1), (NUM_EVALUATION_ROWS, 2)))
    rate = build_schedule(config.schedule, config.optimizer, scenario.steps)
    micro, accumulation = runtime.split_global_batch(config.training, num_processes)
    assert accumulation == scenario.accumulation
    batches = MicroBatches(
        order, micro_batch_size=micro, process=runtime.readers(accelerator)[0],
        num_processes=runtime.readers(accelerator)[1], first_step=progress.step + 1, last_step=scenario.steps,
    )  # fmt: skip
    runtime.warm_up(accelerator, model, rows.__getitems__([0]))
    metrics: dict[int, dict[str, float]] = {}
    gradients = runtime.Gradients(accelerator, model)
    loader = build_loader(rows, batches, 0, pin_memory=False)
    for step, micro_batches in enumerate(in_steps(loader, accumulation), start=progress.step + 1):
        set_learning_rate(optimizer, rate(step))
        num_targets = rows.count_targets(order.rows_at(step))
        outcome = train_step(
            accelerator, model, optimizer, faults.on_batches(accelerator, micro_batches, num_targets), step=step, seed=0,
            num_targets=num_targets, max_grad_norm=config.optimizer.max_grad_norm, gradients=gradients,
            router=facts.router,
        )  # fmt: skip
        progress = progress.advance(order.rows_at(step), outcome.num_targets)
        loss = accelerator.reduce(outcome.nll, reduction="sum").item() / outcome.num_targets
        metrics[step] = {
            "train/loss": loss, "train/grad_norm": float(outcome.grad_norm),
            "train/learning_rate": float(optimizer.param_groups[0]["lr"]),
        }  # fmt: skip
        if outcome.router_loss:
            metrics[step] |= outcome.router_loss.metrics()
        if step in (scenario.steps // 2, scenario.steps):
            metrics[step]["eval/loss"] = evaluate_rows(accelerator, model, held_out, 3).loss
        if scenario.save and step == scenario.steps // 2:
            save_checkpoint(accelerator, scenario.save, model, optimizer, progress, config, "rows")
    end = digest(accelerator, model, optimizer)
    extra = probe(accelerator, model, optimizer, config) if probe else {}
    _forget(accelerator)
    return Curve(
        identity.strategy, identity.engine, identity.num_processes, identity.precision, metrics, progress.ledger, start, end,
        identity.rows_in_parts, identity.layers_in_parts, extra,
    )  # fmt: skip


def digest(accelerator: Any, model: Any, optimizer: Any) -> str:
    """Digest of the full weights, in full precision, however they are sharded."""
    import hashlib

    from acc_lm.export.export import whole_weights
    from acc_lm.runtime import on_main

    weights = whole_weights(accelerator, model, optimizer)
    return on_main(accelerator, lambda: hashlib.sha256(
        b"".join(name.encode() + weights[name].contiguous().view(torch.uint8).numpy().tobytes() for name in sorted(weights))
    ).hexdigest())  # fmt: skip


def _forget(accelerator: Any) -> None:
    """Let the next training of this process have its own Accelerator; the process group stays."""
    from accelerate.state import AcceleratorState, GradientState

    accelerator.wait_for_everyone()
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Faults:
    """Mistakes that the parity tests must detect, planted on purpose."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        assert name in (
            None,
            "mean of means",
            "skipped all-reduce",
            "decay by shape",
            "clipping left to auto",
            "wrong shuffle",
            "step count not restored",
            "first moment not restored",
            "second moment not restored",
            "momentum not restored",
            "parts made orthogonal",
            "decay group not restored",
        )

    def before_prepare(self, accelerator: Any) -> None:
        if self.name == "clipping left to auto":
            accelerator.deepspeed_plugin.deepspeed_config["gradient_clipping"] = "auto"

    def after_prepare(self, model: Any, optimizer: Any) -> None:
        if self.name == "decay by shape":  # sharded parameters are one-dimensional, so nothing would decay
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0
        if self.name == "skipped all-reduce":

            def keep(state: Any, bucket: Any) -> Any:
                future: Any = torch.futures.Future()
                future.set_result(bucket.buffer())
                return future

            keep.__annotations__ = {}  # torch reads types there, and these are not resolved yet
            model.register_comm_hook(None, keep)

    def after_load(self, accelerator: Any, model: Any, optimizer: Any) -> None:
        from acc_lm.runtime import count_updates, pieces_of

        inner = optimizer.optimizer
        if self.name == "step count not restored":
            assert count_updates(optimizer) > 0
            for state in inner.state.values():
                state["step"].zero_()
        if self.name == "decay group not restored":
            for group in inner.param_groups:
                group["weight_decay"] = 0.1
        kind = {
            "first moment not restored": "exp_avg",
            "second moment not restored": "exp_avg_sq",
            "momentum not restored": "momentum_buffer",
        }.get(self.name or "")
        for piece in pieces_of(model, optimizer) if kind else []:
            piece.put(kind, torch.zeros(piece.length))

    def other_order(self, process: int) -> int:
        return process if self.name == "wrong shuffle" else 0

    def on_batches(self, accelerator: Any, batches: Any, num_targets: int) -> Any:
        if self.name != "mean of means":
            yield from batches
            return
        original = accelerator.backward
        for batch in batches:
            mine = max(int((batch["targets"] != -100).sum()), 1)
            parts = accelerator.num_processes * accelerator.gradient_accumulation_steps
            factor = num_targets / (mine * parts)
            accelerator.backward = lambda loss, factor=factor: original(loss * factor)
            yield batch
        accelerator.backward = original


def run_backend(
    config: str, num_processes: int, scenarios: list[Scenario], probe: Callable[..., dict[str, Any]] | None = None
) -> list[Curve]:
    """Each scenario's curve on one backend, from a single launch; the engine is what its name says, or this fails."""
    environment = {} if config == "single" else launcher_environment(
        ROOT / "accelerate_configs" / f"{config}.yaml" if not config.endswith(".yaml") else Path(config), num_processes
    )  # fmt: skip
    per_process = run_everywhere(
        lambda: [train_curve(scenario, probe) for scenario in scenarios],
        num_processes,
        60 + 30 * len(scenarios),
        environment,
    )
    curves: list[Curve] = per_process[0]
    for curve in curves:
        strategy, engine = STRATEGY[Path(config).stem]
        assert (curve.strategy, curve.num_processes) == (strategy, num_processes), curve
        assert curve.rows_in_parts == (2 if "sequence" in Path(config).stem else 1), curve
        assert curve.layers_in_parts == (2 if "tensor" in Path(config).stem else 1), curve
        assert engine in curve.engine, curve.engine
    for others in per_process[1:]:
        for curve, other in zip(curves, others, strict=True):
            same = (other.start, other.ledger) == (curve.start, curve.ledger)
            assert same or any(scenario.fault for scenario in scenarios), "processes differ"
    return curves
