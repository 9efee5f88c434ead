"""Kill and stop runs and change their engines many times: the measured gates of docs/promises/reliability.md.

    python benchmarks/chaos.py [docs/promises/reliability.md] [--kills 100] [--launcher-kills 20] [--only G6,G8]

The functions are those of the tests, called more often. Takes twenty minutes on two cores.
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


GATES = ("G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8", "G9", "G11", "G12", "G13", "G14", "resuming", "G10")


class Chaos:
    """The gates: each method returns what was done and the result, as two cells of a table."""

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

    def seconds_until_reported(self, number: int, extra: list[str]) -> tuple[float, str]:
        """Send this signal to process 1 of two in step 4; return the seconds until process 0 reports it, and its error line."""
        from test_peers import start
        from test_stop import wrap

        def sabotage(rank: int) -> None:
            if rank == 1:
                wrap("acc_lm.training.train_step", lambda: os.kill(os.getpid(), number), 4)

        began = time.monotonic()
        arguments = ["--config", str(self.recipe), f"output_dir={self.folder / 'reported'}-{began}", *extra]
        launch = start(arguments, 2, sabotage)
        while not (found := [line for line in launch.outputs()[0].splitlines() if line.startswith("error: ")]):
            assert time.monotonic() - began < 120, launch.outputs()
            time.sleep(0.01)
        seconds = time.monotonic() - began
        launch.wait()
        (line,) = found
        return seconds, line.split("; the last checkpoint")[0].removeprefix("error: ")

    def all_pass(self, file: str) -> tuple[int, float]:
        """Run a test file, which must pass; return the number of its tests and the seconds."""
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
            f"kill -9 of one process at random moments, {one.kills} times over {one.runs} runs | {one.in_save} kills were during a save; "
            f"every run resumed and ended bit for bit like an uninterrupted one; {one.seconds:.0f} s"
        )

    def G2(self) -> str:
        from test_resume import kill_launches_at_random

        two = kill_launches_at_random(self.recipe_with_dropout, self.folder / "two", self.launcher_kills, seed=2)
        return (
            f"kill -9 under `accelerate launch` with two processes (of process 0, process 1, the launcher, or all), {two.kills} times; runs: "
            f"{two.runs} | {two.in_save} kills were during a save; the same result; no process was left running; {two.seconds:.0f} s"
        )

    def G13(self) -> str:
        return self.killed_in_parts("ddp_sequence", "rows")

    def G14(self) -> str:
        return self.killed_in_parts("tensor_parallel", "layers")

    def killed_in_parts(self, config: str, what: str) -> str:
        from test_resume import kill_launches_at_random

        model = (
            "model.config={hidden_size: 128, intermediate_size: 512, num_attention_heads: 4, num_key_value_heads: 2}"
        )
        recipe = ["--config", str(self.recipe)]
        two = kill_launches_at_random(recipe, self.room(config), self.launcher_kills, 3, config, model)
        return (
            f"the same as G2 with two processes that share {what} ({config}), {two.kills} times; runs: {two.runs} | {two.in_save} kills were "
            f"during a save; the same result; no process was left running; {two.seconds:.0f} s"
        )

    def G3(self) -> str:
        from test_stop import STOPS, stop_a_launch

        names = ", ".join(dict.fromkeys(how for how, _ in STOPS)).replace(
            "STOP, limit", "the file STOP, `training.max_minutes`"
        )
        ends = [stop_a_launch(self.recipe, self.folder / f"stop-{how}-{whom}", how, whom) for how, whom in STOPS]
        return (
            f"two processes under `accelerate launch`, asked to stop by {names}; each signal to the launcher and to one process | {len(ends)} of "
            f"{len(STOPS)}: the step was saved, `preempted` written, all processes gone {min(ends):.1f} to {max(ends):.1f} s after the request"
        )

    def G4(self) -> str:
        seconds, line = self.seconds_until_reported(signal.SIGKILL, [])
        return f"process 1 of two killed in step 4 | process 0 reported it {seconds:.1f} s after the start of the run: `{line}`"

    def G5(self) -> str:
        seconds, line = self.seconds_until_reported(signal.SIGSTOP, ["distributed.timeout_seconds=8"])
        return f"process 1 of two stopped (SIGSTOP) in step 4, `distributed.timeout_seconds=8` | process 0 reported it {seconds:.1f} s after the start of the run: `{line}`"

    def G6(self) -> str:
        from test_keep_going import KILLS, killed_under_keep_going, killed_under_max_restarts

        outer = killed_under_keep_going(self.recipe, self.room("outer"))
        inner = killed_under_max_restarts(self.recipe, self.room("inner"))
        return (
            f"process 0 of two killed in {KILLS} saves, restarted by `acc-lm keep-going`, and by `accelerate launch --rdzv_backend c10d "
            f"--max_restarts 5` | both runs ended bit for bit like an uninterrupted one, with {KILLS} restarts; {outer:.0f} s and {inner:.0f} s"
        )

    def G7(self) -> str:
        from test_checkpoint_cli import DAMAGES, damage_everything, finished_runs

        runs = finished_runs(self.recipe, self.room("damages"))
        counts = [damage_everything(run, self.room(f"damaged-{kind}")) for kind, run in runs.items()]
        return (
            f"every file of a checkpoint {', '.join(DAMAGES)}, in checkpoints of {', '.join(runs)} | {sum(counts)} of {sum(counts)} damaged "
            "files were detected and named, and the previous checkpoint was used"
        )

    def G8(self) -> str:
        from test_storage import LEVELS, fill_levels

        began = time.monotonic()
        how_full = fill_levels(self.recipe, self.room("disk"))
        return (
            f"disk full at {len(LEVELS)} levels from {min(LEVELS)} % to {max(LEVELS)} % of a checkpoint ({how_full}) | each time exit code 8 and one error line, "
            f"nothing half written, and the next run resumed from the previous checkpoint; the last run ended bit for bit like an uninterrupted one; {time.monotonic() - began:.0f} s"
        )

    def G9(self) -> str:
        from test_elastic import go_elastic

        way, worst, num_rows = go_elastic(self.recipe, self.room("elastic"))
        return (
            f"one run moved through {way}, interrupted by kill -9, SIGTERM, the file STOP and the time limit | each of {num_rows} rows once per epoch; "
            f"learning rates equal; losses within {worst:.0e} of one uninterrupted process"
        )

    def G11(self) -> str:
        count, seconds = self.all_pass("test_tracking.py")
        return (
            f"trackers without a key, refused, without an answer, switched off, not installed, on a full disk, raising, slow, hanging | {count} of "
            f"{count} tests: the result equals that of a run without trackers, with one warning; offline and after every interruption, each step appears once, in order; {seconds:.0f} s"
        )

    def G12(self) -> str:
        count, seconds = self.all_pass("test_trust.py")
        return (
            f"pickles and code planted in checkpoints, caches and model folders, paths that lead outside, secrets in every possible place | {count} of "
            f"{count} tests: nothing was executed, nothing was written outside, no secret appeared in any file or line; {seconds:.0f} s"
        )

    def resuming(self) -> str:
        from test_time_to_resume import seconds_to_resume

        early, late, which = seconds_to_resume(self.recipe, self.room("resuming"))
        return f"at 1 % and at 99 % of {which} | {early:.2f} s and {late:.2f} s from the start to the end of the first step, without imports"

    def G10(self) -> str:
        from backends import Scenario
        from test_matrix import ENGINES, LAYERS_IN_PARTS, whole_matrix

        engines = ENGINES | LAYERS_IN_PARTS
        matrix = whole_matrix(Scenario("wide", accumulation=2), self.room("matrix"), engines)
        worst = max(difference for row in matrix.values() for difference, _ in row.values())
        self.matrix = [
            "",
            "Largest relative difference of loss and gradient norm from one uninterrupted process, in the ten steps after the load; "
            "`=`: also bit for bit equal to the writer's own continuation. The engine of the row wrote, the engine of the column read.",
            "",
            f"| | {' | '.join(engines)} |",
            "|---" * (len(engines) + 1) + "|",
        ]
        for writer, row in matrix.items():
            self.matrix.append(f"| {writer} | {' | '.join(f'{row[r][0]:.0e}' + ' =' * row[r][1] for r in engines)} |")
        return f"every engine's checkpoint read by every engine, then 10 steps | {len(matrix)} x {len(matrix)} pairs within {worst:.0e}; table below"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--launcher-kills", type=int, default=20)
    parser.add_argument("--only", metavar="G6,G8", help=f"some of {', '.join(GATES)}; a page keeps its other rows")
    known = parser.parse_args()
    only = known.only.split(",") if known.only else list(GATES)
    if unknown := set(only) - set(GATES):
        parser.error(f"--only must name gates of {', '.join(GATES)}, got {', '.join(sorted(unknown))}")
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
        "| gate | what was done | result |",
        "|---|---|---|",
        *rows.values(),
        *chaos.matrix,
    ]
    if known.page:
        write(known.page, lines, rows if known.only else None, chaos.matrix)


def write(page: Path, lines: list[str], some: dict[str, str] | None, matrix: list[str]) -> None:
    """Replace the page's block, or only some of its rows, and the table of engines if it was made."""
    from acc_lm.studies.tables import machine_line, replace_block

    if some is not None:
        block = page.read_text().partition("<!-- chaos: generated -->\n")[2].partition("\n<!-- chaos: end -->")[0]
        lines, new = block.splitlines(), dict(some)
        for index, line in enumerate(lines):
            name = line.split("|")[1].strip() if line.startswith("| ") else ""
            lines[index] = new.pop(name, line)
        last = max(index for index, line in enumerate(lines) if line.startswith("| G"))
        lines[last + 1 : last + 1] = new.values()
        if matrix:
            start = next(index for index, line in enumerate(lines) if line.startswith(matrix[1][:40]))
            ends = [index for index, line in enumerate(lines) if index > start + 1 and not line.startswith("|")]
            lines[start - 1 : min(ends, default=len(lines))] = matrix
        again = f"Measured again later, {', '.join(some)}: "
        lines = [line for line in lines if not line.startswith(again)]
        lines += ["", again + machine_line()]
    replace_block(page, "chaos", re.sub(r"\n{3,}", "\n\n", "\n".join(lines)))


if __name__ == "__main__":
    main()
