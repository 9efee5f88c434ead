"""Memory of a plan: equal to whole runs on fake tensors and on real ones, for every engine that shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT, run_everywhere
from torch._subclasses.fake_tensor import FakeTensorMode

from acc_lm.config import Config
from acc_lm.errors import ConfigError
from acc_lm.modeling.losses import as_on_gpu, summed_loss
from acc_lm.planning.memory import memory_of
from acc_lm.planning.probe import SWITCH, Checkpointing, Probe
from acc_lm.runtime import LiveBytes, placement_of
from benchmarks.whole_runs import LAUNCHES, compare, whole_run, whole_sharded_run

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4000,
}  # fmt: skip
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 128, "n_layer": 5, "n_head": 4, "vocab_size": 3000}
QWEN3: dict[str, Any] = LLAMA | {"model_type": "qwen3", "head_dim": 96, "tie_word_embeddings": True}
EXPERTS: dict[str, Any] = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 4}
WINDOWS: dict[str, Any] = LLAMA | {"model_type": "gemma2", "head_dim": 64, "sliding_window": 64, "num_hidden_layers": 8}
WIDE: dict[str, Any] = LLAMA | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "vocab_size": 600,
}
MODELS = {"llama": LLAMA, "gpt2": GPT2, "qwen3": QWEN3, "experts": EXPERTS, "soft caps and windows": WINDOWS}


def config_of(shape: dict[str, Any], precision: str = "bf16", length: int = 256, rows: int = 8, **more: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"config": shape} | more.pop("model", {}),
            "data": {"sequence_length": length},
            "training": {
                "max_steps": 1,
                "mixed_precision": precision,
                "global_batch_size": 64,
                "micro_batch_size": rows,
            },
        }
        | more
    )


def placed(name: str, num_processes: int, config: Config) -> Any:
    return placement_of(ROOT / f"accelerate_configs/{name}.yaml", num_processes, 1, config)


def one_process() -> list[Any]:
    """All models with all checkpointing; in `make test` every model once, and a Llama with all."""
    return [
        pytest.param(
            checkpointing, model, marks=[] if model == "llama" or checkpointing == "full" else pytest.mark.slow
        )
        for checkpointing in SWITCH
        for model in MODELS
    ]


@pytest.mark.parametrize(("checkpointing", "model"), one_process())
def test_one_process_needs_what_a_whole_run_on_fake_tensors_holds(model: str, checkpointing: Checkpointing) -> None:
    config = config_of(MODELS[model])
    probe = Probe(config, 0)
    assert len(probe._depths) == (2 if model != "gpt2" or probe.num_blocks > 3 else 1)
    for accumulation in (1, 2):
        found = memory_of(probe, placed("single_gpu", 1, config), 8, accumulation, checkpointing)
        whole = whole_run(probe, config, checkpointing, accumulation, fake=True)
        assert abs(found.tensors / whole - 1) < 0.03
        assert sum(found.parts.values()) == pytest.approx(found.tensors)
        assert found.tensors < found.low < found.high


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_one_process_needs_what_a_real_run_holds(precision: str) -> None:
    """With the branches of a CPU, because the run is on one."""
    config = config_of(LLAMA | {"num_hidden_layers": 4}, precision, length=128, rows=4)

    probe = Probe(config, 0, on_gpu=False)

    def here() -> list[float]:
        torch.set_num_threads(1)
        return [whole_run(probe, config, checkpointing, 2, fake=False) for checkpointing in SWITCH]

    for checkpointing, real in zip(SWITCH, run_everywhere(here)[0], strict=True):
        found = memory_of(probe, placed("single_gpu", 1, config), 4, 2, checkpointing)
        assert abs(found.tensors / real - 1) < 0.02, checkpointing


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(LLAMA, id="llama", marks=pytest.mark.slow),
        pytest.param(GPT2, id="gpt2"),
        pytest.param(WIDE, id="wide", marks=pytest.mark.slow),
    ],
)
def test_shards_need_what_real_sharding_on_a_fake_process_group_holds(shape: dict[str, Any]) -> None:
    config = config_of(shape, length=512)
    cases = [(name, checkpointing) for name in ("fsdp2", "fsdp2_grad_op") for checkpointing in SWITCH]

    probe = Probe(config, 0)

    def here() -> list[float]:
        return [
            whole_sharded_run(probe, config, 8, checkpointing, 2, reshards=name == "fsdp2")
            for name, checkpointing in cases
        ]

    for (name, checkpointing), whole in zip(cases, run_everywhere(here)[0], strict=True):
        found = memory_of(probe, placed(name, 8, config), 8, 2, checkpointing)
        print(name, checkpointing, found.tensors / whole)
        assert abs(found.tensors / whole - 1) < 0.03, f"{name}, {checkpointing}"


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch[0])
def test_a_recipe_needs_what_a_whole_step_of_it_holds(launch: tuple[str, int]) -> None:
    """The smallest model of the table in docs/planning.md."""
    (found,) = run_everywhere(lambda: compare(ROOT / "recipes/pretrain_gpt2-124m_fineweb-edu.yaml", *launch))
    assert abs(found.error) < 0.03


def test_depth_and_rows_extend_the_probe_as_a_whole_model_would_need() -> None:
    config = config_of(LLAMA | {"num_hidden_layers": 9})
    probe = Probe(config, 0)
    assert probe._depths == (2, 3)
    whole = Probe(config, 0)
    whole._depths = (9,)
    for compute in ("autocast", "cast"):
        for checkpointing in SWITCH:
            some = probe.phases(5, checkpointing, compute=compute)  # type: ignore[arg-type]
            all_blocks = whole._run(compute, checkpointing, 9, 5)  # type: ignore[arg-type]
            assert some.kept == pytest.approx(all_blocks.kept, rel=0.005)
            assert some.forward == pytest.approx(all_blocks.forward, rel=0.01)


def test_the_loss_head_on_a_gpu_holds_seven_bytes_of_each_logit_of_a_chunk() -> None:
    with FakeTensorMode(), as_on_gpu():
        hidden = torch.zeros(16384, 64, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.zeros(128256, 64, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(16384, dtype=torch.int64)
        live = LiveBytes()
        for tensor in (hidden, weight, targets):
            live.add(tensor)
        before = live.now
        with live.counting():
            loss = summed_loss(hidden, weight, None, targets)
        kept = live.now - before
        del loss
    assert (live.most - before - kept) / 2**28 < 7


def test_layouts_hold_their_state() -> None:
    """Bytes of a parameter, by hand; the wrong ones are those that people forget."""
    config = config_of(LLAMA)
    n = 8
    expected = {  # weights, further state, gradients
        "single_gpu": (4, 8, 4),
        "ddp": (4, 12, 0),
        "fsdp2": (4 / n, 8 / n, 4 / n),
        "fsdp2_grad_op": (4 / n, 8 / n, 4 / n),
        "deepspeed_zero1": (2, 12 / n + 4, 2),
        "deepspeed_zero2": (2, 12 / n, 4 / n),
        "deepspeed_zero3": (2 / n, 16 / n, 0),
        "deepspeed_zero2_offload": (2, 0, 4 / n),
        "deepspeed_zero3_offload": (0, 0, 0),
        "fsdp2_offload": (0, 0, 0),
    }
    for name, sizes in expected.items():
        found = placed(name, 1 if name == "single_gpu" else n, config)
        assert (found.weights, found.state, found.gradients) == sizes, name
    assert [placed(name, n, config).host * n for name in ("deepspeed_zero2_offload", "fsdp2_offload")] == [18, 16]
    assert placed("deepspeed_zero3_offload", n, config).host * n == 22


def test_accumulated_gradients_are_held_once_and_a_tied_head_too() -> None:
    config = config_of(QWEN3)
    probe = Probe(config, 0)
    single = placed("single_gpu", 1, config)
    once, twice = (memory_of(probe, single, 8, accumulation, "no").tensors for accumulation in (1, 2))
    assert twice - once == pytest.approx(4 * probe.parameters.total)
    untied = Probe(config_of(QWEN3 | {"tie_word_embeddings": False}), 0)
    assert untied.parameters.total - probe.parameters.total == 4000 * 256


def test_an_adapter_has_state_for_its_own_weights_only(tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(**LLAMA).save_pretrained(tmp_path)
    model = {"config": None, "name_or_path": str(tmp_path)}
    whole, lora = config_of(LLAMA, model=model), config_of(LLAMA, model=model, adapter={"kind": "lora"})
    probes = Probe(whole, 0), Probe(lora, 0)
    assert probes[1].parameters.trained < 0.1 * probes[0].parameters.trained
    single = placed("single_gpu", 1, whole)
    full, adapted = (memory_of(probe, single, 1, 1, "no") for probe in probes)
    expected = 4 * probes[1].parameters.total + 8 * probes[1].parameters.trained
    assert adapted.parts["weights, moments and buckets"] == expected < 0.5 * full.parts["weights, moments and buckets"]
    quantized = config_of(LLAMA, model=model, adapter={"kind": "lora", "quantize_base": "nf4"})
    with pytest.raises(ConfigError, match=r"adapter.quantize_base must be none"):
        Probe(quantized, 0)


def test_models_whose_shapes_need_their_tokens_are_refused_by_name() -> None:
    config = config_of(EXPERTS, "no")
    with pytest.raises(ConfigError, match=r"got mixtral: .*; measure it with --dry-run"):
        Probe(config, 0).phases(1, "no", compute="own")


def test_a_tensor_counts_from_before_the_first_operation_that_reads_it() -> None:
    old, live = torch.zeros(1000), LiveBytes(unit=1)
    with live.counting():
        new = torch.zeros(9000)
        assert live.most == 36000
        del new
        old.add_(1)  # was there all the time, next to the new one
    assert (live.now, live.most) == (4000, 40000)
    again = LiveBytes(unit=1)
    again.add_existing()
    assert again.now >= 4000
    del old
