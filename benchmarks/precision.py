"""Differences of the backends from one process in each precision, and their collectives; the tables of docs/promises/parity.md.

    python benchmarks/precision.py [docs/promises/parity.md] [--only "tensor_parallel x2,fsdp2_tensor_parallel 2x2"]

The same short trainings as in tests/runs/test_backends.py: 20 steps, global batch 48, ragged targets.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), *map(str, (ROOT / "tests").glob("*/"))]
os.environ["OMP_NUM_THREADS"] = "1"


def row_of(backend: str, expected: dict[tuple[Any, ...], list[Any]]) -> str:
    """Row of the table: a cell for each precision.

    Args:
        expected: curves of one process by their scenarios; missing ones are added.
    """
    from backends import BACKENDS, run_backend
    from test_backends import BF16, FLOAT64, GRID
    from test_matrix import LAYERS_IN_PARTS

    from acc_lm.run_files.differences import COMPARED, largest_differences

    config, count = (BACKENDS | LAYERS_IN_PARTS)[backend]
    cells = []
    for group in (GRID, BF16, FLOAT64[:1], FLOAT64[1:]):
        scenarios = tuple(group)
        if backend in LAYERS_IN_PARTS:
            scenarios = tuple(replace(each, model="wide") for each in group if each.model == "llama")
        if not scenarios or (scenarios[0].dtype == "float64" and config.startswith("deepspeed")):
            cells.append("refused")
            continue
        if scenarios not in expected:
            expected[scenarios] = run_backend("single", 1, [*scenarios])
        worst = dict.fromkeys(COMPARED, 0.0)
        for one, other in zip(expected[scenarios], run_backend(config, count, [*scenarios]), strict=True):
            for key, value in largest_differences(one.metrics, other.metrics).items():
                worst[key] = max(worst[key], value)
        cells.append(", ".join(f"{worst[key]:.0e}" for key in COMPARED if key != "train/learning_rate"))
    return f"| {backend} | {' | '.join(cells)} |"


def main(page: Path | None, only: list[str]) -> None:
    import conftest  # imports what the forked processes need
    from backends import BACKENDS, Scenario, run_backend
    from test_backends import count_collectives
    from test_matrix import LAYERS_IN_PARTS

    from acc_lm.studies.tables import machine_line, replace_block, replace_rows

    assert conftest
    lines = [
        "`python benchmarks/precision.py docs/promises/parity.md`: largest relative difference of loss, gradient norm and evaluation from one "
        "process, over 20 steps. The worse of a tied GPT-2 and an untied Llama; in float64 both, because Llama's RMSNorm computes in float32. "
        "Layers in parts: a Llama with four heads alone, because GPT-2 is refused.",
        "",
        machine_line(),
        "",
        "| backend | float32 | bf16 | float64, GPT-2 | float64, Llama |",
        "|---|---|---|---|---|",
    ]
    expected: dict[tuple[Any, ...], list[Any]] = {}
    measured = [name for name in BACKENDS | LAYERS_IN_PARTS if not only or name in only]
    for backend in measured:
        lines.append(row_of(backend, expected))
        print(lines[-1], flush=True)
    if only:
        if page:
            replace_rows(page, "precision", lines[-len(measured) :], 1, ", ".join(only))
        return
    lines += [
        "",
        "DeepSpeed updates in float32 whatever the model's dtype: `model.dtype must be float32 under DeepSpeed`, says the refusal.",
        "",
        "Collectives of one optimizer step of four micro-batches (GPT-2, two blocks, two processes), as calls of torch's c10d. In every "
        "micro-batch FSDP2 gathers the weights of its four units (two blocks, the tied embedding with norm and head, the position embedding) and "
        "reduce-scatters their gradients; DDP sends each gradient once.",
        "",
        "| backend | calls |",
        "|---|---|",
    ]
    for backend, (config, count) in BACKENDS.items():
        if "offload" in config or "full" in config or count == 3:
            continue
        curve = run_backend(config, count, [Scenario("gpt2", accumulation=4, steps=2)], count_collectives)[0]
        calls = ", ".join(
            f"{n} x {name.removeprefix('c10d::').strip('_')}" for name, n in sorted(curve.extra["collectives"].items())
        )
        lines.append(f"| {backend} | {calls} |")
        print(lines[-1], flush=True)
    if page:
        replace_block(page, "precision", "\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument("--only", default="", help="backends to measure; a page keeps its other rows")
    known = parser.parse_args()
    main(known.page, known.only.split(",") if known.only else [])
