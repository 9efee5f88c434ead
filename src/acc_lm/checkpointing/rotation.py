"""Rotation of a run's checkpoints on disk: which ones to keep, and which is the best.

checkpoints/step-00000200/   a checkpoint, see loading.py
checkpoints/latest, best     relative links, for users
checkpoints/aside-*          checkpoints that a resumed run set aside; never deleted, never found again
"""

from __future__ import annotations

import errno
import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from acc_lm.checkpointing.crash_points import crash_point
from acc_lm.checkpointing.format import free_name, step_folders
from acc_lm.config import CheckpointConfig
from acc_lm.errors import UNSUPPORTED, warn_once
from acc_lm.run_files import metrics_file
from acc_lm.run_files.metrics_file import gain
from acc_lm.run_files.names import CHECKPOINTS, MANIFEST, STATE
from acc_lm.runtime import on_main

if TYPE_CHECKING:
    from accelerate import Accelerator


def rotate(root: Path, config: CheckpointConfig) -> None:
    """Keep the newest `keep_last` checkpoints and the best `keep_best` by `best_metric`; link `latest` and `best`."""
    newest = [folder for _, folder in sorted(step_folders(root), reverse=True)]
    best = [folder for _, folder in _ranking(root, config.best_metric)]
    _link(root / "latest", newest[0])
    _link_best(root, config.best_metric)
    if config.keep_last is None:
        return
    keep = {*newest[: config.keep_last], *best[: config.keep_best]}
    for folder in newest:
        if folder not in keep:
            remove_checkpoint(folder)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, manifest first, so that a half-removed folder is no checkpoint; of a link, only the link."""
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    crash_point("mid_rotate")
    shutil.rmtree(folder)


def _link(link: Path, folder: Path) -> None:
    temporary = link.with_name(f"tmp-{link.name}")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(folder.name)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.EPERM):
            raise
        warn_once(
            f"output_dir is on a file system without links ({error.strerror}): checkpoints/latest and best will be missing"
        )
        return
    _remove_copy(link)
    temporary.replace(link)


def _remove_copy(link: Path) -> None:
    """Remove the directory left where a copy of the run dereferenced this link; rename anything else there."""
    if link.is_symlink() or not link.exists():
        return
    if (link / MANIFEST).is_file():
        shutil.rmtree(link)
    else:
        link.rename(free_name(link))


def _ranking(root: Path, metric: str) -> list[tuple[float, Path]]:
    """(gain, folder) of the evaluated checkpoints, the best first, ties with the oldest first.

    A stopped run saves before an evaluation that is due. The resumed run makes up for this evaluation, whose value is then
    only in the record (`metrics.jsonl`).
    """
    values = {(step, folder): _value(folder, metric) for step, folder in step_folders(root)}
    if None in values.values():
        record = dict(zip(*metrics_file.series(metrics_file.read(root.parent), metric), strict=True))
        values = {
            (step, folder): record.get(step) if value is None else value for (step, folder), value in values.items()
        }
    found = [(-gain(metric, v), *place) for place, v in values.items() if v is not None and math.isfinite(v)]
    return [(-loss, folder) for loss, _, folder in sorted(found)]


def _value(folder: Path, metric: str) -> float | None:
    try:
        state = json.loads((folder / STATE).read_text())
        measured = state.get("evaluation") or {"eval/loss": state["eval_loss"]}  # from before other metrics existed
        return None if measured.get(metric) is None else float(measured[metric])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def is_among_best(
    accelerator: Accelerator, output_dir: Path, evaluation: dict[str, float], config: CheckpointConfig
) -> bool:
    """True when weights of this evaluation belong among the best `keep_best` checkpoints; the main process decides."""
    return on_main(accelerator, lambda: _beats_the_best(output_dir, evaluation[config.best_metric], config))


def _beats_the_best(output_dir: Path, value: float, config: CheckpointConfig) -> bool:
    gains = [kept for kept, _ in _ranking(output_dir / CHECKPOINTS, config.best_metric)]
    if not config.keep_best or not math.isfinite(value):
        return False
    return len(gains) < config.keep_best or gain(config.best_metric, value) > gains[config.keep_best - 1]


def best_checkpoint(output_dir: Path, metric: str) -> Path | None:
    """Checkpoint with the best evaluation; None without an evaluated one."""
    ranking = _ranking(output_dir / CHECKPOINTS, metric)
    return ranking[0][1] if ranking else None


def link_best(accelerator: Accelerator, output_dir: Path, metric: str) -> Path | None:
    """Point the link `best` at the best checkpoint and return it, or None; the same answer on every process."""
    return on_main(accelerator, lambda: _link_best(output_dir / CHECKPOINTS, metric))


def _link_best(root: Path, metric: str) -> Path | None:
    best = best_checkpoint(root.parent, metric)
    if best:
        _link(root / "best", best)
    else:
        _remove_copy(root / "best")
        (root / "best").unlink(missing_ok=True)
    return best
