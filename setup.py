"""Build step of the wheel: train.py, the recipes and the Accelerate configs go into the package, as acc_lm/project/."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PROJECT = ("train.py", "recipes", "accelerate_configs")


class BuildWithProject(build_py):
    """A clone keeps these files at its top, where people look; an installed package needs them inside."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # acc_lm.project finds the clone's own
            return
        target = Path(self.build_lib, "acc_lm", "project")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in PROJECT:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target / name)
            else:
                shutil.copyfile(ROOT / name, target / name)


setup(cmdclass={"build_py": BuildWithProject})
