"""Run every command of a lab in a copy of this project and put what came out into its pages, in both languages.

    python docs/course/code/update.py 02_train
    python docs/course/code/update.py --only 3,4 02_train      only these blocks (from 0), in the folder of the last time

The copy stays in $TMPDIR/acc-lm-course/NAME, with the runs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import pages

LINES = {
    False: "*{machine}. {count} commands: {seconds:,.0f} s, {cpu:,.0f} s of CPU time.*",
    True: "*{machine}。{count} 個指令：共 {seconds:,.0f} 秒，CPU 時間 {cpu:,.0f} 秒。*",
}
"""The line under the heading, in English and in Chinese."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lab", help="the beginning of the page's name, such as 02_train")
    parser.add_argument("--only", help="numbers of code blocks to run again, from 0, with commas between them")
    known = parser.parse_args(arguments)
    found = pages.lab_pages(known.lab)
    if len(found) != 1:
        names = ", ".join(page.stem for page in pages.lab_pages())
        print(
            f"error: LAB must be the beginning of one page's name, got {known.lab}; give one of {names}",
            file=sys.stderr,
        )
        return 2
    page = found[0]
    only = None if known.only is None else {int(number) for number in known.only.split(",")}
    folder = Path(tempfile.gettempdir(), "acc-lm-course", page.stem)
    if only is None:
        shutil.rmtree(folder, ignore_errors=True)
    pages.copy_project(folder)
    commands = [command for command in pages.commands_of(page) if only is None or command.block in only]
    outputs, seconds, cpu = {}, 0.0, 0.0
    for done in pages.run_commands(commands, folder, pages.learner_environment(folder)):
        print(f"$ {done.command.text}\n{done.output}[{done.seconds:.1f} s, {done.cpu_seconds:.1f} s of CPU time]\n")
        if done.code != done.command.code:
            print(f"error: the page expects exit code {done.command.code}, got {done.code}; see above", file=sys.stderr)
            return 1
        outputs[done.command.block] = outputs.get(done.command.block, "") + done.output
        seconds, cpu = seconds + done.seconds, cpu + done.cpu_seconds
    write(page, outputs, {"count": len(commands), "seconds": seconds, "cpu": cpu} if only is None else None)
    return 0


def write(page: Path, outputs: dict[int, str], measured: dict[str, float] | None) -> None:
    """Fill the marked places of both languages; without a measurement of the complete page its line stays."""
    from acc_lm.studies.tables import machine_line

    for file in (page, pages.in_chinese(page)):
        if not file.exists():
            continue
        text = pages.fill_outputs(file.read_text(), outputs)
        if measured:
            line = LINES[file.name.endswith(pages.CHINESE)].format(machine=machine_line(), **measured)
            text = pages.MEASURED.sub(lambda _, line=line: f"<!-- measured -->\n{line}\n<!-- /measured -->", text)
        file.write_text(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
