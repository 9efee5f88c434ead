"""Put the real output of the quickstart, its picture and the generated tables into README.md and README.zh-TW.md.

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

from ruamel.yaml import YAML

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
TABLES = {
    "": {
        "recipes": "| recipe (what) | | hardware | memory of each process, measured, or of each GPU, estimated |",
        "parity": "| config, processes | engine | largest difference in loss | in gradient norm | rows of each step |",
        "made": "`{command}`, {steps} steps. {made}",
        "same": "the same",
        "others": "OTHERS",
        "train.py": "the whole run in four functions",
    },
    ".zh-TW": {
        "recipes": "| 配方（學什麼） | | 硬體 | 每個行程的記憶體（實測），或每顆 GPU 的記憶體（估計） |",
        "parity": "| 設定檔、行程數 | 引擎 | loss 的最大差異 | 梯度範數的最大差異 | 每一步的資料列 |",
        "made": "`{command}`，{steps} 步。{made}",
        "same": "相同",
        "others": "不同",
        "train.py": "四個函式寫完一次訓練",
    },
}
"""Fixed words of the tables, by the page's language."""
MEMORY_IN_CHINESE = {
    r"([\d.]+) to ([\d.]+) GiB with (\S+) on (\d+)": r"\3，\4 個行程：\1 至 \2 GiB",
    r", (?=\S+，)": "；",
    r"^([\d.]+ GB) per process$": r"每個行程 \1",
    r"^under ([\d.]+ GB)$": r"不到 \1",
}
"""Forms that the memory of a recipe's header has, and what stands for them in Chinese."""


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


def recipe_table(language: str = "") -> str:
    """A row for each recipe, from what its header says; in Chinese from docs/recipes.zh-TW.yaml."""
    words = YAML(typ="safe").load((ROOT / f"docs/recipes{language}.yaml").read_text()) if language else {}
    rows = [TABLES[language]["recipes"], "|---|---|---|---|"]
    for header in read_headers(ROOT / "recipes"):
        what, hardware, memory = header.what, header.hardware, header.memory
        if language:
            what, hardware = (words[header.file.stem][name] for name in ("what", "hardware"))
            for pattern, chinese in MEMORY_IN_CHINESE.items():
                memory = re.sub(pattern, chinese, memory)
        rows.append(f"| [{header.file.stem}](recipes/{header.file.name}) | {what} | {hardware} | {memory} |")
    return "\n".join(rows)


def parity_table(language: str = "") -> str:
    """A row for each strategy of docs/promises/parity.json, and under what it was measured."""
    words = TABLES[language]
    parity = json.loads((ROOT / "docs/promises/parity.json").read_text())
    rows = [words["parity"], "|---|---|---|---|---|"]
    for row in parity["rows"]:
        if row["problem"] is None and not row["name"].startswith(VARIANTS):
            loss, norm = (f"{row['differences'][name]:.0e}" for name in ("train/loss", "train/grad_norm"))
            rows.append(
                f"| {row['name']} | {row['engine']} | {loss} | {norm} | {words['same' if row['same_ledger'] else 'others']} |"
            )
    return "\n".join([*rows, "", words["made"].format(**parity)])


def room_table(language: str = "") -> str:
    """The rooms of docs/architecture.md, which are the first lines of their docstrings."""
    page = (ROOT / f"docs/architecture{language}.md").read_text()
    rows = re.findall(r"^\| \[`(\w+/)`\]\(\S+\) \| (.*) \|$", page, re.M)
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:{width}} {line}" for name, line in rows]
    return "\n".join(["```", f"{'train.py':{width + 2}} {TABLES[language]['train.py']}", "src/acc_lm/", *lines, "```"])


def insert_tables(readme: str, language: str = "") -> str:
    for name, table in (("recipes", recipe_table), ("parity", parity_table), ("rooms", room_table)):
        pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- /{name} -->)"
        assert re.search(pattern, readme, re.DOTALL), f"README{language}.md has no place for {name}"
        text = f"{table(language)}\n"
        readme = re.sub(pattern, lambda match, text=text: match[1] + text + match[2], readme, flags=re.DOTALL)
    return readme


def insert(readme: str, name: str, text: str) -> str:
    pattern = rf"(<!-- {name}: [^>]*-->\n```\n).*?(```\n<!-- /{name} -->)"
    assert re.search(pattern, readme, re.DOTALL), f"README.md has no place for {name}"
    return re.sub(pattern, lambda match: f"{match[1]}{text}\n{match[2]}", readme, flags=re.DOTALL)


def main() -> None:
    readmes = {language: ROOT / f"README{language}.md" for language in TABLES}
    for language, readme in readmes.items():
        readme.write_text(insert_tables(readme.read_text(), language))
    if sys.argv[1:] == ["recipes"]:
        return
    run = ROOT / "runs/readme"
    if len(sys.argv) == 3:
        train, run = Path(sys.argv[1]).read_text(), Path(sys.argv[2])
    else:
        train = output_of(sys.executable, "train.py", f"output_dir={run}")
    shutil.copy(run / "training_curves.png", ROOT / "docs/quickstart.png")
    for readme in readmes.values():
        readme.write_text(insert(readme.read_text(), "quickstart", training_block(train)))


if __name__ == "__main__":
    main()
