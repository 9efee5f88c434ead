"""train.py, the recipes and the Accelerate configs by name, in a clone and in an installed package alike; no torch."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from acc_lm.errors import ConfigError

RECIPES, CONFIGS = "recipes", "accelerate_configs"


def project_folder() -> Path:
    """Folder with train.py, recipes/ and accelerate_configs/: a copy inside the installed package, or the clone itself."""
    inside = Path(__file__).parents[1] / "project"
    return inside if inside.is_dir() else Path(__file__).parents[3]


def training_script() -> Path:
    """`train.py` of the current directory, if it has one; else acc-lm's own."""
    own = Path("train.py").absolute()
    return own if own.is_file() else project_folder() / "train.py"


def find_recipe(name: str | Path) -> Path:
    """Recipe by path, or by the name of one in recipes/, like `quickstart`.

    Raises:
        ConfigError: there is no such file and no such name.
    """
    return _find(name, RECIPES, "a recipe file, or the name of a recipe")


def find_accelerate_config(name: str | Path) -> Path:
    """Accelerate config by path, or by the name of one in accelerate_configs/, like `fsdp2`.

    Raises:
        ConfigError: there is no such file and no such name.
    """
    return _find(name, CONFIGS, "an Accelerate config, or the name of one")


def _find(name: str | Path, kind: str, what: str) -> Path:
    """The file itself; else the file of that name in this folder's project, or in acc-lm's own."""
    given = Path(name).expanduser()
    if given.is_file():
        return given
    folders = (Path(kind), project_folder() / kind)
    if not given.is_absolute():
        for folder in folders:
            for file in (folder / f"{given}.yaml", folder.parent / given if given.parts[:1] == (kind,) else None):
                if file is not None and file.is_file():
                    return file
    candidates = [str(file) for file in sorted(given.parent.glob("*.yaml"))] if given.parent != Path() else []
    candidates += [file.stem for folder in folders for file in sorted(folder.glob("*.yaml"))]
    near = difflib.get_close_matches(str(name), candidates, n=1, cutoff=0.3)
    way = f"nearest: {near[0]}" if near else "check the path"
    raise ConfigError(f"{name} must be {what}, got nothing there; {way}")


@dataclass(frozen=True)
class Header:
    """Facts from the comments at the beginning of a recipe."""

    file: Path
    what: str
    """One sentence: the model, and what it learns."""
    hardware: str
    memory: str


def read_headers(folder: Path) -> list[Header]:
    """Header of each recipe in a folder, the quickstart first."""
    found = []
    for file in sorted(folder.glob("*.yaml"), key=lambda file: (file.stem != "quickstart", file.stem)):
        lines = [line[2:] for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
        hardware, memory = (
            re.findall(rf"^{name}.*?: (.*?)\.?$", "\n".join(lines), re.M)[0] for name in ("Hardware", "Memory")
        )
        what = re.split(r"\. ", " ".join(lines[1:]))[0]
        found.append(Header(file, what, hardware, memory.partition(", by")[0].removesuffix(", measured")))
    return found
