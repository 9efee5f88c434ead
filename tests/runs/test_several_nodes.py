"""Two machines train what one trains: two launchers, each in its own network, joined by a cable."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import LAUNCH_VARIABLES, ROOT, run_training
from test_resume import TIMED

BIN = Path(sys.executable).parent
CONFIGS = ROOT / "accelerate_configs"


class Nodes:
    """Two machines as far as the network goes: namespaces `names` with one address each, or this machine twice."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.main_address = "10.77.0.1" if names else "127.0.0.1"
        self.port = "29500" if names else free_port()

    def start(self, command: list[str], rank: int, output: Path) -> subprocess.Popen[bytes]:
        inside = ["ip", "netns", "exec", self.names[rank]] if self.names else []
        environment = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.match(name)}
        environment["OMP_NUM_THREADS"] = "1"
        if self.names:  # the machines share a hostname here, so gloo could not find its own address by looking it up
            environment["GLOO_SOCKET_IFNAME"] = "eth0"
        with output.open("wb") as file:
            return subprocess.Popen(
                [*inside, str(BIN / command[0]), *command[1:]],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def bytes_received(self, rank: int) -> int | None:
        """Bytes received through the cable so far; None where there is no cable."""
        if not self.names:
            return None
        shown = run_ip("-json", "-statistics", "-netns", self.names[rank], "link", "show", "eth0")
        return int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])


def run_ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """Two network namespaces with an end of one cable each; removed afterwards, with every process in them."""
    mark = f"acc-lm-{os.getpid()}-{secrets.token_hex(3)}"
    names = (f"{mark}-0", f"{mark}-1")
    try:
        for name in names:
            run_ip("netns", "add", name)
        run_ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, start=1):
            run_ip("-netns", name, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                run_ip("-netns", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                for pid in run_ip("netns", "pids", name).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), 9)
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                run_ip("netns", "delete", name)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with contextlib.ExitStack() as stack:
        try:
            names: tuple[str, ...] = stack.enter_context(two_networks())
        except (OSError, subprocess.SubprocessError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip()
            warnings.warn(f"no network namespaces ({reason}): both machines are 127.0.0.1", stacklevel=1)
            names = ()
        yield Nodes(names)


def train_on(nodes: Nodes, commands: list[list[str]], folder: Path, timeout: float = 180) -> list[str]:
    """Run one launcher per machine to its end; returns what each printed."""
    files = [folder / f"output-{rank}" for rank in range(len(commands))]
    launchers = [nodes.start(command, rank, files[rank]) for rank, command in enumerate(commands)]
    end = time.monotonic() + timeout
    try:
        # When one has failed, the others need not be waited for.
        while None in (codes := [launcher.poll() for launcher in launchers]) and not any(codes):
            assert time.monotonic() < end, f"not done after {timeout} s"
            time.sleep(0.05)
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                launcher.terminate()  # which ends its workers; a kill would leave them running
        for launcher in launchers:
            launcher.wait(timeout=40)
    outputs = [file.read_text(errors="replace") for file in files]
    assert codes == [0] * len(commands), "\n".join(outputs)
    return outputs


def by_accelerate(nodes: Nodes, config: str, num_processes: int, arguments: list[str]) -> list[list[str]]:
    return [
        ["accelerate", "launch", "--config_file", str(CONFIGS / config), "--num_machines", "2",
         "--num_processes", str(num_processes), "--machine_rank", str(rank),
         "--main_process_ip", nodes.main_address, "--main_process_port", nodes.port, "train.py", *arguments]
        for rank in range(2)
    ]  # fmt: skip


def by_torchrun(nodes: Nodes, num_processes: int, arguments: list[str]) -> list[list[str]]:
    return [
        ["torchrun", "--nnodes", "2", "--nproc_per_node", str(num_processes // 2), "--node_rank", str(rank),
         "--master_addr", nodes.main_address, "--master_port", nodes.port, "train.py", *arguments]
        for rank in range(2)
    ]  # fmt: skip


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    """Learned values, without what depends on the clock and the machine."""
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in TIMED} for line in lines]


@pytest.fixture(scope="module")
def on_one_machine(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of two processes on one machine."""
    output_dir = tmp_path_factory.mktemp("one-machine") / "run"
    run_training(["--config", str(tiny_recipe), f"output_dir={output_dir}"], num_processes=2)
    return metrics(output_dir)


def check_run(output_dir: Path, outputs: list[str], strategy: str, num_processes: int) -> None:
    environment = json.loads((output_dir / "environment.json").read_text())
    assert (environment["strategy"], environment["num_processes"]) == (strategy, num_processes)
    summary = json.loads((output_dir / "summary.json").read_text())
    assert (summary["status"], summary["world_size"], summary["backend"]) == ("completed", num_processes, "gloo")
    assert [place["local_rank"] for place in summary["processes"]] == [*range(num_processes // 2)] * 2
    assert f"world size {num_processes}, backend gloo; this is rank 0, local rank 0" in outputs[0]
    log = (output_dir / "train.log").read_text().splitlines()
    own = [line for line in log if "  DeepSpeed deepspeed.ops." not in line]  # extensions, built on each machine
    assert all(re.search(r" rank 0( |$)", line) for line in own), "only the first machine speaks"
    assert len([line for line in log if "  step 6/6  loss" in line]) == 1
    assert "step 6/6" in outputs[0]
    assert "step 6/6" not in outputs[1], "only the first machine speaks"


# (config, strategy, processes over both machines)
LAUNCHES = [
    ("multi_node_ddp.yaml", "ddp", 2),
    ("multi_node_hsdp.yaml", "hsdp", 4),
    ("multi_node_deepspeed_zero3.yaml", "deepspeed_zero3", 2),
]


@pytest.mark.parametrize(
    ("config", "strategy", "num_processes"),
    [pytest.param(*row, id=row[0], marks=[pytest.mark.slow] if row[1] != "ddp" else []) for row in LAUNCHES],
)
def test_accelerate_launch_on_two_machines_learns_what_one_machine_learns(
    config: str,
    strategy: str,
    num_processes: int,
    nodes: Nodes,
    tiny: list[str],
    tmp_path: Path,
    on_one_machine: list[dict[str, Any]],
) -> None:
    outputs = train_on(nodes, by_accelerate(nodes, config, num_processes, tiny), tmp_path)
    check_run(tmp_path / "run", outputs, strategy, num_processes)
    learned = metrics(tmp_path / "run")
    if (strategy, num_processes) == ("ddp", 2):
        assert learned == on_one_machine
    assert learned == [pytest.approx(line, rel=1e-5) for line in on_one_machine]
    check_wire(nodes)


WIDE = "model.config={hidden_size: 32, num_attention_heads: 4, num_key_value_heads: 2}"
IN_PARTS = {
    "multi_node_sequence_parallel.yaml": ("hsdp", "in 2 copies", "; rows in 2 parts"),
    "multi_node_fsdp2_tensor_parallel.yaml": ("fsdp2", "in 2 shards", "; layers in 2 parts, vocabulary in 2 parts"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("config", IN_PARTS)
def test_machines_whose_processes_share_rows_or_layers_learn_what_one_process_learns(
    config: str, nodes: Nodes, tiny: list[str], tmp_path: Path
) -> None:
    """Two processes of a machine share rows or layers; the machines read different rows."""
    strategy, *placement = IN_PARTS[config]
    run_training([*tiny, WIDE, f"output_dir={tmp_path}/one"])
    outputs = train_on(nodes, by_accelerate(nodes, config, 4, [*tiny, WIDE]), tmp_path)
    check_run(tmp_path / "run", outputs, strategy, 4)
    found = json.loads((tmp_path / "run/environment.json").read_text())["placement"]
    assert all(words in found for words in placement), found
    assert metrics(tmp_path / "run") == [pytest.approx(line, rel=1e-5) for line in metrics(tmp_path / "one")]
    check_wire(nodes)


@pytest.mark.slow
def test_torchrun_on_two_machines_learns_what_one_machine_learns(
    nodes: Nodes, tiny: list[str], tmp_path: Path, on_one_machine: list[dict[str, Any]]
) -> None:
    outputs = train_on(nodes, by_torchrun(nodes, 2, tiny), tmp_path)
    check_run(tmp_path / "run", outputs, "ddp", 2)
    assert metrics(tmp_path / "run") == on_one_machine
    check_wire(nodes)


@pytest.mark.slow
def test_a_machine_that_dies_ends_the_other_within_seconds(nodes: Nodes, tiny: list[str], tmp_path: Path) -> None:
    """Launcher and process of machine 1 are killed in the middle; the last checkpoint is intact, and one machine resumes from it."""
    endless = [*tiny, "training.max_steps=4000", "training.eval_every=null"]
    files = [tmp_path / f"output-{rank}" for rank in range(2)]
    commands = by_accelerate(nodes, "multi_node_ddp.yaml", 2, endless)
    first, second = (nodes.start(command, rank, files[rank]) for rank, command in enumerate(commands))
    try:
        end = time.monotonic() + 90
        while not (tmp_path / "run/checkpoints/step-00000004").exists():
            assert time.monotonic() < end, files[0].read_text()
            time.sleep(0.02)
        for process in [*psutil.Process(second.pid).children(recursive=True), psutil.Process(second.pid)]:
            process.kill()
        killed = time.monotonic()
        first.wait(timeout=60)
        assert time.monotonic() - killed < 30, "it did not wait for its timeout of ten minutes"
    finally:
        for launcher in (first, second):
            launcher.kill() if launcher.poll() is None else None
            launcher.wait(timeout=40)
    (line,) = [line for line in files[0].read_text().splitlines() if line.startswith("error: ")]
    assert "every process must take part, got: " in line
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "worker_lost"
    alone = run_training([*endless, "training.max_minutes=0.02"], expect=75)
    assert "resumed from" in alone.output


def test_the_page_shows_the_commands_that_ran_here() -> None:
    page = (ROOT / "docs/guides/several_nodes.md").read_text().splitlines()
    nodes = Nodes(())
    for command in (by_accelerate(nodes, "multi_node_ddp.yaml", 2, [])[0], by_torchrun(nodes, 2, [])[0]):
        (shown,) = [line.split() for line in page if line.startswith(command[0])]
        assert [word for word in shown[: shown.index("train.py")] if word.startswith("--")] == [
            word for word in command if word.startswith("--")
        ]


def check_wire(nodes: Nodes) -> None:
    """Each machine received at least the gradients of 6 steps: 12,912 parameters of 4 bytes each."""
    for rank in range(len(nodes.names)):
        received = nodes.bytes_received(rank)
        assert received is not None
        assert received > 6 * 12_912 * 4


def test_no_network_is_left() -> None:
    """Also after a failure in the middle."""
    names: tuple[str, ...] = ()
    try:
        with contextlib.suppress(ZeroDivisionError), two_networks() as names:
            sleeper = subprocess.Popen(["ip", "netns", "exec", names[0], "sleep", "60"])
            assert set(names) <= set(run_ip("netns", "list").replace("(", " ").split())
            raise ZeroDivisionError
    except (OSError, subprocess.SubprocessError):
        warnings.warn("no network namespaces here, so none to leave over", stacklevel=1)
        return
    assert sleeper.wait(timeout=10) == -9
    assert not set(names) & set(run_ip("netns", "list").split())
