"""A report as Markdown, for an issue or a page of documentation; its curves are a picture next to it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from acc_lm.redaction import printable, redact
from acc_lm.reporting.report_parts import (
    Bars,
    Check,
    Figures,
    Folded,
    Grid,
    Pairs,
    Paragraph,
    Part,
    Report,
    Verbatim,
)

MARKUP = re.compile(r"([\\`*_{}\[\]<>()#|~!&])")
SIGNS = {True: "✓", False: "✗", None: "·"}


def as_markdown(report: Report, picture: str) -> str:
    """Report as Markdown.

    Args:
        picture: path of the picture with the curves, from the Markdown file.
    """
    lines = [f"# {plain(report.title)}", ""]
    for block in report.blocks:
        if block.title:
            lines += [f"## {plain(block.title)}", ""]
        for part in block.parts:
            lines += [*_lines(part, picture), ""]
    return "\n".join([*lines, plain(report.made), ""])


def plain(text: str) -> str:
    """Text of a run on one line, in which nothing is markup."""
    return MARKUP.sub(r"\\\1", printable(redact(" ".join(text.split()))))


def _lines(part: Part, picture: str) -> Iterator[str]:
    match part:
        case Paragraph():
            yield f"**{plain(part.text)}**" if part.is_bad else plain(part.text)
        case Pairs():
            yield from _table(("", ""), part.pairs)
        case Grid():
            yield from _table(part.head, part.rows)
        case Bars():
            yield from _table(("", ""), [(name, text) for name, _, text in part.rows])
        case Check():
            yield f"- {SIGNS[part.is_met]} {plain(part.name)}: {plain(part.text)}"
        case Verbatim():
            text = printable(redact(part.text), keep="\n\t")
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            yield from ([plain(part.label), ""] if part.label else [])
            yield from (fence, text, fence)
        case Figures():
            yield f"![curves](<{picture}>)"
        case Folded():
            yield from ("<details><summary>" + plain(part.label) + "</summary>", "")
            for inner in part.parts:
                yield from (*_lines(inner, picture), "")
            yield "</details>"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(map(plain, head))} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(map(plain, row))} |"
