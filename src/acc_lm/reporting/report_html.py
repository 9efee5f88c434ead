"""A report as one page of HTML: no outside file, no text of a run taken as markup, readable on a phone and on paper."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence

from acc_lm.redaction import printable, redact
from acc_lm.reporting.chart_svg import as_svg
from acc_lm.reporting.report_parts import (
    Bars,
    Block,
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
PAGE_STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8882; --bad: #cf4646; --good: #2f9e55; }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 82rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.35rem; margin: .2rem 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; border-bottom: 1px solid var(--line); }
p { margin: .4rem 0; overflow-wrap: anywhere; } .bad { color: var(--bad); font-weight: 600; }
nav { font-size: 13px; margin-bottom: .8rem; display: flex; flex-wrap: wrap; gap: .2rem .8rem; }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .5rem; margin: 0; }
.pairs div { background: var(--soft); border-radius: 6px; padding: .35rem .6rem; }
dt { font-size: 12px; opacity: .75; } dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 1rem; }
figure { margin: 0; break-inside: avoid; } figcaption { font-weight: 600; }
figcaption small, .legend, footer, .unit { font-weight: 400; font-size: 12px; opacity: .8; }
svg { width: 100%; height: auto; display: block; touch-action: pan-y; } svg text { font-size: 11px; fill: currentColor; }
svg text.star { font-size: 16px; text-anchor: middle; fill: #2f9e55; } svg .note { font-size: 10px; opacity: .8; }
.grid { stroke: var(--line); stroke-width: .5; } .axis { stroke: currentColor; stroke-width: 1; }
.line { fill: none; stroke-width: 1.8; } .faint { fill: none; stroke-width: 1; opacity: .38; }
.level { stroke: currentColor; stroke-width: 1; } .mark { stroke: currentColor; stroke-dasharray: 2 3; }
.legend span { margin-right: .8rem; white-space: nowrap; } .legend i { display: inline-block; width: 1.1em; height: 3px; vertical-align: middle; margin-right: .3em; }
.value { font: 12px ui-monospace, monospace; min-height: 1.3em; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; }
td, th { text-align: left; vertical-align: top; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--soft); overflow-wrap: break-word; max-width: 30rem; }
td:last-child { overflow-wrap: anywhere; } th { font-size: 12px; opacity: .75; white-space: nowrap; } td { min-width: 4.5rem; font-variant-numeric: tabular-nums; }
.bars { max-width: 44rem; font-size: 14px; } .bars p { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; margin: .3rem 0 0; }
.bars b { display: block; height: .5em; min-width: 1px; background: #2f7ebc; border-radius: 2px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
pre { font: 13px/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0 .6rem; padding: .4rem .6rem; border-left: 3px solid var(--line); background: var(--soft); max-height: 18rem; overflow: auto; }
.label { font-size: 12px; opacity: .75; } .check { display: flex; gap: .5rem; font-size: 14px; } .check > :first-child { flex: 0 0 1.2em; }
.check span + span { min-width: 0; overflow-wrap: anywhere; } .good { color: var(--good); } details { margin: .3rem 0; } summary { cursor: pointer; font-size: 14px; }
@media print { body { max-width: none; font-size: 11px; } nav, .value { display: none; } .charts { grid-template-columns: repeat(3, minmax(0, 1fr)); } h2 { break-after: avoid; } pre { max-height: none; } }
"""
SCRIPT = """
for (const svg of document.querySelectorAll('svg[data-scale]')) {
  const [x0, x1, y0, y1, log] = svg.dataset.scale.split(' ').map(Number), out = svg.nextElementSibling;
  const lines = [...svg.querySelectorAll('polyline')].map(line => [line.dataset.name, [...line.points].map(p => [p.x, p.y])]);
  const show = value => Number(value.toPrecision(5)).toString();
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * W;
    const near = lines.map(([name, points]) => [name, points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)]);
    if (!near.length) return;
    const x = x0 + (near[0][1][0] - L) / (W - R - L) * (x1 - x0);
    out.textContent = show(x) + ': ' + near.map(([name, p]) => {
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
    """Complete page; its policy lets a browser run no script but the one here, and load nothing."""
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
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = safe(report.title)
    refresh = f'<meta http-equiv=refresh content="{REFRESH_SECONDS}">' if report.is_live else ""
    named = [(f"s{number}", block) for number, block in enumerate(report.blocks)]
    links = " ".join(f'<a href="#{mark}">{safe(block.title)}</a>' for mark, block in named if block.title)
    return "\n".join(
        [
            f'<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=Content-Security-Policy content="{policy}">',
            f'<meta name=viewport content="width=device-width, initial-scale=1">{refresh}<title>{title}</title>',
            f"<style>{PAGE_STYLE}</style>",
            f"<h1>{title}</h1><nav>{links}</nav>",
            *(_as_section(mark, block) for mark, block in named),
            f"<footer><p>{safe(report.made)}</p></footer>",
            f"<script>{script}</script>",
            "",
        ]
    )


def safe(text: str, keep: str = "") -> str:
    """Text of a run as text of a page: no secret, no control character, no markup."""
    return html.escape(printable(redact(text), keep=keep))


def _as_section(mark: str, block: Block) -> str:
    title = f"<h2>{safe(block.title)}</h2>" if block.title else ""
    return f"<section id={mark}>{title}{''.join(map(_as_part, block.parts))}</section>"


def _as_part(part: Part) -> str:
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
            return f"<details><summary>{safe(part.label)}</summary>{''.join(map(_as_part, part.parts))}</details>"


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
    legend += ["<span>┊ resumed</span>"] if marks else []
    scale = " (logarithmic)" if chart.is_log else ""
    unit = f" <small>{safe(chart.unit)}{scale}</small>" if chart.unit or scale else ""
    picture = as_svg(_cleaned(chart), [Mark(mark.x, printable(redact(mark.label))) for mark in marks], chart.title)
    return (
        f"<figure><figcaption>{safe(chart.title)}{unit}</figcaption>{picture}"
        f"<div class=value></div><div class=legend>{''.join(legend)}</div></figure>"
    )


def _cleaned(chart: Chart) -> Chart:
    """Chart whose names are safe to print; the drawing escapes its markup."""
    from dataclasses import replace

    return replace(chart, lines=tuple(replace(line, label=printable(redact(line.label))) for line in chart.lines))
