"""`acc-lm bench-comm`: bandwidths, buckets, memory, hooks and accumulation, in bytes and counts and never by the clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT, launcher_environment, run_everywhere
from torch import nn

from acc_lm.cli import main
from acc_lm.errors import ConfigError, MachineError

CONFIGS = ROOT / "accelerate_configs"
# 1.7 million parameters: 6.7 MiB of gradients, in several buckets of 1 MiB.
WIDE = "model.config={hidden_size: 192, intermediate_size: 768, num_hidden_layers: 3, num_attention_heads: 2, num_key_value_heads: 1}"


def work(recipe: Path, config: str, parts: list[str], *overrides: str) -> dict[str, Any]:
    """Measurements of the main process of two, on this Accelerate config."""
    plan = {"recipe": str(recipe), "overrides": ["training.micro_batch_size=1", *overrides], "repeats": 1, "buckets": [1, 100],
            "sizes": [4096], "devices": 0, "parts": parts}  # fmt: skip

    def run() -> dict[str, Any]:
        from acc_lm.studies.bandwidth_worker import Worker

        return Worker(plan, 2).run()

    found: dict[str, Any] = run_everywhere(run, 2, environment=launcher_environment(CONFIGS / f"{config}.yaml", 2))[0]
    assert found["facts"].get("strategy", config) == config
    return found


def reduced(row: dict[str, Any]) -> dict[str, float]:
    entry: dict[str, float] = row["collectives"].get("all-reduce", {"calls": 0, "bytes": 0})
    return entry


@pytest.mark.parametrize("config", ["ddp", "deepspeed_zero2"])
def test_smaller_buckets_are_more_collectives_of_the_same_bytes(config: str, tiny_recipe: Path) -> None:
    rows = work(tiny_recipe, config, ["buckets"], WIDE)["rows"]["buckets"]
    if config == "ddp":
        nothing = rows.pop(0)
        assert nothing["bucket_cap_mb"] is None
        assert reduced(nothing)["bytes"] == 0, "of a step that sends nothing"
        assert nothing["tcp_bytes"] < 1000
    small, large = rows
    assert (small["bucket_cap_mb"], large["bucket_cap_mb"]) == (1, 100)
    assert reduced(small)["bytes"] == reduced(large)["bytes"]
    assert reduced(large)["bytes"] == pytest.approx(4 * large["num_parameters"], rel=1e-3)
    assert reduced(small)["calls"] >= reduced(large)["calls"] + 4


def test_a_view_saves_a_copy_of_the_gradients(tiny_recipe: Path) -> None:
    copied, viewed = work(tiny_recipe, "ddp", ["memory"], WIDE)["rows"]["memory"]
    assert (copied["gradient_as_bucket_view"], viewed["gradient_as_bucket_view"]) == (False, True)
    assert viewed["held_bytes"] == pytest.approx(2 * viewed["gradient_bytes"], rel=0.3), (
        "weights, and gradients in their buckets"
    )
    saved = copied["held_bytes"] - viewed["held_bytes"]
    assert saved == pytest.approx(copied["gradient_bytes"], rel=0.3), "the copy, as the system counts pages"


@pytest.mark.slow
def test_bench_comm_by_a_real_launch(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = tmp_path / "comm.md"
    parts = "hooks,collectives,data-parallel,accumulation"
    command = ["bench-comm", "--config", str(tiny_recipe), "--sizes", "64KiB,4KiB", "--parts", parts, "--repeats", "1", "--output", str(page)]  # fmt: skip
    assert main([*command, "training.micro_batch_size=1"]) == 0
    values = json.loads((tmp_path / "bench-comm.json").read_text())
    text = page.read_text()
    rows = values["parts"]
    assert (values["num_processes"], values["strategy"], values["device"]) == (2, "ddp", "cpu")

    assert [(row["kind"], row["bytes"]) for row in rows["collectives"]] == [
        (kind, size) for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all") for size in (4096, 65536)
    ]
    for row in rows["collectives"]:
        share = 1.0 if row["kind"] == "all-reduce" else 0.5  # of two processes: 2 (N - 1) / N, and (N - 1) / N
        assert row["algorithm_bandwidth"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["bus_bandwidth"] == pytest.approx(share * row["algorithm_bandwidth"])

    once, eight = rows["accumulation"]
    assert eight["accumulation"] == 8
    assert reduced(eight) == reduced(once), "an eighth for each micro-batch"
    assert reduced(once)["bytes"] == 4 * values["num_parameters"]

    hooks = {row["hook"]: row for row in rows["hooks"]}
    assert hooks["none"]["error"] == 0
    assert 0 < hooks["fp16"]["error"] < 2e-3
    assert 0.01 < hooks["power_sgd"]["error"] < 1.5
    assert reduced(hooks["fp16"])["bytes"] == reduced(hooks["none"])["bytes"] / 2 == 2 * values["num_parameters"]
    assert hooks["power_sgd"]["tcp_bytes"] < hooks["fp16"]["tcp_bytes"]
    assert "which only NCCL executes" in hooks["bf16"]["problem"]
    assert "which fails inside torch from step 2 on" in hooks["batched_power_sgd"]["problem"]
    assert "| bf16 | refused: distributed.comm_hook must be" in text

    assert "data-parallel" not in rows
    assert "| DataParallel | not measured: one process that copies its model to several GPUs" in text
    assert "found 0" in text


@pytest.mark.parametrize(("arguments", "text"), [
    (["--sizes", "4 bananas"], "--sizes must be sizes of 4 bytes or more such as 4KiB,1MiB,256MiB, got '4 bananas'; write them like these"),
    (["--sizes", "1KiB,2"], "--sizes must be sizes of 4 bytes or more such as 4KiB,1MiB,256MiB, got '1KiB,2'; write them like these"),
    (["--parts", "hooks,buckets,colectives"], "--parts must be among collectives, buckets, memory, hooks, accumulation, data-parallel, got 'colectives'"),
    (["--processes", "1"], "--processes must be at least 2 to exchange something, got 1; raise it"),
    (["--repeats", "0"], "--repeats must be at least 1, got 0; raise it"),
    (["--config", "nowhere.yaml"], "nowhere.yaml must be a recipe file, or the name of a recipe, got nothing there"),
])  # fmt: skip
def test_bench_comm_refuses_what_it_cannot_do_in_one_line(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["bench-comm", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_a_launch_that_fails_is_an_error_with_its_output(
    tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from acc_lm.studies import bandwidth

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(bandwidth, "launch", lambda *arguments, **how: "error: no such thing")
    assert main(["bench-comm", "--config", str(tiny_recipe)]) == MachineError.exit_code
    assert "error: the launch must finish, got: no such thing\n" in capsys.readouterr().err


def test_launches_are_as_many_as_there_are_engines_with_buckets() -> None:
    from acc_lm.studies.bandwidth import PARTS, _launches

    def shown(devices: int, parts: tuple[str, ...]) -> list[tuple[str | None, int, list[str]]]:
        return [(file and file.stem, count, names) for file, count, names in _launches(4, devices, parts)]

    most = list(PARTS[:-1])
    assert shown(0, PARTS) == [("ddp", 4, most), ("deepspeed_zero2", 4, ["buckets"])]
    assert shown(4, PARTS)[2:] == [(None, 1, ["data-parallel"])], "one process, where it has something to drive"
    assert shown(0, ("data-parallel",)) == []


def test_sizes_are_read_as_people_write_them() -> None:
    from acc_lm.studies.bandwidth import read_sizes

    assert read_sizes("1MiB, 4KiB,64 kib,256,1GiB") == [256, 4096, 65536, 2**20, 2**30]
    with pytest.raises(ConfigError):
        read_sizes("")


def test_a_collective_that_is_wrong_is_not_timed() -> None:
    def run() -> list[str]:
        import torch.distributed as dist

        from acc_lm.runtime import COLLECTIVES, time_collective

        dist.init_process_group("gloo")
        said = []
        for kind in COLLECTIVES:
            for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
                setattr(dist, name, lambda *tensors: None)
            try:
                time_collective(kind, 4096, torch.device("cpu"), 1)
            except RuntimeError as error:
                said.append(str(error))
        dist.barrier()  # the process that ends first must not take the store from the other
        return said

    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    assert run_everywhere(run, 2) == [[f"{kind} of 4096 bytes gave a wrong result" for kind in kinds]] * 2


def test_a_data_parallel_copy_computes_with_its_own_weights(tiny_recipe: Path) -> None:
    """As DataParallel copies a model: each module by itself, with the content of its __dict__."""
    from acc_lm.config import ModelConfig, TokenizerConfig
    from acc_lm.config.loading import load_config
    from acc_lm.modeling.build import build_model
    from acc_lm.runtime.monitoring.bandwidth import _Replicable
    from acc_lm.text.tokenizer import make_tokenizer

    config: ModelConfig = load_config(tiny_recipe).model
    model, _ = build_model(config, make_tokenizer(TokenizerConfig(kind="byte"), []), 32, 0)
    ids = torch.arange(16).view(2, 8)
    expected = model(input_ids=ids, targets=ids)

    def copy(module: nn.Module) -> nn.Module:
        made = module._replicate_for_data_parallel()
        made._modules = {name: child and copy(child) for name, child in module._modules.items()}
        made._parameters = {
            name: None if p is None else nn.Parameter(torch.zeros_like(p)) for name, p in module._parameters.items()
        }
        return made

    whole = _Replicable(model)
    assert whole(input_ids=ids, targets=ids).shape == (1,), "so that the losses of several can be gathered"
    assert torch.equal(whole(input_ids=ids, targets=ids)[0], expected)
    uniform = torch.tensor(float(model.config.vocab_size)).log() * ids.numel()
    assert torch.allclose(copy(whole)(input_ids=ids, targets=ids)[0], uniform), "all its weights are 0"
    assert not torch.allclose(expected, uniform, rtol=1e-4)


@pytest.mark.parametrize(("cap", "said"), [
    (1, "got a first bucket of 1 MiB for 6.7 MiB; set distributed.bucket_cap_mb=7"), (25, "got a first bucket of 1 MiB for 6.7 MiB"),
    (7, ""),
])  # fmt: skip
def test_power_sgd_in_several_buckets_is_refused_on_a_cpu_where_it_dies(cap: int, said: str, tiny_recipe: Path) -> None:
    def run() -> Any:
        from acc_lm.studies.bandwidth_worker import build

        settings = ["distributed.comm_hook=power_sgd", "distributed.comm_hook_arguments={start_powerSGD_iter: 2}",
                    f"distributed.bucket_cap_mb={cap}", "training.micro_batch_size=1", WIDE]  # fmt: skip
        try:
            case = build(tiny_recipe, settings, 2)
        except MachineError as error:
            return str(error)
        return [float(case.step().grad_norm) for _ in range(5)]

    one, other = run_everywhere(run, 2)
    assert one == other
    if said:
        assert (
            "distributed.bucket_cap_mb must put all gradients into one bucket when PowerSGD runs on CPU processes"
            in one
        )
        assert said in one
    else:
        assert len(one) == 5, "past the step at which it begins to compress"
