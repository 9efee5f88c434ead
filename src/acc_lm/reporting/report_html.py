"""A report as one page of HTML: no outside file, no text of a run taken as markup, readable on a phone and on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from acc_lm.redaction import printable, redact
from acc_lm.reporting.chart_svg import as_svg
from acc_lm.reporting.html_page import as_document, safe
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
from acc_lm.run_files.charts import Chart, Mark
from acc_lm.run_files.curves import PALETTE

REFRESH_SECONDS = 30
"""Seconds after which a browser loads the page of a running run again."""
SCRIPT = """
for (const svg of document.querySelectorAll('svg[data-scale]')) {
  const [x0, x1, y0, y1, log, doubles] = svg.dataset.scale.split(' ').map(Number), out = svg.nextElementSibling;
  const lines = [...svg.querySelectorAll('polyline')].map(line => [line.dataset.name, [...line.points].map(p => [p.x, p.y])]);
  const show = value => Number(value.toPrecision(5)).toString();
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * W;
    const near = lines.map(([name, points]) => [name, points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)]);
    if (!near.length) return;
    const x = x0 + (near[0][1][0] - L) / (W - R - L) * (x1 - x0);
    out.textContent = show(doubles ? 2 ** x : x) + ': ' + near.map(([name, p]) => {
      const y = y0 + (H - B - p[1]) / (H - B - T) * (y1 - y0);
      return name + ' ' + show(log ? 10 ** y : y);
    }).join(', ');
  });
  svg.addEventListener('pointerleave', () => { out.textContent = ''; });
}
addEventListener('beforeprint', () => { for (const part of document.querySelectorAll('details')) part.open = true; });
"""
"""The value under the pointer, and everything open on paper; the page is complete without it."""


def as_page(report: Report) -> str:
    """Complete page of a report."""
    sections = [(block.title, "".join(map(as_element, block.parts))) for block in report.blocks]
    refresh = REFRESH_SECONDS if report.is_live else None
    return as_document(report.title, sections, report.made, chart_script(), refresh_seconds=refresh)


def chart_script() -> str:
    """Script of a page with charts: the value under the pointer, and everything open on paper."""
    from acc_lm.reporting import chart_svg as svg

    script = SCRIPT
    for name, value in {
        "W": svg.CHART_WIDTH,
        "H": svg.CHART_HEIGHT,
        "L": svg.LEFT,
        "R": svg.RIGHT,
        "T": svg.TOP,
        "B": svg.BOTTOM,
    }.items():
        script = f"const {name} = {value};{script}"
    return script


def as_element(part: Part) -> str:
    """Part of a report as HTML."""
    match part:
        case Paragraph():
            return f"<p{' class=bad' * part.is_bad}>{safe(part.text)}</p>"
        case Pairs():
            return (
                "<dl class=pairs>"
                + "".join(f"<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd></div>" for name, value in part.pairs)
                + "</dl>"
            )
        case Grid():
            return _as_table(part)
        case Bars():
            return f"<div class=bars>{''.join(_as_bar(*row) for row in part.rows)}</div>"
        case Verbatim():
            label = f"<div class=label>{safe(part.label)}</div>" if part.label else ""
            return f"{label}<pre>{safe(part.text, keep=chr(10) + chr(9))}</pre>"
        case Check():
            sign = {True: "<span class=good>✓</span>", False: "<span class=bad>✗</span>", None: "<span>·</span>"}[
                part.is_met
            ]
            return f"<div class=check>{sign}<span><b>{safe(part.name)}</b>: {safe(part.text)}</span></div>"
        case Figures():
            return f"<p class=unit>By {safe(part.x_label)}.</p><div class=charts>{''.join(_as_figure(chart, part.marks) for chart in part.charts)}</div>"
        case Folded():
            return f"<details><summary>{safe(part.label)}</summary>{''.join(map(as_element, part.parts))}</details>"


def _as_bar(name: str, share: float, text: str) -> str:
    return f'<p><span>{safe(name)}</span><span>{safe(text)}</span></p><b style="width:{100 * share:.1f}%"></b>'


def _as_table(grid: Grid) -> str:
    head = "".join(f"<th>{safe(cell)}</th>" for cell in grid.head) if any(grid.head) else ""
    rows = "".join("<tr>" + "".join(f"<td>{safe(cell)}</td>" for cell in row) + "</tr>" for row in grid.rows)
    return f"<div class=wide><table><tr>{head}</tr>{rows}</table></div>"


def _as_figure(chart: Chart, marks: Sequence[Mark]) -> str:
    def swatch(color: str, name: str, style: str = "") -> str:
        return f'<span><i style="background:{color}{style}"></i>{safe(name)}</span>'

    legend = [
        swatch(PALETTE[line.color % len(PALETTE)], line.label, ";opacity:.4" * line.is_faint) for line in chart.lines
    ]
    legend += [f"<span>╌ {safe(level.label)}</span>" for level in chart.levels]
    legend += [f"<span>★ {safe(chart.star.label)}</span>"] if chart.star else []
    several = ", in the colour of the run" * any(mark.color is not None for mark in marks)
    legend += [f"<span>┊ resumed{several}</span>"] if marks else []
    scale = " (logarithmic)" if chart.is_log else ""
    unit = f" <small>{safe(chart.unit)}{scale}</small>" if chart.unit or scale else ""
    picture = as_svg(
        _cleaned(chart), [replace(mark, label=printable(redact(mark.label))) for mark in marks], chart.title
    )
    return (
        f"<figure><figcaption>{safe(chart.title)}{unit}</figcaption>{picture}"
        f"<div class=value></div><div class=legend>{''.join(legend)}</div></figure>"
    )


def _cleaned(chart: Chart) -> Chart:
    """Chart whose names are safe to print; the drawing escapes its markup."""
    return replace(chart, lines=tuple(replace(line, label=printable(redact(line.label))) for line in chart.lines))
