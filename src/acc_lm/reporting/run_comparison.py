"""Comparison of two runs: the first step at which their losses part, by how much, and why as far as the files show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from acc_lm.reporting.report_parts import Block, Figures, Grid, Pairs, Paragraph, Part, Report
from acc_lm.reporting.report_proof import ledger_of
from acc_lm.reporting.report_sections import cut, damaged, glance, made_line, value_text
from acc_lm.reporting.run_record import RunRecord, changed_keys, words
from acc_lm.run_files.charts import AXES, By, Drawn, charts_of, marks_of, more_charts_of
from acc_lm.run_files.differences import COMPARED, TOLERANCE, tolerance_for
from acc_lm.run_files.names import RECIPE

LOSSES = ("train/loss", "eval/loss")
"""Metrics that decide whether two runs part; the others of a parity table are shown next to them."""
MEASURED_STEPS = 20
"""Number of steps over which parity's tolerance was measured."""
PRECISIONS = {"float8": "fp8", "fp8": "fp8", "bfloat16": "bf16", "float16": "fp16"}
"""Precision of a parity tolerance, by what the name of a run's own precision contains."""
ORDER_KEYS = ("training.global_batch_size", "data.shuffle", "data.sequence_length", "data.packing")
"""Keys that decide which rows a step has, given the same text."""
LENGTH_KEYS = ("training.max_steps", "training.num_epochs")
ENGINE_NAMES = ("strategy", "num processes", "device", "threads", "torch")
NOT_COMPARED = ("output_dir", "tracking.", "data.cache_dir", "distributed.timeout_seconds")
ENVIRONMENT_NAMES = (
    "strategy",
    "engine",
    "num_processes",
    "precision",
    "device",
    "threads",
    "host",
    "git_commit",
    "text_key",
)
MAX_CHANGES = 200


@dataclass(frozen=True)
class MetricDifference:
    """Differences of one metric between two runs, at the steps that both logged."""

    name: str
    num_steps: int
    largest: float
    """Largest relative difference."""
    tolerance: float
    first_step: int | None
    """First step at which the difference exceeds the tolerance; None: never."""
    values: tuple[float, float] = (0.0, 0.0)
    """Both values at that step."""

    @property
    def at_first(self) -> float:
        return relative(*self.values)


@dataclass(frozen=True)
class Comparison:
    """Differences of a run from the first one."""

    first: RunRecord
    other: RunRecord
    metrics: list[MetricDifference]
    recipe: list[tuple[str, str, str]]
    """(key, value in the first, value in the other) of each key that differs."""
    environment: list[tuple[str, str, str]]
    reasons: list[str]
    """Likely reasons for losses that differ, the likeliest first."""

    @property
    def parts_at(self) -> MetricDifference | None:
        """The loss that parts first."""
        parting = [metric for metric in self.metrics if metric.name in LOSSES and metric.first_step is not None]
        return min(parting, key=lambda metric: metric.first_step or 0, default=None)

    @property
    def verdict(self) -> str:
        """One line: the same run to a relative difference, or the step at which they part, and why."""
        losses = [metric for metric in self.metrics if metric.name in LOSSES]
        if not losses:
            return "not comparable: they logged no loss at the same step"
        if (parting := self.parts_at) is None:
            largest = max(metric.largest for metric in losses)
            steps = max(metric.num_steps for metric in losses)
            same = f"the same run to {largest:.0e}" if largest else "the same run, equal in every digit"
            others = [text for text in self.reasons if text.startswith("other ")]
            return f"{same} over {steps:,} logged steps" + (f"; yet {others[0]}" if others else "")
        before, after = parting.values
        why = self.reasons[0] if self.reasons else "no reason in their files"
        return (
            f"parts at step {parting.first_step:,}: {why} "
            f"({parting.name} {before:.6g} and {after:.6g}, a relative difference of {parting.at_first:.0e}; tolerance {parting.tolerance:.0e})"
        )


def relative(value: float, other: float) -> float:
    """Relative difference as parity measures it."""
    return 0.0 if value == other else abs(other - value) / max(abs(value), 1e-30)


def compare(first: RunRecord, other: RunRecord) -> Comparison:
    """Compare a run with the first one, step by step."""
    bounds = [
        tolerance_for(precision_of(run), words(run.recipe, "optimizer.name") or "adamw") for run in (first, other)
    ]
    tolerance = {name: max(bound[name] for bound in bounds) for name in COMPARED}
    metrics = [found for name in COMPARED if (found := _difference(first, other, name, tolerance[name])) is not None]
    recipe = _recipe_changes(first, other)
    return Comparison(
        first, other, metrics, recipe, _environment_changes(first, other), _reasons(first, other, recipe, metrics)
    )


def precision_of(run: RunRecord) -> str:
    """Precision of a run by parity's names, from its recipe or, where that leaves it to the launch, its engine."""
    asked = words(run.recipe, "training.mixed_precision")
    if asked in TOLERANCE:
        return asked
    own = f"{words(run.environment, 'precision')} {words(run.environment, 'compute')}"
    return next((name for part, name in PRECISIONS.items() if part in own), "no")


def _difference(first: RunRecord, other: RunRecord, name: str, tolerance: float) -> MetricDifference | None:
    one, two = first.columns.curve(name), other.columns.curve(name)
    steps, places, others = np.intersect1d(one.steps, two.steps, assume_unique=True, return_indices=True)
    if not len(steps):
        return None
    values, theirs = one.values[places], two.values[others]
    differences = np.where(values == theirs, 0.0, np.abs(theirs - values) / np.maximum(np.abs(values), 1e-30))
    above = np.flatnonzero(differences > tolerance)
    largest = float(differences.max())
    if not len(above):
        return MetricDifference(name, len(steps), largest, tolerance, None)
    place = above[0]
    return MetricDifference(
        name, len(steps), largest, tolerance, int(steps[place]), (float(values[place]), float(theirs[place]))
    )


def _recipe_changes(first: RunRecord, other: RunRecord) -> list[tuple[str, str, str]]:
    keys = [*first.recipe, *(key for key in other.recipe if key not in first.recipe)]
    if not first.recipe or not other.recipe:
        return []
    pairs = (
        (key, *(value_text(run.recipe[key]) if key in run.recipe else "" for run in (first, other))) for key in keys
    )
    return [(key, was, now) for key, was, now in pairs if was != now and not key.startswith(NOT_COMPARED)]


def _environment_changes(first: RunRecord, other: RunRecord) -> list[tuple[str, str, str]]:
    changes = []
    for name in ENVIRONMENT_NAMES:
        was, now = (_shown(run.environment.get(name)) for run in (first, other))
        if was != now:
            changes.append((name.replace("_", " "), was, now))
    own = [run.environment.get("versions") for run in (first, other)]
    versions = [values if isinstance(values, dict) else {} for values in own]
    for name in [*versions[0], *(name for name in versions[1] if name not in versions[0])]:
        was, now = (_shown(values.get(name)) for values in versions)
        if was != now:
            changes.append((name, was, now))
    return changes


def _shown(value: object) -> str:
    return "" if value is None else cut(str(value), 200)


def _reasons(
    first: RunRecord, other: RunRecord, recipe: Sequence[tuple[str, str, str]], metrics: Sequence[MetricDifference]
) -> list[str]:
    """Likely reasons, from the one that explains most."""
    reasons = []
    keys = changed_keys(first.recipe, other.recipe) if recipe else []
    order = [key for key in keys if key in ORDER_KEYS or key.startswith("data.mixture")]
    if _other_text(first, other):
        named = [key for key in keys if key.startswith(("data.", "tokenizer.")) and key not in order]
        reasons.append("other text" + _in_brackets(named))
    if "seed" in keys:
        reasons.append("other seed, which draws the initial weights and the data order")
    if order:
        reasons.append("other data order" + _in_brackets(order))
    elif "seed" not in keys and not reasons and (rows := _other_rows(first, other)):
        reasons.append(f"other data order ({rows})")
    if models := [key for key in keys if key.startswith(("model.", "adapter.", "tokenizer."))]:
        reasons.append("other model" + _in_brackets(models))
    if numbers := [
        key for key in keys if key.startswith(("optimizer.", "schedule.", "training.")) and key not in order
    ]:
        reasons.append("other recipe" + _in_brackets(numbers))
    rates = next((metric for metric in metrics if metric.name == "train/learning_rate"), None)
    if not numbers and rates is not None and rates.first_step is not None:
        lengths = [key for key, _, _ in recipe if key in LENGTH_KEYS]
        why = ", ".join(lengths) or "a start under a schedule of another length"
        reasons.append(f"other learning rate from step {rates.first_step:,} ({why})")
    return reasons + _reasons_of_launch(first, other, metrics)


def _in_brackets(keys: Sequence[str]) -> str:
    return f" ({', '.join(keys[:5])}{', ...' * (len(keys) > 5)})" if keys else ""


def _reasons_of_launch(first: RunRecord, other: RunRecord, metrics: Sequence[MetricDifference]) -> list[str]:
    """Likely reasons in precision, engine and machine, under which the same recipe gives rounding of its own."""
    reasons = []
    names = {
        name: f"{was or 'unknown'} and {now or 'unknown'}" for name, was, now in _environment_changes(first, other)
    }
    precisions = precision_of(first), precision_of(other)
    if precisions[0] != precisions[1] or "precision" in names:
        reasons.append(f"other precision ({names.get('precision', ' and '.join(precisions))})")
    parting = [metric.first_step for metric in metrics if metric.name in LOSSES and metric.first_step is not None]
    is_late = min(parting, default=0) > MEASURED_STEPS
    late = f", grown over more than the {MEASURED_STEPS} steps of the tolerance" if is_late else ""
    engines = [f"{name} {names[name]}" for name in ENGINE_NAMES if name in names]
    if engines:
        reasons.append(f"rounding of another engine or machine ({'; '.join(engines)}){late}")
    elif first.drawn.resumes or other.drawn.resumes:
        reasons.append(f"rounding after a resume{late}")
    return reasons


def _other_text(first: RunRecord, other: RunRecord) -> bool:
    """True when the hashes of text and tokenizer show that the runs read other text."""
    keys = [
        {words(saved.state, "data_key") for saved in run.checkpoints if words(saved.state, "data_key")}
        for run in (first, other)
    ]
    if all(keys):
        return not keys[0] & keys[1]
    texts = [words(run.environment, "text_key") for run in (first, other)]
    return all(texts) and texts[0] != texts[1]


def _other_rows(first: RunRecord, other: RunRecord) -> str:
    """Statement that shows other rows: another ledger, or another number of tokens, at the same step; empty without one."""
    ledgers = []
    for run in (first, other):
        known = {saved.step: saved.ledger for saved in run.checkpoints if saved.ledger}
        known |= {start.step: words(start.facts, "ledger") for start in run.starts if words(start.facts, "ledger")}
        if (newest := ledger_of(run)) is not None:
            known[newest[0]] = newest[1]
        ledgers.append(known)
    for step in sorted(ledgers[0].keys() & ledgers[1].keys()):
        if ledgers[0][step] != ledgers[1][step]:
            return f"the ledgers of step {step:,} differ"
    tokens = _difference(first, other, "train/tokens", 0.0)
    return (
        f"the targets of step {tokens.first_step:,} differ in number"
        if tokens and tokens.first_step is not None
        else ""
    )


# --- report --------------------------------------------------------------------------------------------------------


def comparison_report(runs: Sequence[RunRecord], by: By = "step") -> Report:
    """Report about several runs: a verdict for each after the first, and their curves over each other."""
    names = names_of(runs)
    found = [compare(runs[0], other) for other in runs[1:]]
    top: list[Part] = []
    for name, comparison in zip(names[1:], found, strict=True):
        is_bad = comparison.parts_at is not None
        top.append(Paragraph(f"{name} compared with {names[0]}: {comparison.verdict}", is_bad=is_bad))
    for name, run in zip(names, runs, strict=True):
        top += [Paragraph(f"{name}: {line}", is_bad=True) for line in damaged(run)]
    drawn = drawn_as(runs)
    charts = [chart for chart in (*charts_of(drawn, by), *more_charts_of(drawn, by)) if chart.lines]
    blocks = [
        Block("", top),
        Block(
            "Curves",
            [Figures(charts, marks_of(drawn, by), AXES[by])] if charts else [Paragraph("left out: no logged step yet")],
        ),
    ]
    blocks += [_block(comparison, names[0], name) for name, comparison in zip(names[1:], found, strict=True)]
    for name, run in zip(names, runs, strict=True):
        blocks.append(Block(f"Run {name}", [*glance(run), *_ledger(run)]))
    return Report(" and ".join(names), blocks, any(run.continues for run in runs), made_line())


def drawn_as(runs: Sequence[RunRecord]) -> list[Drawn]:
    """Curves of the runs, each with a name of its own."""
    return [replace(run.drawn, name=name) for name, run in zip(names_of(runs), runs, strict=True)]


def names_of(runs: Sequence[RunRecord]) -> list[str]:
    """Names of the runs' folders, or their paths where names are the same."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _ledger(run: RunRecord) -> list[Part]:
    ledger = ledger_of(run)
    return [Pairs([("ledger", ledger[1]), ("of step", f"{ledger[0]:,}")])] if ledger else []


def _block(comparison: Comparison, first: str, other: str) -> Block:
    parts: list[Part] = []
    rows = []
    for metric in comparison.metrics:
        parting = "never" if metric.first_step is None else f"{metric.first_step:,}"
        values = (
            ""
            if metric.first_step is None
            else f"{metric.values[0]:.6g} and {metric.values[1]:.6g}, {metric.at_first:.0e}"
        )
        rows.append(
            (metric.name, f"{metric.num_steps:,}", f"{metric.largest:.0e}", f"{metric.tolerance:.0e}", parting, values)
        )
    if rows:
        head = ("metric", "steps of both", "largest difference", "tolerance", "first beyond it at step", "values there")
        parts.append(Grid(head, rows))
        note = f"Relative differences. The tolerance is that of acc-lm parity, measured over {MEASURED_STEPS} steps; rounding grows with more steps."
        parts.append(Paragraph(note))
    if len(comparison.reasons) > 1 and comparison.parts_at is not None:
        parts.append(Paragraph("Further differences that could matter: " + "; ".join(comparison.reasons[1:])))
    for title, changes, same in (
        ("recipe", comparison.recipe, "Same recipe."),
        ("environment", comparison.environment, "Same environment."),
    ):
        if changes:
            parts.append(Grid((title, first, other), changes[:MAX_CHANGES]))
        elif title == "recipe" and not (comparison.first.recipe and comparison.other.recipe):
            lines = (run.reasons.get(RECIPE) for run in (comparison.first, comparison.other))
            parts.append(Paragraph(f"left out: {'; '.join(line for line in lines if line)}"))
        else:
            parts.append(Paragraph(same))
    return Block(f"{other} compared with {first}", parts)
