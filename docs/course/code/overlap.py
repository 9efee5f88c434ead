"""Draw a step of DDP with and without overlap, from the traces of two runs with `profile.steps`.

    python docs/course/code/overlap.py runs/wide runs/wide-one-bucket

The first run sends several buckets, the second one bucket. What is drawn is the second profiled step of process 0.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import draw

Span = tuple[float, float]


def joined(spans: Iterable[Span], gap: float = 0.002) -> list[list[float]]:
    """The spans in order; those less than `gap` seconds apart become one."""
    found: list[list[float]] = []
    for begin, end in sorted(spans):
        if found and begin - found[-1][1] < gap:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def read_step(run: Path, number: int = 1) -> dict[str, Any]:
    """Seconds of one profiled step: its length, when it computes and when it communicates, from its beginning."""
    with gzip.open(run / "profile/trace-process-00000.json.gz", "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    steps = sorted(
        (event["ts"], event["dur"])
        for event in events
        if event["name"].startswith("train step") and event["cat"] == "user_annotation"
    )
    start, length = steps[number]

    def spans(*names: str, category: str | None = None) -> list[Span]:
        return [
            ((event["ts"] - start) / 1e6, (event["ts"] + event["dur"] - start) / 1e6)
            for event in events
            if event["name"].startswith(names)
            and start <= event["ts"] < start + length
            and category in (None, event["cat"])
        ]

    (forward,) = spans("DistributedDataParallel.forward")
    (update,) = spans("Optimizer.step")
    compute = spans("aten::", category="cpu_op")
    between = [span for span in compute if forward[1] <= span[0] < update[0]]
    sends = spans("gloo:all_reduce")
    # Clipping follows the last large all-reduce; its own all-reduces of a few bytes are not gradients.
    backward = [span for span in between if span[0] < max(end for _, end in sends if end <= update[0] or not sends)]
    return {
        "seconds": length / 1e6,
        "forward": joined([forward]),
        "backward": joined(backward),
        "update": joined(
            [*[span for span in compute if span[0] >= update[0]], *[s for s in between if s not in backward]]
        ),
        "all_reduce": [list(span) for span in sorted(sends)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs=2, type=Path, help="the run with buckets, and the run with one bucket")
    parser.add_argument("--output", type=Path, default=Path("runs/theory"))
    known = parser.parse_args()
    traces = {name: read_step(run) for name, run in zip(("buckets", "one_bucket"), known.runs, strict=True)}
    known.output.mkdir(parents=True, exist_ok=True)
    (known.output / "overlap.json").write_text(json.dumps(traces) + "\n")
    draw.draw_data("overlap", known.output)
    for name, trace in traces.items():
        sends = trace["all_reduce"]
        print(f"{name:12} step {trace['seconds']:.3f} s, {len(sends)} all-reduces, the first after {sends[0][0]:.3f} s")


if __name__ == "__main__":
    main()
