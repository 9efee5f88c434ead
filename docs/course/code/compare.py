"""Compare the training losses of runs with those of the first one, at every step that both have logged.

python docs/course/code/compare.py runs/course/one runs/course/two
"""

from __future__ import annotations

import sys
from pathlib import Path

from answers import curve, largest_difference


def main(folders: list[str]) -> int:
    if len(folders) < 2:
        print(
            "error: RUN must be the folders of at least two runs, got fewer; give the first one twice to see zeros",
            file=sys.stderr,
        )
        return 2
    curves = []
    for folder in folders:
        if not Path(folder, "metrics.jsonl").is_file():
            print(f"error: RUN must be the folder of a run, got {folder}; give its output_dir", file=sys.stderr)
            return 2
        curves.append(curve(Path(folder)))
    ends = [max(losses) for losses in curves]
    for folder, end in zip(folders, ends, strict=True):
        if end != ends[0]:
            print(
                f"warning: {folder} ends at step {end}, {folders[0]} at step {ends[0]}; is it of another recipe?",
                file=sys.stderr,
            )
    width = max(map(len, folders))
    print(f"{'run':{width}}  steps compared  last loss  largest relative difference")
    for folder, losses in zip(folders, curves, strict=True):
        steps = losses.keys() & curves[0].keys()
        difference = largest_difference(curves[0], losses)
        print(f"{folder:{width}}  {len(steps):14}  {losses[max(losses)]:9.4f}  {difference:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
