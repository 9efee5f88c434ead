"""Hardware that a plan is made for: facts about GPUs from their data sheets, and reading `8xH100`.

Peak arithmetic speed is in `modeling.flops`, the one table of peaks. The facts here, with their sources:

- Usable memory is what CUDA reports as total, which is less than the sheet's figure where the driver or ECC takes a part:
  79.1 GiB of an H100's and an A100's 80 GB, 139.8 of an H200's 141 GB, 39.4 of an A100's 40 GB, 44.4 of an L40S' 48 GB.
- Memory bandwidth is the data sheet's.
- Ring bandwidth within a machine is what NCCL reaches in one direction: 360 GB/s of the 450 of an H100's NVLink and 235 of
  the 300 of an A100's (stas00/ml-engineering, network/README.md and network/benchmarks/README.md: 80 % of the sheet).
  Other NVLinks take 80 % of their sheet. Without NVLink every byte crosses PCIe and mostly host memory (GeForce has no
  peer-to-peer access): 40 % of the bus in one direction, assumed: 20 GB/s of generation 5, 10 of generation 4, 5 of 3.
- Watts are the board's limit on the data sheet.

A price is never built in.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from acc_lm.errors import ConfigError
from acc_lm.modeling.flops import ANOTHER_CHIP, peak_of

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """Facts about one kind of GPU."""

    name: str
    device: str
    """Name that the driver reports, as `modeling.flops.peak_of` reads it."""
    memory_gib: float
    """Usable memory in GiB, before CUDA's context."""
    memory_bandwidth: float
    """Bytes per second of its own memory."""
    ring_bandwidth: float
    """Bytes per second that each GPU of a ring within a machine sends."""
    per_machine: int
    """GPUs in a machine."""
    family: str
    """Family of the fitted constants: hopper or ampere."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    watts: int
    """Power limit of the board."""
    power_share: float = 1.0
    """Power limit as set on the machine, over `watts`."""
    has_published_rows: bool = False
    """True: runs on this GPU are among those that the constants were fitted on."""

    @property
    def precision(self) -> str:
        """Advised `training.mixed_precision`: bf16 from compute capability 8.0, fp16 on older GPUs."""
        return "bf16" if self.capability >= (8, 0) else "fp16"

    def peak(self, compute: str | None = None) -> float:
        """Peak FLOP per second in a compute dtype; None: in the advised precision's.

        Raises:
            ConfigError: no data sheet figure for this dtype is known, as for bf16 on a V100.
        """
        compute = compute or {"bf16": "bfloat16", "fp16": "float16"}[self.precision]
        found = peak_of(self.device, compute)
        if found is None:
            raise ConfigError(
                f"training.mixed_precision must be {self.precision} to plan for a {self.name}, got a computation in {compute}, "
                f"whose peak speed is not known; set training.mixed_precision={self.precision}"
            )
        return found.flops


_TABLE = (
    Gpu("H100", "NVIDIA H100 80GB HBM3", 79.1, 3.35e12, 360e9, 8, "hopper", (9, 0), 700, has_published_rows=True),
    Gpu("H200", "NVIDIA H200", 139.8, 4.8e12, 360e9, 8, "hopper", (9, 0), 700, has_published_rows=True),
    Gpu("B200", "NVIDIA B200", 178.0, 8.0e12, 720e9, 8, "hopper", (10, 0), 1000),
    Gpu("A100-80", "NVIDIA A100-SXM4-80GB", 79.1, 2.039e12, 235e9, 8, "ampere", (8, 0), 400, has_published_rows=True),
    Gpu("A100-40", "NVIDIA A100-SXM4-40GB", 39.4, 1.555e12, 235e9, 8, "ampere", (8, 0), 400, has_published_rows=True),
    Gpu("A800", "NVIDIA A800-SXM4-80GB", 79.1, 2.039e12, 160e9, 8, "ampere", (8, 0), 400, has_published_rows=True),
    Gpu("L40S", "NVIDIA L40S", 44.4, 0.864e12, 10e9, 8, "ampere", (8, 9), 350),
    Gpu("A10G", "NVIDIA A10G", 22.0, 0.6e12, 10e9, 8, "ampere", (8, 6), 300),
    Gpu("L4", "NVIDIA L4", 22.0, 0.3e12, 10e9, 8, "ampere", (8, 9), 72),
    Gpu("RTX 3060", "NVIDIA GeForce RTX 3060", 11.7, 0.36e12, 10e9, 8, "ampere", (8, 6), 170),
    Gpu("RTX 3090", "NVIDIA GeForce RTX 3090", 23.6, 0.936e12, 10e9, 8, "ampere", (8, 6), 350),
    Gpu("RTX 4090", "NVIDIA GeForce RTX 4090", 23.5, 1.008e12, 10e9, 8, "ampere", (8, 9), 450),
    Gpu("RTX 5090", "NVIDIA GeForce RTX 5090", 31.4, 1.792e12, 20e9, 8, "hopper", (12, 0), 575),
    Gpu("V100", "Tesla V100-SXM2-32GB", 31.7, 0.9e12, 120e9, 8, "ampere", (7, 0), 300),
    Gpu("T4", "Tesla T4", 14.6, 0.32e12, 5e9, 4, "ampere", (7, 5), 70),
)
GPUS = {gpu.name: gpu for gpu in _TABLE}
"""GPUs that a plan can be made for, by name."""
OTHER_NAMES = {"A100": "A100-80", "3060": "RTX 3060", "3090": "RTX 3090", "4090": "RTX 4090", "5090": "RTX 5090"}
"""Shorter spellings -> names in GPUS."""


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """Read a number of GPUs and their kind: `8xH100`, `H100` for one, `64xA100-40`, `2xRTX4090`.

    Raises:
        ConfigError: no such GPU, or no positive number of them; one line, with the nearest name.
    """
    known = {_plain(name): name for name in (*GPUS, *OTHER_NAMES)}
    match = re.fullmatch(r"\s*([^xX×*\s]*)\s*[xX×*]\s*(\S.*?)\s*", text)
    count, name = (match[1], match[2]) if match and _plain(text) not in known else (None, text)
    key = known.get(_plain(name))
    if count is not None and not re.fullmatch(r"[1-9]\d*", count):
        raise ConfigError(
            f"--gpus must be a number of GPUs and their kind, got {text!r}; write a positive number, for example 8x{key or 'H100'}"
        )
    if key is None:
        near = difflib.get_close_matches(_plain(name), [_plain(known) for known in GPUS], n=1, cutoff=0.4)
        hint = next((known for known in GPUS if near and _plain(known) == near[0]), "H100")
        raise ConfigError(
            f"--gpus must name one of {', '.join(GPUS)}, got {name or text!r}; nearest: {f'{count}x' if count else ''}{hint}"
        )
    return int(count or 1), GPUS[OTHER_NAMES.get(key, key)]


def gpus_here() -> tuple[int, Gpu]:
    """Number and kind of this machine's GPUs, with the memory that they report.

    Raises:
        ConfigError: there is none, or none whose facts are known here.
    """
    import torch

    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if not found:
        raise ConfigError("--gpus here must find a GPU, got none on this machine; name some, for example --gpus 8xH100")
    name, size = found[0].name, found[0].total_memory / GIB
    same = [gpu for gpu in _TABLE if gpu.device == name] or [
        gpu for gpu in _TABLE if re.search(rf"\b{gpu.name.partition('-')[0]}\b", name) and not ANOTHER_CHIP.search(name)
    ]
    if not same:
        raise ConfigError(
            f"--gpus here must find one of {', '.join(GPUS)}, got {name}; name the nearest, for example 8xH100"
        )
    nearest = min(same, key=lambda gpu: abs(gpu.memory_gib - size))
    return len(found), replace(nearest, memory_gib=size, per_machine=max(nearest.per_machine, len(found)))


def _plain(name: str) -> str:
    """Name without case, spaces and hyphens, for comparison."""
    return re.sub(r"[\s_-]", "", name).upper()
