"""Put the real output of `make train` and `make test` into README.md.

make readme                             runs both and inserts what they print
python docs/update_readme.py LOG LOG    inserts outputs that were kept
python docs/update_readme.py recipes    only makes the table of recipes anew, from their headers
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


def recipe_table() -> str:
    """A row for each recipe, from what its header says."""
    rows = [
        "| recipe (what) | | hardware | memory of each process, measured, or of each GPU, estimated |",
        "|---|---|---|---|",
    ]
    for file in sorted((ROOT / "recipes").glob("*.yaml"), key=lambda file: (file.stem != "quickstart", file.stem)):
        lines = [line[2:] for line in file.read_text().splitlines() if line.startswith("# ")]
        text = " ".join(lines[1:])
        hardware, memory = (
            re.findall(rf"^{name}.*?: (.*?)\.?$", "\n".join(lines), re.M)[0] for name in ("Hardware", "Memory")
        )
        what = re.split(r"\. ", text)[0]
        figures = memory.partition(", by")[0].removesuffix(", measured")
        rows.append(f"| [{file.stem}](recipes/{file.name}) | {what} | {hardware} | {figures} |")
    return "\n".join(rows)


def insert_table(readme: str) -> str:
    pattern = r"(<!-- recipes: [^>]*-->\n\n).*?(\n\n<!-- /recipes -->)"
    assert re.search(pattern, readme, re.DOTALL), "README.md has no place for the recipes"
    return re.sub(pattern, lambda match: match[1] + recipe_table() + match[2], readme, flags=re.DOTALL)


def insert(readme: str, name: str, text: str) -> str:
    pattern = rf"(<!-- {name}: [^>]*-->\n```\n).*?(```\n<!-- /{name} -->)"
    assert re.search(pattern, readme, re.DOTALL), f"README.md has no place for {name}"
    return re.sub(pattern, lambda match: f"{match[1]}{text}\n{match[2]}", readme, flags=re.DOTALL)


def main() -> None:
    if sys.argv[1:] == ["recipes"]:
        (ROOT / "README.md").write_text(insert_table((ROOT / "README.md").read_text()))
        return
    if len(sys.argv) == 3:
        train, test = (Path(name).read_text() for name in sys.argv[1:])
    else:
        train = output_of(sys.executable, "train.py", "output_dir=runs/readme")
        test = output_of("make", "test")
    summary = re.findall(r"=+ (\d+ passed.*?) =+", test)[-1]
    readme = insert_table((ROOT / "README.md").read_text())
    readme = insert(readme, "quickstart", training_block(train))
    (ROOT / "README.md").write_text(insert(readme, "tests", summary))


if __name__ == "__main__":
    main()
