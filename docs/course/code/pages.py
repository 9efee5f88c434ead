"""A page of the course as a program sees it: its commands in order, and the places that show what they printed.

```bash                  each line is a command; a block with a line that ends in & is one script
```python                the block is a program
<!-- exit code 2 -->     on the line before a block: its last command must end with this code
<!-- output: REGEX -->   after a block, up to <!-- /output -->: the lines of its output that match (no REGEX: all)
<!-- measured -->        up to <!-- /measured -->: date, commit, machine and time of the commands
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COURSE = ROOT / "docs/course"
CHINESE = ".zh-TW.md"
BLOCK = re.compile(r"(?:^<!-- exit code (\d+) -->\n)?^```(bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"^<!-- output(?:: (.*?))? -->\n(.*?)^<!-- /output -->$", re.DOTALL | re.MULTILINE)
MEASURED = re.compile(r"^<!-- measured -->\n(.*?)^<!-- /measured -->$", re.DOTALL | re.MULTILINE)
LAUNCHERS = re.compile(
    r"^(ACCELERATE_|FSDP_|PARALLELISM_CONFIG_|ACC_LM_CONFIG_FILE$|RANK$|WORLD_SIZE$|LOCAL_RANK$|LOCAL_WORLD_SIZE$|MASTER_|TORCHELASTIC_|OMP_NUM)"
)
"""Variables of a launch that a command typed by a learner would not find in its environment."""


@dataclass(frozen=True)
class Command:
    """A command of a page: a line, a script of several lines, or a Python program."""

    section: str
    """Heading above it."""
    text: str
    kind: str
    """line, script or python."""
    code: int
    """Exit code that the page expects."""
    block: int
    """Number of the code block on the page, from 0."""

    @property
    def is_python(self) -> bool:
        return self.kind == "python"

    def words(self) -> list[str]:
        """Arguments with which a process starts that does what the command says."""
        if self.is_python:
            return [sys.executable, "-c", self.text]
        return ["bash", "-c", self.text]


@dataclass(frozen=True)
class Done:
    """A command that has run."""

    command: Command
    code: int
    output: str
    """stdout and stderr together."""
    seconds: float
    cpu_seconds: float


def lab_pages(name: str = "") -> list[Path]:
    """English pages of the course whose name begins with `name`, in order."""
    return [page for page in sorted(COURSE.glob(f"{name}*.md")) if not page.name.endswith(CHINESE)]


def in_chinese(page: Path) -> Path:
    """The page next to an English one that says the same in Chinese."""
    return page.with_name(page.stem + CHINESE)


def commands_of(page: Path) -> list[Command]:
    """Every command of a page, in order."""
    text, found = page.read_text(), []
    for number, block in enumerate(BLOCK.finditer(text)):
        headings = re.findall(r"^#+ (.*)$", _without_code(text[: block.start()]), re.MULTILINE)
        section, code, body = (headings or [""])[-1], int(block[1] or 0), block[3]
        if block[2] == "python":
            found.append(Command(section, body, "python", code, number))
            continue
        body = body.replace("\\\n", " ")
        if re.search(r"&\s*(#.*)?$", body, re.MULTILINE):
            found.append(Command(section, body, "script", code, number))
            continue
        lines = [line for line in body.splitlines() if line.strip() and not line.startswith("#")]
        for line in lines:
            found.append(Command(section, without_comment(line), "line", code if line == lines[-1] else 0, number))
    return found


def without_comment(line: str) -> str:
    return re.sub(r"\s{2,}#.*$", "", line).strip()


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def copy_project(folder: Path) -> None:
    """Copy the files of the project that git knows or would add, as a clone has them."""
    listed = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def learner_environment(folder: Path) -> dict[str, str]:
    """The environment of a terminal in the project's folder, with its virtual environment activated."""
    environment = {name: value for name, value in os.environ.items() if not LAUNCHERS.match(name)}
    binaries = Path(sys.executable).parent
    return environment | {"PATH": f"{binaries}:{environment['PATH']}", "PYTHONPATH": str(folder / "src")}


def run_commands(
    commands: list[Command],
    folder: Path,
    environment: dict[str, str],
    change: Callable[[Command], Command] = lambda command: command,
    timeout: float = 1800,
) -> Iterator[Done]:
    """Type each command in `folder`, as it stands or changed; its output is that of a terminal, without the folder's path."""
    for command in commands:
        started, before = time.monotonic(), _children_seconds()
        words = change(command).words()
        if not command.is_python and command.text.startswith("make "):  # everything is installed
            words[-1] = re.sub(r"^make ", f"make -o .venv/installed BIN={Path(sys.executable).parent} ", words[-1])
        done = subprocess.run(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
        output = done.stdout.replace(f"{folder}/", "").replace(str(folder), ".")
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode
        yield Done(command, code, output, time.monotonic() - started, _children_seconds() - before)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fill_outputs(text: str, outputs: dict[int, str]) -> str:
    """The page with what each block printed in the place after it; a place without a new output stays as it is."""

    def fill(place: re.Match[str]) -> str:
        number = len(BLOCK.findall(text[: place.start()])) - 1
        if number not in outputs:
            return place[0]
        shown = selected(outputs[number], place[1])
        pattern = f": {place[1]}" if place[1] else ""
        return f"<!-- output{pattern} -->\n```text\n{shown}\n```\n<!-- /output -->"

    return OUTPUT.sub(fill, text)


def selected(output: str, pattern: str | None) -> str:
    """The lines that match, with ... in the place of others between them; every line without a pattern."""
    lines = [line.rstrip() for line in output.replace("\r", "\n").strip("\n").splitlines()]
    if pattern is None:
        return "\n".join(lines)
    shown: list[str] = []
    for line in lines:
        if re.search(pattern, line):
            shown.append(line)
        elif shown and shown[-1] != "...":
            shown.append("...")
    if shown and shown[-1] == "...":
        shown.pop()
    return "\n".join(shown)
