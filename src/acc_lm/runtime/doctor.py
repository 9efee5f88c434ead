"""What this machine is and has, and whether an Accelerate config can run on it: `acc-lm doctor`."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from acc_lm.errors import MachineError
from acc_lm.runtime.config_file import CONFIG_FILE_VARIABLE, check_config_file, read_config
from acc_lm.runtime.extensions import COMPILERS, has_libaio
from acc_lm.runtime.identity import library_versions


def machine() -> dict[str, Any]:
    """Versions, devices with their memory in GB, what connects processes, what DeepSpeed would build with."""
    return {
        "python": platform.python_version(),
        "libraries": library_versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "cuda": {"built_for": torch.version.cuda, "available": torch.cuda.is_available()},
        "devices": _devices(),
        "process_groups": {
            "nccl": dist.is_nccl_available(),
            "gloo": dist.is_gloo_available(),
            "mpi": dist.is_mpi_available(),
        },
        "precision": _precision(),
        "cpp_compiler": next((name for name in COMPILERS if shutil.which(name)), None),
        "libaio": has_libaio(),
    }


def _devices() -> list[dict[str, Any]]:
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [
            {
                "name": each.name,
                "memory_gb": round(each.total_memory / 1e9, 1),
                "capability": f"{each.major}.{each.minor}",
            }
            for each in found
        ]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        return [{"name": str(kind), "memory_gb": None, "capability": None}] * torch.accelerator.device_count()
    return []


def _precision() -> str:
    """What to train in here: bf16 where the hardware has it, from compute capability 8.0 on; fp16 before that."""
    if not torch.cuda.is_available():
        return "no, or bf16 (slow on most CPUs)"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def check_config(file: Path, num_processes: int | None) -> list[str]:
    """Notes on a launch of this config on this machine.

    Args:
        num_processes: in all, over all machines; None: what the file says.

    Raises:
        MachineError: it cannot run here, with one line for each reason.
    """
    os.environ[CONFIG_FILE_VARIABLE] = str(file)
    check_config_file()
    config = read_config(file)
    kind = str(config.distributed_type.value)
    machines = getattr(config, "num_machines", 1) or 1
    processes = num_processes or config.num_processes or 1
    precision = str(config.mixed_precision or "no")
    sections = getattr(config, "deepspeed_config", {}) or {}
    here, present = -(-processes // machines), len(_devices()) if not config.use_cpu else 0
    problems = []
    if kind == "MULTI_CPU" or (kind == "NO" and processes > 1):
        problems.append(
            f"{file}: distributed_type must be MULTI_GPU for several processes, got {kind}, which starts one; use accelerate_configs/ddp.yaml"
        )
    if 0 < present < here:
        problems.append(
            f"{file}: num_processes must be at most {present * machines}, one for each GPU, got {processes}; use --num_processes {present * machines}"
        )
    if precision in ("fp16", "fp8") and not present:
        problems.append(f"{file}: mixed_precision must be bf16 or no on a CPU, got {precision}; change it")
    if precision == "bf16" and present and torch.cuda.is_available() and _precision() != "bf16":
        problems.append(
            f"{file}: mixed_precision must be fp16 or no on this GPU, got bf16, which it does not have; change it"
        )
    if kind == "DEEPSPEED":
        if library_versions()["deepspeed"] is None:
            problems.append(f"{file}: deepspeed must be installed, got no such package; pip install deepspeed")
        if not any(shutil.which(compiler) for compiler in COMPILERS):
            problems.append(
                f"{file}: DeepSpeed must find a C++ compiler, got none; install one (Debian: apt install g++)"
            )
        if "nvme" in sections.values() and not has_libaio():
            problems.append(
                f"{file}: offload to nvme must find libaio, got none; install it (Debian: apt install libaio-dev)"
            )
    if problems:
        raise MachineError(*problems)
    notes = [f"{kind}, {processes} process(es) on {machines} machine(s), mixed_precision {precision}: it can run here"]
    if not present and (processes > 1 or kind != "NO"):
        notes.append("no accelerator here: a rehearsal on CPU processes, for trust and not for speed")
    if here > (os.cpu_count() or 1) and not present:
        notes.append(f"{here} processes will share {os.cpu_count()} cores")
    return notes
