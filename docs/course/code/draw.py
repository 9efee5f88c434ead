"""Pictures of the course as SVG files, in English and in Traditional Chinese, readable on light and on dark pages.

    python docs/course/code/draw.py                     # all pictures, into docs/course/pictures
    python docs/course/code/draw.py --measured FOLDER   # first take the JSON files that the commands of theory.md left there

Pictures that show data read what docs/course/code/overlap.py, all_reduce.py and wrong_curves.py have measured, from the JSON files in
the same folder. Each file has its own background in both colour schemes, so it is readable where a page has another one.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drawn_in_chinese import CHINESE

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
WIDTH = 480
LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "soft": "#5b6470",
    "line": "#c3c9d1",
    "blue": "#1d5fd1",
    "red": "#c4320a",
    "green": "#1a7f37",
    "violet": "#7c3aed",
    "wash-blue": "#dbe8ff",
    "wash-red": "#ffe2d6",
    "wash-green": "#d9f5df",
    "wash-grey": "#eef0f3",
}
DARK = {
    "paper": "#161b22",
    "ink": "#e6edf3",
    "soft": "#a4adb8",
    "line": "#48505a",
    "blue": "#79b0ff",
    "red": "#ff9a6b",
    "green": "#63d47b",
    "violet": "#c39bff",
    "wash-blue": "#1c3560",
    "wash-red": "#5a2a17",
    "wash-green": "#173f24",
    "wash-grey": "#252c35",
}


def style() -> str:
    """Colours as CSS variables of both schemes, and classes that use them."""
    light, dark = ("".join(f"--{name}:{value};" for name, value in colours.items()) for colours in (LIGHT, DARK))
    fills = "".join(f".f-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name});fill:none}}" for name in LIGHT)
    return (
        f"<style>svg{{{light}}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}{fills}"
        "text{font-family:system-ui,-apple-system,'Segoe UI','Noto Sans TC','Noto Sans CJK TC',sans-serif;font-size:15px}"
        ".small{font-size:13.5px}.bold{font-weight:600}</style>"
    )


class Picture:
    """An SVG file of a fixed width, to which shapes are added from back to front.

    Args:
        title: what the picture shows, for readers who hear it.
        language: `en` or `zh-TW`; every text is looked up in `CHINESE` for the second.
    """

    def __init__(self, title: str, height: float, language: str) -> None:
        self.language, self.height, self.title = language, height, title
        self.parts: list[str] = []

    def words(self, text: str) -> str:
        if self.language == "en" or not any(letter.isalpha() for letter in text):
            return text
        return CHINESE[text]

    def text(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = "ink",
        anchor: str = "start",
        kind: str = "",
        as_is: bool = False,
    ) -> None:
        shown = html.escape(text if as_is else self.words(text))
        self.parts.append(
            f'<text class="f-{colour} {kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{shown}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "wash-grey",
        edge: str = "line",
        radius: float = 4,
        note: str = "",
    ) -> None:
        inside = f"<title>{html.escape(note)}</title>" if note else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" rx="{radius}" class="f-{fill}" '
            f'style="stroke:var(--{edge})">{inside}</rect>'
        )

    def bar(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A box without an edge."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.2f}" height="{height:.1f}" class="f-{fill}"/>'
        )

    def line(
        self, points: Sequence[tuple[float, float]], colour: str = "soft", width: float = 1.5, dash: str = ""
    ) -> None:
        placed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<polyline points="{placed}" class="s-{colour}" stroke-width="{width}"{dashed}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str = "soft", width: float = 1.8) -> None:
        angle = math.atan2(y2 - y1, x2 - x1)
        stop_x, stop_y = x2 - 7 * math.cos(angle), y2 - 7 * math.sin(angle)
        self.line([(x1, y1), (stop_x, stop_y)], colour, width)
        corners = [(x2, y2)]
        corners += [(x2 - 9 * math.cos(angle + side), y2 - 9 * math.sin(angle + side)) for side in (0.45, -0.45)]
        placed = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self.parts.append(f'<polygon points="{placed}" class="f-{colour}"/>')

    def dot(self, x: float, y: float, colour: str, radius: float = 3.5) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="f-{colour}"/>')

    def save(self, folder: Path, name: str) -> None:
        title = html.escape(self.words(self.title))
        text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.height:.0f}" viewBox="0 0 {WIDTH} {self.height:.0f}" '
            f'role="img" aria-label="{title}"><title>{title}</title>{style()}'
            f'<rect width="{WIDTH}" height="{self.height:.0f}" rx="8" class="f-paper"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )
        suffix = "" if self.language == "en" else f".{self.language}"
        (folder / f"{name}{suffix}.svg").write_text(text)


# --- diagrams ------------------------------------------------------------------------------------------------------


def batch(folder: Path, language: str) -> None:
    """The way of a batch, from text to the update of the weights."""
    p = Picture("The way of a batch", 560, language)
    stages = [
        ("documents", "files, datasets or conversations"),
        ("rows of ids", "encoded once, kept on disk"),
        ("global batch of step k", "a function of seed and k alone"),
    ]
    for i, (name, note) in enumerate(stages):
        y = 16 + 62 * i
        p.box(100, y, 280, 44, "wash-grey")
        p.text(240, y + 19, name, anchor="middle", kind="bold")
        p.text(240, y + 37, note, "soft", "middle", "small")
        if i:
            p.arrow(240, y - 18, 240, y)
    for number in range(8):
        p.box(100 + 35.3 * number, 206, 31, 22, "wash-blue" if number < 4 else "wash-green")
        p.text(115 + 35.3 * number, 222, str(number + 1), anchor="middle", kind="small")
    p.arrow(240, 186, 240, 204)
    for process, (x, fill) in enumerate(((16, "wash-blue"), (252, "wash-green"))):
        p.arrow(170 if process == 0 else 311, 230, x + 106, 252)
        p.box(x, 254, 212, 132, "paper")
        p.text(x + 106, 274, f"process {process}", anchor="middle", kind="bold")
        for micro in range(2):
            y = 284 + 34 * micro
            for row in range(2):
                p.box(x + 12 + 33 * row, y, 29, 22, fill)
                p.text(x + 26 + 33 * row, y + 16, str(1 + 4 * process + 2 * micro + row), anchor="middle", kind="small")
            p.text(x + 84, y + 16, "summed loss", "soft", kind="small")
        p.text(x + 106, 372, "backward: sum of gradients", anchor="middle", kind="small")
        p.arrow(x + 106, 388, 180 if process == 0 else 300, 412)
    p.box(80, 414, 320, 44, "wash-red", "red")
    p.text(240, 433, "all-reduce of the gradients", anchor="middle", kind="bold")
    p.text(240, 451, "divided once, by all targets of the batch", "soft", "middle", "small")
    p.arrow(240, 460, 240, 480)
    p.box(80, 482, 320, 62, "wash-grey")
    p.text(240, 502, "clip, update, next step", anchor="middle", kind="bold")
    p.text(240, 520, "every process computes the same update,", "soft", "middle", "small")
    p.text(240, 537, "so the copies stay equal", "soft", "middle", "small")
    p.save(folder, "batch")


def data_parallel(folder: Path, language: str) -> None:
    """DataParallel: one process, everything passes through GPU 0."""
    p = Picture("DataParallel: one process, everything passes through GPU 0", 400, language)
    p.box(10, 12, 460, 376, "paper", radius=8)
    p.text(22, 32, "one process, one Python interpreter", "soft", kind="small")
    p.box(150, 44, 180, 128, "wash-red", "red")
    p.text(240, 64, "GPU 0", anchor="middle", kind="bold")
    for i, line in enumerate(("model, optimizer", "all outputs, the loss", "sum of all gradients", "its own rows")):
        p.text(240, 86 + 20 * i, line, anchor="middle", kind="small")
    for i in range(3):
        x = 22 + 148 * i
        p.box(x, 252, 140, 70, "wash-blue", "blue")
        p.text(x + 70, 273, f"GPU {i + 1}", anchor="middle", kind="bold")
        p.text(x + 70, 293, "a copy for a step", anchor="middle", kind="small")
        p.text(x + 70, 311, "its rows", anchor="middle", kind="small")
        start = 190 + 50 * i
        p.arrow(start - 7, 174, x + 62, 250, "blue")
        p.arrow(x + 78, 250, start + 9, 174, "red")
    p.text(22, 148, "1 scatter", "blue", kind="small")
    p.text(22, 168, "2 replicate", "blue", kind="small")
    p.text(458, 148, "4 gather", "red", "end", "small")
    p.text(458, 168, "5 gradients", "red", "end", "small")
    p.text(240, 346, "3 forward: one thread for each GPU", anchor="middle", kind="small")
    p.text(240, 370, "6 update of GPU 0's model; the copies are dropped", anchor="middle", kind="small")
    p.save(folder, "data_parallel")


def ddp(folder: Path, language: str) -> None:
    """DDP: equal processes in a ring."""
    p = Picture("DDP: equal processes that sum their gradients", 400, language)
    places = [(20, 16), (260, 16), (260, 232), (20, 232)]
    for i, (x, y) in enumerate(places):
        p.box(x, y, 200, 152, "paper", "blue", 8)
        p.text(x + 100, y + 20, f"process {i}", anchor="middle", kind="bold")
        p.box(x + 14, y + 30, 172, 26, "wash-blue")
        p.text(x + 100, y + 48, "model: complete", anchor="middle", kind="small")
        p.box(x + 14, y + 60, 172, 26, "wash-blue")
        p.text(x + 100, y + 78, "optimizer: complete", anchor="middle", kind="small")
        p.box(x + 14, y + 90, 172, 26, "wash-green")
        p.text(x + 100, y + 108, "its rows, loss, gradient", anchor="middle", kind="small")
        p.text(x + 100, y + 138, "its own Python and GPU", "soft", "middle", "small")
    p.arrow(222, 92, 258, 92, "red", 3)
    p.arrow(360, 170, 360, 230, "red", 3)
    p.arrow(258, 308, 222, 308, "red", 3)
    p.arrow(120, 230, 120, 170, "red", 3)
    p.text(240, 190, "all-reduce: gradients", "red", "middle", "small bold")
    p.text(240, 209, "alone are sent, while", "red", "middle", "small bold")
    p.text(240, 228, "backward computes", "red", "middle", "small bold")
    p.save(folder, "ddp")


def ring_rounds(columns: list[list[int]]) -> list[tuple[list[list[int]], list[tuple[int, int]]]]:
    """Values of all processes before the first round and after each, with the (process, part) that changed in it.

    Args:
        columns: a list of N numbers for each of N processes.
    """
    world = len(columns)
    values, rounds = [list(column) for column in columns], []
    rounds.append(([list(column) for column in values], []))
    for number in range(2 * (world - 1)):
        adds = number < world - 1
        moved = []
        for rank in range(world):
            part = (rank - number) % world if adds else (rank + 1 - (number - world + 1)) % world
            moved.append(((rank + 1) % world, part, values[rank][part]))
        for to, part, value in moved:
            values[to][part] = values[to][part] + value if adds else value
        rounds.append(([list(column) for column in values], [(to, part) for to, part, _ in moved]))
    return rounds


def ring(folder: Path, language: str) -> None:
    """Ring all-reduce of three processes, round by round, with numbers."""
    rounds = ring_rounds([[1, 2, 3], [10, 20, 30], [100, 200, 300]])
    p = Picture("Ring all-reduce, round by round", 40 + 122 * len(rounds), language)
    titles = ["before", "round 1: add", "round 2: add", "round 3: copy", "round 4: copy"]
    notes = [
        "three processes, three parts each",
        "each passes one part to the next",
        "each part is complete somewhere",
        "complete parts travel on",
        "everything is everywhere",
    ]
    for number, ((values, changed), title, note) in enumerate(zip(rounds, titles, notes, strict=True)):
        y = 14 + 124 * number
        p.text(16, y + 16, title, "ink", kind="bold")
        p.text(462, y + 16, note, "soft", "end", "small")
        for rank, column in enumerate(values):
            x = 16 + 154 * rank
            p.text(x + 68, y + 40, f"process {rank}", "soft", "middle", "small")
            for part, value in enumerate(column):
                is_whole = value == sum([1, 10, 100]) * (part + 1)
                fill = "wash-green" if is_whole else "wash-red" if (rank, part) in changed else "wash-grey"
                edge = "red" if (rank, part) in changed else "green" if is_whole else "line"
                p.box(x + 46 * part, y + 48, 44, 34, fill, edge)
                p.text(x + 46 * part + 22, y + 70, str(value), anchor="middle")
            if changed:
                source = 16 + 154 * ((rank - 1) % 3)
                if rank:
                    p.arrow(source + 120, y + 94, x + 30, y + 94, "red")
    for number in range(1, len(rounds)):
        y = 14 + 124 * number
        p.line([(392, y + 94), (392, y + 108), (46, y + 108)], "red", 1.8)
        p.arrow(46, y + 108, 46, y + 88, "red")
    p.save(folder, "ring")


def zero(folder: Path, language: str) -> None:
    """Bytes that each of four processes holds under DDP and ZeRO, and their sum for a named model."""
    p = Picture("What each process holds under DDP, ZeRO-1, ZeRO-2 and ZeRO-3", 560, language)
    kinds = [("weights", 4, "blue"), ("gradients", 4, "green"), ("optimizer state", 8, "red")]
    for i, (name, _, colour) in enumerate(kinds):
        p.bar(16 + 140 * i, 14, 14, 14, colour)
        p.text(36 + 140 * i, 27, name, kind="small")
    world = 4
    for row, (title, first_shared) in enumerate((("DDP", 3), ("ZeRO-1", 2), ("ZeRO-2", 1), ("ZeRO-3, FSDP", 0))):
        y = 46 + 126 * row
        each = [size if i < first_shared else size / world for i, (_, size, _) in enumerate(kinds)]
        p.text(16, y + 16, title, kind="bold", as_is=True)
        p.text(464, y + 16, f"{sum(each):g} bytes a parameter, N = 4", "soft", "end", "small")
        for rank in range(world):
            x = 16 + 114 * rank
            top = y + 26
            for i, (_, size, colour) in enumerate(kinds):
                height = 5 * size
                p.box(x, top, 100, height - 2, "wash-grey", "line", 2)
                if i < first_shared:
                    p.bar(x, top, 100, height - 2, colour)
                else:
                    p.bar(x + 25 * rank, top, 25, height - 2, colour)
                top += height
    p.save(folder, "zero")


def checkpoint(folder: Path, language: str) -> None:
    """The commit of a checkpoint, and what a kill at each moment leaves."""
    p = Picture("The commit of a checkpoint", 470, language)
    p.text(16, 26, "what happens", kind="bold")
    p.text(298, 26, "after a kill here", kind="bold")
    steps = [
        (
            "every process writes its pieces",
            "into a folder with a temporary name",
            "the folder is removed,",
            "resumes from step 100",
        ),
        (
            "every file is flushed to the disk",
            "and its checksum is computed",
            "the folder is removed,",
            "resumes from step 100",
        ),
        ("manifest.json is written last", "and flushed", "the folder is removed,", "resumes from step 100"),
        ("one rename", "step-00000200: the commit", "resumes from step 200", "with nothing missing"),
        ("older checkpoints are removed", "only now", "resumes from step 200,", "old ones go later"),
    ]
    for i, (what, note, after, more) in enumerate(steps):
        y = 40 + 84 * i
        commits = i == 3
        p.box(16, y, 262, 62, "wash-green" if commits else "wash-grey", "green" if commits else "line")
        p.text(147, y + 26, what, anchor="middle", kind="bold small")
        p.text(147, y + 46, note, "soft", "middle", "small")
        if i < 4:
            p.arrow(147, y + 64, 147, y + 84)
        colour = "green" if i >= 3 else "red"
        p.line([(280, y + 31), (294, y + 31)], colour, 2, "3 3")
        p.text(298, y + 27, after, colour, kind="small")
        p.text(298, y + 46, more, colour, kind="small")
    p.save(folder, "checkpoint")


def parallelism(folder: Path, language: str) -> None:
    """The four ways of cutting a batch and a model over four processes."""
    p = Picture("Four ways of cutting a step over four processes", 466, language)
    ways = (
        ("data parallel", "rows of the batch", True, False),
        ("context parallel", "positions in each row", False, False),
        ("pipeline parallel", "layers of the model", True, True),
        ("tensor parallel", "inside each layer", False, True),
    )
    colours = ("blue", "green", "violet", "red")
    for number, (name, note, lies, cuts_model) in enumerate(ways):
        x, y = 16 + 232 * (number % 2), 14 + 220 * (number // 2)
        p.text(x, y + 16, name, kind="bold")
        p.text(x, y + 36, note, "soft", kind="small")
        for part in range(2):
            left, top = x + 116 * part, y + 48
            is_cut = (part == 1) == cuts_model
            for piece in range(4):
                place = (left, top + 32 * piece, 100, 30) if lies else (left + 25 * piece, top, 23, 126)
                if is_cut:
                    p.box(*place, colours[piece], "paper", 3)
            if not is_cut:
                p.box(left, top, 100, 126, "wash-grey", "line", 3)
            p.text(left + 50, top + 146, ("batch", "model")[part], "soft", "middle", "small")
    p.text(16, 452, "a colour is a process; grey: complete on each of them", "soft", kind="small")
    p.save(folder, "parallelism")


def pipeline(folder: Path, language: str) -> None:
    """Forward and backward of four micro-batches over four pipeline stages."""
    stages = micros = 4
    p = Picture("A pipeline of four stages with four micro-batches", 232, language)
    slots = 2 * (micros + stages - 1)
    width = 380 / slots
    for stage in range(stages):
        y = 40 + 40 * stage
        p.text(16, y + 21, f"GPU {stage}", kind="small")
        p.box(80, y, 380, 32, "wash-grey", "line", 2)
        for micro in range(micros):
            backward = (micros + stages - 1) + (stages - 1 - stage) + micro
            for begin, fill in ((stage + micro, "wash-blue"), (backward, "wash-green")):
                p.box(80 + width * begin, y, width, 32, fill, "line", 2)
                p.text(80 + width * (begin + 0.5), y + 21, str(micro + 1), anchor="middle", kind="small")
    p.text(80, 26, "forward", "blue", kind="small bold")
    p.text(460, 26, "backward", "green", "end", "small bold")
    p.text(80, 220, "grey: idle, 3 of 7 slots", "soft", kind="small")
    p.save(folder, "pipeline")


# --- data ----------------------------------------------------------------------------------------------------------

Series = tuple[str, str, Sequence[float], Sequence[float], str]
"""Label, colour, x, y, dashes."""


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that divide a range into about `count` parts."""
    raw = (high - low) / count
    size = 10 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw)
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def chart(
    p: Picture,
    top: float,
    height: float,
    title: str,
    x_label: str,
    lines: Sequence[Series],
    *,
    log: bool = False,
    dots: bool = False,
    y_range: tuple[float, float] | None = None,
    legend: int = 1,
) -> None:
    """Lines over axes; the labels of the lines stand in `legend` columns under the title."""
    left, right = 58, WIDTH - 16
    p.text(16, top + 18, title, kind="bold")
    rows = math.ceil(len(lines) / legend)
    for number, (label, colour, _, _, dash) in enumerate(lines):
        x, y = 16 + (WIDTH - 32) / legend * (number % legend), top + 40 + 20 * (number // legend)
        p.line([(x, y - 5), (x + 24, y - 5)], colour, 2.5, dash)
        p.text(x + 32, y, label, kind="small")
    first, last = top + 36 + 20 * rows, top + height - 36
    scale: Callable[[float], float] = math.log10 if log else float
    xs, ys = [scale(x) for line in lines for x in line[2]], [scale(y) for line in lines for y in line[3]]
    low, high = (scale(end) for end in y_range) if y_range else (min(ys), max(ys))
    if not y_range:
        low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
    x_of = lambda x: left + (scale(x) - min(xs)) / (max(xs) - min(xs)) * (right - left)  # noqa: E731
    y_of = lambda y: last - (min(max(scale(y), low), high) - low) / (high - low) * (last - first)  # noqa: E731
    if log:
        y_ticks = [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)]
        x_ticks = sorted(set(lines[0][2]))
    else:
        y_ticks, x_ticks = ticks(low, high, 4), ticks(min(xs), max(xs))
    for y in y_ticks:
        p.line([(left, y_of(y)), (right, y_of(y))], "line", 1)
        p.text(left - 6, y_of(y) + 5, f"{y:g}" if abs(y) < 1e5 else f"{y:.0e}", "soft", "end", "small", as_is=True)
    for x in x_ticks:
        anchor = "end" if x_of(x) > right - 20 else "middle"
        p.text(
            x_of(x) + 10 * (anchor == "end"),
            last + 18,
            short(x) if log else f"{x:g}",
            "soft",
            anchor,
            "small",
            as_is=True,
        )
    p.text(right, last + 35, x_label, "soft", "end", "small")
    for _, colour, line_x, line_y, dash in lines:
        points = [(x_of(x), y_of(y)) for x, y in zip(line_x, line_y, strict=True)]
        p.line(points, colour, 2.2, dash)
        if dots:
            for x, y in points:
                p.dot(x, y, colour)


def short(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:g} GiB"


def wrong_curves(results: dict[str, Any], folder: Path, language: str) -> None:
    """A chart for each fault: the wrong curve with the right one."""
    right = results["right"]
    steps = list(range(1, len(right["loss"]) + 1))
    loss, step = "held-out loss, nats per target", "step"

    p = Picture("Mean of means: the wrong and the right curve", 300, language)
    chart(
        p,
        0,
        300,
        loss,
        step,
        [
            ("sum over all targets, divided once", "blue", steps, right["held_out"], ""),
            ("mean of each micro-batch's mean", "red", steps, results["mean_of_means"]["held_out"], "7 4"),
        ],
    )
    p.save(folder, "wrong_mean_of_means")

    p = Picture("A schedule that advances once per process: the wrong and the right curve", 560, language)
    wrong = results["schedule_per_process"]
    chart(
        p,
        0,
        250,
        "learning rate",
        step,
        [
            ("one step of the schedule per optimizer step", "blue", steps, right["learning_rate"], ""),
            ("one step of the schedule per process, 2 processes", "red", steps, wrong["learning_rate"], "7 4"),
        ],
    )
    chart(
        p,
        260,
        300,
        loss,
        step,
        [
            ("one step of the schedule per optimizer step", "blue", steps, right["held_out"], ""),
            ("one step of the schedule per process, 2 processes", "red", steps, wrong["held_out"], "7 4"),
        ],
    )
    p.save(folder, "wrong_schedule")

    wrong_reports(results, folder, language)


def wrong_reports(results: dict[str, Any], folder: Path, language: str) -> None:
    """Charts of the faults in what is evaluated, read again and exported."""
    right = results["right"]
    steps, step = list(range(1, len(right["loss"]) + 1)), "step"

    p = Picture("Evaluation by batch means: the wrong and the right curve", 340, language)
    by_size = list(zip(*right["by_batch_means"], strict=True))
    lines: list[Series] = [("sum over all targets, divided once", "blue", steps, right["held_out"], "")]
    for (size, colour, dash), values in zip(
        ((1, "red", "7 4"), (4, "violet", "3 3"), (16, "green", "9 3 2 3")), by_size, strict=True
    ):
        lines.append((f"mean of batch means, batches of {size}", colour, steps, values, dash))
    chart(p, 0, 340, "held-out loss of one model, as reported", step, lines)
    p.save(folder, "wrong_evaluation")

    p = Picture("No set_epoch: the wrong and the right curve", 540, language)
    first = len(steps) - 120
    for number, (name, label, colour) in enumerate(
        (
            ("right", "set_epoch: a new order in each epoch", "blue"),
            ("no_set_epoch", "no set_epoch: the same order again", "red"),
        )
    ):
        chart(
            p,
            270 * number,
            270,
            "training loss of each step, 3 epochs",
            step,
            [(label, colour, steps[first:], results[name]["loss"][first:], "")],
            y_range=(1.9, 3.1),
        )
    p.save(folder, "wrong_no_set_epoch")

    p = Picture("An empty ZeRO-3 export: the wrong and the right curve", 300, language)
    export = results["empty_export"]
    chart(
        p,
        0,
        300,
        "held-out loss of the exported model",
        step,
        [
            ("weights gathered from all processes", "blue", export["steps"], export["right"], ""),
            ("state_dict() as it is under ZeRO-3", "red", export["steps"], export["wrong"], "7 4"),
        ],
    )
    p.save(folder, "wrong_empty_export")


def all_reduce(measured: dict[str, Any], folder: Path, language: str) -> None:
    """Time of an all-reduce over its size, by ring and by tree."""
    p = Picture("Time of an all-reduce over its size, by ring and by tree", 340, language)
    lines: list[Series] = []
    for name, colour, dash in (("ring", "blue", ""), ("tree", "red", "7 4"), ("gloo", "green", "3 3")):
        rows = [row for row in measured["rows"] if row["algorithm"] == name]
        values = [1000 * row["fastest_seconds"] for row in rows]
        lines.append(
            (f"{name}, {measured['processes']} processes", colour, [row["bytes"] for row in rows], values, dash)
        )
    chart(p, 0, 340, "milliseconds, fastest repeat", "size of the tensor", lines, log=True, dots=True, legend=2)
    p.save(folder, "all_reduce")


def overlap(traces: dict[str, Any], folder: Path, language: str) -> None:
    """One step of process 0, from its trace: what computes, and which all-reduces are on their way."""
    names = {
        "buckets": "buckets of 25 MB: sent while backward computes",
        "one_bucket": "one bucket: sent when backward is over",
    }
    end = max(trace["seconds"] for trace in traces.values())
    p = Picture("A step with and without overlap, from traces", 352, language)
    left, right = 16, WIDTH - 16
    x_of = lambda second: left + second / end * (right - left)  # noqa: E731
    for number, (key, title) in enumerate(names.items()):
        trace, y = traces[key], 16 + 140 * number
        p.text(16, y + 12, title, kind="bold")
        p.box(left, y + 22, x_of(trace["seconds"]) - left, 34, "wash-grey", "line", 2)
        for phase, colour in (("forward", "blue"), ("backward", "green"), ("update", "violet")):
            for begin, stop in trace[phase]:
                p.bar(x_of(begin), y + 23, x_of(stop) - x_of(begin), 32, colour)
        p.box(left, y + 62, x_of(trace["seconds"]) - left, 34, "wash-grey", "line", 2)
        for begin, stop in trace["all_reduce"]:
            p.box(x_of(begin), y + 63, x_of(stop) - x_of(begin), 32, "red", "paper", 2)
        p.text(x_of(trace["seconds"]), y + 112, f"{trace['seconds']:.2f} s", "soft", "end", "small", as_is=True)
    legend = (("forward", "blue"), ("backward", "green"), ("update", "violet"), ("all-reduce", "red"))
    for i, (name, colour) in enumerate(legend):
        p.bar(16 + 114 * i, 300, 14, 14, colour)
        p.text(36 + 114 * i, 313, name, kind="small")
    p.text(16, 338, "grey: nothing runs; process 0 of 2, gloo", "soft", kind="small")
    p.save(folder, "overlap")


DIAGRAMS = (batch, data_parallel, ddp, ring, zero, checkpoint, parallelism, pipeline)
DATA = {"wrong_curves": wrong_curves, "all_reduce": all_reduce, "overlap": overlap}
LANGUAGES = ("en", "zh-TW")


def draw_data(name: str, folder: Path) -> None:
    """Draw what was measured, from NAME.json in the folder."""
    found = json.loads((folder / f"{name}.json").read_text())
    for language in LANGUAGES:
        DATA[name](found, folder, language)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=PICTURES)
    parser.add_argument("--measured", type=Path, help="folder with new measurements, such as runs/theory")
    known = parser.parse_args()
    folder = known.output
    folder.mkdir(parents=True, exist_ok=True)
    for name in DATA if known.measured else ():
        shutil.copy(known.measured / f"{name}.json", folder)
    for language in LANGUAGES:
        for diagram in DIAGRAMS:
            diagram(folder, language)
    for name in DATA:
        if (folder / f"{name}.json").exists():
            draw_data(name, folder)


if __name__ == "__main__":
    main()
