"""No split of the global batch into processes, micro-batches and accumulation shows in the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_everywhere

from acc_lm.runtime.engines.gradients import gradient_norms

GLOBAL_BATCH, LENGTH, STEPS, NUM_ROWS = 12, 16, 20, 60
SPLITS = {"1 x 12 x 1": (1, 12), "1 x 3 x 4": (1, 3), "2 x 3 x 2": (2, 3), "3 x 4 x 1": (3, 4)}
MODELS = {
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 64,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
    "llama": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
}  # fmt: skip


def make_config(global_batch_size: int, micro_batch_size: int, **sections: Any) -> Any:
    """The minimal recipe, for tests that bring their own model; `sections` are merged into it."""
    from acc_lm.config import Config

    training = {"max_steps": STEPS, "global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
    return Config.model_validate({
        "model": {"config": {"model_type": "llama"}}, "tracking": {"report_to": []}, "optimizer": {"learning_rate": 1e-3},
        "schedule": {"name": "cosine", "warmup_steps": 4}, **sections, "training": training | sections.get("training", {}),
    })  # fmt: skip


def make_model(name: str, dtype: str) -> Any:
    """The model with its loss installed, as `build_model` makes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from acc_lm.modeling.attention import choose_attention
    from acc_lm.modeling.build import DTYPES
    from acc_lm.modeling.loss_head import install_loss

    torch.manual_seed(0)
    values = dict(MODELS[name])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    choose_attention(model, LENGTH)
    install_loss(model)
    return model.train()


class RaggedRows(torch.utils.data.Dataset):
    """Rows with very different numbers of targets; `empty` ones have none."""

    sequence_length, packs, padded_lengths = LENGTH, False, None

    def __init__(self, empty: set[int]) -> None:
        self.ids = torch.randint(0, 64, (NUM_ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        self.targets = self.ids[:, 1:].clone()
        for row in range(NUM_ROWS):
            self.targets[row, (row * 7) % LENGTH :] = -100
            if row in empty:
                self.targets[row] = -100

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitems__(self, rows: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[rows, :-1], "targets": self.targets[rows]}

    def count_targets(self, rows: Any) -> int:
        return int((self.targets[rows] != -100).sum())


def train_split(name: str, dtype: str, num_processes: int, micro_batch_size: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each of 20 steps, as the main process sees them."""

    def run() -> list[tuple[float, float]]:
        from acc_lm.optimization.optimizer import build_optimizer, set_learning_rate
        from acc_lm.optimization.schedule import build_schedule
        from acc_lm.rows.loader import MicroBatches, build_loader
        from acc_lm.rows.order import RowOrder
        from acc_lm.runtime import Gradients, build_accelerator, identify, prepare
        from acc_lm.training.step import in_steps, train_step

        config = make_config(GLOBAL_BATCH, micro_batch_size)
        accelerator = build_accelerator(config)
        assert accelerator.num_processes == num_processes
        model = make_model(name, dtype)
        model, optimizer = prepare(accelerator, model, build_optimizer(model, config.optimizer))
        assert identify(accelerator, model, optimizer, config).strategy == ("ddp" if num_processes > 1 else "single")
        gradients = Gradients(accelerator, model)
        order = RowOrder(3, NUM_ROWS, GLOBAL_BATCH)
        # In step 3 a complete process of three, and a micro-batch of every other split, has no target.
        rows = RaggedRows(empty=set(order.rows_at(3)[:4].tolist()))
        rate = build_schedule(config.schedule, config.optimizer, STEPS)
        batches = MicroBatches(
            order, micro_batch_size=micro_batch_size, process=accelerator.process_index,
            num_processes=num_processes, first_step=1, last_step=STEPS,
        )  # fmt: skip
        results = []
        loader = build_loader(rows, batches, 0, pin_memory=False)
        for step, micro_batches in enumerate(in_steps(loader, accelerator.gradient_accumulation_steps), start=1):
            set_learning_rate(optimizer, rate(step))
            outcome = train_step(
                accelerator, model, optimizer, micro_batches, step=step, seed=0,
                num_targets=rows.count_targets(order.rows_at(step)), max_grad_norm=1.0, gradients=gradients,
            )  # fmt: skip
            loss = accelerator.reduce(outcome.nll, reduction="sum").item() / outcome.num_targets
            results.append((loss, float(outcome.grad_norm)))
        return results

    return run_everywhere(run, num_processes)[0]


def largest_difference(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    a, b = np.array(one), np.array(other)
    assert a.shape == b.shape == (STEPS, 2)
    return float(np.abs((a - b) / a).max())


@pytest.mark.parametrize(("name", "dtype", "bound"), [
    ("gpt2", "float32", 1e-5), ("llama", "float32", 1e-5), ("gpt2", "float64", 1e-10), ("llama", "float64", 1e-7),
])  # fmt: skip
def test_every_split_has_the_same_losses_and_gradient_norms(name: str, dtype: str, bound: float) -> None:
    whole, *others = [train_split(name, dtype, *split) for split in SPLITS.values()]
    assert whole[0][0] != whole[-1][0], "the run must move"
    for split, other in zip(list(SPLITS)[1:], others, strict=True):
        difference = largest_difference(whole, other)
        print(f"{name} {dtype} {split}: {difference:.1e}")
        assert difference <= bound, split


@pytest.mark.parametrize("name", list(MODELS))
def test_the_first_step_is_the_mean_loss_over_the_targets_of_the_batch(name: str) -> None:
    """Against torch's own mean over all targets at once, on transformers' own logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from acc_lm.rows.order import RowOrder

    torch.manual_seed(0)
    values = dict(MODELS[name])
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    order = RowOrder(3, NUM_ROWS, GLOBAL_BATCH)
    batch = RaggedRows(empty=set(order.rows_at(3)[:4].tolist())).__getitems__(order.rows_at(1))
    logits = plain(batch["input_ids"], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    assert train_split(name, "float32", 1, 3)[0] == pytest.approx((loss.item(), norm.item()), rel=1e-5)


def test_the_norm_of_a_large_gradient_is_exact_on_a_cpu() -> None:
    """torch adds numbers one after the other there, in 32 bits: one part in ten thousand off for five million numbers."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.rand(size, generator=generator) for size in (100, 5_000_000, 4096, 3, 4096 * 3 + 5)]
    exact = [float(gradient.double().norm()) for gradient in gradients]
    assert gradient_norms(gradients, torch.device("cpu")).tolist() == pytest.approx(exact, rel=3e-7)
    assert [float(norm) for norm in torch._foreach_norm(gradients)] != pytest.approx(exact, rel=1e-5)


def test_a_mean_of_micro_batch_means_would_be_detected() -> None:
    """Negative control: what most loops do is far outside the bound."""
    model = make_model("gpt2", "float32")
    rows = RaggedRows(empty=set())
    parts = [rows.__getitems__(list(range(i, i + 3))) for i in range(0, 12, 3)]
    losses = [(model(**part).item(), int((part["targets"] != -100).sum())) for part in parts]
    exact = sum(nll for nll, _ in losses) / sum(n for _, n in losses)
    mean_of_means = sum(nll / n for nll, n in losses) / len(losses)
    assert abs(exact - mean_of_means) / exact > 1e-4


def test_gradients_are_equal_on_all_processes_after_backward() -> None:
    def run() -> bytes:
        from acc_lm.runtime import build_accelerator

        accelerator = build_accelerator(make_config(12, 6))
        torch.manual_seed(accelerator.process_index)  # different starts must end identical: DDP broadcasts
        model = accelerator.prepare(make_model("llama", "float32"))
        batch = RaggedRows(empty=set()).__getitems__([accelerator.process_index * 3 + i + 1 for i in range(3)])
        accelerator.backward(model(**batch))
        return b"".join(p.grad.numpy().tobytes() + p.detach().numpy().tobytes() for p in model.parameters())

    first, second = run_everywhere(run, 2)
    assert first == second


def test_one_gradient_all_reduce_per_optimizer_step() -> None:
    """Under accumulation of 3, every bucket of gradients is sent once a step and not three times."""

    def run() -> tuple[int, int]:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        from acc_lm.runtime import Gradients, build_accelerator
        from acc_lm.training.step import train_step

        accelerator = build_accelerator(make_config(12, 2))
        assert accelerator.gradient_accumulation_steps == 3
        model = make_model("llama", "float32")
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        buckets: list[int] = []

        def count(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks the annotations by identity
            buckets.append(bucket.index())
            return default_hooks.allreduce_hook(None, bucket)

        model.register_comm_hook(None, count)
        rows, gradients = RaggedRows(empty=set()), Gradients(accelerator, model)
        for step in range(1, 5):
            batches = [rows.__getitems__([i, i + 1]) for i in (2, 4, 6)]
            train_step(
                accelerator, model, optimizer, batches,
                step=step, seed=0, num_targets=100, max_grad_norm=1.0, gradients=gradients,
            )  # fmt: skip
        return buckets.count(0), len(set(buckets))

    for first_buckets, _ in run_everywhere(run, 2):
        assert first_buckets == 4


@pytest.mark.parametrize("max_norm", [0.5, 1e9, None])
def test_gradients_are_clipped_as_torch_clips_them(max_norm: float | None) -> None:
    """Bit for bit: scaled down to the norm, never up, and left alone without one."""

    def run() -> bool:
        from acc_lm.runtime import Gradients, build_accelerator

        accelerator = build_accelerator(make_config(2, 2))
        model = make_model("llama", "float32")
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        gradients = Gradients(accelerator, model)
        accelerator.backward(model(**RaggedRows(empty=set()).__getitems__([1, 2])))
        before = [parameter.grad.clone() for parameter in model.parameters()]
        theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        for parameter, gradient in zip(theirs, before, strict=True):
            parameter.grad = gradient.clone()
        norm = gradients.clip(max_norm, optimizer)
        assert 0.5 < float(norm) < 1e9
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(theirs, max_norm, norm)
        ours = [parameter.grad for parameter in model.parameters()]
        assert (max_norm == 0.5) != all(torch.equal(*pair) for pair in zip(ours, before, strict=True))
        return all(torch.equal(a, b.grad) for a, b in zip(ours, theirs, strict=True))

    assert run_everywhere(run, 1) == [True]


@pytest.mark.parametrize("num_targets", [0, 1])
def test_a_global_batch_of_one_target_or_none(num_targets: int) -> None:
    """Its gradient is that of the one loss, and 0 without any."""

    def run() -> tuple[float, float]:
        from acc_lm.runtime import Gradients, build_accelerator
        from acc_lm.training.step import train_step

        accelerator = build_accelerator(make_config(2, 1))
        model = make_model("llama", "float32")
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        batch = RaggedRows(empty=set()).__getitems__([1, 2])
        kept = batch["targets"][0, 3].item()
        batch["targets"][:] = -100
        if num_targets:
            batch["targets"][0, 3] = kept
        model(**batch).backward()
        expected = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
        model.zero_grad()
        rows = [{name: tensor[[i]] for name, tensor in batch.items()} for i in (0, 1)]
        outcome = train_step(
            accelerator, model, optimizer, rows, step=1, seed=0, num_targets=num_targets, max_grad_norm=None,
            gradients=Gradients(accelerator, model),
        )  # fmt: skip
        return float(outcome.grad_norm), expected

    ((norm, expected),) = run_everywhere(run, 1)
    assert norm == pytest.approx(expected, rel=1e-5)
    assert (expected > 0) == bool(num_targets)


@pytest.mark.parametrize("model_name", ["llama", "gpt2"])
def test_nothing_reads_a_tensor_between_logs(model_name: str) -> None:
    """Reading one waits for the device; only a step that is logged may."""

    def run() -> list[str]:
        from acc_lm.progress import Progress
        from acc_lm.runtime import Gradients, build_accelerator
        from acc_lm.stop import StopRequest
        from acc_lm.training.step import train_step

        accelerator = build_accelerator(make_config(12, 6))
        model = make_model(model_name, "float32")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        rows, progress, reads = RaggedRows(empty=set()), Progress(), []
        gradients = Gradients(accelerator, model)
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__contains__", "numpy"):
            original = getattr(torch.Tensor, name)

            def trap(self: torch.Tensor, *arguments: Any, name: str = name, original: Any = original) -> Any:
                reads.append(name)
                return original(self, *arguments)

            setattr(torch.Tensor, name, trap)
        with StopRequest(Path("nowhere"), 60).listening() as stop_request, stop_request.saving(None):
            for step in range(1, 4):
                batches = [rows.__getitems__(list(range(6))), rows.__getitems__(list(range(6, 12)))]
                outcome = train_step(
                    accelerator, model, optimizer, batches,
                    step=step, seed=0, num_targets=100, max_grad_norm=1.0, gradients=gradients,
                )  # fmt: skip
                progress = progress.advance(np.arange(12), outcome.num_targets)
                stop_request.agreed()
        unread = list(reads)
        outcome.nll.item()
        assert reads == [*unread, "item"], "the trap must work"
        return unread

    assert run_everywhere(run, 1) == [[]]


def test_dropout_masks_are_a_function_of_step_and_micro_batch() -> None:
    """Nothing before the step changes them, so a resumed run draws those of an uninterrupted one."""

    def run() -> list[float]:
        from acc_lm.runtime import Gradients, build_accelerator
        from acc_lm.training.step import train_step

        accelerator = build_accelerator(make_config(4, 2))
        model = make_model("gpt2", "float32")
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        gradients, batch = Gradients(accelerator, model), RaggedRows(empty=set()).__getitems__([1, 2])

        def loss(step: int, *micro_batches: Any) -> float:
            torch.rand(step)  # as something else might
            outcome = train_step(
                accelerator, model, optimizer, list(micro_batches), step=step, seed=0, num_targets=20, max_grad_norm=1.0,
                gradients=gradients,
            )  # fmt: skip
            return float(outcome.nll)

        alone = {i: {**batch, "targets": torch.full_like(batch["targets"], -100)} for i in (0, 1)}
        return [
            loss(1, batch, batch), loss(1, batch, batch), loss(2, batch, batch),
            loss(1, batch, alone[1]), loss(1, alone[0], batch),
        ]  # fmt: skip

    ((first, again, other_step, first_half, second_half),) = run_everywhere(run, 1)
    assert first == again
    assert first != other_step
    assert first_half != second_half, "the same rows, under the masks of another micro-batch"
    assert first_half + second_half == pytest.approx(first, rel=1e-6)


def test_the_state_that_masks_are_drawn_from_stays_the_same_from_version_to_version() -> None:
    from acc_lm.training.step import _random_state

    assert _random_state(seed=42, step=7, micro_batch=1, process=3) == 56800247955085158
    assert len({_random_state(*numbers) for numbers in [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)]}) == 4


def test_the_random_state_of_a_step_is_the_one_of_torch_manual_seed() -> None:
    from acc_lm.training.step import set_random_state

    torch.manual_seed(123456789)
    expected = torch.rand(5)
    set_random_state(123456789, torch.device("cpu"))
    assert torch.equal(torch.rand(5), expected)


def test_a_step_searches_for_no_module_and_formats_no_stack() -> None:
    """Accelerate would search the disk for an optimizer, and torch.manual_seed record its caller; per step, 0.3 ms."""

    def run() -> list[str]:
        import sys
        import traceback

        from acc_lm.runtime import Gradients, build_accelerator
        from acc_lm.training.step import train_step

        accelerator = build_accelerator(make_config(12, 6))
        model = make_model("llama", "float32")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
        rows, gradients, seen = RaggedRows(empty=set()), Gradients(accelerator, model), []

        class Finder:
            @staticmethod
            def find_spec(name: str, *_: Any) -> None:
                seen.append(name)

        def step(number: int) -> None:
            batches = [rows.__getitems__(list(range(6))), rows.__getitems__(list(range(6, 12)))]
            train_step(accelerator, model, optimizer, batches, step=number, seed=0, num_targets=100, max_grad_norm=1.0,
                       gradients=gradients)  # fmt: skip

        step(1)  # what is imported on first use
        format_stack = traceback.format_stack
        sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
        traceback.format_stack = lambda *arguments: seen.append("format_stack") or format_stack(*arguments)  # type: ignore[assignment, func-returns-value]
        step(2)
        found = list(seen)
        __import__("importlib").util.find_spec("no_such_module")
        torch.manual_seed(0)
        assert "no_such_module" in seen, "the trap must work"
        assert "format_stack" in seen, "the trap must work"
        return found

    assert run_everywhere(run, 1) == [[]]


def test_a_device_without_manual_seed_all_is_seeded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.mps has `manual_seed` alone."""
    from types import SimpleNamespace

    import torch.mps

    from acc_lm.training.step import set_random_state

    assert not hasattr(torch.mps, "manual_seed_all"), "then there is nothing special to do any more"
    seeded: list[int] = []
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(manual_seed=seeded.append))
    set_random_state(7, torch.device("mps"))
    assert seeded == [7]
