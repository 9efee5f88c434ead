"""Proof in a report: the ledger, the checkpoint of each resume, the engine, and checks computed from the files now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from acc_lm.reporting.report_parts import Check, Grid, Pairs, Paragraph, Part
from acc_lm.reporting.run_record import RunRecord, SavedState, StartOfRun, changed_keys, listed, number, words
from acc_lm.run_files.names import ENVIRONMENT, RECIPE, SUMMARY

MAX_CASES = 60
"""Rows of a parity table that are shown."""


def proof_of(record: RunRecord) -> list[Part]:
    """Ledger and checks that show that the run is what its files say, each computed from the files now."""
    parts: list[Part] = []
    ledger = ledger_of(record)
    if ledger:
        parts.append(Pairs([("ledger", ledger[1]), ("of step", f"{ledger[0]:,}")]))
        parts.append(
            Paragraph(
                "The ledger is a running hash of all rows trained on, in order: two runs with the same one saw the same rows."
            )
        )
    parts += [
        check
        for check in (
            _check_engine(record),
            _check_steps(record),
            _check_checkpoints(record),
            _check_text(record),
            _check_recipe(record),
            _check_ledger(record),
            *(_check_resume(record, start) for start in record.starts if start.step > 0),
            _check_skipped(record),
            _check_final(record),
        )
        if check is not None
    ]
    if rows := listed(record.parity, "rows"):
        parts += parity_table(record.parity, rows)
    return parts or [Paragraph("left out: the run has written nothing that could be checked")]


def ledger_of(record: RunRecord) -> tuple[int, str] | None:
    """(step, ledger) of the newest state that has one."""
    known = [(saved.step, saved.ledger) for saved in record.checkpoints if saved.ledger]
    if words(record.summary, "ledger") and (step := number(record.summary, "step")) is not None:
        known.append((int(step), words(record.summary, "ledger")))
    return max(known, default=None)


def _check_engine(record: RunRecord) -> Check | None:
    facts = record.environment
    total, processes = number(facts, "num_parameters"), number(facts, "num_processes")
    kept = [value for value in listed(facts, "parameters_per_process") if isinstance(value, int)]
    if not words(facts, "engine") or total is None or processes is None:
        return Check("engine", None, record.reasons.get(ENVIRONMENT, f"{ENVIRONMENT} does not name it"))
    met = len(kept) == processes and sum(kept) >= total
    text = (
        f"{words(facts, 'strategy')} ran on {words(facts, 'engine')}, {processes:.0f} process{'es' * (processes != 1)}: {words(facts, 'placement')}; "
        f"together they keep {sum(kept):,} parameters of a model of {total:,.0f}"
    )
    return Check("engine", met, text)


def _check_steps(record: RunRecord) -> Check | None:
    if not record.columns.num_lines:
        return None
    tokens = record.columns.curve("train/tokens").values
    met = record.columns.is_in_order and bool(np.all(np.diff(tokens) > 0))
    count = len(record.columns.curve("train/loss"))
    return Check("record", met, f"{count:,} logged steps, each once and in order; the tokens grow with each")


def _check_checkpoints(record: RunRecord) -> Check | None:
    if not record.checkpoints:
        return None
    bad = [f"{saved.folder.name}: {saved.problem}" for saved in record.checkpoints if saved.problem]
    what = (
        f"{len(record.checkpoints)} on disk, steps {', '.join(str(saved.step) for saved in record.checkpoints[-10:])}"
    )
    return Check(
        "checkpoints", not bad, "; ".join([f"{what}, by size, header and the checksum of their state", *bad[:5]])
    )


def _check_text(record: RunRecord) -> Check | None:
    states = [saved.state for saved in record.checkpoints if saved.state]
    keys = {(words(state, "data_key"), words(state, "vocabulary")) for state in states}
    if not keys:
        return None
    text = ", ".join(sorted({key for key, _ in keys}))
    return Check("text", len(keys) == 1, f"all checkpoints are of the same text and tokenizer: {text}")


def _check_recipe(record: RunRecord) -> Check | None:
    if not record.recipe or not (saved := newest(record)) or not isinstance(saved.state.get("recipe"), dict):
        return None
    changes = changed_keys(saved.state["recipe"], record.recipe)
    text = f"{RECIPE} is the recipe of {saved.folder.name}"
    if changes:
        text = f"{RECIPE} differs from the recipe of {saved.folder.name} in {', '.join(changes[:5])}"
    return Check("recipe", not changes, text)


def newest(record: RunRecord) -> SavedState | None:
    """Newest complete checkpoint."""
    return next((saved for saved in reversed(record.checkpoints) if saved.state), None)


def _check_ledger(record: RunRecord) -> Check | None:
    ledger, step = words(record.summary, "ledger"), number(record.summary, "step")
    saved = next((saved for saved in record.checkpoints if saved.state and saved.step == step), None)
    if not ledger or saved is None:
        return None
    return Check("ledger", saved.ledger == ledger, f"{SUMMARY} and {saved.folder.name} have the same one")


def _check_resume(record: RunRecord, start: StartOfRun) -> Check:
    """The checkpoint that a start resumed from, compared with the one on disk if it is still there."""
    path, ledger = words(start.facts, "checkpoint"), words(start.facts, "ledger")
    name = f"resume at step {start.step:,}"
    if not path:
        return Check(name, None, f"{ENVIRONMENT} does not name its checkpoint")
    saved = next((saved for saved in record.checkpoints if str(saved.folder.resolve()) == path and saved.state), None)
    text = f"from {path}, {words(start.facts, 'checked')} before it was loaded, ledger {ledger}"
    if saved is None:
        return Check(name, None, f"{text}; no longer on disk")
    return Check(name, saved.ledger == ledger, f"{text}; the one on disk has the same ledger")


def _check_skipped(record: RunRecord) -> Check | None:
    skipped = record.columns.curve("train/skipped_steps")
    if not len(skipped):
        return None
    count = max(skipped.values.max(), sum("skipped" in text for _, text in record.events))
    spikes = sum("spike" in text for _, text in record.events)
    return Check(
        "numbers",
        not count and not spikes,
        f"{count:,.0f} steps skipped for a non-finite gradient, {spikes:,} loss spikes",
    )


def _check_final(record: RunRecord) -> Check | None:
    step, exported = number(record.final, "step"), number(record.summary, "exported_step")
    if step is None or exported is None:
        return None
    return Check("final/", step == exported, f"holds the weights of step {step:,.0f}, as {SUMMARY} says")


def parity_table(values: dict[str, Any], rows: Sequence[Any]) -> list[Part]:
    """Table of `acc-lm parity`, if it was written into the run's folder."""
    tolerance = values.get("tolerance")
    cells = []
    for row in rows[:MAX_CASES]:
        if isinstance(row, dict):
            differences = row.get("differences")
            found = [
                number(differences, f"{kind}/{name}")
                for kind, name in (("train", "loss"), ("train", "grad_norm"), ("eval", "loss"))
            ]
            texts = ["" if value is None else f"{value:.0e}" for value in found]
            same = "the same" if row.get("same_ledger") is True else "OTHER"
            problem = words(row, "problem")
            cells.append((words(row, "name"), words(row, "engine") or problem, *texts, same))
    bound = number(tolerance, "train/loss")
    made = "; ".join(text for text in (words(values, "command"), words(values, "made")) if text)
    note = f"Table of {made}." + (f" Tolerance of the loss: {bound:g}." if bound is not None else "")
    head = ("config, processes", "engine", "loss", "gradient norm", "evaluation", "rows")
    return [Paragraph(note), Grid(head, cells)]
