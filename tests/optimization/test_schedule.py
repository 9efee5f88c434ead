"""The learning rate is a function of the step, by transformers' own schedules."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import ROOT
from transformers import TrainingArguments, get_scheduler

from acc_lm.config import SCHEDULES, OptimizerConfig, ScheduleConfig
from acc_lm.errors import ConfigError
from acc_lm.optimization.schedule import build_schedule

ARGUMENTS = {
    "warmup_stable_decay": {"num_decay_steps": 10},
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-5},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_step_k_has_the_rate_that_trainer_gives_it(name: str) -> None:
    """Trainer steps its scheduler after each optimizer step: step k runs at the factor of k - 1."""
    arguments = ARGUMENTS.get(name, {})
    rate = build_schedule(
        ScheduleConfig(name=name, warmup_steps=5 * (name != "constant"), arguments=arguments),
        OptimizerConfig(learning_rate=1e-3),
        40,
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=5, num_training_steps=40, scheduler_specific_kwargs=dict(arguments)
    )
    for step in range(1, 41):
        assert rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), step
        optimizer.step()
        scheduler.step()


def test_cosine_with_a_minimum_ends_there_and_stays() -> None:
    rate = build_schedule(
        ScheduleConfig(name="cosine", warmup_steps=0, min_learning_rate=1e-4), OptimizerConfig(learning_rate=1e-3), 1000
    )
    assert rate(1000) == pytest.approx(1e-4, rel=1e-2)
    assert rate(1001) == rate(2000) == rate(1000), "cosine would climb again"
    assert rate(1) == pytest.approx(1e-3)


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.arguments must fit schedule linear"):
        build_schedule(ScheduleConfig(name="linear", warmup_steps=1, arguments={"power": 2}), OptimizerConfig(), 10)
    with pytest.raises(ConfigError, match="must be empty for schedule constant_with_warmup"):
        build_schedule(
            ScheduleConfig(name="constant_with_warmup", warmup_steps=1, arguments={"x": 1}), OptimizerConfig(), 10
        )
    with pytest.raises(ConfigError, match="at most the run's 10 steps, got 30"):
        build_schedule(ScheduleConfig(warmup_steps=30), OptimizerConfig(), 10)
    rate = build_schedule(
        ScheduleConfig(name="cosine_with_min_lr", warmup_steps=0, arguments={"min_lr_rate": 0.1}),
        OptimizerConfig(learning_rate=1.0),
        1000,
    )
    assert rate(1000) == pytest.approx(0.1, rel=1e-2)
    with pytest.raises(ConfigError, match="num_decay_steps"):
        build_schedule(ScheduleConfig(name="warmup_stable_decay", warmup_steps=1), OptimizerConfig(), 10)


@pytest.mark.parametrize(("share", "num_steps", "warmup"), [(0.03, 3000, 90), (0.1, 25, 3), (0.5, 1, 1), (0.0, 9, 0)])
def test_a_share_of_warmup_is_that_of_the_trainer(share: float, num_steps: int, warmup: int) -> None:
    assert TrainingArguments.get_warmup_steps(SimpleNamespace(warmup_steps=share), num_steps) == warmup
    shared, counted = (
        build_schedule(ScheduleConfig(warmup_steps=each), OptimizerConfig(), num_steps) for each in (share, warmup)
    )
    assert [shared(step) for step in range(1, num_steps + 1)] == [counted(step) for step in range(1, num_steps + 1)]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cosine", {"num_cycles": "two"}),
        ("polynomial", {"power": "two"}),
        ("inverse_sqrt", {"timescale": 0}),
        ("cosine", {"last_epoch": 5}),
        ("cosine_with_min_lr", {"min_lr": 1.0}),
        ("cosine_with_min_lr", {"min_lr_rate": 2.0}),
        ("warmup_stable_decay", {"num_decay_steps": 10, "min_lr_ratio": 2.0}),
        ("warmup_stable_decay", {"num_decay_steps": 37}),
    ],
)
@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_arguments_that_fail_later_in_the_run_are_refused_before_it(
    name: str, arguments: dict[str, object], warmup_steps: int
) -> None:
    """Also arguments that would raise the rate above its peak, or make it fall in one step because the decay exceeds the run."""
    config = ScheduleConfig(name=name, warmup_steps=warmup_steps, arguments=arguments)
    with pytest.raises(ConfigError, match=r"schedule\.arguments(\.num_decay_steps)? must"):
        build_schedule(config, OptimizerConfig(learning_rate=1e-2), 36)


@pytest.mark.parametrize("name", ["cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr"])
@pytest.mark.parametrize("least", [0.0, 1e-4])
def test_a_least_rate_is_the_argument_of_the_schedule_that_was_named(name: str, least: float) -> None:
    rate = build_schedule(
        ScheduleConfig(name=name, warmup_steps=5, min_learning_rate=least), OptimizerConfig(learning_rate=1e-3), 40
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs, arguments = (name, {}) if name == "cosine" and not least else (name, {"min_lr": least})
    theirs = "cosine_with_min_lr" if name == "cosine" and least else theirs
    scheduler = get_scheduler(
        theirs, optimizer, num_warmup_steps=5, num_training_steps=40, scheduler_specific_kwargs=arguments
    )
    for step in range(1, 41):
        assert rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), step
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("bad", [1, 503, 504, 505, 10_006, 10_007])
def test_the_rates_at_the_ends_of_warmup_and_run_are_checked_in_a_run_of_any_length(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between them every tenth step is, in a run of this length."""
    factor = SimpleNamespace(lr_lambdas=[lambda place: 2.0 if place == bad - 1 else 0.5])
    monkeypatch.setattr("transformers.get_scheduler", lambda *arguments, **keys: factor)
    with pytest.raises(ConfigError, match=f"the rate of step {bad} would be 0.02, with a peak of 0.01"):
        build_schedule(ScheduleConfig(warmup_steps=503), OptimizerConfig(learning_rate=1e-2), 10_007)


def test_keys_that_a_schedule_would_ignore_are_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps must be 0 for schedule constant, got 3"):
        ScheduleConfig(name="constant", warmup_steps=3)
    constant = ScheduleConfig(name="constant")
    assert ScheduleConfig.model_validate(constant.model_dump()) == constant, "as config.yaml has it"
    for argument in ("min_lr", "min_lr_rate"):
        with pytest.raises(ValueError, match=f"min_learning_rate must be 0 with arguments.{argument}, got 0.001"):
            ScheduleConfig(name="cosine_with_min_lr", min_learning_rate=1e-3, arguments={argument: 1e-4})


@pytest.mark.parametrize(("how", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_rates_scale_with_the_global_batch_as_requested(how: str, factor: float) -> None:
    """Peak and minimum alike, against the batch that they were chosen for, and never against the number of processes."""
    values = {"name": "cosine", "warmup_steps": 3, "min_learning_rate": 1e-4}
    plain = build_schedule(ScheduleConfig(**values), OptimizerConfig(learning_rate=1e-3), 40, 64)
    config = ScheduleConfig(**values, scale_learning_rate=how, reference_batch_size=16)
    scaled = build_schedule(config, OptimizerConfig(learning_rate=1e-3), 40, 64)
    for step in (1, 2, 4, 20, 40, 41):
        assert scaled(step) == pytest.approx(factor * plain(step), rel=1e-12)
    assert plain(4) == 1e-3
    assert build_schedule(config, OptimizerConfig(learning_rate=1e-3), 40, 16)(4) == 1e-3


@pytest.mark.parametrize("values", [{"scale_learning_rate": "linear"}, {"reference_batch_size": 8}])
def test_a_scale_needs_its_reference(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="reference_batch_size must be set with scale_learning_rate, and only then"):
        ScheduleConfig(**values)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant_with_warmup", "warmup_stable_decay", "polynomial"])
def test_after_a_changed_global_batch_the_rate_follows_the_position(name: str) -> None:
    """Six steps of 8 rows, then steps of 16: from step 7 on, the rates that a run of 16 has from its step 4 on."""
    arguments = {"num_decay_steps": 5} if name == "warmup_stable_decay" else {}
    config = ScheduleConfig(name=name, warmup_steps=5, arguments=arguments)
    optimizer = OptimizerConfig(learning_rate=1e-3)
    whole, changed = (
        build_schedule(config, optimizer, 20, 16),
        build_schedule(config, optimizer, 23, 16, 6 * 16 - 6 * 8),
    )
    assert [changed(step) for step in range(7, 25)] == [whole(step) for step in range(4, 22)]
    with pytest.raises(ConfigError, match=r"must be at most the run's 4\.5 steps"):
        build_schedule(config, optimizer, 6, 16, 24)


def test_every_fragment_of_the_page_is_a_recipe(tmp_path: Path) -> None:
    """Blocks of docs/guides/controls.md: each merged into the quickstart, and each schedule for all of its steps."""
    from ruamel.yaml import YAML

    from acc_lm.config.loading import load_config

    page = (ROOT / "docs/guides/controls.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 13
    names = set()
    for block in blocks:
        values = YAML(typ="safe", pure=True).load((ROOT / "recipes/quickstart.yaml").read_text())
        for section, keys in YAML(typ="safe", pure=True).load(block).items():
            values[section] = keys if section == "schedule" else {**values.get(section, {}), **keys}
        file = tmp_path / "recipe.yaml"
        with file.open("w") as out:
            YAML(typ="safe", pure=True).dump(values, out)
        config = load_config(file)
        rate = build_schedule(config.schedule, config.optimizer, 300, 32)
        assert 0 < max(rate(step) for step in range(1, 301)) <= config.optimizer.learning_rate * 2**0.5
        names.add(config.schedule.name)
    assert {"linear", "warmup_stable_decay", "inverse_sqrt", "cosine"} <= names
