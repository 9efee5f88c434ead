"""Kill, stop and swap, at length: the measured gates of docs/reliability.md.

    python benchmarks/chaos.py [docs/reliability.md] [--kills 100] [--launcher-kills 20]

The same functions as in the tests, more often. A quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["OMP_NUM_THREADS"] = "1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--launcher-kills", type=int, default=20)
    known = parser.parse_args()
    import conftest
    from backends import Scenario
    from processes import KEPT_CACHE
    from test_matrix import ENGINES, whole_matrix
    from test_peers import start
    from test_resume import kill_at_random, kill_launches_at_random, with_dropout
    from test_stop import wrap

    from acc_lm.cli.parity import machine_line, replace_block

    folder = Path(tempfile.mkdtemp(prefix="acc-lm-chaos-"))
    os.environ["ACC_LM_CACHE"] = str(folder / "cache")
    (folder / "cache").mkdir()
    (KEPT_CACHE / "torch_extensions").mkdir(parents=True, exist_ok=True)
    (folder / "cache" / "torch_extensions").symlink_to(KEPT_CACHE / "torch_extensions")
    text, recipe = folder / "words.jsonl", folder / "tiny.yaml"
    text.write_text("".join(json.dumps({"text": words}) + "\n" for words in conftest.make_words()))
    recipe.write_text(conftest.tiny_recipe_of(text))
    lines = ["`make chaos`, that is `python benchmarks/chaos.py docs/reliability.md`:", "", machine_line(), "",
             "| gate | what was done | what came of it |", "|---|---|---|"]  # fmt: skip

    def tell(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    def seconds_until_told(sabotage: object, extra: list[str]) -> tuple[float, str]:
        began = time.monotonic()
        arguments = ["--config", str(recipe), f"output_dir={folder / 'told'}-{began}", *extra]
        launch = start(arguments, 2, sabotage)
        while not (found := [line for line in launch.outputs()[0].splitlines() if line.startswith("error: ")]):
            assert time.monotonic() - began < 120, launch.outputs()
            time.sleep(0.01)
        seconds = time.monotonic() - began
        launch.wait()
        (line,) = found
        return seconds, line.split("; the last checkpoint")[0].removeprefix("error: ")

    one = kill_at_random(with_dropout(recipe), folder / "one", known.kills, seed=1)
    tell(
        f"| G1 | {one.kills} times kill -9 of one process at random moments, over {one.runs} runs | {one.in_save} kills were inside a save; "
        f"every run went on and ended bit for bit like one that was never touched; {one.seconds:.0f} s |"
    )
    two = kill_launches_at_random(with_dropout(recipe), folder / "two", known.launcher_kills, seed=2)
    tell(
        f"| G2 | {two.kills} times kill -9 under `accelerate launch` with two processes: process 0, process 1, the launcher, all of them, over "
        f"{two.runs} runs | {two.in_save} kills were inside a save; the same; no process was left behind; {two.seconds:.0f} s |"
    )

    def die(rank: int) -> None:
        if rank == 1:
            wrap("acc_lm.step.train_step", lambda: os.kill(os.getpid(), signal.SIGKILL), 4)

    def hang(rank: int) -> None:
        if rank == 1:
            wrap("acc_lm.step.train_step", lambda: os.kill(os.getpid(), signal.SIGSTOP), 4)

    seconds, says = seconds_until_told(die, [])
    tell(
        f"| G4 | process 1 of two killed in step 4 | the other said so {seconds:.1f} s after the start of the run: `{says}` |"
    )
    seconds, says = seconds_until_told(hang, ["distributed.timeout_seconds=8"])
    tell(
        f"| G5 | process 1 of two stopped (SIGSTOP) in step 4, `distributed.timeout_seconds=8` | the other said so {seconds:.1f} s after the start of the run: `{says}` |"
    )
    (folder / "matrix").mkdir()
    matrix = whole_matrix(Scenario("gpt2"), folder / "matrix")
    worst = max(difference for row in matrix.values() for difference, _ in row.values())
    tell(
        f"| G10 | every engine's checkpoint read by every engine, the 10 steps after it | {len(matrix)} x {len(matrix)} pairs within {worst:.0e}; table below |"
    )
    lines += [
        "", "Largest relative difference of loss and gradient norm from one process that was never interrupted, in the ten steps after the load; "
        "`=`: and bit for bit what the writer itself went on to do. Rows wrote, columns read.", "",
        f"| | {' | '.join(ENGINES)} |", "|---" * (len(ENGINES) + 1) + "|",
    ]  # fmt: skip
    for writer, row in matrix.items():
        lines.append(f"| {writer} | {' | '.join(f'{row[r][0]:.0e}' + ' =' * row[r][1] for r in ENGINES)} |")
    if known.page:
        replace_block(known.page, "chaos", "\n".join(lines))


if __name__ == "__main__":
    main()
