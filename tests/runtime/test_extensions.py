"""DeepSpeed's compiled parts: no process waits for a stale lock, and builds are announced."""

from __future__ import annotations

from pathlib import Path

import pytest

from acc_lm.errors import MachineError
from acc_lm.runtime.settings import extensions


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    (tmp_path / "cpu_adam").mkdir()
    file = tmp_path / "cpu_adam" / "lock"
    file.touch()
    return file


@pytest.fixture(autouse=True)
def first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    # Set and not removed: only variables that were set are restored, and the build sets this one.
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "")


def test_a_stale_lock_in_our_folder_is_removed_and_named(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extensions, "extensions_folder", lambda: lock.parent.parent)
    extensions.build_extensions(needs_cpu_adam=False, needs_nvme=False, on_cpu=False)
    assert not lock.exists()
    assert f"removed {lock}, left by a build that was killed" in capsys.readouterr().err


def test_a_stale_lock_in_a_folder_of_the_user_is_refused_with_the_command(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parent.parent))
    with pytest.raises(MachineError, match=f"every start would wait forever; remove it: rm {lock}"):
        extensions.build_extensions(needs_cpu_adam=True, needs_nvme=False, on_cpu=True)
    assert lock.exists()


def test_a_lock_that_a_build_holds_is_left_alone(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parent.parent))
    with lock.open():
        extensions.build_extensions(needs_cpu_adam=True, needs_nvme=False, on_cpu=True)
    assert lock.exists()


def test_a_build_is_announced_and_its_failure_reaches_the_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extensions, "extensions_folder", lambda: tmp_path)
    monkeypatch.setattr(extensions.shutil, "which", lambda name: None)
    with pytest.raises(MachineError, match="DeepSpeed must find a C\\+\\+ compiler to build CPUAdam, got none"):
        extensions.build_extensions(needs_cpu_adam=True, needs_nvme=False, on_cpu=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(MachineError, match="C\\+\\+ compiler"):
        extensions.build_extensions(needs_cpu_adam=True, needs_nvme=False, on_cpu=False)
    monkeypatch.undo()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "")
    monkeypatch.setattr(extensions, "extensions_folder", lambda: tmp_path)

    def build(*arguments: object, **keywords: dict[str, str]) -> None:
        Path(keywords["env"]["TORCH_EXTENSIONS_DIR"], "cpu_adam").mkdir(parents=True)

    monkeypatch.setattr(extensions.subprocess, "run", build)
    extensions.build_extensions(needs_cpu_adam=True, needs_nvme=False, on_cpu=False)
    assert "building DeepSpeed's CPUAdam with the C++ compiler, once for this machine" in capsys.readouterr().err
    assert (tmp_path / "cpu_adam").is_dir()
    assert not list(tmp_path.glob("tmp-*"))


def test_each_installation_has_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build files contain the paths of the sources: if shared, each start from another place would build again."""
    here = extensions.extensions_folder()
    monkeypatch.setattr(extensions.sys, "prefix", "/another/venv")
    assert extensions.extensions_folder() != here


def test_nvme_without_libaio_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "extensions_folder", lambda: tmp_path)
    monkeypatch.setattr(extensions, "has_libaio", lambda: False)
    with pytest.raises(MachineError, match="offload to nvme must find libaio, got none on this machine; install it"):
        extensions.build_extensions(needs_cpu_adam=True, needs_nvme=True, on_cpu=True)
