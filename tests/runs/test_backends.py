"""Swap the YAML, keep the curve: every backend, on its real engine, against one process."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import BACKENDS, GLOBAL_BATCH, STEPS, STRATEGY, TIED, Curve, Scenario, run_backend
from processes import ROOT, Launch, launcher_environment, run_training

from acc_lm.run_files.differences import TOLERANCE, largest_differences, read_metrics
from acc_lm.runtime.settings.extensions import has_libaio
from acc_lm.studies.parity import ParityRow

GRID = [
    Scenario("gpt2", accumulation=4, gradient_checkpointing=True),
    Scenario("llama", accumulation=1),
    Scenario("gpt2", accumulation=1),
    Scenario("llama", accumulation=4, gradient_checkpointing=True),
]
BF16 = [Scenario("gpt2", accumulation=4, mixed_precision="bf16"), Scenario("llama", mixed_precision="bf16")]
FLOAT64 = [Scenario("gpt2", accumulation=4, dtype="float64"), Scenario("llama", dtype="float64")]
SHARDED = ["fsdp2 x2", "hsdp 2x2", "deepspeed_zero1 x2", "deepspeed_zero2 x2", "deepspeed_zero3 x2"]


@cache
def one_process(*scenarios: Scenario) -> list[Curve]:
    return run_backend("single", 1, list(scenarios))


def compare(scenario: Scenario, expected: Curve, got: Curve, tolerance: dict[str, float]) -> None:
    assert expected.metrics[1]["train/loss"] - expected.metrics[STEPS]["train/loss"] > 0.1, "the run must learn"
    differences = largest_differences(expected.metrics, got.metrics)
    print(scenario, got.strategy, {name: f"{value:.1e}" for name, value in differences.items()})
    assert set(differences) == set(tolerance)
    for name, difference in differences.items():
        assert difference <= tolerance[name], (str(scenario), name)
    assert got.ledger == expected.ledger
    assert got.start == expected.start, "the weights before the first step"


def in_part(names: Iterable[str], *slow: str) -> list[Any]:
    """All of them, of which these run in `make test-all` only."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


MORE = {
    "fsdp2 x3": ("fsdp2", 3), "fsdp2_grad_op x4": ("fsdp2_grad_op", 4), "deepspeed_zero1 x3": ("deepspeed_zero1", 3),
    "deepspeed_zero2 x4": ("deepspeed_zero2", 4), "deepspeed_zero3 x3": ("deepspeed_zero3", 3), "deepspeed_zero3_offload x4": ("deepspeed_zero3_offload", 4),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_processes_follow_the_curve_too(name: str) -> None:
    for scenario, expected, got in zip(GRID, one_process(*GRID), run_backend(*MORE[name], GRID), strict=True):
        compare(scenario, expected, got, TOLERANCE["no"])


@pytest.mark.parametrize(
    "name", in_part(BACKENDS, "fsdp2_grad_op x2", "deepspeed_zero3_full x2", "deepspeed_zero3_sequence x2")
)
def test_every_backend_follows_the_curve_of_one_process(name: str) -> None:
    """20 steps, ragged targets, tied and untied, accumulation 1 and 4, activation checkpointing on and off."""
    assert TIED == {"gpt2": True, "llama": False}
    for scenario, expected, got in zip(GRID, one_process(*GRID), run_backend(*BACKENDS[name], GRID), strict=True):
        compare(scenario, expected, got, TOLERANCE["no"])


def test_activation_checkpointing_and_accumulation_change_nothing() -> None:
    checkpointed, plain = one_process(*GRID)[0], one_process(*GRID)[2]
    differences = largest_differences(plain.metrics, checkpointed.metrics)
    assert all(difference <= TOLERANCE["no"][name] for name, difference in differences.items())


@pytest.mark.parametrize(
    "name", in_part(["ddp x2", "ddp x3", "fsdp2 x2", "hsdp 2x2", "ddp_sequence x2"], "ddp x3", "hsdp 2x2")
)
def test_in_float64_only_rounding_remains(name: str) -> None:
    """Llama's RMSNorm computes in float32 whatever the model is in."""
    for scenario, expected, got in zip(
        FLOAT64, one_process(*FLOAT64), run_backend(*BACKENDS[name], FLOAT64), strict=True
    ):
        assert got.precision == "float64"
        bound = 1e-10 if scenario.model == "gpt2" else 1e-7
        compare(scenario, expected, got, {name: 0.0 if "rate" in name else bound for name in TOLERANCE["no"]})


def test_deepspeed_does_not_take_float64(tiny: list[str]) -> None:
    environment = launcher_environment(ROOT / "accelerate_configs" / "deepspeed_zero2.yaml", 2)
    finished = run_training([*tiny, "model.dtype=float64"], 2, environment, expect=4)
    assert (
        "model.dtype must be float32 under DeepSpeed, which updates in float32 whatever the model's dtype"
        in finished.errors[0]
    )


@pytest.mark.parametrize("name", in_part(
    [name for name in BACKENDS if name not in ("fsdp2_offload x2", "deepspeed_zero3_full x2")],
    "ddp x3", "fsdp2_grad_op x2", "hsdp 2x2", "deepspeed_zero1 x2", "deepspeed_zero2 x2", "deepspeed_zero2_offload x2", "deepspeed_zero3_offload x2",
    "ddp_sequence x2", "sequence_parallel 2x2", "deepspeed_zero3_sequence x2",
))  # fmt: skip
def test_bf16_stays_within_its_band(name: str) -> None:
    """fp32 master weights, losses in fp32: a loss rounded to 16 bits would be off by 1e-3."""
    for scenario, expected, got in zip(BF16, one_process(*BF16), run_backend(*BACKENDS[name], BF16), strict=True):
        assert got.precision in (
            "float32 weights, bfloat16 autocast compute, float32 reduction",
            "float32 weights, bfloat16 compute, float32 reduction",
        )
        compare(scenario, expected, got, TOLERANCE["bf16"])


@pytest.mark.parametrize(("fault", "name", "model"), [
    ("mean of means", "ddp x2", "llama"),
    ("mean of means", "deepspeed_zero2 x2", "llama"),
    ("skipped all-reduce", "ddp x2", "llama"),
    ("decay by shape", "deepspeed_zero3 x2", "gpt2"),
    ("clipping left to auto", "deepspeed_zero2 x2", "llama"),
    ("wrong shuffle", "fsdp2 x2", "llama"),
])  # fmt: skip
def test_a_planted_fault_is_detected(fault: str, name: str, model: str) -> None:
    scenario = Scenario(model, accumulation=4)
    expected = one_process(scenario)[0]
    got = run_backend(*BACKENDS[name], [Scenario(model, accumulation=4, fault=fault)])[0]
    differences = largest_differences(expected.metrics, got.metrics)
    print(fault, {key: f"{value:.1e}" for key, value in differences.items()})
    assert any(difference > TOLERANCE["no"][key] for key, difference in differences.items())
    with pytest.raises(AssertionError):
        compare(scenario, expected, got, TOLERANCE["no"])


@pytest.mark.parametrize("name", ["ddp x2", *SHARDED])
def test_processes_that_draw_other_weights_start_from_those_of_the_first(name: str) -> None:
    scenario = Scenario("gpt2", seed_by_process=True, steps=2)
    got = run_backend(*BACKENDS[name], [scenario])[0]
    assert got.start == one_process(Scenario("gpt2", steps=2))[0].start


# --- what is sent between the processes ----------------------------------------------------------------------------


def count_collectives(accelerator: Any, model: Any, optimizer: Any, config: Any) -> dict[str, Any]:
    """Calls of c10d in one optimizer step of four micro-batches, by name."""
    from backends import LENGTH, NUM_ROWS, RaggedRows

    from acc_lm.runtime import Gradients, split_global_batch
    from acc_lm.training.step import train_step

    micro, accumulation = split_global_batch(config.training, accelerator.num_processes)
    rows = RaggedRows(NUM_ROWS, 1)
    first = accelerator.process_index * micro * accumulation
    batches = [rows.__getitems__(list(range(first + i * micro, first + (i + 1) * micro))) for i in range(accumulation)]
    gradients = Gradients(accelerator, model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train_step(
            accelerator,
            model,
            optimizer,
            batches,
            step=99,
            seed=0,
            num_targets=100 * LENGTH,
            max_grad_norm=1.0,
            gradients=gradients,
        )
    names = {event.key: event.count for event in profile.key_averages() if event.key.startswith("c10d::")}
    return {"collectives": names, "blocks": config.model.config.get("n_layer")}


def test_the_collectives_of_a_step() -> None:
    """DDP sends gradients once a step, however many micro-batches; FSDP2 gathers weights and scatters gradients in each."""
    scenario = Scenario("gpt2", accumulation=4, steps=2)
    counts = {
        name: run_backend(*BACKENDS[name], [scenario], count_collectives)[0].extra["collectives"]
        for name in (
            "ddp x2",
            "fsdp2 x2",
            "fsdp2_grad_op x2",
            "deepspeed_zero1 x2",
            "deepspeed_zero2 x2",
            "deepspeed_zero3 x2",
        )
    }
    for name, calls in counts.items():
        print(name, calls)
    assert counts["ddp x2"] == {"c10d::allreduce_": 1}
    units = 4  # two blocks, the tied embedding with norm and head, and the rest: the position embedding
    gathers, scatters = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"
    assert counts["fsdp2 x2"][scatters] == counts["fsdp2_grad_op x2"][scatters] == 4 * units
    assert counts["fsdp2 x2"][gathers] > counts["fsdp2_grad_op x2"][gathers]
    assert counts["fsdp2 x2"]["c10d::allreduce_"] == 1, "of the gradient norm"


# --- all of train.py -----------------------------------------------------------------------------------------------

LAUNCHES = {
    name: launch for name, launch in BACKENDS.items() if name not in ("ddp_sequence x2", "deepspeed_zero3_sequence x2")
}
LAUNCHES |= {"single": ("single", 1)}


def environment_of(config: str, num_processes: int) -> dict[str, str]:
    return (
        {}
        if config == "single"
        else launcher_environment(ROOT / "accelerate_configs" / f"{config}.yaml", num_processes)
    )


@pytest.mark.parametrize(
    "name",
    in_part(
        LAUNCHES,
        "ddp x3",
        "fsdp2_grad_op x2",
        "fsdp2_offload x2",
        "deepspeed_zero1 x2",
        "deepspeed_zero2_offload x2",
    ),
)
def test_a_dry_run_does_everything_once_and_keeps_nothing(name: str, tiny: list[str], tmp_path: Path) -> None:
    config, num_processes = LAUNCHES[name]
    finished = run_training([*tiny, "--dry-run"], num_processes, environment_of(config, num_processes))
    lines = [line for line in finished.output.splitlines() if line.startswith("dry run: ")]
    assert [line.split()[2] for line in lines] == ["step", "evaluate", "save", "measure", "load", "everything"]
    assert "every tensor is restored bit for bit" in lines[4]
    assert f"strategy      {STRATEGY[config][0]}, {num_processes} process" in finished.output
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def exported(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny recipe, trained to its end on every backend."""
    folder = tmp_path_factory.mktemp("exports")
    for config, num_processes in LAUNCHES.values():
        run_training(
            ["--config", str(tiny_recipe), f"output_dir={folder / config}-{num_processes}"], num_processes,
            environment_of(config, num_processes),
        )  # fmt: skip
    return {name: folder / f"{config}-{count}" for name, (config, count) in LAUNCHES.items()}


def test_every_backend_exports_the_model_that_it_trained(exported: dict[str, Path]) -> None:
    from safetensors.torch import load_file

    expected = load_file(exported["ddp x2"] / "final" / "model.safetensors")
    files = sorted(file.name for file in (exported["ddp x2"] / "final").iterdir())
    for name, folder in exported.items():
        environment = json.loads((folder / "environment.json").read_text())
        assert environment["strategy"] == STRATEGY[LAUNCHES[name][0]][0]
        assert sorted(file.name for file in (folder / "final").iterdir()) == files, name
        tensors = load_file(folder / "final" / "model.safetensors")
        assert {key: (t.shape, t.dtype) for key, t in tensors.items()} == {
            key: (t.shape, t.dtype) for key, t in expected.items()
        }
        last = read_checkpoint(folder / "checkpoints" / "latest")
        for key, tensor in tensors.items():  # the last checkpoint was written from the same live weights
            assert torch.equal(last[key], tensor.flatten()), (name, key)


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Full, flat weights from the pieces of all processes."""
    from safetensors import safe_open

    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for path in sorted(folder.resolve().glob("tensors-*.safetensors")):
        with safe_open(path, "pt") as file:
            starts = json.loads(file.metadata()["pieces"])["starts"]
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                kind, _, name = key.partition("/")
                if kind == "param":
                    parts.setdefault(name, []).append((starts[name], file.get_tensor(key)))
    return {
        name: torch.cat([tensor for _, tensor in sorted(pieces, key=lambda p: p[0])]) for name, pieces in parts.items()
    }


def test_the_exported_models_have_the_evaluation_loss_that_was_measured(exported: dict[str, Path]) -> None:
    """In a fresh process, by transformers alone, on the held-out rows."""
    from transformers import AutoModelForCausalLM

    from acc_lm.config.loading import load_config
    from acc_lm.data import build_data
    from acc_lm.text.tokenizer import load_tokenizer

    losses = {}
    for name, folder in exported.items():
        config = load_config(folder / "config.yaml")
        data = build_data(
            config.data, config.tokenizer, load_tokenizer(config.tokenizer, config.model), config.seed, 12, True
        )
        model = AutoModelForCausalLM.from_pretrained(folder / "final", use_safetensors=True).eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for row in range(len(data.evaluation)):
                batch = data.evaluation[row]
                logits = model(batch["input_ids"]).logits
                total += torch.nn.functional.cross_entropy(
                    logits[0].double(), batch["targets"][0], ignore_index=-100, reduction="sum"
                ).item()
                count += int((batch["targets"] != -100).sum())
        measured = read_metrics(folder)[6]["eval/loss"]
        assert total / count == pytest.approx(measured, rel=1e-6), name
        losses[name] = total / count
    for name, loss in losses.items():
        assert loss == pytest.approx(losses["ddp x2"], rel=1e-6), name


def one_step(arguments: list[str]) -> int:
    """`train.py`, stopped as if a signal had come in its first step."""
    import train
    from acc_lm.stop import StopRequest

    StopRequest.agreed = lambda self: "SIGTERM"  # type: ignore[method-assign]
    return train.main(arguments)


@pytest.mark.slow
def test_a_run_may_change_its_backend_at_every_stop(exported: dict[str, Path], tiny: list[str], tmp_path: Path) -> None:
    """One step on each of them, from checkpoint to checkpoint; the curve is that of one uninterrupted process."""
    journey = ["single", "fsdp2 x2", "deepspeed_zero3 x2", "hsdp 2x2", "deepspeed_zero1 x2", "ddp x3"]
    for step, name in enumerate(journey, start=1):
        config, num_processes = LAUNCHES[name]
        arguments = [*tiny, "training.log_every=1"]
        launch = Launch(
            lambda arguments=arguments: one_step(arguments), num_processes, environment_of(config, num_processes)
        )
        finished = launch.wait(60)
        assert set(finished.codes) == {0 if step == len(journey) else 75}, finished.output
    got, expected = read_metrics(tmp_path / "run"), read_metrics(exported["single"])
    assert sorted(got) == [1, 2, 3, 4, 5, 6]
    assert sorted(expected) == [1, 2, 3, 4, 6], "it logs the first and every other step, and evaluates at the third"
    logged = {
        step: {name: got[step][name] for name in values if name in got[step]} for step, values in expected.items()
    }
    differences = largest_differences(expected, logged)
    assert all(difference <= TOLERANCE["no"][name] for name, difference in differences.items()), differences


@pytest.mark.slow  # DeepSpeed's AsyncIO alone takes minutes to build
@pytest.mark.skipif(not has_libaio(), reason="libaio is not installed (Debian: libaio-dev)")
def test_nvme_offload_follows_the_curve(tmp_path: Path) -> None:
    text = (ROOT / "accelerate_configs" / "deepspeed_zero3_nvme.yaml").read_text()
    assert "/local_nvme" in text
    file = tmp_path / "deepspeed_zero3_nvme.yaml"
    file.write_text(text.replace("/local_nvme", str(tmp_path)))
    scenarios = GRID[:2]
    for scenario, expected, got in zip(
        scenarios, one_process(*GRID), run_backend(str(file), 2, scenarios), strict=False
    ):
        compare(scenario, expected, got, TOLERANCE["no"])


def test_more_processes_than_the_batch_has_parts_is_refused(tiny: list[str]) -> None:
    assert GLOBAL_BATCH % 5
    finished = run_training([*tiny, "training.global_batch_size=13"], 2, environment_of("fsdp2", 2), expect=2)
    assert "training.global_batch_size must be a multiple" in finished.errors[0]
    shutil.rmtree("unused", ignore_errors=True)


# --- files written by others ---------------------------------------------------------------------------------------

ANSWERS = ROOT / "tests/support/accelerate_config_answers"
WRITTEN = {
    "ddp": ("ddp", 2), "ddp_affinity": ("ddp", 2), "fsdp2": ("fsdp2", 2), "fsdp2_named_block": ("fsdp2", 2), "hsdp": ("hsdp", 4),
    "deepspeed_zero2": ("deepspeed_zero2", 2), "deepspeed_zero3_offload": ("deepspeed_zero3", 2),
    "multi_node_ddp": ("ddp", 2), "multi_node_deepspeed_zero3": ("deepspeed_zero3", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", in_part(WRITTEN, "ddp_affinity", "fsdp2_named_block", "hsdp", "multi_node_ddp"))
def test_what_accelerate_config_writes_runs(name: str, tiny: list[str]) -> None:
    strategy, num_processes = WRITTEN[name]
    environment = launcher_environment(ANSWERS / f"{name}.yaml", num_processes)
    finished = run_training([*tiny, "--dry-run"], num_processes, environment)
    assert f"strategy      {strategy}, {num_processes} processes" in finished.output
    assert "dry run: everything works" in finished.output


def test_accumulation_that_accelerate_config_wrote_is_overridden_with_a_line(tiny: list[str]) -> None:
    environment = launcher_environment(ANSWERS / "deepspeed_zero2.yaml", 2)
    finished = run_training([*tiny, "--dry-run", "training.micro_batch_size=3"], 2, environment)
    assert (
        "gradient_accumulation_steps 1 of the Accelerate config is overridden: the recipe sets it to 2"
        in finished.output
    )


@pytest.mark.parametrize(("name", "text"), [
    ("fsdp1", "fsdp_version must be 2, got 1, which torch no longer develops; use accelerate_configs/fsdp2.yaml"),
    ("multi_cpu", "must start all requested processes, got one"),
])  # fmt: skip
def test_configs_that_cannot_run_are_one_line(name: str, text: str, tiny: list[str]) -> None:
    environment = launcher_environment(ANSWERS / f"{name}.yaml", 2)
    num_processes = 1 if name == "multi_cpu" else 2
    finished = run_training([*tiny, "--dry-run"], num_processes, environment, expect=4)
    assert len(finished.errors) == 1
    assert text in finished.errors[0]


def engine_settings(accelerator: Any, model: Any, optimizer: Any, config: Any) -> dict[str, Any]:
    zero = model._config.zero_config
    return {
        "parsed": {key: getattr(zero, key) for key in type(zero).model_fields if not key.startswith("offload_")},
        "offload_param": zero.offload_param.model_dump(mode="json"),
        "offload_optimizer": zero.offload_optimizer.model_dump(mode="json"),
        "batch": (
            model.train_batch_size(),
            model.train_micro_batch_size_per_gpu(),
            model.gradient_accumulation_steps(),
        ),
        "clipping": model.gradient_clipping(),
        "file": model.config,
    }


def test_every_key_of_the_full_deepspeed_config_reaches_the_engine() -> None:
    file = json.loads((ROOT / "accelerate_configs" / "deepspeed_zero3_full.json").read_text())
    scenario = Scenario("llama", accumulation=4, steps=2)
    seen = run_backend("deepspeed_zero3_full", 2, [scenario], engine_settings)[0].extra
    hidden = 32
    of_hidden_size = {
        "reduce_bucket_size": hidden * hidden, "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }  # fmt: skip
    aliases = {
        "stage3_prefetch_bucket_size": "prefetch_bucket_size", "stage3_param_persistence_threshold": "param_persistence_threshold",
        "stage3_max_live_parameters": "max_live_parameters", "stage3_max_reuse_distance": "max_reuse_distance",
        "stage3_gather_16bit_weights_on_model_save": "gather_16bit_weights_on_model_save",
    }  # fmt: skip
    for key, value in file["zero_optimization"].items():
        if key.startswith("offload_"):
            for name, wanted in value.items():
                assert seen[key][name] == wanted, (key, name)
        else:
            wanted = of_hidden_size[key] if value == "auto" else value
            assert seen["parsed"][aliases.get(key, key)] == wanted, key
    assert seen["batch"] == (48, 6, 4)
    assert seen["clipping"] == 0.5
    for key, value in file["fp16"].items():
        assert seen["file"]["fp16"][key] == (False if key == "enabled" else value), key
    assert {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    } <= set(file)


def test_a_hand_written_config_that_contradicts_the_recipe_is_refused(tiny: list[str], tmp_path: Path) -> None:
    settings = json.loads((ROOT / "accelerate_configs" / "deepspeed_zero3_full.json").read_text())
    settings |= {
        "train_batch_size": 64,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
    }
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    text = (ROOT / "accelerate_configs" / "deepspeed_zero3_full.yaml").read_text()
    assert "deepspeed_zero3_full.json" in text
    file = tmp_path / "full.yaml"
    file.write_text(text.replace("deepspeed_zero3_full.json", str(tmp_path / "ds.json")))
    finished = run_training([*tiny, "--dry-run"], 2, launcher_environment(file, 2), expect=4)
    assert len(finished.errors) == 4, finished.output
    for word in ("train_batch_size", "gradient_clipping", "optimizer must be left out", "bf16.enabled"):
        assert any(word in line for line in finished.errors), word


def test_a_block_class_that_the_model_does_not_have_is_refused(tiny: list[str]) -> None:
    environment = launcher_environment(ROOT / "accelerate_configs" / "fsdp2.yaml", 2)
    finished = run_training(
        [*tiny, "--dry-run"], 2, environment | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block"}, expect=4
    )
    assert "got GPT2Block; leave it out, the model's own is LlamaDecoderLayer" in finished.errors[0]


# --- the engine that runs is the one requested ---------------------------------------------------------------------


def test_a_silent_fall_back_to_ddp_is_an_error(tiny: list[str]) -> None:
    """Accelerate alone would train with DDP on CPU processes, silently."""

    def run() -> int:
        import train
        from acc_lm.runtime.launch import accelerator

        accelerator.shard_on_cpu = lambda *arguments: None
        return train.main([*tiny, "--dry-run"])

    finished = Launch(run, 2, environment_of("fsdp2", 2)).wait(60)
    assert set(finished.codes) == {4}, finished.output
    assert "the launch must run fsdp2, as its Accelerate config requests, got ddp" in finished.errors[0]


def test_the_blocks_are_the_units_and_small_tensors_are_sharded_too() -> None:
    def units(accelerator: Any, model: Any, optimizer: Any, config: Any) -> dict[str, Any]:
        from torch.distributed.fsdp import FSDPModule

        names = [type(module).__name__ for module in model.modules() if isinstance(module, FSDPModule)]
        return {"units": names, "whole": [n for n, p in model.named_parameters() if not hasattr(p, "device_mesh")]}

    seen = run_backend("fsdp2", 2, [Scenario("gpt2", steps=1), Scenario("llama", steps=1)], units)
    assert seen[0].extra["units"].count("FSDPGPT2Block") == 2
    assert seen[1].extra["units"].count("FSDPLlamaDecoderLayer") == 2
    assert seen[0].extra["whole"] == seen[1].extra["whole"] == []


# --- acc-lm parity -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parity_by_real_launches(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from acc_lm.cli import main

    monkeypatch.chdir(ROOT)
    page = tmp_path / "parity.md"
    page.write_text("# Parity\n\nwritten by hand\n")
    arguments = [
        "parity",
        "--config",
        str(tiny_recipe),
        "--steps",
        "4",
        "--cases",
        "single:1,fsdp2:2,ddp:5",
        "--output",
        str(page),
    ]
    assert main(arguments) == 0
    text = page.read_text()
    assert "written by hand" in text
    assert "| fsdp2 x2 | fsdp2 | FSDPLlamaForCausalLM |" in text
    assert "Left out: ddp x5, because 5 processes do not divide" in text
    values = json.loads(page.with_suffix(".json").read_text())
    assert [row["strategy"] for row in values["rows"]] == ["single", "fsdp2"]
    assert all(row["same_ledger"] and row["peak_memory_gb"] > 0 and row["seconds"] > 0 for row in values["rows"])


def test_parity_detects_a_launch_with_another_result_or_other_rows(
    tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However equal its figures are, if the rows differ."""
    from acc_lm.cli import main
    from acc_lm.studies import parity

    def launch(script: list[str], file: Path | None, num_processes: int, *more: object, **named: object) -> None:
        folder = Path(script[-1].removeprefix("output_dir="))
        folder.mkdir()
        loss = 2.0 + 1e-4 * (num_processes == 4)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, **dict.fromkeys(TOLERANCE["no"], loss)}) + "\n")
        environment = {"num_processes": num_processes, "strategy": "ddp", "engine": "Model"}
        (folder / "environment.json").write_text(json.dumps(environment))
        (folder / "summary.json").write_text(json.dumps({"ledger": str(num_processes // 3), "peak_memory_gb": [1.0]}))

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(parity, "launch", launch)
    arguments = ["parity", "--config", str(tiny_recipe), "--cases"]
    assert main([*arguments, "single:1,ddp:2"]) == 0
    assert "OTHER ROWS" not in capsys.readouterr().out
    assert main([*arguments, "single:1,ddp:3"]) == 1
    assert "OTHER ROWS" in capsys.readouterr().out
    assert main([*arguments, "single:1,ddp:4"]) == 1
    assert "NOT within the tolerance" in capsys.readouterr().out


@pytest.mark.parametrize(("cases", "text"), [
    ("nothing:2", "nothing must be an Accelerate config, or the name of one"), ("ddp", "--cases must be written NAME:PROCESSES, got ddp"),
])  # fmt: skip
def test_parity_refuses_what_it_cannot_read(
    cases: str, text: str, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from acc_lm.cli import main

    monkeypatch.chdir(ROOT)
    assert main(["parity", "--config", str(tiny_recipe), "--cases", cases]) == 2
    assert text in capsys.readouterr().err


def test_a_value_that_is_missing_or_not_a_number_is_no_agreement() -> None:
    expected = {1: {"train/loss": 2.0}, 2: {"train/loss": 1.0}}
    assert largest_differences(expected, {1: {"train/loss": 2.0}}) == {"train/loss": float("inf")}
    assert largest_differences(expected, {1: {"train/loss": 2.0}, 2: {"train/loss": float("nan")}}) == {
        "train/loss": float("inf")
    }
    assert largest_differences(expected, {1: {"train/loss": 2.2}, 2: {"train/loss": 1.0}}) == {
        "train/loss": pytest.approx(0.1)
    }
    more = {**expected, 3: {"train/loss": 0.5}}
    assert largest_differences(expected, more) == largest_differences(more, expected) == {"train/loss": float("inf")}
    row = ParityRow("a", "ddp", "DDP", largest_differences({}, {}), True, 0.0, 0.0)
    assert not row.is_within(TOLERANCE["no"]), "nothing was compared"


def test_a_row_is_launched_from_a_clean_environment_on_its_own_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that another launch left in the shell are no part of a row; the port stays taken, except for a store of torch."""
    import socket

    import torch.distributed as dist

    from acc_lm.studies import launching

    seen: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")

    def start(command: list[str], log: Any, stdout: Any, variables: dict[str, str]) -> Any:
        seen.append((command, variables))
        if "--main_process_port" in command:
            port = int(command[command.index("--main_process_port") + 1])
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return subprocess.Popen(["true"])

    monkeypatch.setattr(launching, "_start", start)
    for file in (None, ROOT / "accelerate_configs/ddp.yaml"):
        assert launching.launch(["train.py"], file, 2, tmp_path / "log", 60, environment={"MINE": "1"}) is None
    for _, variables in seen:
        assert not {"ACCELERATE_MIXED_PRECISION", "RANK"} & set(variables)
        assert (variables["ACCELERATE_USE_CPU"], variables["NCCL_SOCKET_IFNAME"], variables["MINE"]) == (
            "true",
            "eth0",
            "1",
        )
