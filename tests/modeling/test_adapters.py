"""An adapter learns the same on every engine, is all that is saved, and works with its own base only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from backends import LENGTH, MODELS, Curve, Scenario, run_backend
from processes import ROOT, launcher_environment, run_training, start_training
from test_resume import assert_equal_logs, different, tensors_of, wait_for
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from acc_lm.cli import main
from acc_lm.config import AdapterConfig, ModelConfig, TokenizerConfig
from acc_lm.errors import ConfigError
from acc_lm.modeling.adapter import add_adapter, apply_adapter, open_adapter, save_adapter, weights_checksum
from acc_lm.modeling.build import build_empty_model, build_model
from acc_lm.modeling.checks import check_model
from acc_lm.optimization.optimizer import decayed_names
from acc_lm.run_files.differences import largest_differences
from acc_lm.text.tokenizer import make_tokenizer

ENGINES = {
    "single": ("single", 1), "ddp x2": ("ddp", 2), "fsdp2 x2": ("fsdp2", 2),
    "deepspeed_zero2 x2": ("deepspeed_zero2", 2), "deepspeed_zero3 x2": ("deepspeed_zero3", 2),
}  # fmt: skip
STEPS = 8
LORA = ("adapter.kind=lora", "adapter.rank=4", "adapter.alpha=64")
GPT2_LINEAR = 2 * 4  # layers x linear layers of each
Bases = dict[str, Path]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Base models of the adapters: with an untied head, with a tied one, and the first with other weights."""
    tokenizer, folders = make_tokenizer(TokenizerConfig(kind="byte"), []), {}
    for name, model_type, seed in (("llama", "llama", 0), ("gpt2", "gpt2", 0), ("other", "llama", 1)):
        model, _ = build_model(ModelConfig(config=MODELS[model_type]), tokenizer, LENGTH, seed)
        folders[name] = tmp_path_factory.mktemp("bases") / name
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


# --- the same on every engine --------------------------------------------------------------------------------------


def adapted(bases: Bases, model: str, *overrides: str, steps: int = STEPS, **fields: Any) -> Scenario:
    from_folder = ("model.config=null", f"model.name_or_path={bases[model]}")
    return Scenario(model, steps=steps, overrides=(*from_folder, *overrides), **fields)


def scenarios(bases: Bases, save: Path) -> dict[str, Scenario]:
    return {
        "llama": adapted(bases, "llama", *LORA, save=save / "llama"),
        "gpt2": adapted(bases, "gpt2", *LORA, accumulation=2, gradient_checkpointing=True),
        "dora": adapted(bases, "llama", *LORA, "adapter.use_dora=true", "adapter.use_rslora=true", steps=4),
        "frozen": adapted(bases, "gpt2", "model.freeze=transformer.w?e.*", save=save / "frozen", steps=4),
    }


def look_at_weights(accelerator: Any, model: Any, optimizer: Any, config: Any) -> dict[str, Any]:
    """Weights that are not trained, gathered from wherever they are after the last step, and the types of everything."""
    from acc_lm.runtime import WEIGHT, bare_model, gather_tensor, pieces_of, whole_shapes

    pieces, shapes = pieces_of(model, optimizer), whole_shapes(model)
    frozen = torch.nn.Module()
    for name, parameter in bare_model(model).named_parameters():
        if not parameter.requires_grad:
            mine = [piece for piece in pieces if piece.name == name]
            whole = gather_tensor(accelerator, mine, WEIGHT, shapes[name], parameter.dtype)
            frozen.register_parameter(name.replace(".base_layer", "").replace(".", "/"), torch.nn.Parameter(whole))
    return {
        "frozen": {name.replace("/", "."): p.detach().numpy() for name, p in frozen.named_parameters()},
        "dtypes": {str(p.dtype) for p in bare_model(model).parameters()},
    }


@pytest.fixture(scope="module")
def curves(bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Curve]]:
    """{engine: {scenario: its curve}}, with the checkpoint of those that were saved after half of their steps."""
    found = {}
    for engine, (config, num_processes) in ENGINES.items():
        wanted = scenarios(bases, tmp_path_factory.mktemp("saved"))
        ran = run_backend(config, num_processes, [*wanted.values()], look_at_weights)
        found[engine] = dict(zip(wanted, ran, strict=True))
        for name, scenario in wanted.items():
            if scenario.save:
                found[engine][name].extra["saved"] = scenario.save / f"checkpoints/step-{scenario.steps // 2:08d}"
    return found


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "single"])
def test_an_adapter_learns_the_same_on_every_engine(engine: str, curves: dict[str, dict[str, Curve]]) -> None:
    """`run_backend` has checked that the engine is what its name says."""
    for name, curve in curves[engine].items():
        single = curves["single"][name]
        assert curve.metrics.keys() == single.metrics.keys()
        differences = largest_differences(single.metrics, curve.metrics)
        print(engine, name, differences)
        assert max(differences.values()) <= 1e-6, name
        assert curve.ledger == single.ledger
        assert curve.start == single.start, "the same adapter is drawn everywhere"
        assert curve.end != curve.start
        assert curve.extra["dtypes"] == {"torch.float32"}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_base_is_not_touched(engine: str, bases: Bases, curves: dict[str, dict[str, Curve]]) -> None:
    for name, model in (("llama", "llama"), ("gpt2", "gpt2"), ("dora", "llama"), ("frozen", "gpt2")):
        before = dict(AutoModelForCausalLM.from_pretrained(bases[model]).named_parameters())
        after = curves[engine][name].extra["frozen"]
        expected = {"transformer.wte.weight", "transformer.wpe.weight"} if name == "frozen" else set(before)
        assert after.keys() == expected
        for parameter, values in after.items():
            assert values.tobytes() == before[parameter].detach().numpy().tobytes(), (name, parameter)


def test_an_adapter_that_is_not_averaged_is_detected(bases: Bases, curves: dict[str, dict[str, Curve]]) -> None:
    """Negative control: what is learned shows in these losses."""
    broken = adapted(bases, "llama", *LORA, fault="skipped all-reduce")
    curve = run_backend("ddp", 2, [broken])[0]
    assert max(largest_differences(curves["single"]["llama"].metrics, curve.metrics).values()) > 1e-3


@pytest.mark.parametrize(
    "reader", [pytest.param(engine, marks=[pytest.mark.slow] if "zero3" in engine else []) for engine in ENGINES]
)
def test_a_run_resumes_from_the_checkpoint_of_any_engine(
    reader: str, bases: Bases, curves: dict[str, dict[str, Curve]], tmp_path: Path
) -> None:
    """From a checkpoint of the same engine bit for bit, from another's to rounding; with an adapter or frozen weights."""
    config, num_processes = ENGINES[reader]
    writers = list(dict.fromkeys([reader, "single", "fsdp2 x2", "deepspeed_zero3 x2"]))
    journeys = [(writer, "llama") for writer in writers] + [(writer, "frozen") for writer in {reader, writers[-1]}]
    loads = [
        replace(scenarios(bases, tmp_path)[name], save=None, load=curves[writer][name].extra["saved"])
        for writer, name in journeys
    ]
    for (writer, name), curve in zip(journeys, run_backend(config, num_processes, loads), strict=True):
        whole = curves["single"][name]
        assert sorted(curve.metrics) == sorted(whole.metrics)[len(whole.metrics) // 2 :]
        assert curve.ledger == whole.ledger
        differences = largest_differences({step: whole.metrics[step] for step in curve.metrics}, curve.metrics)
        print(name, writer, "->", reader, differences)
        assert max(differences.values()) <= 1e-6, (name, writer)
        if writer == reader:
            own = curves[reader][name]
            assert curve.end == own.end
            assert all(curve.metrics[step] == own.metrics[step] for step in curve.metrics)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "num_processes"), [
    ("ddp", 3), ("hsdp", 4), ("fsdp2_grad_op", 2), ("fsdp2_offload", 2), ("deepspeed_zero1", 2), ("deepspeed_zero2_offload", 2),
    ("deepspeed_zero3_offload", 2),
])  # fmt: skip
def test_an_adapter_learns_the_same_on_the_other_engines(
    config: str, num_processes: int, bases: Bases, curves: dict[str, dict[str, Curve]], tmp_path: Path
) -> None:
    saves = adapted(bases, "llama", *LORA, save=tmp_path)
    from_single = adapted(bases, "llama", *LORA, load=curves["single"]["llama"].extra["saved"])
    whole, went_on = run_backend(config, num_processes, [saves, from_single])
    for curve in (whole, went_on):
        expected = {step: curves["single"]["llama"].metrics[step] for step in curve.metrics}
        assert max(largest_differences(expected, curve.metrics).values()) <= 1e-6
    load = tmp_path / f"checkpoints/step-{STEPS // 2:08d}"
    assert run_backend(config, num_processes, [adapted(bases, "llama", *LORA, load=load)])[0].end == whole.end


@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_is_as_small_as_its_adapter(engine: str, curves: dict[str, dict[str, Curve]]) -> None:
    """A pair of matrices for each linear layer, three numbers of four bytes for each of their elements."""
    from safetensors import safe_open

    folder = curves[engine]["llama"].extra["saved"]
    elements = 2 * 4 * (32 + 32 + 32 + 16 + 32 + 16 + 32 + 32 + 3 * (32 + 64))
    saved = 0
    for file in folder.glob("tensors-*"):
        with safe_open(file, "pt") as tensors:
            assert all(".lora_" in name for name in tensors.keys())  # noqa: SIM118 - no mapping
            saved += sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118
    assert saved == 3 * elements
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size < 3 * 4 * elements + 40_000, "and what says which piece is where"


# --- a complete run ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe(tiny_recipe: Path, bases: Bases) -> list[str]:
    """With dropout, so that a resumed run has to draw the same masks."""
    return [
        "--config", str(tiny_recipe), "model.config=null", f"model.name_or_path={bases['llama']}", *LORA, "adapter.dropout=0.1",
        "training.micro_batch_size=6", "training.log_every=1", "checkpoint.every=1", "checkpoint.keep_last=null", "export.sample_tokens=8",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(recipe: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of one process, and what it printed."""
    run = tmp_path_factory.mktemp("finished") / "run"
    return run, run_training([*recipe, f"output_dir={run}"]).output


def adapter_in(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run / "final/adapter_model.safetensors")


@pytest.mark.parametrize("engine", ["single", pytest.param("deepspeed_zero3 x2", marks=pytest.mark.slow)])
def test_a_killed_and_restarted_run_equals_the_uninterrupted_one(
    engine: str, recipe: list[str], tmp_path: Path
) -> None:
    config, count = ENGINES[engine]
    environment = {} if count == 1 else launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", count)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_training([*recipe, f"output_dir={whole}"], count, environment)
    launch = start_training([*recipe, f"output_dir={killed}"], count, environment)
    wait_for(killed / "checkpoints/step-00000003/manifest.json")
    for pid in launch.pids:
        os.kill(pid, signal.SIGKILL)
    assert set(launch.wait().codes) == {-signal.SIGKILL}
    again = run_training([*recipe, f"output_dir={killed}"], count, environment)
    assert "resumed from" in again.output
    assert different(tensors_of(whole, 6), tensors_of(killed, 6)) == []
    assert_equal_logs(whole, killed)
    final = "final/adapter_model.safetensors"
    assert (whole / final).read_bytes() == (killed / final).read_bytes()
    # The gathered weights are those of the engine: peft's own way of saving leaves empty tensors on some.
    from acc_lm.checkpointing.loading import read_tensors

    held = {key: tensor for key, tensor in read_tensors(whole / "checkpoints/latest") if key.startswith("param/")}
    exported = adapter_in(whole)
    assert len(held) == len(exported) == 28
    for key, tensor in held.items():
        name = f"base_model.model.{key.removeprefix('param/')}".replace(".default.", ".")
        assert torch.equal(exported[name], tensor), name


def test_the_exported_adapter_is_small_and_says_what_it_is_for(
    finished: tuple[Path, str], bases: Bases, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = finished
    trained = sum(tensor.numel() for tensor in adapter_in(run).values())
    assert f"({trained:,} trained)" in output
    assert "sample:\n" in output
    assert "none (" not in output, "the closing sample comes from the adapter and its base"
    names = {file.name for file in (run / "final").iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json", "base.json", "run.json", "tokenizer.json", "tokenizer_config.json", "README.md"}  # fmt: skip
    settings = json.loads((run / "final/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(bases["llama"])
    assert settings["target_modules"] == sorted(settings["target_modules"])
    assert len(settings["target_modules"]) == 14
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 64.0, "LORA")
    card = (run / "final/README.md").read_text()
    assert "library_name: peft" in card
    assert f"A LoRA adapter of rank 4 (for a model in a local folder, {trained:,} parameters)" in card
    # As a user would: by peft, by acc-lm, by transformers' pipeline.
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(run / "final")
    weights = peft.get_peft_model_state_dict(loaded)
    assert all(torch.equal(weights[name], tensor) for name, tensor in adapter_in(run).items())
    assert len(weights) == 28
    assert main(["generate", str(run / "final"), "--prompt", "red tree", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("red tree")
    from transformers import pipeline

    answer = pipeline("text-generation", model=str(run / "final"))("red tree", max_new_tokens=3)
    assert answer[0]["generated_text"].startswith("red tree")


@pytest.mark.parametrize("overrides", [(), ("adapter.use_dora=true", "adapter.use_rslora=true")], ids=["lora", "dora"])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_merged_logits_are_those_of_adapter_and_base(
    model: str, overrides: tuple[str, ...], recipe: list[str], bases: Bases, tmp_path: Path
) -> None:
    run, merged = tmp_path / "run", tmp_path / "merged"
    run_training([*recipe, *overrides, f"model.name_or_path={bases[model]}", "adapter.dropout=0", f"output_dir={run}"])
    (tmp_path / "tmp-merged").mkdir()
    (tmp_path / "tmp-merged/thesis.txt").write_text("mine")
    assert main(["export", str(run / "final"), str(merged), "--merge"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run", "merged", "tmp-merged"}
    assert (tmp_path / "tmp-merged/thesis.txt").read_text() == "mine"
    base = AutoModelForCausalLM.from_pretrained(bases[model]).eval()
    ids = AutoTokenizer.from_pretrained(merged)("red green blue tree house", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        without = base(ids).logits
        together = apply_adapter(open_adapter(run / "final"), base).eval()(ids).logits  # type: ignore[arg-type]
        alone = AutoModelForCausalLM.from_pretrained(merged).eval()(ids).logits
    assert not list(merged.glob("adapter*"))
    card = (merged / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert (
        "# merged\n\nA model in a local folder with a LoRA adapter, merged into it in float32 and stored in float32."
        in card
    )
    assert card.partition("## Data")[2] == (run / "final/README.md").read_text().partition("## Data")[2]
    for text in (card, (run / "final/README.md").read_text()):
        assert "base_model" not in text, "a path of this machine is no base model"
    assert (together - without).abs().max() > 1e-3, "the adapter has learned something"
    assert (alone - together).abs().max() <= 1e-6
    # And the newest checkpoint holds the same adapter.
    assert main(["checkpoint", "convert-to-hf", str(run / "checkpoints/latest"), str(tmp_path / "converted")]) == 0
    base = AutoModelForCausalLM.from_pretrained(bases[model]).eval()
    with torch.no_grad():
        assert torch.equal(apply_adapter(open_adapter(tmp_path / "converted"), base).eval()(ids).logits, together)  # type: ignore[arg-type]


IN_4_BITS = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed (Linux alone)")


def look_at_types(accelerator: Any, model: Any, optimizer: Any, config: Any) -> dict[str, Any]:
    """Type and bytes of each parameter that is not trained, and of each that is."""
    from acc_lm.runtime import bare_model

    named = dict(bare_model(model).named_parameters())
    return {
        "frozen": {name: (str(p.dtype), p.detach().view(-1).view(torch.uint8).numpy().tobytes()) for name, p in named.items() if not p.requires_grad},
        "trained": {str(p.dtype) for p in named.values() if p.requires_grad},
    }  # fmt: skip


@IN_4_BITS
def test_a_base_in_4_bits_learns_the_same_on_one_process_and_on_several(
    bases: Bases, curves: dict[str, dict[str, Curve]], tmp_path: Path
) -> None:
    four_bits = adapted(bases, "llama", *LORA, "adapter.quantize_base=nf4")
    one = run_backend("single", 1, [replace(four_bits, save=tmp_path)], look_at_types)[0]
    load = tmp_path / f"checkpoints/step-{STEPS // 2:08d}"
    several, went_on = run_backend("ddp", 2, [four_bits, replace(four_bits, load=load)], look_at_types)
    for curve in (several, went_on):
        expected = {step: one.metrics[step] for step in curve.metrics}
        assert max(largest_differences(expected, curve.metrics).values()) <= 1e-6
        assert curve.extra["frozen"] == one.extra["frozen"], "the same 4 bits on every process, before and after"
    quantized = {name for name, (dtype, _) in one.extra["frozen"].items() if dtype == "torch.uint8"}
    assert quantized == {name for name in one.extra["frozen"] if name.endswith("base_layer.weight")}
    assert len(quantized) == 2 * 7
    assert sum(len(one.extra["frozen"][name][1]) for name in quantized) * 2 == 2 * (4 * 32 + 3 * 64 - 2 * 16) * 32
    assert one.extra["trained"] == {"torch.float32"}
    off = largest_differences(curves["single"]["llama"].metrics, one.metrics)["train/loss"]
    assert 1e-5 < off < 5e-2, "4 bits are another base, but not a far one"


@IN_4_BITS
def test_a_run_on_a_base_in_4_bits_is_resumed_exported_and_merged(recipe: list[str], tmp_path: Path) -> None:
    whole, stopped, four_bits = tmp_path / "whole", tmp_path / "stopped", [*recipe, "adapter.quantize_base=nf4"]
    run_training([*four_bits, f"output_dir={whole}"])
    shutil.copytree(whole, stopped)
    for step in (4, 5, 6):
        shutil.rmtree(stopped / f"checkpoints/step-{step:08d}")
    assert "step-00000003 at step 3" in run_training([*four_bits, f"output_dir={stopped}"]).output
    assert different(tensors_of(whole, 6), tensors_of(stopped, 6)) == []
    assert main(["export", "--merge", str(whole / "final"), str(tmp_path / "merged")]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.float32


@IN_4_BITS
def test_each_refusal_of_4_bits_is_one_line(
    bases: Bases, recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    four_bits = AdapterConfig(kind="lora", quantize_base="nf4")
    with pytest.raises(ConfigError, match=r"must be none for transformer.h.0.attn.c_attn, a Conv1D, got nf4"):
        build(bases, four_bits, "gpt2")
    environment = launcher_environment(ROOT / "accelerate_configs/fsdp2.yaml", 2)
    overrides = ["adapter.quantize_base=nf4", f"output_dir={tmp_path / 'run'}"]
    finished = run_training([*recipe, *overrides], 2, environment, expect=4)
    assert "error: adapter.quantize_base must be none under fsdp2, which cannot shard" in finished.output
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn.modules", None)
    with pytest.raises(ConfigError, match="without bitsandbytes, got nf4; pip install bitsandbytes"):
        build(bases, four_bits)


def test_dry_run_tries_an_adapter_and_leaves_nothing(recipe: list[str], tmp_path: Path) -> None:
    finished = run_training([*recipe, f"output_dir={tmp_path / 'run'}", "--dry-run"])
    assert "every tensor is restored bit for bit" in finished.output
    assert not (tmp_path / "run").exists()


# --- what is trained -----------------------------------------------------------------------------------------------


def build(bases: Bases, adapter: AdapterConfig, model: str = "llama", **fields: Any) -> Any:
    config = ModelConfig(name_or_path=str(bases[model]), **fields)
    return build_model(config, AutoTokenizer.from_pretrained(bases[model]), LENGTH, 3, adapter)


def test_the_recipes_settings_reach_peft(bases: Bases) -> None:
    section = AdapterConfig(
        kind="lora", rank=2, alpha=3.0, dropout=0.25, target_modules=("q_proj", "layers.0.mlp.up_proj"), use_dora=True, use_rslora=True
    )  # fmt: skip
    model, facts = build(bases, section)
    lora = model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout, lora.use_dora, lora.use_rslora) == (2, 3.0, 0.25, True, True)
    layers = {name for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
    assert layers == {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"}  # fmt: skip
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == pytest.approx(3.0 / 2**0.5)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".lora_")[1].split(".")[0] for name in trained} == {"A", "B", "magnitude_vector"}
    assert facts.num_trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert facts.dropout == 0.25
    decayed = decayed_names(model) & trained
    assert {name.split(".lora_")[1].split(".")[0] for name in decayed} == {"A", "B"}


def test_all_linear_leaves_the_head_alone_and_equal_seeds_draw_equal_adapters(bases: Bases) -> None:
    for name, linear in (("llama", 14), ("gpt2", GPT2_LINEAR)):
        model, facts = build(bases, AdapterConfig(kind="lora"), name)
        layers = [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
        assert len(layers) == linear
        assert model.get_output_embeddings() not in layers
        again, _ = build(bases, AdapterConfig(kind="lora"), name)
        pairs = zip(model.parameters(), again.parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)
        # The processes that get their weights from the main one have the same names, shapes and base.
        tokenizer = AutoTokenizer.from_pretrained(bases[name])
        config = ModelConfig(name_or_path=str(bases[name]))
        empty = build_empty_model(config, tokenizer, LENGTH, facts, AdapterConfig(kind="lora"))
        expected = [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()]
        assert [(name, p.shape, p.dtype, p.requires_grad) for name, p in empty.named_parameters()] == expected
        assert empty.base_checksum == model.base_checksum == facts.base
        # Whatever was drawn earlier.
        late = AutoModelForCausalLM.from_pretrained(bases[name])
        torch.rand(7)
        add_adapter(late, AdapterConfig(kind="lora"), 3, facts.base)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), late.parameters(), strict=True))


def test_the_checksum_is_of_names_shapes_and_values_in_any_type(bases: Bases) -> None:
    model = AutoModelForCausalLM.from_pretrained(bases["llama"])
    checksum = weights_checksum(model)
    assert weights_checksum(AutoModelForCausalLM.from_pretrained(bases["llama"]).double()) == checksum
    assert weights_checksum(AutoModelForCausalLM.from_pretrained(bases["other"])) != checksum
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    assert weights_checksum(model) != checksum


def test_a_base_in_16_bits_has_an_adapter_in_32(bases: Bases, tmp_path: Path) -> None:
    model, facts = build(bases, AdapterConfig(kind="lora"), dtype="bfloat16")
    dtypes = {(p.dtype, p.requires_grad) for p in model.parameters()}
    assert dtypes == {(torch.bfloat16, False), (torch.float32, True)}
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    section = ModelConfig(name_or_path=str(bases["llama"]), dtype="bfloat16")
    save_adapter(tmp_path, weights, model.peft_config["default"], section, facts.base)
    from acc_lm.export.exported import load_exported

    loaded = load_exported(tmp_path)  # of the type that it was trained with, or its checksum would be another
    assert loaded.get_base_model().model.embed_tokens.weight.dtype == torch.bfloat16


def test_an_adapter_is_added_to_a_base_in_16_bits_without_rounding(bases: Bases, tmp_path: Path) -> None:
    """An update too small for 16 bits is in the merged weights, which are in 32."""
    from acc_lm.export.exported import merge

    model, facts = build(bases, AdapterConfig(kind="lora"), dtype="bfloat16")
    weights = {name: torch.full_like(p, 1e-3) for name, p in model.named_parameters() if p.requires_grad}
    section = ModelConfig(name_or_path=str(bases["llama"]), dtype="bfloat16")
    settings = model.peft_config["default"]
    save_adapter(tmp_path / "final", weights, settings, section, facts.base)
    AutoTokenizer.from_pretrained(bases["llama"]).save_pretrained(tmp_path / "final")
    merge(tmp_path / "final", tmp_path / "merged")
    name = "model.layers.0.mlp.up_proj"
    base = AutoModelForCausalLM.from_pretrained(bases["llama"], dtype=torch.bfloat16).get_parameter(f"{name}.weight")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").get_parameter(f"{name}.weight")
    update = settings.lora_alpha / settings.r * settings.r * 1e-3**2
    assert torch.allclose(merged - base.float(), torch.full_like(merged, update), rtol=1e-2)


def test_modules_that_peft_cannot_adapt_are_one_line() -> None:
    config = AutoConfig.for_model("mamba", vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(
        ConfigError, match=r"adapter\.target_modules must be layers that peft can adapt in a model of type mamba, got: "
    ):
        add_adapter(AutoModelForCausalLM.from_config(config), AdapterConfig(kind="lora"), 0, "")


@pytest.mark.parametrize(("model", "pattern", "frozen"), [
    ("llama", "model.embed_tokens.*", {"model.embed_tokens.weight"}),
    ("gpt2", "lm_head.weight", {"transformer.wte.weight"}),  # tied: one tensor under two names
    ("llama", "*layers.1.mlp*", {f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}),
])  # fmt: skip
def test_frozen_weights_are_chosen_by_name(model: str, pattern: str, frozen: set[str], bases: Bases) -> None:
    built, facts = build(bases, AdapterConfig(), model, freeze=(pattern,))
    assert {name for name, p in built.named_parameters() if not p.requires_grad} == frozen
    assert facts.num_trainable == sum(p.numel() for p in built.parameters() if p.requires_grad) < facts.num_parameters


# --- refusals ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[list[str], int, str]] = {
    "a layer that is not there": (
        ["adapter.target_modules=[q_proj, query]"], 2,
        "adapter.target_modules must be all-linear or among down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, got 'query'",
    ),
    "the head": (["adapter.target_modules=[lm_head]"], 2, "got 'lm_head', the output head; name some of these"),
    "an embedding": (["adapter.target_modules=[embed_tokens]"], 2, "got 'embed_tokens'; name some of these"),
    "no layer": (["adapter.target_modules=[]"], 2, "got 'nothing'"),
    "a copy of the head": (["adapter.modules_to_save=[lm_head]"], 2, "adapter.modules_to_save must be a known key"),
    "an unknown kind": (["adapter.kind=qlora"], 2, "adapter.kind must be one of none, lora"),
    "rank 0": (["adapter.rank=0"], 2, "adapter.rank must be"),
    "no base": (
        ["model.name_or_path=null", "model.config={model_type: llama}"], 2,
        "model.name_or_path must be the model that the adapter is for, got null; name one, or train the model itself",
    ),
    "4 bits of what is trained": (
        ["adapter.kind=none", "adapter.quantize_base=nf4"], 2, "adapter.quantize_base must be none without an adapter, got nf4",
    ),
    "4 bits that compute in 64": (
        ["adapter.quantize_base=nf4", "model.dtype=float64"], 2, "adapter.quantize_base must be none for model.dtype float64, got nf4",
    ),
    "rows for new ids": (["model.resize_embeddings=true"], 2, "model.resize_embeddings must be false with an adapter"),
    "both ways to freeze": (["model.freeze=[lm_head*]"], 2, "model.freeze must be empty with an adapter"),
    "a pattern without a match": (
        ["adapter.kind=none", "model.freeze=[model.embed*, model.layers.7.*]"], 2,
        "model.freeze must match names of parameters, got 'model.layers.7.*', which matches none; use names such as model.embed_tokens.weight, ",
    ),
    "everything frozen": (["adapter.kind=none", "model.freeze=['*']"], 2, "model.freeze must leave something to train, got ['*']"),
}  # fmt: skip


def test_an_adapter_without_its_kind_is_refused() -> None:
    """Forgotten, the kind would be none, and the run would train the entire model."""
    for key, value in ("rank", 8), ("target_modules", ["q_proj"]), ("use_dora", True):
        with pytest.raises(ValueError, match=f"kind must be set with {key}"):
            AdapterConfig.model_validate({key: value})
    assert AdapterConfig.model_validate({"kind": "none", "rank": 8}).kind == "none", (
        "an override of a recipe with an adapter"
    )
    assert AdapterConfig.model_validate({"rank": 16}).kind == "none", "its default"


@pytest.mark.parametrize("what", REFUSED)
def test_each_refusal_is_one_line(what: str, recipe: list[str], tmp_path: Path) -> None:
    overrides, code, says = REFUSED[what]
    finished = run_training([*recipe, *overrides, f"output_dir={tmp_path / 'run'}"], expect=code)
    assert len(finished.errors) == 1, finished.output
    assert says in finished.errors[0]
    assert "a model that runs" not in finished.errors[0], "the model is not to blame"
    assert "Traceback" not in finished.output


def test_frozen_weights_that_would_be_rounded_are_refused(recipe: list[str], tmp_path: Path) -> None:
    environment = launcher_environment(ROOT / "accelerate_configs/deepspeed_zero2.yaml", 2)
    overrides = ["adapter.kind=none", "model.freeze=[lm_head*]", "training.mixed_precision=bf16"]
    finished = run_training([*recipe, *overrides, f"output_dir={tmp_path / 'run'}"], 2, environment, expect=4)
    assert "error: model.freeze must be empty under DeepSpeed with bf16" in finished.output


@pytest.mark.parametrize(("overrides", "says"), [
    (["adapter.rank=8"], "adapter.rank was 4, is 8"),
    (["adapter.rank=8", "checkpoint.allow_changed_recipe=true"], "adapter.rank was 4, is 8"),
    (["adapter.kind=none"], "adapter.kind was 'lora', is 'none'"),
])  # fmt: skip
def test_a_changed_adapter_cannot_be_resumed(
    overrides: list[str], says: str, finished: tuple[Path, str], recipe: list[str]
) -> None:
    refused = run_training([*recipe, *overrides, f"output_dir={finished[0]}"], expect=5)
    assert says in refused.errors[0]


@pytest.fixture
def moved(finished: tuple[Path, str], bases: Bases, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the run, next to a copy of its base whose weights a test may change."""
    run, base = tmp_path / "run", tmp_path / "base"
    shutil.copytree(finished[0], run, symlinks=True)
    shutil.copytree(bases["llama"], base)
    file = run / "final/adapter_config.json"
    file.write_text(file.read_text().replace(str(bases["llama"]), str(base)))
    return run, base


def test_an_adapter_for_another_base_cannot_be_resumed(bases: Bases, recipe: list[str], tmp_path: Path) -> None:
    """On an engine where only one process ever sees the base."""
    environment, count = launcher_environment(ROOT / "accelerate_configs/fsdp2.yaml", 2), 2
    base = Path(shutil.copytree(bases["llama"], tmp_path / "base"))
    arguments = [*recipe, f"model.name_or_path={base}", f"output_dir={tmp_path / 'run'}"]
    run_training(arguments, count, environment)
    shutil.copy(bases["other"] / "model.safetensors", base)  # the same sizes, the same header, other weights
    refused = run_training([*arguments, "training.max_steps=8"], count, environment, expect=5)
    assert len(refused.errors) == 1
    assert "step-00000006 must be of an adapter for this base, got one for other weights; put back the base" in refused.errors[0]  # fmt: skip
    assert not (tmp_path / "run/checkpoints/step-00000007").exists()


def damage_settings(**values: Any) -> Callable[[Path, Path, Bases], object]:
    def damage(run: Path, base: Path, bases: Bases) -> None:
        file = run / "final/adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path, Path, Bases], object], str]] = {
    "other weights": (
        lambda run, base, bases: shutil.copy(bases["other"] / "model.safetensors", base), "must be used with the base that it was trained on",
    ),
    "no base": (lambda run, base, bases: shutil.rmtree(base), "got nothing there; put it back, or correct base_model_name_or_path"),
    "no model there": (lambda run, base, bases: (base / "config.json").unlink(), "the base of the adapter"),
    "no weights": (lambda run, base, bases: (run / "final/adapter_model.safetensors").unlink(), "must be a LoRA adapter with its weights in adapter_model.safetensors"),
    "weights cut off": (
        lambda run, base, bases: os.truncate(run / "final/adapter_model.safetensors", 1000), "must be a LoRA adapter with its weights in",
    ),
    "code to import": (damage_settings(megatron_config={"a": 1}, megatron_core="evil"), "must be a LoRA adapter"),
    "another kind": (damage_settings(peft_type="VERA"), "must be a LoRA adapter with its weights in adapter_model.safetensors, got: kind VERA"),
    "no base named": (damage_settings(base_model_name_or_path=None), "got: kind LORA, base None"),
    "no words": (lambda run, base, bases: (run / "final/adapter_config.json").write_text("[]"), "must be a LoRA adapter"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("verb", ["generate", "export"])
def test_an_adapter_that_cannot_be_used_is_one_line(
    verb: str, what: str, moved: tuple[Path, Path], bases: Bases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, base = moved
    final, output = str(run / "final"), str(tmp_path / "merged")
    arguments = ["generate", final, "--max-new-tokens", "2"] if verb == "generate" else ["export", final, output, "--merge"]  # fmt: skip
    damage, says = DAMAGES[what]
    damage(run, base, bases)
    assert main(arguments) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(errors) == 1, errors
    assert says in errors[0]
    assert not Path(output).exists()


def test_export_requires_an_adapter_and_a_new_folder(
    finished: tuple[Path, str], bases: Bases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(bases["llama"]), str(tmp_path / "new"), "--merge"]) == 2
    assert "FINAL must be the folder of an adapter" in capsys.readouterr().err
    assert main(["export", str(finished[0] / "final"), str(tmp_path), "--merge"]) == 2
    assert "OUTPUT must be a new folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"must be a full model, got the adapter .*acc-lm export --merge .*/final OUTPUT"):  # fmt: skip
        check_model(ModelConfig(name_or_path=str(finished[0] / "final")), None, 257, LENGTH)
