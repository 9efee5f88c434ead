"""Kill, stop and swap, at length: the measured gates of docs/reliability.md.

    python benchmarks/chaos.py [docs/reliability.md] [--kills 100] [--launcher-kills 20] [--only G6,G8]

The same functions as in the tests, more often. Twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["OMP_NUM_THREADS"] = "1"


GATES = ("G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8", "G9", "G11", "G12", "resuming", "G10")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--launcher-kills", type=int, default=20)
    parser.add_argument(
        "--only", metavar="G6,G8", help=f"single ones of {', '.join(GATES)}; a page keeps its other rows"
    )
    known = parser.parse_args()
    only = known.only.split(",") if known.only else list(GATES)
    if unknown := set(only) - set(GATES):
        parser.error(f"--only must name gates of {', '.join(GATES)}, got {', '.join(sorted(unknown))}")
    if known.page and known.only and "G10" in only:
        parser.error("--only must leave out G10 with a page, whose table is made with all gates, got G10")
    import conftest
    from backends import Scenario
    from processes import KEPT_CACHE
    from test_checkpoint_cli import DAMAGES, damage_everything, finished_runs
    from test_elastic import go_elastic
    from test_keep_going import KILLS, killed_under_keep_going, killed_under_max_restarts
    from test_matrix import ENGINES, whole_matrix
    from test_peers import start
    from test_resume import kill_at_random, kill_launches_at_random, with_dropout
    from test_stop import STOPS, stop_a_launch, wrap
    from test_storage import LEVELS, fill_levels
    from test_time_to_resume import seconds_to_resume

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

    def room(name: str) -> Path:
        (folder / name).mkdir()
        return folder / name

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

    def die(rank: int) -> None:
        if rank == 1:
            wrap("acc_lm.step.train_step", lambda: os.kill(os.getpid(), signal.SIGKILL), 4)

    def hang(rank: int) -> None:
        if rank == 1:
            wrap("acc_lm.step.train_step", lambda: os.kill(os.getpid(), signal.SIGSTOP), 4)

    def all_pass(file: str) -> tuple[int, float]:
        """How many tests of a file there are, when all of them pass."""
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", str(ROOT / "tests" / file)]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found = re.search(r"^(\d+) passed", shown.stdout, re.MULTILINE)
        assert shown.returncode == 0, shown.stdout
        assert found
        return int(found[1]), time.monotonic() - began

    if "G1" in only:
        one = kill_at_random(with_dropout(recipe), folder / "one", known.kills, seed=1)
        tell(
            f"| G1 | {one.kills} times kill -9 of one process at random moments, over {one.runs} runs | {one.in_save} kills were inside a save; "
            f"every run went on and ended bit for bit like one that was never touched; {one.seconds:.0f} s |"
        )
    if "G2" in only:
        two = kill_launches_at_random(with_dropout(recipe), folder / "two", known.launcher_kills, seed=2)
        tell(
            f"| G2 | {two.kills} times kill -9 under `accelerate launch` with two processes: process 0, process 1, the launcher, all of them, over "
            f"{two.runs} runs | {two.in_save} kills were inside a save; the same; no process was left behind; {two.seconds:.0f} s |"
        )
    if "G3" in only:
        names = ", ".join(dict.fromkeys(how for how, _ in STOPS)).replace(
            "STOP, limit", "the file STOP, `training.max_minutes`"
        )
        ends = [stop_a_launch(recipe, folder / f"stop-{how}-{whom}", how, whom) for how, whom in STOPS]
        tell(
            f"| G3 | two processes under `accelerate launch`, told to stop: {names}; each signal to the launcher and to one process | {len(ends)} of "
            f"{len(STOPS)}: the step was saved, `preempted` written, all processes gone {min(ends):.1f} to {max(ends):.1f} s after the request |"
        )
    if "G4" in only:
        seconds, says = seconds_until_told(die, [])
        tell(
            f"| G4 | process 1 of two killed in step 4 | the other said so {seconds:.1f} s after the start of the run: `{says}` |"
        )
    if "G5" in only:
        seconds, says = seconds_until_told(hang, ["distributed.timeout_seconds=8"])
        tell(
            f"| G5 | process 1 of two stopped (SIGSTOP) in step 4, `distributed.timeout_seconds=8` | the other said so {seconds:.1f} s after the start of the run: `{says}` |"
        )
    if "G6" in only:
        outer = killed_under_keep_going(recipe, room("outer"))
        inner = killed_under_max_restarts(recipe, room("inner"))
        tell(
            f"| G6 | process 0 of two killed in {KILLS} saves: started again by `acc-lm keep-going`, and by `accelerate launch --rdzv_backend c10d "
            f"--max_restarts 5` | both ended bit for bit like a run that was never touched, with {KILLS} restarts; {outer:.0f} s and {inner:.0f} s |"
        )
    if "G7" in only:
        runs = finished_runs(recipe, room("damages"))
        counts = [damage_everything(run, room(f"damaged-{kind}")) for kind, run in runs.items()]
        tell(
            f"| G7 | every file of a checkpoint {', '.join(DAMAGES)}, in checkpoints of {', '.join(runs)} | {sum(counts)} of {sum(counts)} damages "
            "were found and named, and the checkpoint before was used |"
        )
    if "G8" in only:
        began = time.monotonic()
        how_full = fill_levels(recipe, room("disk"))
        tell(
            f"| G8 | disk full at {len(LEVELS)} levels from {min(LEVELS)} % to {max(LEVELS)} % of a checkpoint ({how_full}) | each time exit code 8 and one line, "
            f"nothing half written, and the next run went on from the checkpoint before; the last one ended bit for bit like one that was never touched; {time.monotonic() - began:.0f} s |"
        )
    if "G9" in only:
        way, worst, num_rows = go_elastic(recipe, room("elastic"))
        tell(
            f"| G9 | one run through {way}, ended by kill -9, SIGTERM, the file STOP and the time limit | each of {num_rows} rows once per epoch; "
            f"learning rates equal; losses within {worst:.0e} of one process that was never interrupted |"
        )
    if "G11" in only:
        count, seconds = all_pass("test_tracking.py")
        tell(
            f"| G11 | trackers without a key, refused, never answered, switched off, not installed, on a full disk, raising, slow, hanging | {count} of "
            f"{count} tests: the result is that of a run without any, with one warning; offline and after every interruption each step once, in order; {seconds:.0f} s |"
        )
    if "G12" in only:
        count, seconds = all_pass("test_trust.py")
        tell(
            f"| G12 | pickles and code planted in checkpoints, caches and model folders, paths that lead outside, secrets in every place they may stand | {count} of "
            f"{count} tests: nothing was executed, nothing written outside, no secret in any file or line; {seconds:.0f} s |"
        )
    if "resuming" in only:
        early, late, which = seconds_to_resume(recipe, room("resuming"))
        tell(
            f"| resuming | at 1 % and at 99 % of {which} | {early:.2f} s and {late:.2f} s from the start to the end of the first step, imports apart |"
        )
    if "G10" in only:
        matrix = whole_matrix(Scenario("gpt2"), room("matrix"))
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
    if known.page and known.only:
        rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
        block = known.page.read_text().partition("<!-- chaos: generated -->\n")[2].partition("\n<!-- chaos: end -->")[0]
        kept = [
            rows.get(line.split("|")[1].strip(), line) if line.startswith("| ") else line for line in block.splitlines()
        ]
        kept.append(f"\n{known.only} anew: {machine_line()}")
        replace_block(known.page, "chaos", "\n".join(kept))
    elif known.page:
        replace_block(known.page, "chaos", "\n".join(lines))


if __name__ == "__main__":
    main()
