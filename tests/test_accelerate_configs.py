"""Every Accelerate config is one that Accelerate reads, says what it is for, and holds no learning."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from processes import ROOT

CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_accelerate_reads_it_and_every_key_has_one_comment(file: Path) -> None:
    config = load_config_from_file(str(file))
    assert config.num_processes == (2 if file.stem == "ddp" else 1)
    assert config.mixed_precision == "no", "precision is the recipe's"
    header = [line for line in file.read_text().splitlines() if line.startswith("# ")]
    for word in ("When to use it:", "Smallest sensible hardware:", "Verified:"):
        assert sum(word in line for line in header) == 1
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            assert line.count(" # ") == 1, line


def test_the_configs_of_this_version() -> None:
    assert [file.stem for file in CONFIGS] == ["cpu", "ddp", "single_gpu"]
