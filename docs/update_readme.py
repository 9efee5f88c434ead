"""Put the real output of `make train` and `make test` into README.md.

make readme                             runs both and inserts what they print
python docs/update_readme.py LOG LOG    inserts outputs that were kept
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def output_of(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def training_block(output: str) -> str:
    """The start block, the first and last lines of the run, and the score."""
    lines = [line.rstrip() for line in output.splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("strategy"))
    steps = [i for i, line in enumerate(lines) if re.match(r"step \d+/", line)]
    scores = next(i for i, line in enumerate(lines) if line.startswith("held-out text, bits per byte"))
    start = [line for line in lines[first : steps[0]] if not line.startswith(("tracking", "output"))]
    end = [line for line in lines[steps[-1] : scores + 4] if not line.startswith("saved ")]
    return "\n".join([*start, lines[steps[0]], "...", *end])


def insert(readme: str, name: str, text: str) -> str:
    pattern = rf"(<!-- {name}: [^>]*-->\n```\n).*?(```\n<!-- /{name} -->)"
    assert re.search(pattern, readme, re.DOTALL), f"README.md has no place for {name}"
    return re.sub(pattern, lambda match: f"{match[1]}{text}\n{match[2]}", readme, flags=re.DOTALL)


def main() -> None:
    if len(sys.argv) == 3:
        train, test = (Path(name).read_text() for name in sys.argv[1:])
    else:
        train = output_of(sys.executable, "train.py", "output_dir=runs/readme")
        test = output_of("make", "test")
    summary = re.findall(r"=+ (\d+ passed.*?) =+", test)[-1]
    readme = (ROOT / "README.md").read_text()
    readme = insert(readme, "quickstart", training_block(train))
    (ROOT / "README.md").write_text(insert(readme, "tests", summary))


if __name__ == "__main__":
    main()
