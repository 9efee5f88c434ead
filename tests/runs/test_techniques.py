"""Techniques for speed change nothing that a run learns: each is compared with the same run without it.

For techniques that only a GPU has, their decisions are tested here; their results in `test_gpu.py`.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import Curve, Scenario, run_backend, train_curve
from processes import ROOT, UNFREEZE, launcher_environment, run_everywhere, run_training
from torch.nn.attention import SDPBackend

import acc_lm.modeling.losses
from acc_lm.checkpointing.loading import read_tensors
from acc_lm.config import Config
from acc_lm.errors import ConfigError, MachineError
from acc_lm.modeling.attention import causal_attention, kernel_order, prefer_kernels

GPU = torch.device("cuda")
FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ONE_OF_ONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": "0"}  # fmt: skip


def curves(config: str, num_processes: int, scenario: Scenario, environment: dict[str, str] | None = None) -> Curve:
    """One training on one backend, with additions to its environment."""
    found = (
        {} if config == "single" else launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", num_processes)
    )
    ports = {}
    if config != "single" and num_processes == 1:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports = ONE_OF_ONE | {"MASTER_PORT": str(probe.getsockname()[1])}
    curve: Curve = run_everywhere(
        lambda: train_curve(scenario), num_processes, 240, found | ports | (environment or {})
    )[0]
    assert curve.strategy == ("single" if config == "single" else config)
    return curve


def furthest(one: Curve, other: Curve) -> float:
    """Largest relative difference of any loss, gradient norm or evaluation."""
    assert one.metrics
    return max(
        abs(value / other.metrics[step][key] - 1)
        for step, values in one.metrics.items()
        for key, value in values.items()
        if key != "train/learning_rate"
    )


# --- one by one ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("technique", ["attention", "loss", "update", "transfer"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_without_one_technique_it_learns_the_same(name: str, technique: str) -> None:
    """Removed as the ladder of `python -m benchmarks.gpu ceilings` removes it."""
    from benchmarks import contenders

    scenario = Scenario(name, steps=3)

    def run() -> tuple[Curve, str]:
        import acc_lm.modeling.build

        contenders.without(technique)
        found: list[Any] = []
        install, fuse = acc_lm.modeling.build.install_loss, torch.optim.AdamW.__init__
        acc_lm.modeling.build.install_loss = lambda model: found.append(install(model)) or found[-1]

        def seen(self: Any, *arguments: Any, **keywords: Any) -> None:
            fuse(self, *arguments, **keywords)
            found.append(bool(self.defaults["fused"]))

        torch.optim.AdamW.__init__ = seen  # type: ignore[method-assign]
        return train_curve(scenario), f"{found[0]}, {found[1]}"

    def plain() -> Curve:
        return train_curve(scenario)

    (without, what), usual = run_everywhere(run)[0], run_everywhere(plain)[0]
    assert what.startswith("fused") == (technique != "loss"), what
    assert what.endswith("True") == (technique != "update"), what
    off = furthest(without, usual)
    print(f"{name} without {technique}: {off:.1e}")
    assert without.start == usual.start
    assert off <= 2e-6


def test_the_activation_in_one_operation_is_the_same() -> None:
    from transformers.activations import ACT2FN

    values = torch.linspace(-12, 12, 100_001, dtype=torch.float64, requires_grad=True)
    one, eight = (ACT2FN[name](values) for name in ("gelu_pytorch_tanh", "gelu_new"))
    slopes = [torch.autograd.grad(made.sum(), values)[0] for made in (one, eight)]
    assert (one - eight).abs().max() <= 1e-14
    assert (slopes[0] - slopes[1]).abs().max() <= 1e-13


def test_gradients_that_are_views_of_their_buckets_are_the_same() -> None:
    views, copies = (
        curves("ddp", 2, Scenario("llama", steps=3, overrides=(f"distributed.gradient_as_bucket_view={choice}",)))
        for choice in ("true", "false")
    )
    assert views.metrics == copies.metrics
    assert views.end == copies.end


# --- vocabulary ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    ["single", "fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "deepspeed_zero3"))],
)
def test_a_vocabulary_with_more_rows_trains_the_same_and_is_saved_without_them(
    config: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """257 ids, computed with 320: losses, norms and every shape in a checkpoint are those of 257, and either resumes from it."""
    num_processes = 1 if config == "single" else 2
    asked = acc_lm.modeling.losses.padded_vocabulary

    def train(**how: Any) -> tuple[Curve, Curve]:
        scenarios = [Scenario("gpt2", steps=4, **how), Scenario("llama", steps=4, mixed_precision="bf16")]
        first, second = run_backend(config, num_processes, scenarios)
        return first, second

    usual = train(save=tmp_path / "usual")
    monkeypatch.setattr(acc_lm.modeling.losses, "padded_vocabulary", lambda size, _: asked(size, GPU))
    assert acc_lm.modeling.losses.padded_vocabulary(257, GPU) == 320
    more = train(save=tmp_path / "more")
    monkeypatch.undo()
    off = [furthest(one, other) for one, other in zip(usual, more, strict=True)]
    print(f"{config}: {off[0]:.1e} in fp32, {off[1]:.1e} in bf16")
    assert usual[0].start == more[0].start
    assert off[0] <= 1e-6
    assert off[1] <= 2e-3
    saved = [{name: tuple(tensor.shape) for name, tensor in read_tensors(folder)} for folder in
             (step_folder(tmp_path / "usual"), step_folder(tmp_path / "more"))]  # fmt: skip
    assert saved[0] == saved[1]
    assert (257, 32) in saved[1].values()
    resumed, _ = train(load=step_folder(tmp_path / "more"))
    assert furthest(resumed, usual[0]) <= 1e-6


def step_folder(folder: Path) -> Path:
    (manifest,) = folder.rglob("manifest.json")
    return manifest.parent


# --- attention -----------------------------------------------------------------------------------------------------


def test_cudnn_comes_first_on_hopper_and_nowhere_else() -> None:
    assert list(kernel_order((9, 0))) == FIRST
    assert kernel_order((8, 0)) == kernel_order((8, 9)) == kernel_order((10, 0)) == kernel_order((12, 0)) == ()


@pytest.mark.parametrize(
    ("capability", "cudnn", "first"), [((9, 0), True, True), ((8, 0), True, False), ((9, 0), False, False)]
)
def test_a_run_sets_the_order_of_kernels_for_its_process(capability: tuple[int, int], cudnn: bool, first: bool) -> None:
    def run() -> tuple[list[str], bool, bool]:
        from torch.nn.attention import _cur_sdpa_kernel_backends

        from acc_lm.config import TrainingConfig
        from acc_lm.runtime.launch.accelerator import _set_numerics

        before = [backend.name for backend in _cur_sdpa_kernel_backends(with_priority=True)]
        torch.cuda.get_device_capability = lambda device=None: capability  # type: ignore[assignment, misc]
        _set_numerics(TrainingConfig(max_steps=1, cudnn_attention=cudnn), GPU)
        gc.collect()  # without a reference it would be undone here
        names = [backend.name for backend in _cur_sdpa_kernel_backends(with_priority=True)]
        return names, names == before, torch.backends.cuda.cudnn_sdp_enabled()

    names, unchanged, enabled = run_everywhere(run)[0]
    assert (names == [backend.name for backend in FIRST]) == first
    assert enabled == cudnn
    if not first and cudnn:
        assert unchanged


def test_the_order_of_kernels_changes_no_graph_and_no_number() -> None:
    def run() -> tuple[list[int], list[float]]:
        from test_fast_path import RECIPES, batch_of, make, small

        file = next(file for file in RECIPES if file.stem == "quickstart")
        model, _ = make(small(file, 4, 4), file)
        graphs, losses = [], []

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            graphs[-1] += 1
            return graph.forward

        for capability in ((8, 0), (9, 0)):
            prefer_kernels(capability)
            torch._dynamo.reset()
            graphs.append(0)
            losses.append(torch.compile(model, backend=backend)(**batch_of(4, False)).item())
        return graphs, losses

    graphs, losses = run_everywhere(run)[0]
    assert graphs == [1, 1], "no graph break"
    assert losses[0] == losses[1]


# --- compilation ---------------------------------------------------------------------------------------------------

REGIONS = {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"}


@pytest.mark.parametrize(
    ("config", "regions"),
    [
        pytest.param("single", {}, id="whole"),
        pytest.param("single", REGIONS, id="regions", marks=pytest.mark.slow),
        pytest.param("fsdp2", REGIONS, id="fsdp2 regions"),
        pytest.param("ddp", {}, id="ddp", marks=pytest.mark.slow),
        pytest.param("deepspeed_zero2", {}, id="deepspeed_zero2", marks=pytest.mark.slow),
    ],
)
def test_compiled_it_learns_the_same(config: str, regions: dict[str, str], usual: dict[str, Curve]) -> None:
    """Requested through the launch, by `dynamo_config`; the same names too, or the weights' digest would differ at the start."""
    num_processes = 1 if config == "single" else 2
    compiled = curves(config, num_processes, SMALL, {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER"} | regions)
    off = furthest(compiled, usual["no"])
    print(f"{config}: {off:.1e}")
    assert compiled.start == usual["no"].start
    assert off <= 2e-6


def test_fsdp2_compiled_as_one_graph_is_refused(tiny: list[str]) -> None:
    """Accelerate compiles the model first, and torch then calls none of the hooks that gather its weights."""
    environment = launcher_environment(ROOT / "accelerate_configs/fsdp2.yaml", 2)
    finished = run_training(
        tiny, 2, environment | {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, expect=4
    )  # fmt: skip
    assert "dynamo_use_regional_compilation must be true under fsdp2, got false" in finished.errors[0]


SMALL = Scenario("llama", steps=3)


@pytest.fixture(scope="module")
def usual() -> dict[str, Curve]:
    """One process, nothing added."""
    return {p: curves("single", 1, replace(SMALL, mixed_precision=p)) for p in ("no", "bf16")}


# --- 16 bits without autocast --------------------------------------------------------------------------------------


def test_one_process_under_fsdp2_learns_what_autocast_does(usual: dict[str, Curve]) -> None:
    """`fsdp2.yaml` with one process: weights in fp32, cast once a step and not in every product."""
    found = curves("fsdp2", 1, replace(SMALL, mixed_precision="bf16"))
    assert (found.num_processes, found.precision) == (1, "float32 weights, bfloat16 compute, float32 reduction")
    assert "autocast" in usual["bf16"].precision
    off = furthest(found, usual["bf16"])
    print(f"{off:.1e} from autocast, {furthest(usual['no'], usual['bf16']):.1e} from fp32 to autocast")
    assert found.start == usual["bf16"].start
    assert off <= 2e-3
    assert furthest(usual["no"], usual["bf16"]) > 1e-6, "16 bits are really used"


# --- garbage collector ---------------------------------------------------------------------------------------------


def test_no_collection_during_the_steps_looks_at_what_was_there_before(tiny: list[str]) -> None:
    def run() -> tuple[int, int]:
        import acc_lm.training
        import train

        gc.unfreeze = UNFREEZE
        gc.unfreeze()
        counts = []
        step = acc_lm.training.train_step

        def counted(*arguments: Any, **keywords: Any) -> Any:
            counts.append(gc.get_freeze_count())
            return step(*arguments, **keywords)

        acc_lm.training.train_step = counted
        assert train.main(tiny) == 0
        return min(counts), gc.get_freeze_count()

    during, after = run_everywhere(run)[0]
    assert during > 50_000
    assert after == 0


# --- 8 bits --------------------------------------------------------------------------------------------------------

FP8 = replace(SMALL, mixed_precision="fp8")


def test_a_missing_requirement_of_fp8_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from acc_lm.runtime.launch.refusals import checked_precision
    from acc_lm.runtime.settings import fp8

    monkeypatch.setattr(fp8, "find_spec", lambda name: None)
    with pytest.raises(
        MachineError, match=r"^training.mixed_precision must be bf16 or no without torchao, got fp8; install"
    ):
        checked_precision("fp8", has_accelerator=True)
    monkeypatch.setattr(fp8, "find_spec", lambda name: "here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(
        MachineError, match=r"on NVIDIA A100, got fp8, which needs compute capability 8.9 and it has 8.0"
    ):
        checked_precision("fp8", has_accelerator=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert checked_precision("fp8", has_accelerator=True) == "fp8"
    with pytest.raises(MachineError, match="must be bf16 or no under DeepSpeed, got fp8"):
        checked_precision("fp8", has_accelerator=True, strategy="deepspeed_zero2")


@pytest.mark.parametrize(
    ("override", "says"),
    [("adapter.kind=lora", "adapter.kind must be none with training.mixed_precision fp8"),
     ("model.dtype=bfloat16", "model.dtype must be float32 with training.mixed_precision fp8")],
)  # fmt: skip
def test_settings_that_do_not_go_with_fp8_are_refused(override: str, says: str, tiny: list[str]) -> None:
    from acc_lm.config.loading import load_config
    from acc_lm.runtime.settings.fp8 import check_recipe

    with pytest.raises(ConfigError, match=says):
        check_recipe(load_config(Path(tiny[1]), ["model.config=null", "model.name_or_path=somewhere", override]))


def test_positions_that_8_bits_cannot_multiply_are_refused_before_any_reading(tiny: list[str]) -> None:
    """The gradient of a weight is a product over all positions of a micro-batch; a search may end at a single row."""
    from acc_lm.config.loading import load_config
    from acc_lm.runtime import check_run
    from acc_lm.runtime.settings.fp8 import check_rows

    def recipe(length: int, *more: str) -> Config:
        fixed = ["training.mixed_precision=fp8", "training.micro_batch_size=2", f"data.sequence_length={length}"]
        return load_config(Path(tiny[1]), [*fixed, *more])

    with pytest.raises(ConfigError, match=r"must be a multiple of 16 with training.mixed_precision fp8, got 30 x 2"):
        check_run(recipe(30))
    check_run(recipe(24))
    with pytest.raises(ConfigError, match=r"got 24 x 1; make data.sequence_length such a multiple"):
        check_rows(recipe(24, "training.find_micro_batch_size=true"), 2)


def test_a_model_without_a_layer_for_fp8_is_refused() -> None:
    """GPT-2 has its own kind of linear layer, which no library replaces; small layers are left out too."""
    from test_fast_path import RECIPES, make, small

    from acc_lm.runtime.settings.fp8 import check_layers

    for name in ("pretrain_gpt2-124m_fineweb-edu", "quickstart"):
        file = next(file for file in RECIPES if file.stem == name)
        model, _ = make(small(file, 4, 4), file)
        if name == "quickstart":
            check_layers(model)
            layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
            for layer in layers[1:-1]:  # the first and the last keep theirs, and do not count
                layer.in_features = 24
        with pytest.raises(ConfigError, match=f"must be bf16 for {type(model).__name__}, got fp8"):
            check_layers(model)


@pytest.mark.parametrize(("config", "num_processes"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
def test_fp8_trains_close_to_bf16(config: str, num_processes: int, usual: dict[str, Curve], tmp_path: Path) -> None:
    """With torchao's own emulation, so that the complete path runs without a GPU: prepared, trained, saved, compared."""
    pytest.importorskip("torchao")

    def run() -> tuple[Curve, set[str]]:
        from torchao.float8 import Float8LinearConfig

        from acc_lm.runtime.launch import refusals

        refusals.checked_precision = lambda *_: "fp8"
        original = Float8LinearConfig.from_recipe_name
        Float8LinearConfig.from_recipe_name = staticmethod(lambda name: replace(original(name), emulate=True))
        names: set[str] = set()

        def look(accelerator: Any, model: Any, optimizer: Any, config: Any) -> dict[str, Any]:
            names.update(name for name, m in model.named_modules() if type(m).__name__ == "Float8Linear")
            return {}

        return train_curve(FP8, look), names

    environment = {} if config == "single" else launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", 2)
    curve, names = run_everywhere(run, num_processes, 240, environment)[0]
    assert curve.precision.startswith("float32 weights, fp8 products, else bfloat16")
    assert len(names) == 2 * 7 - 1, "all of two blocks but the first"
    off = furthest(curve, usual["bf16"])
    print(f"{config}: {off:.1e} from bf16")
    assert curve.start == usual["bf16"].start
    assert 1e-5 < off <= 5e-2


@pytest.mark.parametrize(("dtype", "autocast", "grouped"), [
    (torch.float32, False, False), (torch.float32, True, True), (torch.bfloat16, False, True), (torch.float64, False, True),
])  # fmt: skip
def test_shared_heads_are_repeated_on_a_gpu_where_no_kernel_takes_them(
    dtype: torch.dtype, autocast: bool, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fake tensors: in float32 the only kernel left would keep scores of T x T."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    asked: list[tuple[int, bool]] = []

    def attend(query: Any, key: Any, value: Any, *, enable_gqa: bool, **keywords: Any) -> Any:
        asked.append((key.shape[1], enable_gqa))
        return torch.empty(query.shape)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr("torch.is_autocast_enabled", lambda kind: autocast)
    monkeypatch.setattr("torch.get_autocast_dtype", lambda kind: torch.bfloat16)
    with FakeTensorMode():
        query, key = (torch.empty(2, heads, 8, 16, dtype=dtype, device="cuda") for heads in (4, 2))
        causal_attention(torch.nn.Module(), query, key, key, None)
    assert asked == [(2, True) if grouped else (4, False)]


def test_repeated_heads_give_what_shared_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for repeats in (False, True):
        monkeypatch.setattr("acc_lm.modeling.attention._lacks_grouped_kernel", lambda query, repeats=repeats: repeats)
        torch.manual_seed(0)
        given = [torch.randn(2, heads, 8, 16, requires_grad=True) for heads in (6, 2, 2)]
        output, _ = causal_attention(torch.nn.Module(), *given, None)
        found.append([output, *torch.autograd.grad(output.square().sum(), given)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
