"""Evaluation has one value, whatever the batch size and the number of processes."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from backends import STRATEGY
from processes import ROOT, launcher_environment, run_everywhere
from test_step import make_config, make_model

from acc_lm.errors import ConfigError
from acc_lm.evaluation.held_out import EvaluationResult, check_best_metric, pool
from acc_lm.rows.text_rows import Rows


def held_out_rows() -> Rows:
    """19 full rows and one of 5 targets; tokens stand for 0 to 4 bytes."""
    random = np.random.RandomState(0)
    tokens = random.randint(0, 64, size=19 * 16 + 5 + 1).astype(np.uint16)
    return Rows(tokens, 16, random.randint(0, 5, size=len(tokens)).astype(np.uint32))


def evaluate_all(name: str, dtype: str, num_processes: int, engine: str | None = None) -> list[EvaluationResult]:
    def run() -> list[EvaluationResult]:
        from acc_lm.evaluation.held_out import evaluate_rows
        from acc_lm.optimization.optimizer import build_optimizer
        from acc_lm.runtime import build_accelerator, identify, prepare

        config = make_config(12, 1)
        accelerator = build_accelerator(config)
        assert accelerator.num_processes == num_processes
        model = make_model(name, dtype)
        model, optimizer = prepare(accelerator, model, build_optimizer(model, config.optimizer))
        strategy = identify(accelerator, model, optimizer, config).strategy
        assert strategy == STRATEGY[engine or ("ddp" if num_processes > 1 else "single")][0]
        kept = [p.data_ptr() for p in model.parameters()]
        results = [evaluate_rows(accelerator, model, held_out_rows(), batch_size) for batch_size in (1, 3, 8)]
        assert model.training
        assert [p.data_ptr() for p in model.parameters()] == kept, "what was gathered for it must be given up again"
        return results

    environment = launcher_environment(ROOT / f"accelerate_configs/{engine}.yaml", num_processes) if engine else {}
    everywhere = run_everywhere(run, num_processes, environment=environment)
    assert all(results == everywhere[0] for results in everywhere), "all processes must know the same value"
    return everywhere[0]


@pytest.mark.parametrize(
    ("name", "dtype", "bound"), [("llama", "float32", 1e-6), ("gpt2", "float32", 1e-6), ("gpt2", "float64", 1e-12)]
)
def test_evaluation_does_not_depend_on_batch_size_or_processes(name: str, dtype: str, bound: float) -> None:
    results = [result for num_processes in (1, 2, 3) for result in evaluate_all(name, dtype, num_processes)]
    assert len(results) == 9
    for result in results:
        assert result.num_targets == 19 * 16 + 5
        assert result.token_accuracy == results[0].token_accuracy
        assert abs(result.loss - results[0].loss) <= bound * results[0].loss
        assert abs(result.bits_per_byte - results[0].bits_per_byte) <= bound * results[0].bits_per_byte


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("engine", "num_processes"),
    [("fsdp2", 3), ("deepspeed_zero2", 2), ("deepspeed_zero3", 2),
     *(pytest.param(*other, marks=pytest.mark.slow) for other in [("fsdp2", 2), ("fsdp2_grad_op", 2), ("hsdp", 4)])],
)  # fmt: skip
def test_evaluation_does_not_depend_on_the_engine(engine: str, num_processes: int, name: str) -> None:
    expected = evaluate_all(name, "float32", 1)[0]
    for result in evaluate_all(name, "float32", num_processes, engine):
        assert (result.num_targets, result.token_accuracy) == (expected.num_targets, expected.token_accuracy)
        assert abs(result.loss - expected.loss) <= 1e-6 * expected.loss
        assert abs(result.bits_per_byte - expected.bits_per_byte) <= 1e-6 * expected.bits_per_byte


def test_evaluation_equals_transformers_own_logits() -> None:
    from test_step import MODELS
    from transformers import AutoConfig, AutoModelForCausalLM

    rows = held_out_rows()
    values = dict(MODELS["gpt2"])
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).double().eval()
    nll = correct = targets = 0
    for row in range(len(rows)):
        batch = rows[row]
        keep = batch["targets"][0] >= 0
        log_p = plain(batch["input_ids"]).logits[0].log_softmax(-1)[keep]
        wanted = batch["targets"][0][keep]
        nll -= log_p[range(len(wanted)), wanted].sum().item()
        correct += int((log_p.argmax(-1) == wanted).sum())
        targets += len(wanted)
    result = evaluate_all("gpt2", "float64", 1)[0]
    assert math.isclose(result.loss, nll / targets, rel_tol=1e-9)
    assert result.token_accuracy == correct / targets
    num_bytes = int(rows.bytes_of_token[1:].sum())
    assert math.isclose(result.bits_per_byte, nll / math.log(2) / num_bytes, rel_tol=1e-9)


def test_the_evaluate_library_gives_the_same_values(tmp_path: Path) -> None:
    def run() -> list[dict[str, float]]:
        import os

        os.environ["HF_HOME"] = str(tmp_path)
        import evaluate

        from acc_lm.evaluation.held_out import evaluate_rows
        from acc_lm.runtime import build_accelerator

        path = ROOT / "src/acc_lm/evaluation/metrics/language_modeling.py"
        metric = evaluate.load(str(path), cache_dir=str(tmp_path / "metrics"))
        accelerator = build_accelerator(make_config(6, 1))
        model, rows = accelerator.prepare(make_model("gpt2", "float64")), held_out_rows()
        model.eval()
        for row in range(len(rows)):
            with torch.no_grad():
                sums = model(**rows[row])
            metric.add(nll=sums.nll.item(), num_targets=sums.num_targets.item(), num_correct=sums.num_correct.item(),
                       num_bytes=rows.count_bytes([row]))  # fmt: skip
        ours = evaluate_rows(accelerator, model, rows, 4).metrics()
        return [metric.compute(), {name.removeprefix("eval/"): value for name, value in ours.items()}]

    ((theirs, ours),) = run_everywhere(run)
    assert theirs == pytest.approx(ours, rel=1e-12)


def test_only_the_first_rows_count_when_evaluation_is_limited() -> None:
    def run() -> tuple[int, int]:
        from acc_lm.evaluation.held_out import evaluate_rows
        from acc_lm.runtime import build_accelerator

        accelerator = build_accelerator(make_config(6, 1))
        model = accelerator.prepare(make_model("llama", "float32"))
        return tuple(evaluate_rows(accelerator, model, held_out_rows(), size, 7).num_targets for size in (2, 5))

    assert run_everywhere(run, 2) == [(7 * 16, 7 * 16)] * 2


def test_between_is_called_after_every_few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop is noticed there, so a long evaluation does not delay it; 20 rows are 10 batches here."""
    from acc_lm.evaluation import held_out

    monkeypatch.setattr(held_out, "PAUSE_BATCHES", 4)

    def run() -> int:
        from acc_lm.runtime import build_accelerator

        accelerator = build_accelerator(make_config(6, 1))
        model, calls = accelerator.prepare(make_model("llama", "float32")), list[None]()
        held_out.evaluate_rows(accelerator, model, held_out_rows(), 1, 20, between=lambda: calls.append(None))
        return len(calls)

    assert run_everywhere(run, 2) == [2, 2]


def test_results_are_pooled_as_if_all_targets_had_been_evaluated_together() -> None:
    parts = [EvaluationResult(2.0, 0.5, 2 * 30 / math.log(2) / 90, 30, 90), EvaluationResult(4.0, 0.0, None, 10, 0)]
    pooled = pool(parts)
    assert (pooled.loss, pooled.token_accuracy, pooled.num_targets, pooled.num_bytes) == (2.5, 0.375, 40, 90)
    assert pooled.bits_per_byte == pytest.approx(100 / math.log(2) / 90)
    assert pool(parts[1:]).bits_per_byte is None


def test_bits_per_byte_is_the_best_metric_only_of_targets_that_stand_for_text() -> None:
    """In a mixture it is that of all sources together."""
    with_text, without = (
        held_out_rows(),
        Rows(held_out_rows().tokens, 16, np.zeros(len(held_out_rows().tokens), np.uint32)),
    )

    def data(evaluation: Rows, names: tuple[str, ...] = (), **sets: Rows) -> Any:
        mixture = SimpleNamespace(names=names) if names else None
        return SimpleNamespace(evaluation=evaluation, evaluation_sets=sets, mixture=mixture)

    for usable in (data(with_text), data(without, ("a", "b"), a=without, b=with_text), data(with_text, a=without)):
        check_best_metric(usable, "eval/bits_per_byte")
    for unusable in (data(without), data(with_text, ("a",), a=without, b=with_text), data(without, a=with_text)):
        check_best_metric(unusable, "eval/loss")
        with pytest.raises(ConfigError, match="must be a metric that the held-out text has, got eval/bits_per_byte"):
            check_best_metric(unusable, "eval/bits_per_byte")
    check_best_metric(data(without, b=with_text), "eval/b/bits_per_byte")
    with pytest.raises(ConfigError, match="got eval/b/bits_per_byte"):
        check_best_metric(data(with_text, b=without), "eval/b/bits_per_byte")
