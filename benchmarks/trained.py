"""Data x trained weights x rows x engine: runs that cover every pair of values; a table of docs/promises/parity.md.

python benchmarks/trained.py [docs/promises/parity.md] [--only tensor_parallel,fsdp2_tensor_parallel]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), *map(str, (ROOT / "tests").glob("*/"))]
os.environ["OMP_NUM_THREADS"] = "1"


def main(page: Path | None, only: list[str]) -> None:
    import conftest  # imports what the forked processes need
    from processes import run_training
    from test_conversations import CASES, CASES_WITH_LAYERS_IN_PARTS, arguments, try_case, write

    from acc_lm.studies.tables import machine_line, replace_block, replace_rows

    lines = [
        "`python benchmarks/trained.py docs/promises/parity.md`:",
        "",
        "- 10 steps; the largest relative difference of any step from one process on the same rows.",
        "- Then the same launch, killed with SIGKILL at its second save and started again.",
        "- Every value of a column was run with every value of each other column; layers in parts train no adapter, and a wider model.",
        "- For text, *packed* means `data.attend_across_documents: false`; *padded* means that a row is read as one text.",
        "",
        machine_line(),
        "",
        "| data | trained | rows | engine | loss | gradient norm | evaluation | rows of each step | after the kill |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recipe = folder / "tiny.yaml"
        recipe.write_text(conftest.tiny_recipe_of(folder / "unused.txt"))
        tiny = ["--config", str(recipe)]
        base = folder / "base"
        run_training(arguments(tiny, write(folder / "base.jsonl", "messages"), base))
        cases = [case for case in (*CASES, *CASES_WITH_LAYERS_IN_PARTS) if not only or case.engine in only]
        for case in cases:
            place = Path(tempfile.mkdtemp(dir=folder))
            outcome = try_case(case, tiny, base, place)
            far = " | ".join(f"{outcome.differences[k]:.0e}" for k in ("train/loss", "train/grad_norm", "eval/loss"))
            rows = "the same" if outcome.same_rows else "OTHER"
            killed = "bit for bit" if outcome.same_after_kill else "OTHER"
            lines.append(f"| {' | '.join(case)} | {far} | {rows} | {killed} |")
            print(lines[-1], flush=True)
    if page and only:
        replace_rows(page, "trained", lines[-len(cases) :], 4, ", ".join(only))
    elif page:
        replace_block(page, "trained", "\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("--only", default="", help="engines to measure; a page keeps its other rows")
    known = parser.parse_args()
    main(known.page, known.only.split(",") if known.only else [])
