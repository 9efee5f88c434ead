"""Quality per token: AdamW and Muon on the same rows, each at several learning rates; a table of docs/measured/performance.md.

    python benchmarks/optimizers.py [docs/measured/performance.md]      # eleven short runs on one core

Every run starts from the same weights and sees the same tokens in the same order. The best rate of each optimizer is run
again with other seeds, which change weights and order; a difference within their spread does not count.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), *map(str, (ROOT / "tests").glob("*/"))]
os.environ["OMP_NUM_THREADS"] = "1"

RATES = {"adamw": (3e-3, 6e-3, 1.2e-2), "muon": (6e-3, 1.2e-2, 2.4e-2, 4.8e-2)}
OF_THE_REST = 6e-3
"""Rate of the parameters that muon leaves to AdamW: AdamW's best."""
OTHER_SEEDS = (43, 44)
STEPS, ROWS, LENGTH, EVERY = 400, 16, 128, 20
RECIPE = [
    "--config",
    str(ROOT / "recipes/quickstart.yaml"),
    "model.config={model_type: llama, hidden_size: 64, intermediate_size: 176, num_hidden_layers: 3, num_attention_heads: 4, "
    "num_key_value_heads: 4, tie_word_embeddings: true, initializer_range: 0.08}",
    "tokenizer.kind=byte",
    f"data.sequence_length={LENGTH}",
    f"training.max_steps={STEPS}",
    f"training.global_batch_size={ROWS}",
    f"training.micro_batch_size={ROWS}",
    f"training.log_every={EVERY}",
    f"training.eval_every={EVERY}",
    "training.eval_batches=8",
    "schedule.warmup_steps=40",
    "schedule.min_learning_rate=0",
    "checkpoint.every=null",
    "checkpoint.keep_best=0",
    "tracking.report_to=[]",
    "export.sample_tokens=0",
]


def run(name: str, rate: float, seed: int, folder: Path) -> dict[int, float]:
    """Train once and return the held-out loss by step."""
    from processes import run_training

    from acc_lm.run_files.metrics_file import read

    output = folder / f"{name}-{rate}-{seed}"
    settings = [f"optimizer.name={name}", f"optimizer.learning_rate={rate}", f"seed={seed}", f"output_dir={output}"]
    run_training([*RECIPE, *settings, f"optimizer.adamw_learning_rate={OF_THE_REST if name == 'muon' else 'null'}"])
    return {int(entry["step"]): entry["eval/loss"] for entry in read(output) if "eval/loss" in entry}


def main(page: Path | None) -> None:
    import conftest  # imports what the forked processes need

    from acc_lm.studies.tables import machine_line, replace_block

    assert conftest
    tokens = STEPS * ROWS * LENGTH
    lines = [
        f"`python benchmarks/optimizers.py docs/measured/performance.md`: a Llama of 0.15 million weights on the bytes of Python's standard library, {tokens:,} "
        "tokens, cosine schedule; loss on held-out text in nats per byte. Under muon, the parameters left to AdamW "
        f"have the peak rate {OF_THE_REST:g}.",
        "",
        machine_line(),
        "",
        "| optimizer | learning rate | final loss | with other seeds | tokens until AdamW's best final loss |",
        "|---|---|---|---|---|",
    ]
    curves: dict[tuple[str, float], list[dict[int, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, rates in RATES.items():
            for rate in rates:
                curves[name, rate] = [run(name, rate, 42, folder)]
                print(name, rate, curves[name, rate][0][STEPS], flush=True)
            best = min(rates, key=lambda rate, name=name: curves[name, rate][0][STEPS])  # type: ignore[misc]
            curves[name, best] += [run(name, best, seed, folder) for seed in OTHER_SEEDS]
    goal = min(runs[0][STEPS] for (name, _), runs in curves.items() if name == "adamw")
    means = {}
    for (name, rate), (first, *others) in curves.items():
        reached = next((step for step, loss in first.items() if loss <= goal), None)
        spread = ", ".join(f"{other[STEPS]:.3f}" for other in others)
        share = f"{reached * ROWS * LENGTH:,} ({reached / STEPS:.0%})" if reached else "not reached"
        lines.append(f"| {name} | {rate:g} | {first[STEPS]:.3f} | {spread or '-'} | {share} |")
        if others:
            means[name] = mean(run[STEPS] for run in (first, *others))
    lines += ["", f"Mean of three seeds at the best rate: AdamW {means['adamw']:.3f}, Muon {means['muon']:.3f}."]
    print("\n".join(lines))
    if page:
        replace_block(page, "optimizers", "\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
