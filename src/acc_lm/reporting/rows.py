"""Rows of a run as text, in a terminal or as HTML: documents apart, targets marked, cuts and padding visible."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

from acc_lm.data import ShownRow
from acc_lm.redaction import printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GUTTER = {True: "learned", False: "given"}
COLORS = {True: "\033[32m", False: "\033[2m"}
RESET = "\033[0m"
MARKS = "‹", "›"
"""Marks around special tokens, which a text can spell but not be."""
BAR = 40  # characters of the longest bar of a histogram
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre, .document { font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.document { border-left: 3px solid #8888; margin: .5rem 0; padding-left: .7rem; }
.learned { background: #2a72; color: inherit; } .given { opacity: .65; }
.note { font-size: 13px; opacity: .75; } h2 { font-size: 1rem; margin: 2rem 0 .3rem; }
:root { color-scheme: light dark; }
"""


@dataclass(frozen=True)
class Span:
    """Consecutive ids of a document that are all targets, or all given."""

    ids: list[int]
    texts: list[str]
    """Text of each id; put together they may differ from the text of the span, where a character has several ids."""
    text: str
    is_learned: bool


def _spans(ids: list[int], flags: list[bool], tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    special = set(tokenizer.all_special_ids)
    edges = [0, *(k for k in range(1, len(ids)) if flags[k] != flags[k - 1]), len(ids)]

    def text(some: list[int]) -> str:
        parts = groupby(some, key=lambda token: token in special)
        return "".join(f"{MARKS[0]}{decode(run)}{MARKS[1]}" if is_special else decode(run) for is_special, run in parts)

    def decode(some: Iterable[int]) -> str:
        return str(tokenizer.decode(list(some), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return [
        Span(ids[first:last], [text([token]) for token in ids[first:last]], text(ids[first:last]), flags[first])
        for first, last in pairwise(edges)
    ]


# --- terminal ------------------------------------------------------------------------------------------------------


def as_text(row: ShownRow, tokenizer: PreTrainedTokenizerBase, *, with_ids: bool, in_color: bool) -> str:
    """A row for a terminal: each line begins with `given` or `learned`."""
    lines = [row.title, *(f"  {note}" for note in row.notes)]
    for number, document in enumerate(row.documents, start=1):
        lines.append(f"  -- document {number}")
        for span in _spans(*document, tokenizer):
            if with_ids:
                shown = [f"{token:>7}  '{printable(text)}'" for token, text in zip(span.ids, span.texts, strict=True)]
            else:
                shown = printable(span.text, keep="\n\t").split("\n")
            before, after = (COLORS[span.is_learned], RESET) if in_color else ("", "")
            lines += [f"  {GUTTER[span.is_learned]:>7} | {before}{line}{after}" for line in shown]
    return "\n".join(lines)


def histogram(lengths: np.ndarray, limit: int | None, unit: str) -> list[str]:
    """Lines of a histogram of lengths in ids, on a scale of powers of two; longer ones than `limit` are cut."""
    edges = 1 << np.arange(int(lengths.max()).bit_length() + 1)
    first = int(np.searchsorted(edges, lengths.min(), side="right")) - 1
    counts = np.histogram(lengths, np.append(edges[first:-1], edges[-1] + 1))[0]
    lines = [f"{unit} by length in tokens: median {int(np.median(lengths)):,}, longest {lengths.max():,}"]
    for low, high, count in zip(edges[first:-1], edges[first + 1 :], counts, strict=True):
        bar = "#" * int(np.ceil(BAR * count / counts.max()))
        lines.append(f"  {low:>9,} to {high - 1:>9,}  {count:>9,}  {bar}".rstrip())
    if limit is not None and (cut := int((lengths > limit).sum())):
        enough = int(np.quantile(lengths, 0.99, method="higher")) - 1
        lines.append(
            f"  data.sequence_length {limit - 1:,} cuts {cut:,} of them ({cut / len(lengths):.1%}); {enough:,} would fit 99%"
        )
    return lines


# --- HTML ----------------------------------------------------------------------------------------------------------


def as_html(
    title: str, facts: list[str], rows: list[ShownRow], tokenizer: PreTrainedTokenizerBase, *, with_ids: bool
) -> str:
    """A page of its own with the same content, where targets have a coloured background."""
    parts = [f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"]
    parts += [
        f"<h1>{html.escape(title)}</h1>",
        f"<pre>{html.escape(printable(chr(10).join(facts), keep=chr(10)))}</pre>",
    ]
    parts.append(
        "<p class=note><span class=learned>learned</span>, <span class=given>given</span>; ‹special token›</p>"
    )
    for row in rows:
        parts.append(f"<h2>{html.escape(row.title)}</h2>")
        parts += [f"<p class=note>{html.escape(note)}</p>" for note in row.notes]
        for document in row.documents:
            parts.append(
                "<div class=document>"
                + "".join(_as_span(span, with_ids) for span in _spans(*document, tokenizer))
                + "</div>"
            )
    return "\n".join(parts) + "\n"


def _as_span(span: Span, with_ids: bool) -> str:
    kind = GUTTER[span.is_learned]
    if not with_ids:
        return f"<span class={kind}>{html.escape(printable(span.text, keep=chr(10) + chr(9)))}</span>"
    return "".join(
        f'<span class={kind} title="{token}">{html.escape(printable(text, keep=chr(10)))}</span>'
        for token, text in zip(span.ids, span.texts, strict=True)
    )
