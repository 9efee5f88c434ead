"""DeepSpeed's C++ extensions, built ahead of their use in a folder that cannot block other jobs.

DeepSpeed builds on first use into one folder that all jobs of a user share. A killed build leaves its lock there, and
every later start silently waits on it forever. Here each machine and version has a folder of its own, a build goes to a
temporary folder that is renamed when it is complete, and a lock that no process holds is removed and reported.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import xxhash

from acc_lm.cache import cache_folder
from acc_lm.errors import MachineError

BUILD_SECONDS = 900
COMPILERS = ("g++", "c++", "clang++")


def build_extensions(*, needs_cpu_adam: bool, needs_nvme: bool, on_cpu: bool) -> None:
    """Build the extensions that this launch will load: the first process of a machine builds, the others wait for it.

    Raises:
        MachineError: no compiler, no libaio, a failed build, or a lock that no process holds in the user's own folder.
    """
    bin_folder = str(Path(sys.executable).parent)  # ninja is there, even if the environment is not activated
    if bin_folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([bin_folder, os.environ.get("PATH", "")])
    names = _names(needs_cpu_adam, needs_nvme, on_cpu)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    ours = extensions_folder()
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or ours)
    theirs = root != ours  # the user chose a folder: DeepSpeed builds there as it always does
    os.environ["TORCH_EXTENSIONS_DIR"] = str(root)
    if is_first:
        for lock in root.glob("*/lock"):
            _look_at_lock(lock, is_ours=not theirs)
    if theirs or not names:
        return
    _refuse_missing_libaio(needs_nvme)
    started = time.time()
    for name in names:
        done, failed = root / f"{name}.done", root / f"{name}.failed"
        if is_first and not done.exists():
            try:
                _build(name, root, done)
            except MachineError as error:
                failed.write_text(str(error))  # for the waiting processes
                raise
        _wait_for(done, failed, started)


def check_extensions(*, needs_cpu_adam: bool, needs_nvme: bool, on_cpu: bool) -> None:
    """Refuse extensions that `build_extensions` could not build here.

    Raises:
        MachineError: no compiler, or no libaio.
    """
    _refuse_missing_libaio(needs_nvme)
    for name in _names(needs_cpu_adam, needs_nvme, on_cpu):
        if not (extensions_folder() / f"{name}.done").exists():
            _refuse_missing_compiler(name)


def _names(needs_cpu_adam: bool, needs_nvme: bool, on_cpu: bool) -> list[str]:
    return ["ShareMemCommBuilder"] * on_cpu + ["CPUAdamBuilder"] * needs_cpu_adam + ["AsyncIOBuilder"] * needs_nvme


def _refuse_missing_libaio(needs_nvme: bool) -> None:
    if needs_nvme and not has_libaio():
        raise MachineError(
            "offload to nvme must find libaio, got none on this machine; install it (Debian: apt install libaio-dev), or use "
            "accelerate_configs/deepspeed_zero3_offload.yaml"
        )


def _refuse_missing_compiler(name: str) -> None:
    if not any(shutil.which(compiler) for compiler in COMPILERS):
        raise MachineError(
            f"DeepSpeed must find a C++ compiler to build {name.removesuffix('Builder')}, got none; install one (Debian: apt install g++)"
        )


def extensions_folder() -> Path:
    """Folder of the built extensions, separate for each machine, version and installation.

    The code is compiled for the machine's processor, and machines with different processors may share a home folder. The
    build files contain the paths of the installation's sources, so another installation would build everything again.
    """
    versions = (
        f"py{sys.version_info.major}{sys.version_info.minor}-torch{version('torch')}-deepspeed{version('deepspeed')}"
    )
    place = xxhash.xxh3_64_hexdigest(sys.prefix.encode())[:8]
    return cache_folder() / "torch_extensions" / f"{platform.node()}-{versions}-{place}"


def _look_at_lock(lock: Path, is_ours: bool) -> None:
    if _is_held(lock):
        return
    time.sleep(1.0)  # it may just have been released
    if not lock.exists() or _is_held(lock):
        return
    if not is_ours:
        raise MachineError(
            f"{lock.parent} must not be locked, got a lock of a build that was killed (no process holds it), on which every start would "
            f"wait forever; remove it: rm {lock}"
        )
    lock.unlink(missing_ok=True)
    print(f"removed {lock}, left by a build that was killed", file=sys.stderr)


def _is_held(lock: Path) -> bool:
    """Return whether a process has the lock open, as torch does while it builds."""
    target = str(lock.resolve())
    for process in psutil.process_iter():
        try:
            if any(file.path == target for file in process.open_files()):
                return True
        except psutil.Error:
            continue  # the process ended, or is another user's
    return False


def _build(name: str, root: Path, done: Path) -> None:
    _refuse_missing_compiler(name)
    root.mkdir(parents=True, exist_ok=True)
    aside = root / f"tmp-{os.getpid()}"
    for left in root.glob("tmp-*"):  # left by killed builds
        if not psutil.pid_exists(int(left.name.removeprefix("tmp-"))):
            shutil.rmtree(left, ignore_errors=True)
    print(
        f"building DeepSpeed's {name.removesuffix('Builder')} with the C++ compiler, once for this machine ...",
        file=sys.stderr,
    )
    started = time.monotonic()
    code = f"from deepspeed.ops import op_builder; from deepspeed.accelerator import get_accelerator; get_accelerator().create_op_builder({name!r}).load(verbose=False)"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    try:
        subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "TORCH_EXTENSIONS_DIR": str(aside), "MAX_JOBS": str(os.cpu_count() or 1)},
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        shutil.rmtree(aside, ignore_errors=True)
        lines = [line for line in error.stderr.splitlines() if "error" in line.lower()] or error.stderr.splitlines()[
            -1:
        ]
        raise MachineError(
            f"DeepSpeed's {name} must build on this machine, got: {lines[0] if lines else 'no message'}"
        ) from None
    except subprocess.TimeoutExpired:
        shutil.rmtree(aside, ignore_errors=True)
        raise MachineError(
            f"DeepSpeed's {name} must build within {BUILD_SECONDS} s, got none; check the machine's load"
        ) from None
    for built in aside.iterdir():
        target = root / built.name
        if not target.exists():
            with contextlib.suppress(OSError):  # another job was faster
                built.rename(target)
    shutil.rmtree(aside, ignore_errors=True)
    done.touch()
    print(f"built in {time.monotonic() - started:.0f} s", file=sys.stderr)


def _wait_for(done: Path, failed: Path, since: float) -> None:
    while not done.exists():
        if failed.exists() and failed.stat().st_mtime >= since - 1:
            raise MachineError(failed.read_text())
        if time.time() - since > BUILD_SECONDS + 60:
            raise MachineError(f"{done} must appear when the first process of this machine has built it, got nothing")
        time.sleep(0.1)


def has_libaio() -> bool:
    from ctypes.util import find_library

    header = any(Path(folder, "libaio.h").exists() for folder in ("/usr/include", "/usr/local/include"))
    return header and find_library("aio") is not None
