"""Memory, utilization and energy of every GPU of a run, from NVML where it is installed; nothing without it."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from acc_lm.runtime.engines.collectives import gather_objects

if TYPE_CHECKING:
    from accelerate import Accelerator

JOULES_PER_WH = 3600.0


class Gpus:
    """GPU of each process, as the driver sees it, which includes the memory of other programs.

    A driver that does not answer, or refuses a question, costs the run nothing but the figure. Every process creates one.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._nvml: Any = None
        self._handle: Any = None
        self._uuid = ""
        self._is_seen = False
        """True if NVML sees the GPU of any process; the same on all, because they gather the figures together."""
        if accelerator.device.type == "cuda":
            self._open(accelerator.device)
            self._is_seen = any(gather_objects(accelerator, self._handle is not None))
        self._started = self._joules()

    def metrics(self) -> dict[str, float]:
        """Memory in use, in GB, and share of the last moments in which the GPU computed, by rank. Every process calls."""
        values: dict[str, float] = {}
        for rank, figures in enumerate(self._gather((self._memory_gb(), self._utilization()))):
            for name, value in zip(("gpu_memory_gb", "gpu_utilization"), figures, strict=True):
                if value is not None:
                    values[f"{name}/{rank}"] = value
        return values

    def energy_wh(self) -> float | None:
        """Energy of all GPUs since this object was created, each GPU counted once; None if no driver counts it. Every process calls."""
        now, before = self._joules(), self._started
        used = None if now is None or before is None else now - before
        by_gpu = {uuid: joules for uuid, joules in self._gather((self._uuid, used)) if joules is not None}
        return sum(by_gpu.values()) / JOULES_PER_WH if by_gpu else None

    def _open(self, device: torch.device) -> None:
        with suppress(Exception):  # not installed, no driver, a part of a GPU: NVML raises errors of its own
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            self._nvml = nvml

    def _gather(self, figures: Any) -> list[Any]:
        return gather_objects(self._accelerator, figures) if self._is_seen else []

    def _memory_gb(self) -> float | None:
        with suppress(Exception):
            return float(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) / 1e9
        return None

    def _utilization(self) -> float | None:
        with suppress(Exception):
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100
        return None

    def _joules(self) -> float | None:
        with suppress(Exception):  # GPUs before Volta do not count it
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
        return None
