"""Content of a report about one run: status, curves, evaluations, samples, sources, time, memory, starts, recipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np

from acc_lm.config.reference import describe_keys
from acc_lm.reporting.report_parts import (
    Bars,
    Block,
    Figures,
    Folded,
    Grid,
    Pairs,
    Paragraph,
    Part,
    Report,
    Verbatim,
)
from acc_lm.reporting.report_proof import proof_of
from acc_lm.reporting.run_record import RunRecord, StartOfRun, listed, number, words
from acc_lm.run_files.charts import AXES, LONGEST_NAME, PARTS_OF_A_STEP, By, charts_of, marks_of, more_charts_of
from acc_lm.run_files.metrics_file import gain
from acc_lm.run_files.names import ENVIRONMENT, METRICS, RECIPE, SAMPLES, STARTED_ON, SUMMARY

MAX_SHOWN = 8
"""Number of samples of one prompt, from the first to the last evaluation."""
LONGEST_SAMPLE = 3000  # characters
MAX_ROWS = 60
"""Number of rows of a table that grows with the run."""


class LeftOut(Exception):
    """Reason why a section has no content."""


def report_of(record: RunRecord, by: By = "step") -> Report:
    """Every section of a run's report; one without content says why in a line."""
    sections: list[tuple[str, Callable[[], list[Part]]]] = [
        ("", lambda: glance(record)),
        ("Curves", lambda: curves_of(record, by)),
        ("Evaluations", lambda: evaluations_of(record)),
        ("Samples over time", lambda: samples_of(record)),
        ("Text by source", lambda: sources_of(record)),
        ("Time of a step", lambda: time_of(record)),
        ("Memory by phase", lambda: memory_section(record)),
        ("Starts, resumes and backends", lambda: starts_of(record)),
        ("Proof", lambda: proof_of(record)),
        ("Recipe", lambda: keys_of(record)),
        ("Environment", lambda: launch_of(record)),
    ]
    blocks = []
    for title, make in sections:
        try:
            parts = make()
        except LeftOut as reason:
            parts = [Paragraph(f"left out: {reason}")]
        blocks.append(Block(title, parts))
    return Report(f"Run {record.name}", blocks, record.continues, made_line())


def made_line() -> str:
    """Time and version of a report."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("acc-lm")
    except PackageNotFoundError:
        own = "of a clone"
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, acc-lm {own}"


# --- the top -------------------------------------------------------------------------------------------------------


def glance(record: RunRecord) -> list[Part]:
    """Status, position and scores of the run."""
    columns, summary = record.columns, record.summary
    status, steps = record.status, record.num_steps
    pairs = [("status", status), ("step", f"{record.step:,}" + (f" of {steps:,}" if steps else ""))]
    for name, label, form in (
        ("train/epoch", "passes over the text", "{:.3g}"),
        ("train/tokens", "tokens", "{:,.0f}"),
        ("train/loss", "training loss", "{:.4f}"),
        ("eval/loss", "evaluation loss", "{:.4f}"),
        ("eval/bits_per_byte", "bits per byte", "{:.4f}"),
    ):
        if len(curve := columns.curve(name)):
            pairs.append((label, form.format(curve.last)))
    pairs += [(f"{name} -9", f"{value:.4f}") for name, value in record.compressors.items()]
    if len(speed := columns.curve("train/tokens_per_second")):
        pairs.append(("tokens per second", f"{np.median(speed.values[-50:]):,.0f}"))
    pairs += time_left(record)
    if not record.is_live and (when := words(summary, "time")):
        pairs.append(("ended", clock(when)))
    parts: list[Part] = [Pairs(pairs)]
    reason = words(summary, "reason")
    if status == "killed":
        parts.append(Paragraph("killed: the run left its lock and no summary; the same command resumes", is_bad=True))
    elif reason and not record.is_live:
        parts.append(Paragraph(f"{status}: {reason}", is_bad=status not in ("completed", "preempted")))
    elif record.is_live and reason:
        parts.append(Paragraph(f"The attempt before this one ended: {words(summary, 'status')}: {reason}"))
    parts += [Paragraph(f"{line}; its section is left out", is_bad=True) for line in damaged(record)]
    return parts


def damaged(record: RunRecord) -> list[str]:
    """Lines about damaged files; a missing one is named in its section only."""
    lines = [line for line in record.reasons.values() if "is missing" not in line]
    if record.columns.num_damaged:
        lines.append(f"{METRICS} has {record.columns.num_damaged:,} damaged lines, which are skipped")
    return lines


def seconds_of(record: RunRecord) -> float:
    """Seconds of training that the logged steps took; evaluations and saves not included."""
    pace = record.columns.curve("train/seconds_per_step")
    return float(np.sum(pace.values * np.diff(pace.steps, prepend=0.0)))


def time_left(record: RunRecord) -> list[tuple[str, str]]:
    """Pairs about the time of training so far and, while the run lives, the time that is left."""
    pace = record.columns.curve("train/seconds_per_step")
    if not len(pace):
        return []
    pairs = [("time of training", duration(seconds_of(record)))]
    if record.is_live and record.num_steps:
        left = (record.num_steps - record.step) * float(np.median(pace.values[-50:]))
        pairs.append(("time left, about", duration(left)))
    return pairs


def duration(seconds: float) -> str:
    """Readable duration: 75 -> 1:15, 3700 -> 1:01:40."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours:,}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def clock(text: str) -> str:
    """Time of the files of a run, shortened; unchanged if it is none."""
    try:
        return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):
        return text


def curves_of(record: RunRecord, by: By) -> list[Part]:
    run = record.drawn
    charts = [chart for chart in (*charts_of([run], by), *more_charts_of([run], by)) if chart.lines]
    if not charts:
        raise LeftOut(record.reasons.get(METRICS, f"{METRICS} has no logged step yet"))
    parts: list[Part] = [Figures(charts, marks_of([run], by), AXES[by])]
    lost = {name: count for name, count in record.columns.nonfinite.items() if name in ("train/loss", "eval/loss")}
    parts += [
        Paragraph(f"{count:,} values of {name} were not finite and are not drawn") for name, count in lost.items()
    ]
    return parts


# --- evaluations, samples, sources ------------------------------------------------------------------------------------


def evaluations_of(record: RunRecord) -> list[Part]:
    """First, best and last loss of the held-out text and each evaluation set, and the passes over the text."""
    rows = []
    for name in ("", *record.columns.parts("eval", "/loss")[:MAX_ROWS]):
        prefix = f"eval/{name}/" if name else "eval/"
        losses = record.columns.curve(f"{prefix}loss")
        if not len(losses):
            continue
        best = int(np.argmax([gain("loss", float(value)) for value in losses.values]))
        others = (record.columns.curve(f"{prefix}{key}") for key in ("perplexity", "token_accuracy", "bits_per_byte"))
        last = [f"{curve.last:.4g}" if len(curve) else "" for curve in others]
        best_text = f"{losses.values[best]:.4f} at step {losses.steps[best]:.0f}"
        rows.append(
            (
                cut(name, LONGEST_NAME) or "held-out text",
                f"{losses.values[0]:.4f}",
                best_text,
                f"{losses.last:.4f}",
                *last,
            )
        )
    if not rows:
        raise LeftOut("no evaluation is recorded")
    head = ("text", "first loss", "best loss", "last loss", "perplexity", "accuracy", "bits per byte")
    parts: list[Part] = [Grid(head, rows)]
    if passes := epochs_of(record):
        parts.append(passes)
    return parts


def epochs_of(record: RunRecord) -> Grid | None:
    """Table of the passes over the training rows."""
    numbers = record.columns.curve("epoch/number")
    if not len(numbers):
        return None
    losses, seconds = (record.columns.curve(f"epoch/{name}") for name in ("train_loss", "seconds"))
    rows = []
    for step, value in list(zip(numbers.steps, numbers.values, strict=True))[-MAX_ROWS:]:
        loss, took = losses.values[losses.steps == step], seconds.values[seconds.steps == step]
        cells = f"{loss[0]:.4f}" if len(loss) else "", duration(took[0]) if len(took) else ""
        rows.append((f"{value:.0f}", f"{step:,.0f}", *cells))
    return Grid(("pass", "ended at step", "training loss", "duration"), rows)


def samples_of(record: RunRecord) -> list[Part]:
    """The newest sample of each prompt, and earlier ones to open."""
    if not record.samples:
        wanted = number(record.recipe, "tracking.sample_tokens")
        raise LeftOut(
            record.reasons.get(SAMPLES, "none yet" if wanted else "the recipe asks for none (tracking.sample_tokens)")
        )
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for sample in sorted(record.samples, key=lambda sample: sample["step"]):
        by_prompt.setdefault(words(sample, "prompt"), []).append(sample)
    parts: list[Part] = []
    for prompt, samples in list(by_prompt.items())[:MAX_SHOWN]:
        shown = [samples[round(place)] for place in np.linspace(0, len(samples) - 1, min(MAX_SHOWN, len(samples)))]
        texts = [
            Verbatim(cut(prompt, 500) + " → " + cut(_without_blanks(words(sample, "text"))), f"step {sample['step']:,}")
            for sample in shown
        ]
        parts.append(texts[-1])
        if texts[:-1]:
            parts.append(Folded(f"{len(texts) - 1} earlier", list(reversed(texts[:-1]))))
    return parts


def cut(text: str, longest: int = LONGEST_SAMPLE) -> str:
    """Text of at most `longest` characters, with a mark where it was cut."""
    return text if len(text) <= longest else f"{text[:longest]} [...]"


def _without_blanks(text: str) -> str:
    """Text without a long blank end, as early samples often have."""
    blanks = len(text) - len(text.rstrip())
    return text if blanks < 4 else f"{text.rstrip()} [{blanks} blanks]"


def sources_of(record: RunRecord) -> list[Part]:
    """Tokens of each source of a mixture, from the last logged step."""
    names = record.columns.parts("train/tokens")
    tokens = {name: record.columns.curve(f"train/tokens/{name}") for name in names}
    total = sum(curve.last for curve in tokens.values() if len(curve))
    if not total:
        raise LeftOut("the text has one source")
    passes = record.summary.get("sources")
    rows = []
    for name, curve in list(tokens.items())[:MAX_ROWS]:
        count = number(passes.get(name) if isinstance(passes, dict) else None, "passes")
        text = f"{curve.last:,.0f} tokens, {curve.last / total:.1%}"
        rows.append(
            (cut(name, LONGEST_NAME), curve.last / total, text + (f", {count:.3g} passes" if count is not None else ""))
        )
    return [Bars(rows)]


# --- time and memory -----------------------------------------------------------------------------------------------


def time_of(record: RunRecord) -> list[Part]:
    """Parts of the time of all logged steps, and the time next to the steps."""
    total = seconds_of(record)
    if total <= 0:
        raise LeftOut(record.reasons.get(METRICS, "no time is recorded yet"))
    rows = []
    for part in PARTS_OF_A_STEP:
        curve = record.columns.curve(f"train/seconds_{part}")
        seconds = float(np.sum(curve.values * np.diff(curve.steps, prepend=0.0)))
        share = max(0.0, min(1.0, seconds / total))
        rows.append((part, share, f"{share:.1%}, {duration(seconds)} of {duration(total)}"))
    parts: list[Part] = [Bars(rows)]
    if (held := number(record.summary, "seconds_held_by_saving")) is not None:
        parts.append(Paragraph(f"Saving held the last attempt up for {held:.1f} s."))
    if record.profile:
        parts.append(Folded("profile of a few steps", [Verbatim(record.profile)]))
    return parts


def memory_section(record: RunRecord) -> list[Part]:
    """Peak memory after each phase, of the process that used most."""
    phases = [phases for phases in listed(record.summary, "peak_memory_gb_by_phase") if isinstance(phases, dict)]
    names = list(dict.fromkeys(name for process in phases for name in process))
    found = {name: [value for process in phases if (value := number(process, name)) is not None] for name in names}
    peaks = {name: values for name, values in found.items() if values and max(values) > 0}
    if not peaks:
        soon = "it is written when the run ends"
        raise LeftOut(record.reasons.get(SUMMARY, "") or (soon if record.is_live else f"{SUMMARY} does not have it"))
    highest = max(max(values) for values in peaks.values())
    rows = []
    for name, values in list(peaks.items())[:MAX_ROWS]:
        span = f" (least {min(values):.2f})" if len(values) > 1 else ""
        rows.append((name, max(values) / highest, f"{max(values):.2f} GB{span}"))
    note = "Peak of the process that used most, in GB (1e9 bytes), up to the end of each phase."
    if record.is_live:
        note += " Of the attempt before this one."
    return [Bars(rows), Paragraph(note)]


# --- starts ------------------------------------------------------------------------------------------------


def starts_of(record: RunRecord) -> list[Part]:
    """Table of the starts, with what changed between them; and the events of the run."""
    rows = []
    for before, start in zip([None, *record.starts], record.starts, strict=False):
        changed = [name for name in STARTED_ON if name != "engine" and _changed(before, start, name)]
        facts = start.facts
        where = f"step {start.step:,}"
        device = ", ".join(text for text in (words(facts, "precision"), words(facts, "device")) if text)
        rows.append((where, clock(start.time), start.engine, words(facts, "engine"), device, ", ".join(changed)))
    parts: list[Part] = []
    if rows:
        parts.append(Grid(("from", "time", "strategy", "engine", "precision, device", "changed"), rows[-MAX_ROWS:]))
    if record.events:
        parts.append(Grid(("step", "event"), [(f"{step:,}", text) for step, text in record.events[-MAX_ROWS:]]))
    if not parts:
        raise LeftOut(record.reasons.get(ENVIRONMENT, "the run was started once, and nothing happened to it"))
    return parts


def _changed(before: StartOfRun | None, start: StartOfRun, name: str) -> bool:
    return before is not None and before.facts.get(name) != start.facts.get(name)


# --- recipe and environment ------------------------------------------------------------------------------------------


def keys_of(record: RunRecord) -> list[Part]:
    """Keys that differ from their defaults, then all of them."""
    if not record.recipe:
        raise LeftOut(record.reasons.get(RECIPE, "the recipe is empty"))
    defaults = {key: default for key, _, default, _ in describe_keys()}
    rows = []
    for key, value in record.recipe.items():
        default = defaults.get(re.sub(r"\.\d+\.", "[].", key), "")  # keys of a list's sections
        if (
            value_text(value) != default
            and not (value == [] and default in ("[]", ""))
            and not (value == {} and default == "{}")
        ):
            rows.append((key, value_text(value), default))
    every = "\n".join(f"{key}: {value_text(value)}" for key, value in record.recipe.items())
    return [
        Grid(("key, changed from the default", "value", "default"), rows),
        Folded(f"all {len(record.recipe)} keys", [Verbatim(every)]),
    ]


def value_text(value: Any) -> str:
    """Value of a key as YAML would write it, on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ", ".join(f'"{part}"' if isinstance(part, str) else value_text(part) for part in value) + "]"
    return str(value)


def launch_of(record: RunRecord) -> list[Part]:
    """Hardware, versions and launch of the last start."""
    facts = record.environment
    if not facts:
        raise LeftOut(record.reasons.get(ENVIRONMENT, f"{ENVIRONMENT} is empty"))
    names = (
        "strategy",
        "engine",
        "num_processes",
        "precision",
        "device",
        "threads",
        "placement",
        "num_parameters",
        "updated_per_process",
        "host",
        "git_commit",
        "slurm_job_id",
        "text_key",
        "working_directory",
    )
    rows = [
        (name.replace("_", " "), f"{value:,}" if type(value) is int else str(value))
        for name in names
        if (value := facts.get(name)) is not None
    ]
    versions = facts.get("versions")
    if isinstance(versions, dict):
        found = [f"{name} {version}" for name, version in versions.items() if isinstance(version, str)]
        rows.append(("versions", ", ".join(found[:MAX_ROWS])))
    command = [word for word in listed(facts, "launch_command") if isinstance(word, str)]
    rows += [("note", note) for note in listed(facts, "notes") if isinstance(note, str)]
    parts: list[Part] = [Grid(("", ""), [(name, cut(text, 2000)) for name, text in rows])]
    if command:
        parts.append(Verbatim(cut(" ".join(command)), "launch command"))
    return parts
