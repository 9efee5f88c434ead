"""Rows in parts: a row that several processes share gives the loss, the gradient and the run of a complete one."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from backends import LENGTH, MODELS, Scenario, run_backend, train_curve
from processes import ROOT, Finished, Launch, launcher_environment, run_everywhere, run_training
from test_elastic import at_step
from test_resume import assert_equal_runs

from acc_lm.config import ModelConfig, TokenizerConfig
from acc_lm.errors import ConfigError
from acc_lm.modeling import row_parts
from acc_lm.modeling.attention import causal_attention
from acc_lm.modeling.build import build_model
from acc_lm.modeling.row_parts import RowParts, StackedParts
from acc_lm.rows.packing import apart
from acc_lm.run_files.differences import TOLERANCE, largest_differences, read_metrics
from acc_lm.runtime import bare_model
from acc_lm.text.tokenizer import make_tokenizer

CONFIGS = ROOT / "accelerate_configs"
END = 256
SHAPES = {
    **MODELS,
    "qwen3": {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16},
}  # fmt: skip


def model_of(name: str, size: int = 1, length: int = 32, **fields: Any) -> Any:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    return build_model(ModelConfig(config=SHAPES[name] | fields), tokenizer, length, 0, parts_of_rows=size)[0]


def batch_of(length: int, packed: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, END, (3, length + 1), generator=torch.Generator().manual_seed(length))
    ids[:, 4::9] = END
    targets = ids[:, 1:].clone()
    targets[1, length // 2 :] = targets[2] = -100
    whole = {"input_ids": ids[:, :-1], "targets": targets}
    return whole | apart(ids[:, :-1].numpy(), END) if packed else whole


def loss_and_gradients(model: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def off_by(model: Any, batch: dict[str, torch.Tensor], parts: RowParts) -> float:
    """Largest difference of loss and gradients of rows in parts from those of complete rows, relative to the largest element."""
    model.row_parts = RowParts()
    expected = loss_and_gradients(model, batch)
    model.row_parts = parts
    got = loss_and_gradients(model, batch)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "mixtral"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_parts_give_the_gradient_of_complete_rows(name: str, packed: bool) -> None:
    """All parts on one process; odd lengths, rows shorter than the number of parts, rows without a target."""
    model = model_of(name)
    for size, length in ((2, 32), (4, 31), (3, 2)):
        assert off_by(model, batch_of(length, packed), StackedParts(size)) < 2e-6


def test_positions_from_0_in_each_part_and_documents_that_see_each_other_are_detected() -> None:
    class Restarting(StackedParts):
        def cut(self, *arguments: Any) -> Any:
            part = super().cut(*arguments)
            return part._replace(position_ids=torch.arange(part.input_ids.shape[1]).expand_as(part.input_ids))

    class Mixing(StackedParts):
        def cut(self, *arguments: Any) -> Any:
            return super().cut(*arguments)._replace(document_ids=None)

    for name in ("llama", "gpt2"):
        assert off_by(model_of(name), batch_of(32, False), Restarting(2)) > 1e-3
        assert off_by(model_of(name), batch_of(32, True), Mixing(2)) > 1e-3


def test_models_that_need_complete_rows_are_refused() -> None:
    """The nearest that works is named; a model whose head is not plain shows its loss, others their attention."""
    model_of("llama", size=2)
    for name, size, fields, got in (
        ("llama", 2, {"model_type": "mistral", "sliding_window": 8}, r"sdpa \(sliding_window\)"),
        ("gpt2", 2, {"model_type": "gpt_neo", "hidden_size": 32, "num_layers": 2, "attention_types": [[["global"], 2]]}, "transformers' "),
        ("llama", 2, {"model_type": "cohere"}, "a loss on the model's own logits"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"must be 1 for a model of type .*, got {size} for .*{got}.*; remove it"):
            model_of(name, size, **fields)


# --- the exchange --------------------------------------------------------------------------------------------------


def attention_in_parts() -> dict[str, float]:
    """Largest differences from complete rows of the output and of each gradient, for each number of key-value heads."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = RowParts()
    parts.begin(dist.group.WORLD)
    found = {}
    for shared in (1, 2, 4):
        draw = torch.Generator().manual_seed(shared)
        shapes = [(2, heads, 8, 6) for heads in (4, shared, shared)]
        whole = [torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes]
        weights = torch.randn(2, 8, 4, 6, generator=draw, dtype=torch.float64)
        expected, _ = causal_attention(torch.nn.Module(), *whole)
        wanted = torch.autograd.grad((expected * weights).sum(), whole)
        part = slice(rank * 8 // size, (rank + 1) * 8 // size)
        mine = [tensor.detach()[:, :, part].requires_grad_() for tensor in whole]
        output, _ = causal_attention(torch.nn.Module(), *mine, row_parts=parts)
        gradients = torch.autograd.grad((output * weights[:, part]).sum(), mine)
        found[f"{shared} output"] = float((output - expected[:, part]).abs().max())
        found[f"{shared} gradient"] = max(
            float((got - all_of_it[:, :, part]).abs().max()) for got, all_of_it in zip(gradients, wanted, strict=True)
        )
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_attention_over_the_processes_is_attention_over_the_rows(size: int) -> None:
    for found in run_everywhere(attention_in_parts, size):
        assert set(found) == {f"{shared} {what}" for shared in (1, 2, 4) for what in ("output", "gradient")}
        assert max(found.values()) < 1e-12


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Mistakes of the exchange and of the loss."""
    if fault == "no backward":
        keep = staticmethod(lambda context, *gradients: (gradients[0], None))
        with patch.object(row_parts._Exchange, "backward", keep):
            yield
    elif fault == "loss counted twice":
        # After the check of the run's identity, which refuses rows that are not cut.
        with patch("backends.Faults.after_prepare", lambda faults, model, optimizer: complete_again(model)):
            yield
    else:
        yield


def complete_again(model: Any) -> None:
    """Let each process compute complete rows, as if the others did not compute them too."""
    bare_model(model).row_parts.size = 1


def curves_with_faults() -> list[Any]:
    curves = []
    for fault in (None, "no backward", "loss counted twice"):
        with planted(fault):
            curves.append(train_curve(Scenario("gpt2", steps=4, accumulation=2)))
    return curves


def test_an_exchange_without_its_backward_and_a_loss_counted_twice_are_detected() -> None:
    expected = run_backend("single", 1, [Scenario("gpt2", steps=4, accumulation=2)])[0]
    environment = launcher_environment(CONFIGS / "ddp_sequence.yaml", 2)
    good, without_backward, twice = run_everywhere(curves_with_faults, 2, 120, environment)[0]
    assert (good.strategy, good.rows_in_parts) == ("ddp", 2)

    def off(curve: Any) -> dict[str, float]:
        return {name.removeprefix("train/"): d for name, d in largest_differences(expected.metrics, curve.metrics).items()}  # fmt: skip

    assert all(d <= TOLERANCE["no"][name] for name, d in largest_differences(expected.metrics, good.metrics).items())
    assert off(without_backward)["grad_norm"] > 1e-3
    assert off(twice)["loss"] > 0.5
    assert off(twice)["grad_norm"] > 0.5


# --- complete runs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run that is trained once by one process, and once in parts."""

    config: str
    arguments: Callable[[Path], list[str]]
    num_processes: int | None = None
    sizes: dict[str, int] | None = None
    """Sizes of parallelism_config other than those of the file."""
    environment: dict[str, str] | None = None


HEADS = "num_attention_heads: 4, num_key_value_heads: 2"
WIDE = f"model.config={{hidden_size: 32, {HEADS}}}"
EXPERTS = f"model.config={{model_type: mixtral, hidden_size: 32, intermediate_size: 32, {HEADS}, num_local_experts: 4, router_aux_loss_coef: 0.1, sliding_window: null}}"  # fmt: skip
COMPILED = {
    "ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER", "ACCELERATE_DYNAMO_MODE": "default", "ACCELERATE_DYNAMO_USE_FULLGRAPH": "false",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "false", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true",
}  # fmt: skip
PACKED = ["data.attend_across_documents=false", "data.sequence_length=31"]
CASES = {
    "packed, FSDP2": Case("sequence_parallel", lambda data: [f"data.files=[{data}/short.jsonl]", *PACKED]),
    "a batch of 1, DDP": Case("ddp_sequence", lambda data: [WIDE, "training.global_batch_size=1", "training.micro_batch_size=1"], 4, {"sp": 4}),
    "context parallel by name, HSDP": Case("hsdp", lambda data: [WIDE], 4, {"dp_replicate": 2, "dp_shard": 1, "cp": 2}),
    "padded chats, ZeRO-3": Case("deepspeed_zero3_sequence", lambda data: [f"data.files=[{data}/chats.jsonl]", "data.packing=false"]),
    "packed chats and experts, ZeRO-2": Case("deepspeed_zero2", lambda data: [f"data.files=[{data}/chats.jsonl]", EXPERTS], 2, {"sp": 2}),
    "padded chats and experts, ZeRO-1": Case("deepspeed_zero1", lambda data: [f"data.files=[{data}/chats.jsonl]", EXPERTS, "data.packing=false"], 2, {"sp": 2}),
    "experts per micro-batch, DDP": Case("ddp_sequence", lambda data: [EXPERTS, "model.router_loss=per_micro_batch"]),
    "offload, ZeRO-3": Case("deepspeed_zero3_offload", lambda data: [WIDE], 2, {"sp": 2}),
    "LoRA, FSDP2": Case("sequence_parallel", lambda data: ["model.config=null", f"model.name_or_path={data}/base/final", "adapter.kind=lora"]),
    "mixture, DDP": Case("ddp_sequence", lambda data: ["data.files=[]", f"data.mixture=[{{name: a, files: ['{data}/long-*.txt'], weight: 2}}, {{name: b, files: [{data}/short.jsonl], weight: 1}}]"]),
    "stream, FSDP2": Case("sequence_parallel", lambda data: [f"data.files=['{data}/long-*.txt']", "data.streaming=true", "data.num_streams=6", f"data.eval_files=[{data}/short.jsonl]"]),
    "evaluation sets, DDP": Case("ddp_sequence", lambda data: [f"data.evaluation_sets={{other: [{data}/short.jsonl]}}"]),
    "selective checkpointing, FSDP2": Case("sequence_parallel", lambda data: ["model.gradient_checkpointing=selective"]),
    "compiled, FSDP2": Case("sequence_parallel", lambda data: PACKED, environment=COMPILED),
    "compiled, DDP": Case("ddp_sequence", lambda data: ["data.sequence_length=31"], environment=COMPILED),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(
            draw.choice(["alpha", "beta", "of", "the", "row", "parts"]) for _ in range(draw.randint(least, most))
        )

    for number in range(6):
        (folder / f"long-{number}.txt").write_text(words(300, 300))
    (folder / "short.jsonl").write_text("".join(json.dumps({"text": words(1, 6)}) + "\n" for _ in range(300)))
    chats = [{"prompt": words(1, 2), "completion": words(1, 3)} for _ in range(150)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_run_in_parts_is_the_same_run(name: str, data: Path, tiny: list[str], tmp_path: Path) -> None:
    case = CASES[name]
    settings = ["training.max_steps=4", "training.micro_batch_size=3", "training.log_every=1", "training.eval_every=2", "checkpoint.every=null"]  # fmt: skip
    arguments = [*tiny, *settings, *case.arguments(data)]
    if "LoRA" in name:
        run_training([*tiny, "training.max_steps=2", f"output_dir={data}/base"])
    run_training([*arguments, f"output_dir={tmp_path}/one"])
    file = tmp_path / f"{case.config}.yaml"
    text = (CONFIGS / file.name).read_text()
    if case.sizes:
        sizes = [f"  parallelism_config_{key}_size: {size}" for key, size in case.sizes.items()]
        text = "\n".join([text.partition("parallelism_config:")[0], "parallelism_config:", *sizes, ""])
    file.write_text(text)
    count = case.num_processes or (4 if case.config == "sequence_parallel" else 2)
    environment = launcher_environment(file, count) | (case.environment or {})
    finished = run_training([*arguments, f"output_dir={tmp_path}/parts"], count, environment)
    found = json.loads((tmp_path / "parts/environment.json").read_text())
    size = (case.sizes or {}).get("sp", 2)
    assert found["rows_in_parts"] == size
    strategy = {"FSDP2": "fsdp2", "DDP": "ddp", "HSDP": "hsdp"}.get(name.rsplit(", ", 1)[1], name[-6:].replace("-", ""))
    assert found["strategy"].removeprefix("deepspeed_") == strategy.lower().strip()
    assert f"rows in {size} parts" in finished.output
    one, parts = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "parts")
    assert one[1]["train/loss"] > one[4]["train/loss"]
    differences = largest_differences(one, parts)
    print(name, {key: f"{value:.1e}" for key, value in differences.items()})
    assert all(value <= 1e-6 for value in differences.values()), differences
    ledgers = [json.loads((tmp_path / run / "summary.json").read_text())["ledger"] for run in ("one", "parts")]
    assert ledgers[0] == ledgers[1]
    others = [
        key for key in one[4] if key.startswith("eval/") or "router" in key or "busiest" in key or "tokens/" in key
    ]
    for step in (2, 4):
        assert [parts[step].get(key) for key in others] == pytest.approx(
            [one[step].get(key) for key in others], rel=1e-5
        ), others
    if "experts" in name:
        assert "train/router_loss" in others


# --- checkpoints ---------------------------------------------------------------------------------------------------

LAUNCHES = {"ddp_sequence": 2, "sequence_parallel": 4, "deepspeed_zero3_sequence": 2}


def launch(config: str, arguments: list[str], prepare: Callable[[], object]) -> Finished:
    """`train.py` on the processes of a config, after `prepare` in each of them; single: one process."""

    def run() -> int:
        import train

        prepare()
        return train.main(arguments)

    if config == "single":
        return Launch(run).wait(60)
    count = LAUNCHES[config]
    return Launch(run, count, launcher_environment(CONFIGS / f"{config}.yaml", count)).wait(60)


@pytest.mark.parametrize("config", LAUNCHES)
def test_a_killed_run_in_parts_resumes_bit_for_bit(config: str, tiny: list[str], tmp_path: Path) -> None:
    """A process dies by kill -9 in the middle of a step, and the others do not wait for its part."""
    arguments = [*tiny, "training.micro_batch_size=3", "data.sequence_length=31"]
    assert launch(config, [*arguments, f"output_dir={tmp_path}/whole"], lambda: None).code == 0
    kill = at_step(4, lambda: os.kill(os.getpid(), signal.SIGKILL))
    codes = launch(config, arguments, kill).codes
    assert codes[-1] == -signal.SIGKILL
    assert 0 not in codes
    finished = launch(config, arguments, lambda: None)
    assert finished.code == 0, finished.output
    assert "step-00000003 at step 3" in finished.output
    assert_equal_runs(tmp_path / "whole", tmp_path / "run", 6)


def test_a_run_may_divide_its_rows_anew_at_every_stop(tiny: list[str], tmp_path: Path) -> None:
    """From engine to engine within an epoch; the curve and the ledger are those of one uninterrupted process."""
    arguments = [*tiny, "training.micro_batch_size=3", "training.log_every=1"]
    assert launch("single", [*arguments, f"output_dir={tmp_path}/whole"], lambda: None).code == 0
    legs = ["single", "sequence_parallel", "ddp_sequence", "single", "deepspeed_zero3_sequence", "single"]
    for step, config in enumerate(legs, start=1):
        stop = at_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM)) if step < len(legs) else lambda: None
        finished = launch(config, arguments, stop)
        assert set(finished.codes) == {75 if step < len(legs) else 0}, finished.output
        notes = finished.output.count("the checkpoint was written with each row on")
        assert notes == (step > 1 and ("sequence" in config) != ("sequence" in legs[step - 2]))
    whole, run = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "run")
    assert all(value <= 1e-6 for value in largest_differences(whole, run).values())
    ledgers = [json.loads((tmp_path / name / "summary.json").read_text())["ledger"] for name in ("whole", "run")]
    assert ledgers[0] == ledgers[1]


# --- what is sent, and what is kept --------------------------------------------------------------------------------


def sent_in_a_step(accelerator: Any, model: Any, optimizer: Any, config: Any) -> dict[str, Any]:
    """All-to-alls of one step of two micro-batches of 6 rows."""
    from backends import RaggedRows

    from acc_lm.runtime import Gradients, Traffic, summarize_traffic
    from acc_lm.training.step import train_step

    batches, gradients = [RaggedRows(12, 1).__getitems__(range(6))] * 2, Gradients(accelerator, model)
    keywords = {"step": 9, "seed": 0, "num_targets": 96, "max_grad_norm": 1.0, "gradients": gradients}
    with Traffic() as traffic:
        train_step(accelerator, model, optimizer, batches, **keywords)
    assert {call.num_processes for call in traffic.calls if call.kind == "all-to-all"} == {2}
    return summarize_traffic(traffic.calls)["all-to-all"]


@pytest.mark.parametrize("config", ["ddp_sequence", pytest.param("sequence_parallel", marks=pytest.mark.slow)])
def test_the_bytes_exchanged_in_a_step_are_those_of_the_formula(config: str) -> None:
    """b x T/S x (2 q + 2 kv) elements in each layer and direction; checkpointing exchanges once more before backward."""
    scenarios = [
        Scenario("gpt2", accumulation=2, steps=2),
        Scenario("llama", accumulation=2, steps=2),
        Scenario("llama", accumulation=2, steps=2, gradient_checkpointing=True),
    ]
    curves = run_backend(config, LAUNCHES[config], scenarios, sent_in_a_step)
    rows, positions, width, layers, micro_batches, size = 6, LENGTH // 2, 32, 2, 2, 4
    for curve, shared, times in zip(curves, (width, 2 * width // 2, 2 * width // 2), (2, 2, 3), strict=True):
        # The only key-value head of llama is sent twice, once for each process.
        elements = rows * positions * (2 * width + 2 * shared) * layers * micro_batches * times
        assert curve.extra["bytes"] == elements * size
        assert curve.extra["ring_bytes"] == elements * size / 2
        assert curve.extra["calls"] == 4 * layers * micro_batches * times


def kept_for_backward() -> int:
    """Bytes of the tensors that the forward pass keeps for the backward pass, without the weights and their gradients."""
    from acc_lm.runtime.engines.collectives import PATIENCE

    dist.init_process_group("gloo", timeout=PATIENCE)
    model = model_of("llama", length=1024, num_attention_heads=4, num_key_value_heads=4)
    if dist.get_world_size() > 1:
        model.row_parts.begin(dist.group.WORLD)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape != model.lm_head.weight.shape:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch_of(1024, False))
    loss.backward()
    return sum(kept.values())


def test_the_activations_of_a_process_fall_with_the_number_of_parts() -> None:
    whole = run_everywhere(
        kept_for_backward,
        1,
        environment={"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    )[0]
    assert whole > 5e6
    for size in (2, 4):
        for kept in run_everywhere(kept_for_backward, size):
            print(size, kept, whole / kept)
            assert kept == pytest.approx(whole / size, rel=0.1)
