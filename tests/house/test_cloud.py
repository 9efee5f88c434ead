"""Files for containers and clouds: each parses, its parts fit together, and its command is one that this version takes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT
from ruamel.yaml import YAML
from test_readme import take_launcher

from acc_lm.cli import launch
from acc_lm.cli.train import parse_train_arguments
from acc_lm.config import Config

CLOUD = ROOT / "cloud"
DOCKERFILE = (CLOUD / "Dockerfile").read_text()
STUB = """#!/usr/bin/env python3
import json, sys
if sys.argv[1:2] == ["path"]:
    print({train!r})
else:
    print("STARTED", json.dumps([{name!r}, *sys.argv[1:]]))
"""


def read(name: str) -> Any:
    return YAML(typ="safe", pure=True).load((CLOUD / name).read_text())


def started(script: str, variables: dict[str, str], home: Path) -> list[str]:
    """Words of the program that a shell script starts, as the shell expands them; the programs themselves are stubs."""
    programs, activate = home / "programs", home / "venv/bin/activate"
    for folder in (programs, activate.parent):
        folder.mkdir(parents=True)
    activate.touch()
    for name in ("acc-lm", "torchrun"):
        (programs / name).write_text(STUB.format(name=name, train=str(ROOT / "train.py")))
        (programs / name).chmod(0o755)
    environment = {"HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}", **variables}
    done = subprocess.run(["bash", "-euc", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("STARTED ")]
    words: list[str] = json.loads(line.removeprefix("STARTED "))
    return words


def taken(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Config]:
    """The launcher's options and the recipe that these words stand for, read by the parsers of both."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    if words[:2] == ["acc-lm", "launch"]:
        executed: list[list[str]] = []
        monkeypatch.setattr(launch.os, "execv", lambda program, command: executed.append(command))
        launch.main(words[2:])
        words = ["accelerate", "launch", *executed[0][3:]]
    _, (script, *arguments) = take_launcher(words)
    assert Path(script).name == "train.py"
    parser = get_args_parser() if words[0] == "torchrun" else launch_command_parser()
    options = parser.parse_args(words[1 if words[0] == "torchrun" else 2 :])
    parsed = parse_train_arguments(arguments, ROOT / "recipes/quickstart.yaml")
    assert parsed
    return options, parsed[0]


def check_folder(config: Config, mounts: list[dict[str, str]], pod: dict[str, Any]) -> None:
    """Check that the run may write to a volume, has the time that its pod has, and memory to share."""
    volumes = pod["volumes"]
    match = re.search(r"^ENV TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)$", DOCKERFILE, re.M)
    assert match
    assert pod["terminationGracePeriodSeconds"] > int(match[1]) > 30, "the launcher would end its processes after 30"
    assert f"USER 1000:{pod['securityContext']['fsGroup']}\n" in DOCKERFILE
    assert any(Path(config.output_dir).is_relative_to(mount["mountPath"]) for mount in mounts)
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in volumes}
    assert "/dev/shm" in [mount["mountPath"] for mount in mounts]


def test_skypilot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = read("sky.yaml")
    assert set(task) == {"name", "resources", "num_nodes", "workdir", "envs", "secrets", "file_mounts", "setup", "run"}
    assert not any(task["secrets"].values())
    counts = {name.split(":")[1] for name in task["resources"]["accelerators"]}
    assert (counts, task["num_nodes"]) == ({"8"}, 1)
    options, config = taken(
        started(task["run"], {**task["envs"], "SKYPILOT_NUM_GPUS_PER_NODE": "8"}, tmp_path), monkeypatch
    )
    assert options.num_processes == 8
    assert any(Path(config.output_dir).is_relative_to(folder) for folder in task["file_mounts"])
    extra = re.search(r'install -q "\.\[(\w+)\]"', task["setup"])
    assert extra
    assert extra[1] in extras()


def test_jobset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = read("jobset.yaml")
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = job["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    assert spec["completions"] == spec["parallelism"] == int(variables["MACHINES"])
    assert spec["completionMode"] == "Indexed", "it numbers the machines"
    assert container["command"] == ["bash", "-c"]
    (script,) = container["args"]
    options, config = taken(started(script, {**variables, "JOB_COMPLETION_INDEX": "1"}, tmp_path), monkeypatch)
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert (int(options.num_machines), options.num_processes) == (spec["completions"], spec["completions"] * gpus)
    assert int(options.machine_rank) == 1
    name = job["metadata"]["name"]
    assert options.main_process_ip == f"{name}-{replicated['name']}-0-0.{name}", "pod 0 of job 0, by the set's service"
    check_folder(config, container["volumeMounts"], pod)


def test_trainjob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = read("trainjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    variables = {entry["name"]: entry["value"] for entry in trainer["env"]}
    runtime = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "a",
        "PET_MASTER_PORT": "29400",
    }
    for name, value in runtime.items():
        monkeypatch.setenv(name, value)
    options, config = taken(started(trainer["args"][0], variables, tmp_path), monkeypatch)
    assert (options.nnodes, options.nproc_per_node, int(options.node_rank)) == ("2", "8", 1), "from the runtime"
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert (replicated["name"], pod["containers"][0]["name"]) == ("node", "node"), "as the runtime names them"
    check_folder(config, pod["containers"][0]["volumeMounts"], pod)


def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_the_dockerfile_has_both_kinds_and_starts_what_we_take() -> None:
    lines = re.sub(r"\\\n\s*", "", DOCKERFILE).splitlines()
    words = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert {word[0] for word in words} <= {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    stages = [rest.split(" AS ")[1] for name, rest in words if name == "FROM" and " AS " in rest]
    assert stages == ["cuda", "cpu"]
    assert [rest for name, rest in words if name == "FROM"][-1] == "${KIND}"
    assert ("ARG", "KIND=cuda") in [tuple(word) for word in words]
    (installed,) = re.findall(r"\.\[([\w,]+)\]", DOCKERFILE)
    assert set(installed.split(",")) <= extras()
    entry, command = (json.loads(rest) for name, rest in words if name in ("ENTRYPOINT", "CMD"))
    assert (entry, command[0]) == (["acc-lm"], "train")
    assert parse_train_arguments(command[1:], ROOT / "recipes/quickstart.yaml")
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs"} <= set(ignored)


def test_the_development_container_is_built_from_the_dockerfile() -> None:
    file = ROOT / ".devcontainer/devcontainer.json"
    settings = json.loads(file.read_text())
    build = settings["build"]
    assert (file.parent / build["dockerfile"]).resolve() == CLOUD / "Dockerfile"
    assert (file.parent / build["context"]).resolve() == ROOT
    assert f" AS {build['args']['KIND']}\n" in DOCKERFILE
    (extra,) = re.findall(r"\.\[(\w+)\]", settings["postCreateCommand"])
    assert extra in extras()


def test_the_commands_for_docker_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (CLOUD / "README.md").read_text() + re.sub(r"^# *", "", DOCKERFILE, flags=re.M)
    lines = re.findall(r"^docker run .*$", text, re.M)
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line)
        arguments = words[words.index("acc-lm") + 1 :]
        if arguments[0] == "launch":
            options, config = taken(["acc-lm", *arguments], monkeypatch)
            assert options.num_processes == 8
            assert config.output_dir.startswith("/work/runs/"), "the mounted folder"
        else:
            assert parse_train_arguments(arguments[1:], ROOT / "recipes/quickstart.yaml")
    for file in re.findall(r"-f (cloud/[\w.]+)", text):
        assert (ROOT / file).is_file(), file
