"""Time to resume, independent of progress: what is read before the first step does not depend on the step's number."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from processes import Launch, run_training


def long_run(recipe: Path, run: Path, num_steps: int, *more: str) -> list[str]:
    """Arguments of a run that saves after a hundredth of its steps and just before its end."""
    return [
        "--config", str(recipe), f"training.max_steps={num_steps}", "training.eval_every=null", "training.log_every=100",
        f"checkpoint.every={num_steps // 100}", "checkpoint.keep_last=null", "checkpoint.keep_best=0", *more, f"output_dir={run}",
    ]  # fmt: skip


def until_the_first_step(arguments: list[str], whole: Path, step: int, target: Path) -> dict[str, Any]:
    """Work of a run that resumes from this step, before its first one, and the seconds from its start to the end of that."""
    name = f"step-{step:08d}"
    shutil.copytree(whole / "checkpoints" / name, target / "checkpoints" / name)
    (target / "metrics.jsonl").write_bytes((whole / "metrics.jsonl").read_bytes())
    done = {"rows read": 0, "calls for rows": 0, "epochs shuffled": 0}
    began = time.monotonic()

    def run() -> int:
        import acc_lm.rows.order
        import acc_lm.rows.text_rows
        import acc_lm.training
        import train

        train_step, getitems, permutation = (
            acc_lm.training.train_step,
            acc_lm.rows.text_rows.Rows.__getitems__,
            acc_lm.rows.order.permutation,
        )

        def reading(self: acc_lm.rows.text_rows.Rows, rows: list[int]) -> acc_lm.rows.batch.Batch:
            done["rows read"] += len(list(rows))
            done["calls for rows"] += 1
            return getitems(self, rows)

        def shuffling(*given: Any) -> Any:
            done["epochs shuffled"] += 1
            return permutation(*given)

        def stepping(*given: Any, **keywords: Any) -> None:
            train_step(*given, **keywords)
            print(json.dumps({"step": keywords["step"], "seconds": time.monotonic() - began, **done}), flush=True)
            os._exit(0)

        acc_lm.rows.text_rows.Rows.__getitems__ = reading  # type: ignore[method-assign]
        acc_lm.training.train_step = stepping  # type: ignore[assignment]
        acc_lm.rows.order.permutation = shuffling
        return train.main([*arguments, f"output_dir={target}"])

    finished = Launch(run).wait(60)
    found: dict[str, Any] = json.loads(finished.output.splitlines()[-1])
    assert found.pop("step") == step + 1, finished.output
    return found


def test_resuming_early_and_late_in_a_run_reads_equally_much(tiny_recipe: Path, tmp_path: Path) -> None:
    """Step 500 is in the sixteenth pass over the rows; reading all of them would be some 6000 rows."""
    arguments = long_run(tiny_recipe, tmp_path / "whole", 501)
    run_training(arguments)
    early, late = (until_the_first_step(arguments, tmp_path / "whole", step, tmp_path / str(step)) for step in (5, 500))
    print(early, late)
    del early["seconds"], late["seconds"]
    # A micro-batch warms up; it is twelve rows, and so is a step.
    assert early == late == {"rows read": 24, "calls for rows": 2, "epochs shuffled": 1}


def seconds_to_resume(recipe: Path, folder: Path) -> tuple[float, float, str]:
    """At 1 % and 99 % of a longer run: seconds from the start to the end of the first step, minimum of five; and which run."""
    big = ["data.source=synthetic", "data.files=[]", "data.sequence_length=512", "training.global_batch_size=16",
           "training.micro_batch_size=16"]  # fmt: skip
    arguments = long_run(recipe, folder / "whole", 200, *big)
    run_training(arguments, timeout=600)
    tries = [
        [
            until_the_first_step(arguments, folder / "whole", step, folder / f"{step}-{number}")["seconds"]
            for step in (2, 198)
        ]
        for number in range(5)
    ]
    early, late = (min(seconds) for seconds in zip(*tries, strict=True))
    return early, late, "200 steps of 8,192 tokens"
