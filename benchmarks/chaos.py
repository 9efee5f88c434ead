"""Kill, stop and swap, at length: the measured gates of docs/promises/reliability.md.

    python benchmarks/chaos.py [docs/promises/reliability.md] [--kills 100] [--launcher-kills 20] [--only G6,G8]

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
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), *map(str, (ROOT / "tests").glob("*/"))]
os.environ["OMP_NUM_THREADS"] = "1"


GATES = ("G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8", "G9", "G11", "G12", "resuming", "G10")


class Chaos:
    """The gates, each a method of its name that returns what was done and what came of it, as two cells of a table."""

    def __init__(self, folder: Path, kills: int, launcher_kills: int) -> None:
        import conftest
        from processes import KEPT_CACHE
        from test_resume import with_dropout

        self.folder, self.kills, self.launcher_kills = folder, kills, launcher_kills
        self.matrix: list[str] = []
        os.environ["ACC_LM_CACHE"] = str(folder / "cache")
        (folder / "cache").mkdir()
        (KEPT_CACHE / "torch_extensions").mkdir(parents=True, exist_ok=True)
        (folder / "cache" / "torch_extensions").symlink_to(KEPT_CACHE / "torch_extensions")
        text, self.recipe = folder / "words.jsonl", folder / "tiny.yaml"
        text.write_text("".join(json.dumps({"text": words}) + "\n" for words in conftest.make_words()))
        self.recipe.write_text(conftest.tiny_recipe_of(text))
        self.recipe_with_dropout = with_dropout(self.recipe)

    def room(self, name: str) -> Path:
        (self.folder / name).mkdir()
        return self.folder / name

    def seconds_until_told(self, number: int, extra: list[str]) -> tuple[float, str]:
        """Send this signal to process 1 of two in step 4; the time until process 0 says so, and its words."""
        from test_peers import start
        from test_stop import wrap

        def sabotage(rank: int) -> None:
            if rank == 1:
                wrap("acc_lm.training.train_step", lambda: os.kill(os.getpid(), number), 4)

        began = time.monotonic()
        arguments = ["--config", str(self.recipe), f"output_dir={self.folder / 'told'}-{began}", *extra]
        launch = start(arguments, 2, sabotage)
        while not (found := [line for line in launch.outputs()[0].splitlines() if line.startswith("error: ")]):
            assert time.monotonic() - began < 120, launch.outputs()
            time.sleep(0.01)
        seconds = time.monotonic() - began
        launch.wait()
        (line,) = found
        return seconds, line.split("; the last checkpoint")[0].removeprefix("error: ")

    def all_pass(self, file: str) -> tuple[int, float]:
        """How many tests of a file there are, when all of them pass."""
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", str(next((ROOT / "tests").rglob(file)))]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found = re.search(r"^(\d+) passed", shown.stdout, re.MULTILINE)
        assert shown.returncode == 0, shown.stdout
        assert found
        return int(found[1]), time.monotonic() - began

    def G1(self) -> str:
        from test_resume import kill_at_random

        one = kill_at_random(self.recipe_with_dropout, self.folder / "one", self.kills, seed=1)
        return (
            f"{one.kills} times kill -9 of one process at random moments, over {one.runs} runs | {one.in_save} kills were inside a save; "
            f"every run went on and ended bit for bit like one that was never touched; {one.seconds:.0f} s"
        )

    def G2(self) -> str:
        from test_resume import kill_launches_at_random

        two = kill_launches_at_random(self.recipe_with_dropout, self.folder / "two", self.launcher_kills, seed=2)
        return (
            f"{two.kills} times kill -9 under `accelerate launch` with two processes: process 0, process 1, the launcher, all of them, over "
            f"{two.runs} runs | {two.in_save} kills were inside a save; the same; no process was left behind; {two.seconds:.0f} s"
        )

    def G3(self) -> str:
        from test_stop import STOPS, stop_a_launch

        names = ", ".join(dict.fromkeys(how for how, _ in STOPS)).replace(
            "STOP, limit", "the file STOP, `training.max_minutes`"
        )
        ends = [stop_a_launch(self.recipe, self.folder / f"stop-{how}-{whom}", how, whom) for how, whom in STOPS]
        return (
            f"two processes under `accelerate launch`, told to stop: {names}; each signal to the launcher and to one process | {len(ends)} of "
            f"{len(STOPS)}: the step was saved, `preempted` written, all processes gone {min(ends):.1f} to {max(ends):.1f} s after the request"
        )

    def G4(self) -> str:
        seconds, says = self.seconds_until_told(signal.SIGKILL, [])
        return f"process 1 of two killed in step 4 | the other said so {seconds:.1f} s after the start of the run: `{says}`"

    def G5(self) -> str:
        seconds, says = self.seconds_until_told(signal.SIGSTOP, ["distributed.timeout_seconds=8"])
        return f"process 1 of two stopped (SIGSTOP) in step 4, `distributed.timeout_seconds=8` | the other said so {seconds:.1f} s after the start of the run: `{says}`"

    def G6(self) -> str:
        from test_keep_going import KILLS, killed_under_keep_going, killed_under_max_restarts

        outer = killed_under_keep_going(self.recipe, self.room("outer"))
        inner = killed_under_max_restarts(self.recipe, self.room("inner"))
        return (
            f"process 0 of two killed in {KILLS} saves: started again by `acc-lm keep-going`, and by `accelerate launch --rdzv_backend c10d "
            f"--max_restarts 5` | both ended bit for bit like a run that was never touched, with {KILLS} restarts; {outer:.0f} s and {inner:.0f} s"
        )

    def G7(self) -> str:
        from test_checkpoint_cli import DAMAGES, damage_everything, finished_runs

        runs = finished_runs(self.recipe, self.room("damages"))
        counts = [damage_everything(run, self.room(f"damaged-{kind}")) for kind, run in runs.items()]
        return (
            f"every file of a checkpoint {', '.join(DAMAGES)}, in checkpoints of {', '.join(runs)} | {sum(counts)} of {sum(counts)} damages "
            "were found and named, and the checkpoint before was used"
        )

    def G8(self) -> str:
        from test_storage import LEVELS, fill_levels

        began = time.monotonic()
        how_full = fill_levels(self.recipe, self.room("disk"))
        return (
            f"disk full at {len(LEVELS)} levels from {min(LEVELS)} % to {max(LEVELS)} % of a checkpoint ({how_full}) | each time exit code 8 and one line, "
            f"nothing half written, and the next run went on from the checkpoint before; the last one ended bit for bit like one that was never touched; {time.monotonic() - began:.0f} s"
        )

    def G9(self) -> str:
        from test_elastic import go_elastic

        way, worst, num_rows = go_elastic(self.recipe, self.room("elastic"))
        return (
            f"one run through {way}, ended by kill -9, SIGTERM, the file STOP and the time limit | each of {num_rows} rows once per epoch; "
            f"learning rates equal; losses within {worst:.0e} of one process that was never interrupted"
        )

    def G11(self) -> str:
        count, seconds = self.all_pass("test_tracking.py")
        return (
            f"trackers without a key, refused, never answered, switched off, not installed, on a full disk, raising, slow, hanging | {count} of "
            f"{count} tests: the result is that of a run without any, with one warning; offline and after every interruption each step once, in order; {seconds:.0f} s"
        )

    def G12(self) -> str:
        count, seconds = self.all_pass("test_trust.py")
        return (
            f"pickles and code planted in checkpoints, caches and model folders, paths that lead outside, secrets in every place they may stand | {count} of "
            f"{count} tests: nothing was executed, nothing written outside, no secret in any file or line; {seconds:.0f} s"
        )

    def resuming(self) -> str:
        from test_time_to_resume import seconds_to_resume

        early, late, which = seconds_to_resume(self.recipe, self.room("resuming"))
        return f"at 1 % and at 99 % of {which} | {early:.2f} s and {late:.2f} s from the start to the end of the first step, imports apart"

    def G10(self) -> str:
        from backends import Scenario
        from test_matrix import ENGINES, whole_matrix

        matrix = whole_matrix(Scenario("gpt2"), self.room("matrix"))
        worst = max(difference for row in matrix.values() for difference, _ in row.values())
        self.matrix = [
            "",
            "Largest relative difference of loss and gradient norm from one process that was never interrupted, in the ten steps after the load; "
            "`=`: and bit for bit what the writer itself went on to do. Rows wrote, columns read.",
            "",
            f"| | {' | '.join(ENGINES)} |",
            "|---" * (len(ENGINES) + 1) + "|",
        ]
        for writer, row in matrix.items():
            self.matrix.append(f"| {writer} | {' | '.join(f'{row[r][0]:.0e}' + ' =' * row[r][1] for r in ENGINES)} |")
        return f"every engine's checkpoint read by every engine, the 10 steps after it | {len(matrix)} x {len(matrix)} pairs within {worst:.0e}; table below"


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
    from acc_lm.studies.tables import machine_line

    chaos = Chaos(Path(tempfile.mkdtemp(prefix="acc-lm-chaos-")), known.kills, known.launcher_kills)
    rows = {}
    for name in only:
        rows[name] = f"| {name} | {getattr(chaos, name)()} |"
        print(rows[name], flush=True)
    lines = [
        "`make chaos`, that is `python benchmarks/chaos.py docs/promises/reliability.md`:",
        "",
        machine_line(),
        "",
        "| gate | what was done | what came of it |",
        "|---|---|---|",
        *rows.values(),
        *chaos.matrix,
    ]
    if known.page:
        write(known.page, lines, rows if known.only else None)


def write(page: Path, lines: list[str], some: dict[str, str] | None) -> None:
    """Replace the page's block, or only some of its rows."""
    from acc_lm.studies.tables import machine_line, replace_block

    if some is not None:
        block = page.read_text().partition("<!-- chaos: generated -->\n")[2].partition("\n<!-- chaos: end -->")[0]
        lines = [
            some.get(line.split("|")[1].strip(), line) if line.startswith("| ") else line for line in block.splitlines()
        ]
        lines.append(f"\n{','.join(some)} anew: {machine_line()}")
    replace_block(page, "chaos", "\n".join(lines))


if __name__ == "__main__":
    main()
