"""Frame of a page: one file of HTML with its style and one script, which loads nothing and in which no text is markup."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence

from acc_lm.redaction import printable, redact

PAGE_STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8882; --bad: #cf4646; --good: #2f9e55; }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 82rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.35rem; margin: .2rem 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
p { margin: .4rem 0; overflow-wrap: anywhere; } .bad { color: var(--bad); font-weight: 600; }
nav { font-size: 13px; margin-bottom: .8rem; display: flex; flex-wrap: wrap; gap: .2rem .8rem; } nav a { min-width: 0; overflow-wrap: anywhere; }
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
.legend span { display: inline-block; margin-right: .8rem; overflow-wrap: anywhere; } .legend i { display: inline-block; width: 1.1em; height: 3px; vertical-align: middle; margin-right: .3em; }
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


def as_document(
    title: str,
    sections: Sequence[tuple[str, str]],
    made: str,
    script: str,
    *,
    style: str = "",
    refresh_seconds: int | None = None,
) -> str:
    """Complete page; its policy lets a browser run no script but the one here, and load nothing.

    Args:
        sections: title of each section, as raw text, and its HTML.
        style: rules in addition to those of all pages.
        refresh_seconds: time after which a browser loads the page again; None: never.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    refresh = "" if refresh_seconds is None else f'<meta http-equiv=refresh content="{refresh_seconds}">'
    links = " ".join(f'<a href="#s{number}">{safe(name)}</a>' for number, (name, _) in enumerate(sections) if name)
    return "\n".join(
        [
            f'<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=Content-Security-Policy content="{policy}">',
            f'<meta name=viewport content="width=device-width, initial-scale=1">{refresh}<title>{safe(title)}</title>',
            f"<style>{PAGE_STYLE}{style}</style>",
            f"<h1>{safe(title)}</h1><nav>{links}</nav>",
            *(
                f"<section id=s{number}>{f'<h2>{safe(name)}</h2>' if name else ''}{content}</section>"
                for number, (name, content) in enumerate(sections)
            ),
            f"<footer><p>{safe(made)}</p></footer>",
            f"<script>{script}</script>",
            "",
        ]
    )


def safe(text: str, keep: str = "") -> str:
    """Text of a run or a recipe as text of a page: no secret, no control character, no markup."""
    return html.escape(printable(redact(text), keep=keep))
