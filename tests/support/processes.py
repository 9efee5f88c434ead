"""Real training processes in a second: this parent has imported everything once, and forks what a launcher would start."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpuinfo
import torch
from accelerate.state import AcceleratorState, GradientState

from acc_lm import errors

ROOT = Path(__file__).parent.parent.parent
# Read before conftest.py gives the tests their own cache: a minute of compiling must not be repeated in every test run.
KEPT_CACHE = Path(os.environ.get("ACC_LM_CACHE") or Path.home() / ".cache" / "acc-lm-tests").expanduser()
GRACE_SECONDS = 20
UNFREEZE = gc.unfreeze
LAUNCH_VARIABLES = re.compile(
    r"^(ACCELERATE_|FSDP_|PARALLELISM_CONFIG_|ACC_LM_CONFIG_FILE$|RANK$|WORLD_SIZE$|LOCAL_RANK$|LOCAL_WORLD_SIZE$|MASTER_|TORCHELASTIC_|OMP_NUM)"
)


def build_extensions_once(needs_nvme: bool) -> None:
    """Build DeepSpeed's C++ extensions before processes with a time limit wait for them; one test worker builds, others wait."""
    from acc_lm.runtime.settings.extensions import extensions_folder

    folder = KEPT_CACHE / "torch_extensions" / extensions_folder().name
    on_cpu = not torch.accelerator.is_available()
    code = (
        "from acc_lm.runtime.settings.extensions import build_extensions\n"
        f"build_extensions(needs_cpu_adam=True, needs_nvme={needs_nvme}, on_cpu={on_cpu})"
    )
    names = ["CPUAdam", *["ShareMemComm"] * on_cpu, *["AsyncIO"] * needs_nvme]
    with (folder.parent / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all((folder / f"{name}Builder.done").exists() for name in names):
            environment = {key: value for key, value in os.environ.items() if not LAUNCH_VARIABLES.match(key)}
            environment.pop("TORCH_EXTENSIONS_DIR", None)  # DeepSpeed itself would build there, when it is first used
            environment["ACC_LM_CACHE"] = str(KEPT_CACHE)
            subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=1800)


@dataclass(frozen=True)
class Finished:
    """Exit codes and outputs of the processes of one launch."""

    codes: list[int]
    """Exit codes; -N when ended by signal N."""
    outputs: list[str]
    """stdout and stderr together, per process."""

    @property
    def code(self) -> int:
        return self.codes[0]

    @property
    def output(self) -> str:
        return self.outputs[0]

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error: ")]


class Launch:
    """Processes that run `function`, with the environment that a launcher would give them."""

    def __init__(
        self, function: Callable[[], int | None], num_processes: int = 1, environment: dict[str, str] | None = None
    ):
        self.folder = Path(tempfile.mkdtemp())
        self.final_outputs: list[str] | None = None
        if (environment or {}).get("ACCELERATE_USE_DEEPSPEED") == "true":
            build_extensions_once("nvme" in (environment or {}).values())
            cpuinfo.get_cpu_info()  # remembered for the processes that are forked
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pids = []
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(num_processes):
            pid = os.fork()
            if pid == 0:
                self._child(function, rank, num_processes, port, environment or {})
            self.pids.append(pid)

    def _child(
        self, function: Callable[[], int | None], rank: int, world: int, port: int, environment: dict[str, str]
    ) -> None:
        code = 1
        gc.freeze()  # no collection looks at what was inherited, not at the end of a run either: looking copies its memory
        gc.unfreeze = lambda: None
        # A process started by a launcher has no Accelerator yet, whatever a test that ran in this process has built.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        # torch makes the thread pool of a forked process again when it is first used, as set_num_threads does. Asked
        # by several threads of a backward pass at once, it can find none and abort.
        torch.set_num_threads(torch.get_num_threads())
        try:
            with (self.folder / f"output-{rank}").open("wb", buffering=0) as file, open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            # Plain streams on the redirected descriptors: pytest's own would write elsewhere.
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            for name in list(os.environ):
                if LAUNCH_VARIABLES.match(name):
                    del os.environ[name]
            needs_launcher = {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"} & set(environment)
            if world > 1 or needs_launcher:  # torchrun's
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                }  # fmt: skip
            os.environ |= environment
            errors.LAUNCHER_SECONDS = 0.5  # no launcher ends the others here
            code = function() or 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def wait(self, timeout: float = 300) -> Finished:
        """Codes and outputs; a process that outlives the timeout is killed and the test fails."""
        codes: dict[int, int] = {}
        end = time.monotonic() + timeout
        while len(codes) < len(self.pids):
            for pid in self.pids:
                if pid not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[pid] = os.waitstatus_to_exitcode(status)
                        if codes[pid]:  # a launcher would end the others
                            end = min(end, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > end:
                for pid in self.pids:
                    if pid not in codes:
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                if any(codes.values()):
                    break
                raise TimeoutError(f"processes were still running after {timeout} s:\n" + "\n".join(self.outputs()))
            time.sleep(0.005)
        self.final_outputs = self.outputs()
        shutil.rmtree(self.folder)
        return Finished([codes.get(pid, -signal.SIGKILL) for pid in self.pids], self.final_outputs)

    def outputs(self) -> list[str]:
        if self.final_outputs is not None:
            return self.final_outputs
        files = [self.folder / f"output-{rank}" for rank in range(len(self.pids))]
        return [file.read_text(errors="replace") if file.exists() else "" for file in files]


def start_training(arguments: list[str], num_processes: int = 1, environment: dict[str, str] | None = None) -> Launch:
    """Start `train.py` with these arguments, as its processes would run it."""

    def function() -> int:
        import train

        sys.argv = ["train.py", *arguments]
        return train.main(arguments)

    return Launch(function, num_processes, environment)


def run_training(
    arguments: list[str],
    num_processes: int = 1,
    environment: dict[str, str] | None = None,
    timeout: float = 300,
    expect: int | None = 0,
) -> Finished:
    """Train to the end; `expect` is the exit code that every process must have."""
    finished = start_training(arguments, num_processes, environment).wait(timeout)
    if expect is not None:
        assert finished.codes == [expect] * num_processes, "\n".join(finished.outputs)
    return finished


def run_everywhere(
    function: Callable[[], Any], num_processes: int = 1, timeout: float = 300, environment: dict[str, str] | None = None
) -> list[Any]:
    """Call `function` in each of `num_processes` processes that can form a group; returns what each returned."""
    with tempfile.TemporaryDirectory() as folder:

        def store() -> None:
            value = function()
            Path(folder, os.environ.get("RANK", "0")).write_bytes(pickle.dumps(value))

        finished = Launch(store, num_processes, environment).wait(timeout)
        assert finished.codes == [0] * num_processes, "\n".join(finished.outputs)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(num_processes)]


def launcher_environment(
    config_file: Path,
    num_processes: int | None = None,
    machine_rank: int | None = None,
    num_machines: int | None = None,
    main_process_ip: str | None = None,
    port: int = 0,
) -> dict[str, str]:
    """The environment that `accelerate launch` would give the processes that `Launch` forks: give it as `environment`.

    Accelerate's own functions make it. RANK and the like, threads and the search path are left to `Launch`; port 0 is any
    free one.
    """
    values = {
        "num_processes": num_processes, "machine_rank": machine_rank, "num_machines": num_machines,
        "main_process_ip": main_process_ip, "main_process_port": port,
    }  # fmt: skip
    options = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    from acc_lm.runtime.settings.config_file import launch_with

    _, environment = launch_with(config_file, *options)
    for name in ("OMP_NUM_THREADS", "PYTHONPATH"):
        environment.pop(name, None)
    return environment | {"ACC_LM_CONFIG_FILE": str(config_file)}
