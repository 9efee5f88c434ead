"""Put the real output of the quickstart, its picture and the generated tables into README.md.

make readme                             trains and inserts what is printed
python docs/update_readme.py LOG RUN    inserts an output that was kept, and the picture of that run
python docs/update_readme.py recipes    only makes the tables anew: recipes from their headers, rooms, parity
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from acc_lm.config.project import read_headers

ROOT = Path(__file__).parent.parent
VARIANTS = (
    "multi_node_ddp",
    "fsdp2_grad_op",
    "fsdp2_offload",
    "deepspeed_zero1",
    "deepspeed_zero2_offload",
    "deepspeed_zero3_offload",
    "ddp_sequence",
    "deepspeed_zero3_sequence",
    "tensor_parallel",
)
"""Cases of docs/promises/parity.md that the README leaves out."""


def output_of(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def training_block(output: str) -> str:
    """Facts that decide the run, its first and last lines, and its score."""
    lines = [line.rstrip() for line in output.splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("strategy"))
    steps = [i for i, line in enumerate(lines) if re.match(r"step \d+/", line)]
    scores = next(i for i, line in enumerate(lines) if line.startswith("held-out text, bits per byte"))
    shown = ("strategy", "global batch", "model", "held out")
    start = [line for line in lines[first : steps[0]] if line.startswith(shown)]
    return "\n".join([*start, lines[steps[0]], "...", lines[steps[-1]], "...", *lines[scores : scores + 4]])


def recipe_table() -> str:
    """A row for each recipe, from what its header says."""
    rows = [
        "| recipe (what) | | hardware | memory of each process, measured, or of each GPU, estimated |",
        "|---|---|---|---|",
    ]
    rows += [
        f"| [{header.file.stem}](recipes/{header.file.name}) | {header.what} | {header.hardware} | {header.memory} |"
        for header in read_headers(ROOT / "recipes")
    ]
    return "\n".join(rows)


def parity_table() -> str:
    """A row for each strategy of docs/promises/parity.json, and under what it was measured."""
    parity = json.loads((ROOT / "docs/promises/parity.json").read_text())
    rows = [
        "| config, processes | engine | largest difference in loss | in gradient norm | rows of each step |",
        "|---|---|---|---|---|",
    ]
    for row in parity["rows"]:
        if row["problem"] is None and not row["name"].startswith(VARIANTS):
            loss, norm = (f"{row['differences'][name]:.0e}" for name in ("train/loss", "train/grad_norm"))
            rows.append(
                f"| {row['name']} | {row['engine']} | {loss} | {norm} | {'the same' if row['same_ledger'] else 'OTHERS'} |"
            )
    return "\n".join([*rows, "", f"`{parity['command']}`, {parity['steps']} steps. {parity['made']}"])


def room_table() -> str:
    """The rooms of docs/architecture.md, which are the first lines of their docstrings."""
    rows = re.findall(r"^\| \[`(\w+/)`\]\(\S+\) \| (.*) \|$", (ROOT / "docs/architecture.md").read_text(), re.M)
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:{width}} {line}" for name, line in rows]
    return "\n".join(["```", f"{'train.py':{width + 2}} the whole run in four functions", "src/acc_lm/", *lines, "```"])


def insert_tables(readme: str) -> str:
    for name, table in (("recipes", recipe_table), ("parity", parity_table), ("rooms", room_table)):
        pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- /{name} -->)"
        assert re.search(pattern, readme, re.DOTALL), f"README.md has no place for {name}"
        text = f"{table()}\n"
        readme = re.sub(pattern, lambda match, text=text: match[1] + text + match[2], readme, flags=re.DOTALL)
    return readme


def insert(readme: str, name: str, text: str) -> str:
    pattern = rf"(<!-- {name}: [^>]*-->\n```\n).*?(```\n<!-- /{name} -->)"
    assert re.search(pattern, readme, re.DOTALL), f"README.md has no place for {name}"
    return re.sub(pattern, lambda match: f"{match[1]}{text}\n{match[2]}", readme, flags=re.DOTALL)


def main() -> None:
    if sys.argv[1:] == ["recipes"]:
        (ROOT / "README.md").write_text(insert_tables((ROOT / "README.md").read_text()))
        return
    run = ROOT / "runs/readme"
    if len(sys.argv) == 3:
        train, run = Path(sys.argv[1]).read_text(), Path(sys.argv[2])
    else:
        train = output_of(sys.executable, "train.py", f"output_dir={run}")
    shutil.copy(run / "training_curves.png", ROOT / "docs/quickstart.png")
    readme = insert_tables((ROOT / "README.md").read_text())
    (ROOT / "README.md").write_text(insert(readme, "quickstart", training_block(train)))


if __name__ == "__main__":
    main()
