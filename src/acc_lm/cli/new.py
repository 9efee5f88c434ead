"""`acc-lm new FOLDER`: a folder with train.py, a recipe and Accelerate configs, to own and edit."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from acc_lm.config.project import CONFIGS, RECIPES, find_accelerate_config, find_recipe, project_folder
from acc_lm.errors import ConfigError

MAKEFILE = """\
# make train: {recipe} on whatever is here. make rehearse: the same on two processes of this machine, with {config}.
train:
\tpython train.py --config recipes/{recipe}.yaml

rehearse:
\tACCELERATE_USE_CPU=true accelerate launch --config_file accelerate_configs/{config}.yaml --num_processes 2 train.py --config recipes/{recipe}.yaml --dry-run

.PHONY: train rehearse
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder to make; it must not exist yet, or be empty"
    )
    parser.add_argument(
        "--recipe", default="quickstart", metavar="NAME", help="recipe to start from (default: quickstart)"
    )
    parser.add_argument(
        "--config", default="ddp", metavar="NAME", help="Accelerate config to start from (default: ddp)"
    )


def run(known: argparse.Namespace) -> int:
    recipe, config = find_recipe(known.recipe), find_accelerate_config(known.config)
    folder: Path = known.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"FOLDER must not exist yet, or be empty, got {folder}; choose another name")
    for file, name in (
        (project_folder() / "train.py", "train.py"),
        (project_folder() / RECIPES / "schema.json", f"{RECIPES}/schema.json"),
        (recipe, f"{RECIPES}/{recipe.name}"),
        *((file, f"{CONFIGS}/{file.name}") for file in config.parent.glob(f"{config.stem}.*")),  # with DeepSpeed's JSON
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / name)
    (folder / "Makefile").write_text(MAKEFILE.format(recipe=recipe.stem, config=config.stem), encoding="utf-8")
    print(f"{folder}: train.py, {RECIPES}/{recipe.name}, {CONFIGS}/{config.name}, Makefile")
    print(f"cd {folder} && make train")
    return 0
