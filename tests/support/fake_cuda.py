"""train.py on a GPU that is not there: its tensors have a shape, a type and the device `cuda:0`, and no memory (torch's FakeTensor).

    python tests/support/fake_cuda.py [key=value ...]           overrides of a small recipe; needs g++ once, and no CUDA build of torch

Finds branches for CUDA that raise, operators that are given two devices or types, and, printed by place, where the host waits for
the device, copies from memory that is not pinned, or gets attention without a fused kernel. Finds no wrong number, no race, no
time, and nothing that cuDNN, NCCL or Triton refuse when they run. FlexAttention takes its eager form, which shows types and shapes.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

STUB = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static Device gpu() { return Device(DeviceType::CUDA, 0); }
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {  // autograd asks for streams
  Device exchangeDevice(Device) const override { return gpu(); }
  Device getDevice() const override { return gpu(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, gpu()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, gpu()); }
};
static impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new Guard());
namespace at {
struct CUDAHooks final : CUDAHooksInterface {  // and whether CUDA is the accelerator; torch finds it by this name
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
"""


def load_stub(folder: Path) -> None:
    """Answer autograd's questions for device and stream. Before torch is imported, which looks for the hooks once."""
    root = Path(importlib.util.find_spec("torch").submodule_search_locations[0])  # type: ignore[union-attr, index]
    if (root / "lib/libtorch_cuda.so").exists():  # a CUDA build has its own
        return
    digest = hashlib.blake2b((STUB + (root / "version.py").read_text()).encode(), digest_size=8).hexdigest()
    library = folder / f"fake_cuda_{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            source, made = Path(work, "stub.cpp"), Path(work, "stub.so")
            source.write_text(STUB)
            flags = ["-std=c++20", "-O0", "-fPIC", "-shared", f"-I{root}/include", f"-L{root}/lib"]
            subprocess.run(["g++", *flags, str(source), "-o", str(made), "-lc10", "-ltorch_cpu"], check=True)
            made.rename(library)
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(root / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


load_stub(Path(os.environ["ACC_LM_CACHE"], "torch_extensions"))

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402

RECIPE = [
    "model.config={model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 2}",
    "tokenizer.kind=char", "data.source=synthetic", "data.synthetic_tokens=20000", "data.sequence_length=64", "training.max_steps=3",
    "training.global_batch_size=8", "training.micro_batch_size=4", "training.log_every=3", "training.eval_every=3", "training.eval_batches=1",
    "checkpoint.every=3", "schedule.warmup_steps=2", "export.sample_tokens=0", "tracking.report_to=[]",
]  # fmt: skip
FIRST_STEP = 2
"""From this step on everything exists; the step before may wait."""
PHASE = {"now": ""}
SEEN: Counter[str] = Counter()


def note(what: str) -> None:
    if PHASE["now"]:
        ours = [f for f in traceback.extract_stack() if "/acc_lm/" in f.filename or f.filename.endswith("/train.py")]
        place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}"
        SEEN[f"{PHASE['now']:5} {what:28} {place}"] += 1


class Watcher(TorchDispatchMode):
    """Recorder of places where the host waits or copies badly; gives a scalar the value that is read from it."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is None or not hasattr(function, "overloadpacket"):  # a higher-order operator, as FlexAttention is
            return function(*args, **kwargs)
        name, on_gpu = function.overloadpacket.__name__, first.device.type == "cuda"
        if name == "_local_scalar_dense":
            if on_gpu:
                note("WAIT item()")
            return value_of(first.dtype)
        if on_gpu and name in ("equal", "is_nonzero", "nonzero", "masked_select", "_unique2"):
            note(f"WAIT {name}")
            if name in ("equal", "is_nonzero"):
                return True
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else first
            target = first.device if name == "copy_" else torch.device(kwargs.get("device") or first.device)
            waits = not (args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking", False))
            way = f"{source.device.type}->{target.type}"
            if way in ("cpu->cuda", "cuda->cpu") and waits:
                note(f"WAIT copy {way}")
            elif way == "cpu->cuda" and not source.is_contiguous():
                note(f"PAGEABLE copy {way}")  # ATen makes it contiguous first, in memory that is not pinned
        return function(*args, **kwargs)


def value_of(dtype: torch.dtype) -> Any:
    return {torch.bool: False, torch.int64: 1, torch.int32: 0}.get(dtype, 1.0)


def tolist(tensor: Any) -> Any:
    if tensor.device.type == "cuda":
        note("WAIT tolist()")

    def fill(shape: Any) -> Any:
        return [fill(shape[1:]) for _ in range(shape[0])] if shape else value_of(tensor.dtype)

    return fill(tuple(tensor.shape))


SDPA = torch.nn.functional.scaled_dot_product_attention


def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """The kernel that a GPU takes, by the rules of torch 2.13's ATen/native/transformers/cuda/sdp_utils.cpp."""
    if query.device.type != "cuda":
        return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (query, key, value))
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        raise RuntimeError(f"query, key and value must be of one type, got {query.dtype}, {key.dtype}, {value.dtype}")
    aten = torch.ops.aten
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if not enable_gqa and query.dtype != torch.float64:
        return aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]  # fmt: skip
    note("SLOW attention, no kernel")
    return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]  # fmt: skip


class Stream:
    device, stream_id = torch.device("cuda", 0), 0

    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...


class Event:
    """Refuses to be read before it was recorded, as CUDA does."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._timing, self._at = enable_timing, None

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()  # type: ignore[assignment]

    def elapsed_time(self, other: Event) -> float:
        if not self._timing or not other._timing or self._at is None or other._at is None:
            raise RuntimeError("invalid resource handle")
        return 1000 * (other._at - self._at)


def pretended_gpu() -> dict[Any, dict[str, Any]]:
    """Answers of torch about an H100, except for allocating and computing: module -> names -> values."""
    is_prepared = [False]
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, uuid="0"
    )
    stream = Stream()

    def lazily(answer: Any) -> Callable[..., Any]:
        def answered(*_: Any, **__: Any) -> Any:
            is_prepared[0] = True
            return answer

        return answered

    def reset_peak(*_: Any) -> None:
        if not is_prepared[0]:
            raise RuntimeError("Invalid device argument 0: did you call init?")

    def always(answer: Any) -> Callable[..., Any]:
        return lambda *_, **__: answer

    def synchronize(*_: Any) -> None:
        note("WAIT synchronize()")

    return {
        torch.cuda: {
            "is_available": always(True), "is_initialized": lambda: is_prepared[0], "_is_compiled": always(True), "device_count": always(1),
            "current_device": lazily(0), "set_device": lazily(None), "get_device_properties": lazily(properties), "init": lazily(None),
            "get_device_capability": lazily((9, 0)), "get_device_name": lazily(properties.name), "is_bf16_supported": always(True),
            "_lazy_init": lazily(None), "current_stream": always(stream), "Stream": Stream, "Event": Event, "synchronize": synchronize,
            "empty_cache": always(None), "manual_seed_all": always(None), "reset_peak_memory_stats": reset_peak,
            "max_memory_allocated": always(1 << 30), "memory_allocated": always(1 << 30), "is_current_stream_capturing": always(False),
        },
        torch.accelerator: {"is_available": always(True), "device_count": always(1), "current_accelerator": always(torch.device("cuda")),
                            "synchronize": synchronize, "current_device_index": always(0)},
        torch.backends.cuda: {"is_built": always(True)},
        torch.nn.functional: {"scaled_dot_product_attention": attention},
        torch.Tensor: {"pin_memory": lambda tensor, *_: tensor},
    }  # fmt: skip


class Driver:
    """NVML with one GPU that has used 3.6 kJ more each time it is asked."""

    JOULES = iter(range(0, 10**6, 3600))

    @staticmethod
    def nvmlInit() -> None: ...

    @staticmethod
    def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
        return uuid

    @staticmethod
    def nvmlDeviceGetMemoryInfo(handle: str) -> Any:
        return SimpleNamespace(used=2 << 30)

    @staticmethod
    def nvmlDeviceGetUtilizationRates(handle: str) -> Any:
        return SimpleNamespace(gpu=90)

    @staticmethod
    def nvmlDeviceGetTotalEnergyConsumption(handle: str) -> int:
        return 1000 * next(Driver.JOULES)


@contextlib.contextmanager
def changed(changes: dict[Any, dict[str, Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for place, values in changes.items():
            for name, value in values.items():
                stack.enter_context(patch.object(place, name, value, create=True))
        yield


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run with tensors that exist, for code that reads numbers of the model."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def move(model: torch.nn.Module, mode: Any) -> None:
    """Put fake tensors on the GPU into the modules; `Module.to` cannot keep a fake Parameter the same object."""
    known: dict[Any, Any] = {}
    for module in model.modules():
        for tensors, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in known:  # a tied one once
                    with torch.no_grad():
                        fake = mode.from_tensor(tensor.detach()).to("cuda")
                    known[tensor] = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake  # fmt: skip
                tensors[name] = known.get(tensor)  # type: ignore[arg-type]
    model.to = lambda *_, **__: model  # type: ignore[method-assign, assignment]


def main(overrides: list[str]) -> int:
    # First, before anything is pretended: these libraries check CUDA while they are imported.
    import peft  # noqa: F401
    import torch._dynamo
    import transformers.models.llama.modeling_llama  # noqa: F401
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    import acc_lm.checkpointing.saving
    import acc_lm.modeling.build
    import acc_lm.modeling.checks
    import acc_lm.run_files.metrics_file
    import acc_lm.training
    import acc_lm.training.divergence
    import train

    sys.modules["pynvml"] = Driver  # type: ignore[assignment]
    output = Path(tempfile.mkdtemp())
    mode, empty = FakeTensorMode(allow_non_fake_inputs=True), torch.empty
    build, step, look = (
        acc_lm.modeling.build.build_model,
        acc_lm.training.train_step,
        acc_lm.training.divergence.Watch.look,
    )

    def build_model(*args: Any, **kwargs: Any) -> Any:
        model, facts = outside(build)(*args, **kwargs)
        move(model, mode)
        return model, facts

    def train_step(*args: Any, **kwargs: Any) -> Any:
        PHASE["now"] = "step" if kwargs["step"] >= FIRST_STEP else ""
        return step(*args, **kwargs)

    def look_at_log(*args: Any) -> float:
        PHASE["now"] = PHASE["now"] and "other"
        return look(*args)

    def write(accelerator: Any, root: Path, snapshot: Any, *_: Any) -> tuple[Path, int]:
        assert {tensor.device.type for tensor in snapshot.tensors.values()} == {"cpu"}
        return root, 0

    changes = pretended_gpu() | {
        torch: {"empty": lambda *sizes, pin_memory=False, **how: empty(*sizes, **how)},
        FakeTensor: {"tolist": tolist},
        acc_lm.modeling.checks: {"check_model": outside(acc_lm.modeling.checks.check_model)},
        acc_lm.training.run: {"build_model": build_model},
        acc_lm.training: {"train_step": train_step},
        acc_lm.training.divergence.Watch: {"look": look_at_log},
        acc_lm.checkpointing.saving: {"write_checkpoint": write},
        acc_lm.training.ending: {"export_model": lambda *_, **__: output / "run/final"},
        acc_lm.run_files.metrics_file: {"draw": lambda *_: None},
    }
    with changed(changes), mode, Watcher(), torch.compiler.set_stance("force_eager"):
        code = train.main([*RECIPE, f"output_dir={output / 'run'}", *overrides])
    print(f"calls in the steps from {FIRST_STEP} on (step), and at a log, in an evaluation and in a save (other):")
    for line, count in SEEN.most_common():
        print(f"{count:5} {line}")
    lines = (output / "run/metrics.jsonl").read_text().splitlines()
    print("driver:", *sorted(name for name in json.loads(lines[0]) if name.startswith("train/gpu_")))
    print("energy:", json.loads((output / "run/summary.json").read_text())["energy_wh"])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
