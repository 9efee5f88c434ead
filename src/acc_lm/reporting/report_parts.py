"""Parts of a report, the same for a page of HTML and for Markdown. Their texts are raw: each writer escapes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from acc_lm.run_files.charts import Chart, Mark


@dataclass(frozen=True)
class Paragraph:
    text: str
    is_bad: bool = False
    """True for what a reader must not overlook: a failure, runs that part."""


@dataclass(frozen=True)
class Pairs:
    """Names with short values, such as the figures at the top."""

    pairs: list[tuple[str, str]]


@dataclass(frozen=True)
class Grid:
    """Table; columns of numbers are aligned by their writer."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Bars:
    """Shares as bars: (name, share from 0 to 1, text)."""

    rows: list[tuple[str, float, str]]


@dataclass(frozen=True)
class Verbatim:
    """Text with its own line breaks."""

    text: str
    label: str = ""


@dataclass(frozen=True)
class Check:
    """Statement about a run, and whether the files show it; None: they cannot show it."""

    name: str
    is_met: bool | None
    text: str


@dataclass(frozen=True)
class Figures:
    charts: Sequence[Chart]
    marks: Sequence[Mark]
    x_label: str


@dataclass(frozen=True)
class Folded:
    """Parts that a reader opens when wanted."""

    label: str
    parts: list[Part]


Part = Paragraph | Pairs | Grid | Bars | Verbatim | Check | Figures | Folded


@dataclass(frozen=True)
class Block:
    """Titled section of a report."""

    title: str
    parts: list[Part] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    title: str
    blocks: list[Block]
    is_live: bool = False
    made: str = ""
    """Line about when and by which version the report was made."""
