"""The wheel, installed in an environment of its own and used from an empty folder, as anyone would."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import LAUNCH_VARIABLES, ROOT

SMALL = [
    "model.config={model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2}",
    "tokenizer.kind=byte",
    "data.sequence_length=32",
    "training.max_steps=6",
    "checkpoint.every=3",
    "tracking.report_to=[]",
]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a program of the environment in an empty folder; its libraries are those of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    clone = folder / "clone"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = "from setuptools import build_meta; build_meta.build_sdist('..')"  # and the wheel from that, as on PyPI
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(clone)
    (source,) = folder.glob("acc_lm-*.tar.gz")
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], check=True)
    venv.create(folder / "venv", with_pip=False)
    libraries = folder / "venv/lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (wheel,) = folder.glob("acc_lm-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", libraries, wheel], check=True)
    # The other libraries are those of this environment; its .pth files are not read, so an editable acc-lm is not found.
    (libraries / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "empty").mkdir()

    def run(
        *command: str, code: int = 0, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.match(name)}
        variables |= {"OMP_NUM_THREADS": "1", "PATH": f"{folder / 'venv/bin'}:{os.environ['PATH']}"} | (
            environment or {}
        )
        variables.pop("PYTHONPATH", None)
        program = [str(folder / "venv/bin/python"), "-m", "acc_lm", *command]
        done = subprocess.run(program, cwd=folder / "empty", env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def test_the_package_is_that_of_the_wheel(run: Run) -> None:
    place = Path(run("path", "train.py").stdout.strip())
    assert place.parent.name == "project"
    assert ROOT not in place.parents
    for name in (*(ROOT / "recipes").glob("*"), *(ROOT / "accelerate_configs").glob("*")):
        assert (place.parent / name.parent.name / name.name).read_bytes() == name.read_bytes()
    assert place.read_bytes() == (ROOT / "train.py").read_bytes()
    assert (place.parent / "accelerate_configs/fsdp2.yaml").samefile(run("path", "fsdp2").stdout.strip())


def test_from_an_empty_folder_it_trains_resumes_evaluates_and_generates(run: Run) -> None:
    first = run("train", "quickstart", *SMALL, "training.max_steps=3", "output_dir=runs/mine")
    assert "step 3/3" in first.stdout
    more = run("train", "--config", "quickstart", *SMALL, "output_dir=runs/mine")
    assert "resumed from" in more.stdout
    assert "perplexity" in run("evaluate", "runs/mine/final", "--data", run("path", "train.py").stdout.strip()).stdout
    assert run("generate", "runs/mine/final", "--prompt", "def ").stdout
    assert "step-00000006" in run("checkpoint", "list", "runs/mine").stdout


@pytest.mark.parametrize(("name", "strategy"), [("ddp", "ddp"), ("fsdp2", "fsdp2")])
def test_from_an_empty_folder_a_backend_is_rehearsed(name: str, strategy: str, run: Run) -> None:
    done = run(
        "launch",
        name,
        "--num_processes",
        "2",
        "quickstart",
        *SMALL,
        "--dry-run",
        environment={"ACCELERATE_USE_CPU": "true"},
    )
    assert "dry run: everything works" in done.stdout
    assert any(
        line.startswith("strategy") and strategy in line and "2 processes" in line for line in done.stdout.splitlines()
    )
    assert done.stderr.startswith("accelerate launch --quiet --config_file ")


@pytest.mark.parametrize(("name", "num_processes"), [("cpu", 1), ("ddp", 2)])
def test_an_error_under_a_launcher_ends_with_our_line(name: str, num_processes: int, run: Run) -> None:
    launched = ("launch", name, "--num_processes", str(num_processes), "quickstart", "training.max_stepz=3")
    done = run(*launched, code=1, environment={"ACCELERATE_USE_CPU": "true"})
    ours = "error: command line: training.max_stepz must be a known key, got 'max_stepz'; did you mean max_steps?"
    lines = [line for line in done.stderr.splitlines() if not set(line) <= set("=-")]
    assert lines[1] == ours, "immediately"
    assert lines[-1].endswith(ours), "and at the end, where torchrun reports the process that failed"
    assert len(lines) == 2 or num_processes > 1


def test_the_versions_are_those_that_are_installed(run: Run) -> None:
    text = run("--version").stdout
    assert text.startswith("acc-lm ")
    for name in ("torch", "accelerate", "transformers", "deepspeed"):
        assert f"{name} {importlib.metadata.version(name)}" in text


def test_a_folder_of_ones_own_has_what_make_train_needs(run: Run, tmp_path: Path) -> None:
    run("new", str(tmp_path / "mine"), "--recipe", "pretrain_synthetic", "--config", "deepspeed_zero3_full")
    assert {str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*") if path.is_file()} == {
        "Makefile", "train.py", "recipes/pretrain_synthetic.yaml", "recipes/schema.json",
        "accelerate_configs/deepspeed_zero3_full.json", "accelerate_configs/deepspeed_zero3_full.yaml",
    }  # fmt: skip
    assert "must not exist yet, or be empty" in run("new", str(tmp_path / "mine"), code=2).stderr
