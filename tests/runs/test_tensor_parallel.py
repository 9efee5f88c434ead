"""Layers in parts: processes that share every layer train the model of one process, and each holds its part of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from backends import LENGTH, MODELS, Curve, RaggedRows, Scenario, run_backend, train_curve
from processes import ROOT, Finished, Launch, launcher_environment, run_everywhere, run_training
from safetensors.torch import load_file
from test_elastic import at_step
from test_resume import assert_equal_runs

from acc_lm.checkpointing.loading import read_tensors
from acc_lm.config import ModelConfig, TokenizerConfig
from acc_lm.errors import ConfigError
from acc_lm.modeling.build import build_model
from acc_lm.modeling.vocabulary_parts import VocabularyParts
from acc_lm.run_files.differences import largest_differences, read_metrics
from acc_lm.runtime.engines import tensor_parallel
from acc_lm.runtime.engines.gradients import Gradients
from acc_lm.text.tokenizer import make_tokenizer

CONFIGS = ROOT / "accelerate_configs"
LAUNCHES = {"tensor_parallel": 2, "fsdp2_tensor_parallel": 4, "fsdp2": 2, "ddp": 2, "fsdp2_tensor_sequence": 4}
EACH_CONFIG = ["tensor_parallel", "fsdp2_tensor_parallel"]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, **HEADS}
SHAPES = {
    "untied": {"model_type": "llama", **SMALL},
    "tied": {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 16},
    "dropped": {"model_type": "starcoder2", **SMALL, "residual_dropout": 0.1, "embedding_dropout": 0.1},
}  # fmt: skip
SCENARIOS = [Scenario("untied", gradient_checkpointing=True), Scenario("tied"), Scenario("qwen3", accumulation=2)]


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fields in SHAPES.items():
        monkeypatch.setitem(MODELS, name, fields)


# --- the same curve ------------------------------------------------------------------------------------------------


def facts_of_a_step(accelerator: Any, model: Any, optimizer: Any, config: Any) -> dict[str, Any]:
    """Shapes of the weights here, differences between copies, and the collectives of one step of two micro-batches of 6 rows."""
    from acc_lm.runtime import Gradients, Traffic, bare_model, check_replicas, summarize_traffic
    from acc_lm.training.step import train_step

    check_replicas(accelerator, model, 1)
    shapes = {name: tuple(getattr(p, "_local_tensor", p).shape) for name, p in bare_model(model).named_parameters()}
    batches, gradients = [RaggedRows(12, 1).__getitems__(range(6))] * 2, Gradients(accelerator, model)
    accelerator.gradient_accumulation_steps = 2
    keywords = {"step": 9, "seed": 0, "num_targets": 96, "max_grad_norm": 1.0, "gradients": gradients}
    with Traffic() as traffic:
        train_step(accelerator, model, optimizer, batches, **keywords)
    of_layers = [call for call in traffic.calls if call.kind == "all-reduce" and call.num_bytes >= 6 * LENGTH * 32 * 2]
    of_loss = [call for call in traffic.calls if (call.kind, call.num_bytes) == ("all-gather", 2 * 3 * 6 * LENGTH * 4)]
    return {
        "shapes": shapes, "traffic": summarize_traffic(of_layers), "sizes": {call.num_processes for call in of_layers},
        "dtypes": [call.dtype for call in of_layers], "of_loss": len(of_loss),
    }  # fmt: skip


def check_facts(config: str, curve: Curve, scenario: Scenario) -> None:
    """Half of heads, units and ids, all of the norms; 4 all-reduces of tokens x hidden in each layer, 2 for the vocabulary."""
    shapes, shards = curve.extra["shapes"], 2 if config.startswith("fsdp2") else 1
    width = 64 if scenario.model == "qwen3" else 32
    layer = "model.layers.1."
    for name, (rows, columns) in {
        "self_attn.q_proj": (width / 2, 32), "self_attn.k_proj": (width / 4, 32), "self_attn.o_proj": (32, width / 2),
        "mlp.gate_proj": (32, 32), "mlp.down_proj": (32, 32),
    }.items():  # fmt: skip
        assert shapes[f"{layer}{name}.weight"] == (rows / shards, columns), name
    assert shapes["model.norm.weight"] == (32 / shards,)
    for name in ("model.embed_tokens.weight", *["lm_head.weight"] * (scenario.model != "tied")):
        assert shapes[name][1] == 32
        assert abs(shapes[name][0] - 129 / shards) < 1, "257 ids do not divide: one more in the first part"
    times = 5 if scenario.gradient_checkpointing else 4  # the forward pass comes twice, but for its last sum
    layers, micro_batches, tokens, hidden = 2, 2, 6 * LENGTH, 32
    found = curve.extra["traffic"]["all-reduce"]
    sums = (times * layers + 2) * micro_batches
    assert (found["calls"], found["bytes"]) == (sums, sums * tokens * hidden * 4)
    assert curve.extra["of_loss"] == micro_batches, "three numbers of each token from each process"
    assert curve.extra["sizes"] == {2}


@pytest.mark.parametrize("config", EACH_CONFIG)
def test_processes_that_share_layers_follow_the_curve_of_one(config: str) -> None:
    """20 steps, ragged targets; tied and untied heads, and norms of each head under accumulation."""
    expected = run_backend("single", 1, SCENARIOS)
    for scenario, one, got in zip(
        SCENARIOS, expected, run_backend(config, LAUNCHES[config], SCENARIOS, facts_of_a_step), strict=True
    ):
        check_facts(config, got, scenario)
        assert (got.start, got.ledger) == (one.start, one.ledger), "the weights are those of one process, bit for bit"
        differences = largest_differences(one.metrics, got.metrics)
        print(config, scenario, {name: f"{value:.1e}" for name, value in differences.items()})
        assert all(value <= 1e-6 for value in differences.values())


def with_rows_in_parts(folder: Path, shards: int = 1) -> str:
    """Config of FSDP2 whose processes share layers and rows, two each."""
    text = (CONFIGS / "fsdp2_tensor_parallel.yaml").read_text()
    text = text.replace("parallelism_config_dp_shard_size: 2", f"parallelism_config_dp_shard_size: {shards}")
    text = text.replace("num_processes: 4", f"num_processes: {4 * shards}")
    file = folder / "fsdp2_tensor_sequence.yaml"
    file.write_text(text.rstrip() + "\n  parallelism_config_sp_size: 2\n")
    return str(file)


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_processes_that_share_layers_and_rows_follow_the_curve_of_one(shards: int, tmp_path: Path) -> None:
    """Part 0 of the layers on processes 0 and 2, which share rows; part 1 on 1 and 3; with 8 processes two such grids."""
    expected = run_backend("single", 1, SCENARIOS)
    curves = run_backend(with_rows_in_parts(tmp_path, shards), 4 * shards, SCENARIOS)
    for scenario, one, got in zip(SCENARIOS, expected, curves, strict=True):
        assert (got.start, got.ledger) == (one.start, one.ledger)
        assert (got.rows_in_parts, got.layers_in_parts) == (2, 2)
        differences = largest_differences(one.metrics, got.metrics)
        print(shards, scenario, {name: f"{value:.1e}" for name, value in differences.items()})
        assert all(value <= 1e-6 for value in differences.values())


def test_processes_that_share_layers_drop_the_same_elements() -> None:
    """One reader draws the masks of one process, so that even with dropout the curves are equal."""
    scenario = Scenario("dropped", steps=4)
    one, got = (run_backend(config, LAUNCHES.get(config, 1), [scenario])[0] for config in ("single", "tensor_parallel"))
    assert max(largest_differences(one.metrics, got.metrics).values()) <= 1e-6


@pytest.mark.parametrize("config", ["tensor_parallel", pytest.param("fsdp2_tensor_parallel", marks=pytest.mark.slow)])
def test_the_precision_names_the_dtype_of_the_sums(config: str) -> None:
    scenario = Scenario("untied", mixed_precision="bf16", steps=6)
    one = run_backend("single", 1, [scenario])[0]
    got = run_backend(config, LAUNCHES[config], [scenario], facts_of_a_step)[0]
    dtypes = set(got.extra["dtypes"])
    if config == "tensor_parallel":
        assert dtypes == {"bfloat16", "float32"}
        assert (
            got.precision
            == "float32 weights, bfloat16 autocast compute, float32 reduction, bfloat16 forward, float32 backward sums over parts of layers"
        )
    else:
        assert dtypes == {"bfloat16"}
        assert (
            got.precision == "float32 weights, bfloat16 compute, float32 reduction, bfloat16 sums over parts of layers"
        )
    differences = largest_differences(one.metrics, got.metrics)
    print(config, differences)
    assert differences["train/loss"] < 3e-4
    assert differences["train/grad_norm"] < 2e-2


# --- planted faults ------------------------------------------------------------------------------------------------


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Mistakes that others made, or that a plan of transformers invites."""
    summed = Gradients._sum_of_each_head

    def norms_of_copies(self: Any, norms: torch.Tensor, local: Any) -> torch.Tensor:
        return self._parts.sum(norms.square().sum())  # type: ignore[no-any-return]

    def sum_copies_too(self: Any) -> None:
        summed(self)
        for name, parameter in self._named:
            if name == "model.norm.weight":
                self._parts.sum(parameter.grad)

    looked_up, added = VocabularyParts.here, VocabularyParts.sum

    def everywhere(self: Any, ids: torch.Tensor) -> Any:
        rows, is_here = looked_up(self, ids)
        return rows, is_here | (ids >= 0) & (ids.shape[-1] == 1)  # targets of a chunk are a column

    def without(dimensions: int) -> Any:
        return lambda self, tensor: tensor if tensor.dim() == dimensions else added(self, tensor)

    if fault == "loss counted by each process":
        with patch("acc_lm.training.step.repeats_losses", lambda accelerator: False):
            yield
    elif fault == "norm that counts copies":
        with patch.object(Gradients, "_sum_of_squares", norms_of_copies):
            yield
    elif fault == "norms of heads not summed":
        with patch.object(Gradients, "_sum_of_each_head", lambda self: None):
            yield
    elif fault == "norms of heads summed after each micro-batch":
        with patch("backends.Faults.after_prepare", lambda faults, model, optimizer: sum_accumulated(model)), patch.object(
            Gradients, "_sum_of_each_head", lambda self: None
        ):  # fmt: skip
            yield
    elif fault == "ids of other parts not looked up":
        with patch.object(VocabularyParts, "sum", without(3)):
            yield
    elif fault == "gradient of the head's input not summed":
        with patch.object(VocabularyParts, "sum", without(2)):
            yield
    elif fault == "targets found in each part":
        with patch.object(VocabularyParts, "here", everywhere):
            yield
    elif fault == "probabilities among the own ids":
        with patch.object(VocabularyParts, "gather", lambda self, values: values.expand(self.size, *values.shape)):
            yield
    elif fault == "gradients of copies summed":
        with patch.object(Gradients, "_sum_of_each_head", sum_copies_too):
            yield
    elif fault == "gradient of an input not summed":
        with patch.object(
            tensor_parallel._Enter, "backward", staticmethod(lambda context, *gradients: (gradients[0], None))
        ):
            yield
    else:
        yield


def sum_accumulated(model: Any) -> None:
    """transformers' own rule: all-reduce what has been accumulated so far, after each backward."""
    parts = tensor_parallel.layer_parts(model)

    def summing(parameter: Any) -> None:
        parts.sum(parameter.grad)

    for name in parts.of_each_head:
        model.get_parameter(name).register_post_accumulate_grad_hook(summing)


FAST = Scenario("qwen3", steps=6, accumulation=2, overrides=("optimizer.learning_rate=0.02",))
FAULTS = {
    "loss counted by each process": ("loss", 0.5), "norm that counts copies": ("grad_norm", 1e-3),
    "norms of heads not summed": ("grad_norm", 1e-5), "norms of heads summed after each micro-batch": ("grad_norm", 1e-5),
    "ids of other parts not looked up": ("loss", 1e-2), "gradient of the head's input not summed": ("grad_norm", 1e-2),
    "targets found in each part": ("loss", 1e-1), "probabilities among the own ids": ("loss", 1e-2),
    "gradients of copies summed": ("grad_norm", 1e-4), "gradient of an input not summed": ("grad_norm", 1e-3),
}  # fmt: skip


def curves_with_faults() -> list[Curve]:
    curves = []
    for fault in (None, *FAULTS):
        with planted(fault):
            curves.append(train_curve(FAST))
    return curves


def test_planted_faults_are_detected() -> None:
    expected = run_backend("single", 1, [FAST])[0]
    environment = launcher_environment(CONFIGS / "tensor_parallel.yaml", 2)
    good, *others = run_everywhere(curves_with_faults, 2, 120, environment)[0]
    assert (good.strategy, good.layers_in_parts) == ("tensor_parallel", 2)
    assert max(largest_differences(expected.metrics, good.metrics).values()) <= 1e-6
    for (fault, (name, least)), curve in zip(FAULTS.items(), others, strict=True):
        off = largest_differences(expected.metrics, curve.metrics)
        print(fault, off)
        assert off[f"train/{name}"] > least, fault


# --- other models --------------------------------------------------------------------------------------------------

BIASES = {"attention_bias": True, "mlp_bias": True}
CUT = {
    "llama with biases": {"model_type": "llama", **SMALL, **BIASES},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "mistral with a window": {"model_type": "mistral", **SMALL, "sliding_window": 8},
    "gemma3": {"model_type": "gemma3_text", **SMALL, "head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {"model_type": "gemma2", **SMALL, "head_dim": 8, "sliding_window": 8},
    "starcoder2": {"model_type": "starcoder2", **SMALL, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "phi": {"model_type": "phi", **SMALL},
    "granite": {"model_type": "granite", **SMALL},
    "cohere": {"model_type": "cohere", **SMALL},
    "smollm3": {"model_type": "smollm3", **SMALL},
}  # fmt: skip


def model_of(fields: dict[str, Any]) -> Any:
    return build_model(ModelConfig(config=fields), make_tokenizer(TokenizerConfig(kind="byte"), []), 32, 0)[0]


def gradients_of_models() -> dict[str, float]:
    """Largest difference of loss and gradients from those of the complete model, relative to the largest element of each."""
    from acc_lm.runtime.engines.collectives import PATIENCE

    dist.init_process_group("gloo", timeout=PATIENCE)
    found = {}
    batch = RaggedRows(6, 1).__getitems__(range(6))
    for name, fields in CUT.items():
        losses, gradients = [], []
        for size in (1, 2):
            model = model_of(fields)
            if size > 1:
                tensor_parallel.cut_layers(model, size)
            loss = model(**batch)
            loss.backward()
            losses.append(loss.detach()[None])
            gradients.append({key: p.grad for key, p in model.named_parameters()})
        parts = tensor_parallel.layer_parts(model)
        assert parts.dimension, name
        pairs = [losses]
        for key, gradient in gradients[1].items():
            if key in parts.of_each_head:
                parts.sum(gradient)
            whole = gradients[0][key]
            if key in parts.dimension:
                whole = whole.chunk(2, parts.dimension[key])[parts.index]
            pairs.append([whole, gradient])
        found[name] = max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-3)) for a, b in pairs)
    return found


def test_models_are_cut_by_their_own_plans() -> None:
    for found in run_everywhere(gradients_of_models, 2):
        print(found)
        assert set(found) == set(CUT)
        assert max(found.values()) < 1e-5


def test_models_and_recipes_that_cannot_be_cut_are_refused() -> None:
    nearest = "use accelerate_configs/fsdp2.yaml, or sequence_parallel.yaml for long rows"
    for fields, size, got in (
        (MODELS["gpt2"], 2, "no plan in transformers of how its layers are cut"),
        ({"model_type": "mixtral", **SMALL, "num_local_experts": 4}, 2, "layers that are cut by the rule"),
        ({"model_type": "olmo2", **SMALL}, 2, "layers that are cut by the rule colwise_gather_output"),
        ({"model_type": "llama", **SMALL, "intermediate_size": 63}, 2, r"63 units in model.layers.0.mlp.gate_proj, which do not divide"),
        ({"model_type": "llama", **SMALL, "attention_dropout": 0.1}, 2, "dropout inside its layers"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"must be 1 for a model of type .*, got {size} for .*{got}.*; {nearest}"):
            tensor_parallel.modules_to_cut(model_of(fields), size)
    with pytest.raises(
        ConfigError, match="must divide the 4 attention heads and the 2 key-value heads of the model, got 4; nearest: 2"
    ):
        tensor_parallel.modules_to_cut(model_of(SHAPES["untied"]), 4)
    refused = "must divide the 2 attention heads of a part of a layer, and divide or be a multiple of its 1 key-value heads, got 4 with tp_size 2"
    with pytest.raises(ConfigError, match=refused), patch.object(tensor_parallel, "parts_of_rows", lambda: 4):
        tensor_parallel.modules_to_cut(model_of(SHAPES["untied"]), 2)


def test_a_model_whose_parts_do_not_add_up_is_refused() -> None:
    """The plan alone would pass: only the trial on its own weights sees that a module depends on all of its units."""
    model = model_of(SHAPES["untied"])
    forward = type(model.model.layers[0].mlp).forward

    def scaled(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * self.gate_proj.weight.shape[0]  # type: ignore[no-any-return]

    modules = tensor_parallel.modules_to_cut(model, 2)
    tensor_parallel._check_parts(model, modules, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    refused = pytest.raises(ConfigError, match="outputs that change when layers are cut")
    with patch.object(type(model.model.layers[0].mlp), "forward", scaled), refused:
        tensor_parallel._check_parts(model, modules, 2)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


REFUSED = {
    "adapter": (["adapter.kind=lora", "model.config=null", "model.name_or_path=some/model"], {}, 2, "adapter.kind must be none with layers in 2 parts, got lora"),
    "muon": (["optimizer.name=muon"], {}, 2, "optimizer.name must be adamw with layers in 2 parts, got muon"),
    "search": (["training.find_micro_batch_size=true"], {}, 2, "training.find_micro_batch_size must be false with layers in parts"),
    "rows too": ([], {"PARALLELISM_CONFIG_SP_SIZE": "2"}, 4, "parallelism_config_sp_size must be 1 with tp_size 2 and without use_fsdp, got 2; give both sizes in"),
    "copies": ([], {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, 2, "parallelism_config_dp_replicate_size must be 1 with tp_size 2, got 2"),
    "processes": ([], {"PARALLELISM_CONFIG_TP_SIZE": "4"}, 2, "must multiply to the number of processes, got dp_shard_size 1 x tp_size 4 for 2 processes"),
    "shards": ([], {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "PARALLELISM_CONFIG_TP_SIZE": "2"}, 4, "parallelism_config_dp_shard_size must be 1 without use_fsdp, got 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_launches_that_cannot_cut_layers_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tiny: list[str]
) -> None:
    from acc_lm.config.loading import load_config
    from acc_lm.errors import UserError
    from acc_lm.runtime.launch.request import read_launch

    overrides, variables, count, message = REFUSED[name]
    for key, value in (launcher_environment(CONFIGS / "tensor_parallel.yaml", count) | variables).items():
        monkeypatch.setenv(key, value)
    for key, value in {"WORLD_SIZE": count, "RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": count}.items():
        monkeypatch.setenv(key, str(value))
    with pytest.raises(UserError) as refused:
        read_launch(load_config(Path(tiny[1]), overrides))
    assert message in str(refused.value)
    assert ";" in str(refused.value)


# --- complete runs -------------------------------------------------------------------------------------------------

WIDE = "model.config={hidden_size: 32, num_attention_heads: 4, num_key_value_heads: 2}"
TIED = "model.config={hidden_size: 32, num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: true}"
COMPILED = {
    "ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER", "ACCELERATE_DYNAMO_MODE": "default", "ACCELERATE_DYNAMO_USE_FULLGRAPH": "false",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "false", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true",
}  # fmt: skip
CASES: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "packed, pretrained": ("tensor_parallel", lambda data: [f"data.files=[{data}/short.jsonl]", "data.attend_across_documents=false", "model.config=null", f"model.name_or_path={data}/base/final"]),
    "padded chats, tied": ("fsdp2_tensor_parallel", lambda data: [TIED, f"data.files=[{data}/chats.jsonl]", "data.packing=false"]),
    "padded chats, tied, alone": ("tensor_parallel", lambda data: [TIED, f"data.files=[{data}/chats.jsonl]", "data.packing=false"]),
    "stream and evaluation sets": ("fsdp2_tensor_parallel", lambda data: [WIDE, f"data.files=['{data}/long-*.txt']", "data.streaming=true", "data.num_streams=6", f"data.eval_files=[{data}/chats.txt]", f"data.evaluation_sets={{other: [{data}/chats.txt]}}"]),
    "compiled": ("tensor_parallel", lambda data: [WIDE, f"data.files=[{data}/short.jsonl]"]),
    "compiled under FSDP2": ("fsdp2_tensor_parallel", lambda data: [WIDE, f"data.files=[{data}/short.jsonl]"]),
    "packed": ("fsdp2_tensor_parallel", lambda data: [WIDE, f"data.files=[{data}/short.jsonl]", "data.attend_across_documents=false"]),
    "packed, rows in parts": ("fsdp2_tensor_sequence", lambda data: [TIED, f"data.files=[{data}/short.jsonl]", "data.attend_across_documents=false", "data.sequence_length=31"]),
    "padded chats, rows in parts, compiled": ("fsdp2_tensor_sequence", lambda data: [WIDE, f"data.files=[{data}/chats.jsonl]", "data.packing=false", "model.gradient_checkpointing=selective"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: Path) -> Path:
    folder = tmp_path_factory.mktemp("data")
    words = ["alpha", "beta", "of", "the", "row", "parts"]
    texts = [" ".join(words[(i * k) % 6] for k in range(1, 2 + i % 6)) for i in range(300)]
    (folder / "short.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    chats = [{"prompt": text[:8], "completion": text[-9:]} for text in texts[1:150]]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "chats.txt").write_text("\n".join(texts[:40]))
    for number in range(6):
        (folder / f"long-{number}.txt").write_text(" ".join(texts[number::6]))
    run_training(["--config", str(tiny_recipe), WIDE, "training.max_steps=2", f"output_dir={folder}/base"])
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_layers_in_parts_is_the_same_run(name: str, data: Path, tiny: list[str], tmp_path: Path) -> None:
    config, more = CASES[name]
    settings = ["training.max_steps=4", "training.micro_batch_size=3", "training.log_every=1", "training.eval_every=2", "checkpoint.every=null", "tracking.sample_tokens=4", "tracking.peak_tflops=0.001"]  # fmt: skip
    arguments = [*tiny, *settings, *more(data)]
    run_training([*arguments, f"output_dir={tmp_path}/one"])
    count = LAUNCHES[config]
    environment = launcher_environment(file_of(config, tmp_path), count)
    if "compiled" in name:
        environment |= COMPILED
    finished = run_training([*arguments, f"output_dir={tmp_path}/parts"], count, environment)
    found = json.loads((tmp_path / "parts/environment.json").read_text())
    strategy = "fsdp2" if config.startswith("fsdp2") else "tensor_parallel"
    assert (found["strategy"], found["layers_in_parts"], found["num_processes"]) == (strategy, 2, count)
    assert "; layers in 2 parts" in found["placement"]
    assert "layers in 2 parts" in finished.output
    rows = " / 2 parts of a row" if "sequence" in config else ""
    assert f"{count} processes{rows} / 2 parts of the layers x" in finished.output
    one, parts = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "parts")
    assert one[1]["train/loss"] > one[4]["train/loss"]
    differences = largest_differences(one, parts)
    print(name, {key: f"{value:.1e}" for key, value in differences.items()})
    assert all(value <= 1e-6 for value in differences.values()), differences
    same = ("train/tokens", "eval/bits_per_byte", "eval/token_accuracy", "eval/perplexity")
    assert [parts[4][key] for key in same] == pytest.approx([one[4][key] for key in same], rel=1e-6)
    work = [run[4]["train/mfu"] * run[4]["train/seconds_per_step"] * n for run, n in ((one, 1), (parts, count))]
    assert work[1] == pytest.approx(work[0], rel=1e-3), "FLOP of the model, however many processes share a layer"
    targets = [run[4]["train/tokens_per_second"] * run[4]["train/seconds_per_step"] for run in (one, parts)]
    assert targets[1] == pytest.approx(targets[0], rel=1e-3)
    summaries = [json.loads((tmp_path / run / "summary.json").read_text()) for run in ("one", "parts")]
    assert summaries[0]["ledger"] == summaries[1]["ledger"]
    samples = [(tmp_path / run / "samples.jsonl").read_text() for run in ("one", "parts")]
    assert samples[0] == samples[1]
    assert_same_model(tmp_path / "one/final", tmp_path / "parts/final")


def assert_same_model(one: Path, other: Path) -> None:
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (one, other)]
    states = [model.state_dict() for model in models]
    assert {name: tensor.shape for name, tensor in states[0].items()} == {name: tensor.shape for name, tensor in states[1].items()}  # fmt: skip
    assert max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0]) < 1e-4
    ids = torch.arange(2, 18)[None]
    assert torch.allclose(*(model(ids).logits for model in models), atol=1e-3)


# --- checkpoints ---------------------------------------------------------------------------------------------------


def file_of(config: str, folder: Path) -> Path:
    """File of a config; the one whose processes share rows, too, is made in this folder."""
    return Path(with_rows_in_parts(folder)) if config == "fsdp2_tensor_sequence" else CONFIGS / f"{config}.yaml"


def launch(config: str, arguments: list[str], prepare: Callable[[], object], folder: Path) -> Finished:
    """`train.py` on the processes of a config, after `prepare` in each of them; single: one process."""

    def run() -> int:
        import train

        prepare()
        return train.main(arguments)

    if config == "single":
        return Launch(run).wait(60)
    count = LAUNCHES[config]
    return Launch(run, count, launcher_environment(file_of(config, folder), count)).wait(60)


@pytest.mark.parametrize("config", [*EACH_CONFIG, pytest.param("fsdp2_tensor_sequence", marks=pytest.mark.slow)])
def test_a_killed_run_with_layers_in_parts_resumes_bit_for_bit(config: str, tiny: list[str], tmp_path: Path) -> None:
    """A process dies by kill -9 in the middle of a step, and the others do not wait for its part."""
    arguments = [*tiny, WIDE, "training.micro_batch_size=3"]
    assert launch(config, [*arguments, f"output_dir={tmp_path}/whole"], lambda: None, tmp_path).code == 0
    kill = at_step(4, lambda: os.kill(os.getpid(), signal.SIGKILL))
    codes = launch(config, arguments, kill, tmp_path).codes
    assert codes[-1] == -signal.SIGKILL
    assert 0 not in codes
    finished = launch(config, arguments, lambda: None, tmp_path)
    assert finished.code == 0, finished.output
    assert "step-00000003 at step 3" in finished.output
    assert_equal_runs(tmp_path / "whole", tmp_path / "run", 6)
    saved = dict(read_tensors(tmp_path / "run/checkpoints/step-00000006"))
    for name, tensor in load_file(tmp_path / "run/final/model.safetensors").items():
        assert torch.equal(saved[f"param/{name}"], tensor)


def test_a_run_may_divide_its_layers_anew_at_every_stop(tiny: list[str], tmp_path: Path) -> None:
    """From engine to engine within an epoch; the curve and the ledger are those of one uninterrupted process."""
    legs = [
        "single",
        "tensor_parallel",
        "fsdp2",
        "tensor_parallel",
        "ddp",
        "fsdp2_tensor_parallel",
        "fsdp2_tensor_sequence",
        "single",
    ]
    arguments = [*tiny, WIDE, "training.micro_batch_size=3", "training.log_every=1", f"training.max_steps={len(legs)}"]
    assert launch("single", [*arguments, f"output_dir={tmp_path}/whole"], lambda: None, tmp_path).code == 0
    for step, config in enumerate(legs, start=1):
        stop = at_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM)) if step < len(legs) else lambda: None
        finished = launch(config, arguments, stop, tmp_path)
        assert set(finished.codes) == {75 if step < len(legs) else 0}, finished.output
        notes = finished.output.count("the checkpoint was written with each layer on")
        assert notes == (step > 1 and ("tensor" in config) != ("tensor" in legs[step - 2]))
    whole, run = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "run")
    assert all(value <= 1e-6 for value in largest_differences(whole, run).values())
    starts = json.loads((tmp_path / "run/environment.json").read_text())["starts"]
    assert [start["layers_in_parts"] for start in starts] == [2 if "tensor" in config else 1 for config in legs]
    ledgers = [json.loads((tmp_path / name / "summary.json").read_text())["ledger"] for name in ("whole", "run")]
    assert ledgers[0] == ledgers[1]
