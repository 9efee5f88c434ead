"""Muon: complete matrices made orthogonal, on every engine that has them, against a separate float64 implementation."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import STEPS, STRATEGY, Curve, Scenario, run_backend
from processes import ROOT, launcher_environment, run_everywhere, run_training
from test_matrix import whole_matrix
from test_nonfinite import train_with_bad_losses
from test_resume import assert_equal_runs, kill_at_random, resume_from, with_dropout
from torch import Tensor

from acc_lm.config import Config, OptimizerConfig
from acc_lm.config.loading import load_config
from acc_lm.errors import ConfigError
from acc_lm.optimization.muon import MuonAndAdamW, hidden_matrices
from acc_lm.optimization.optimizer import build_optimizer, set_learning_rate
from acc_lm.run_files.differences import OF_MUON, TOLERANCE, largest_differences

MUON = "optimizer.name=muon"
RATE, MOMENTUM, DECAY = 1e-2, 0.9, 0.3  # none is torch's own
BOUNDS = TOLERANCE["no"] | OF_MUON
SHAPES = [(48, 32), (32, 48), (32, 32), (33, 7), (1, 16)]
SCENARIOS = [
    Scenario("gpt2", overrides=(MUON, "optimizer.adamw_learning_rate=3e-3")),
    Scenario("llama", accumulation=2, gradient_checkpointing=True, overrides=(MUON, "optimizer.momentum=0.9")),
]


def make_matrices(shapes: list[tuple[int, int]] = SHAPES) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def gradients_of(step: int, parameters: list[Any]) -> list[Tensor]:
    """With rows of very different sizes, as gradients have them: a matrix that is already nearly orthogonal would show little."""
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(tuple(p.shape), generator=generator) for p in parameters]
    return [torch.logspace(0, -3, len(g)).view(-1, *[1] * (g.ndim - 1)) * g for g in drawn]


def make_muon(matrices: list[Any], others: list[Any]) -> MuonAndAdamW:
    groups = [
        {"params": matrices, "weight_decay": DECAY, "momentum": MOMENTUM},
        {"params": others, "weight_decay": DECAY},
    ]
    return MuonAndAdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, fused=True)


def read_muon(weight: Tensor, gradients: list[Tensor], orthogonal: bool = True) -> Tensor:
    """Weight after these gradients, in float64, from the two papers."""
    weight, momentum = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient.double()
        update = MOMENTUM * momentum + (1 - MOMENTUM) * gradient.double()
        u, s, v = torch.linalg.svd(update / update.norm(), full_matrices=False)
        for _ in range(5):  # on singular values it is the same polynomial as on the matrix
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        update = u @ s.diag() @ v if orthogonal else update
        weight = weight - RATE * DECAY * weight - 0.2 * max(weight.shape) ** 0.5 * RATE * update
    return weight


def test_a_step_is_the_one_of_the_paper() -> None:
    """To the precision of 16 bits; without the iteration, or with half a matrix, the step differs."""
    matrices = make_matrices()
    before = [matrix.detach().clone() for matrix in matrices]
    optimizer = make_muon(matrices, [torch.nn.Parameter(torch.zeros(3))])
    gradients = [gradients_of(step, matrices) for step in range(3)]
    for given in gradients:
        for matrix, gradient in zip(matrices, given, strict=True):
            matrix.grad = gradient.clone()
        optimizer.step()
    for number, (matrix, start) in enumerate(zip(matrices, before, strict=True)):
        mine = [given[number] for given in gradients]
        expected = read_muon(start, mine)
        moved = (expected - start).norm()
        assert (matrix - expected).norm() < 0.02 * moved
        plain = read_muon(start, mine, orthogonal=False)
        lower = slice(len(start) // 2, None)
        half = read_muon(start[lower], [gradient[lower] for gradient in mine])
        if len(start) > 1:
            assert (plain - expected).norm() > 0.2 * moved
            assert (half - expected[lower]).norm() > 0.1 * moved


def test_it_is_torchs_muon_combined_with_torchs_adamw_bit_for_bit() -> None:
    ours, theirs = make_matrices(), make_matrices()
    our_others, their_others = ([torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(7, 3))] for _ in "ab")
    optimizer = make_muon(ours, our_others)
    muon = torch.optim.Muon(theirs, lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(their_others, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY, fused=True)
    for step in range(4):
        for parameters in ([*ours, *our_others], [*theirs, *their_others]):
            for parameter, gradient in zip(parameters, gradients_of(step, parameters), strict=True):
                parameter.grad = gradient
        for one in (optimizer, muon, adamw):
            for group in one.param_groups:
                group["lr"] = RATE / (1 + step)
            one.step()
    assert all(map(torch.equal, [*ours, *our_others], [*theirs, *their_others]))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(optimizer.state[mine]["momentum_buffer"], muon.state[other]["momentum_buffer"])
        assert optimizer.state[mine]["step"] == 4


@pytest.mark.parametrize(("num_processes", "mesh"), [(2, (2,)), pytest.param(4, (2, 2), marks=pytest.mark.slow)])
def test_a_sharded_matrix_makes_the_step_of_the_full_one_bit_for_bit(num_processes: int, mesh: tuple[int, ...]) -> None:
    """Controls: torch's own Muon on the same parts, and each part made orthogonal by itself."""

    def run() -> list[tuple[float, float | None, float]]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        dist.init_process_group("gloo")
        where = init_device_mesh("cpu", mesh)
        placements = [Replicate()] * (len(mesh) - 1) + [Shard(0)]
        found = []
        for shape in SHAPES:
            ends = []
            for kind in ("whole", "parts", "torch's", "by itself"):
                (matrix,) = make_matrices([shape])
                if kind != "whole":
                    matrix = torch.nn.Parameter(distribute_tensor(matrix.detach(), where, placements))
                held = torch.nn.Parameter(matrix.to_local().detach()) if kind == "by itself" else matrix
                other = torch.nn.Parameter(torch.zeros(3))
                optimizer: Any = make_muon([held], [other])
                if kind == "torch's":
                    optimizer = torch.optim.Muon(
                        [held], lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
                    )
                try:
                    for step in range(3):
                        (gradient,) = gradients_of(step, [matrix])
                        if kind != "whole":
                            cut = distribute_tensor(gradient, where, placements)
                            gradient = cut.to_local() if kind == "by itself" else cut
                        held.grad = gradient
                        optimizer.step()
                    ends.append(matrix.full_tensor().detach() if kind != "whole" else matrix.detach())
                except RuntimeError:
                    assert kind == "torch's", "a matrix of one row"
                    ends.append(None)
            whole, parts, torchs, alone = ends
            off = [None if end is None else float((end - whole).abs().max()) for end in (parts, torchs, alone)]
            found.append(tuple(off))
        dist.barrier()
        dist.destroy_process_group()
        return found

    for per_shape in run_everywhere(run, num_processes):
        ours, torchs, alone = zip(*per_shape, strict=True)
        assert ours == (0.0,) * len(SHAPES)
        assert max(off for off in torchs if off is not None) > 1e-4
        assert min(alone[:3]) > 1e-3


def test_a_skipped_step_changes_nothing_and_no_step_reads_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices, others = make_matrices(), [torch.nn.Parameter(torch.ones(5))]
    optimizer = make_muon(matrices, others)
    reads: list[str] = []

    def state() -> list[Tensor]:
        values = [p.detach() for p in [*matrices, *others]]
        values += [tensor for kept in optimizer.state.values() for tensor in kept.values()]
        return [value.clone() for value in values]

    def step(bad: bool) -> None:
        for parameter, gradient in zip([*matrices, *others], gradients_of(1, [*matrices, *others]), strict=True):
            parameter.grad = gradient * (float("nan") if bad else 1)
        optimizer.found_inf = torch.tensor(float(bad))
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy"):
                patch.setattr(torch.Tensor, name, lambda self, *a, name=name: reads.append(name))
            optimizer.step()

    step(bad=False)
    before = state()
    step(bad=True)
    assert all(map(torch.equal, state(), before))
    step(bad=False)
    assert not any(map(torch.equal, state(), before))
    assert reads == []


@pytest.mark.parametrize(("fields", "left_out"), [
    ({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}, {"transformer.wte.weight", "transformer.wpe.weight"}),
    ({"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
     {"model.embed_tokens.weight", "lm_head.weight"}),
    ({"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
      "num_key_value_heads": 1, "tie_word_embeddings": True}, {"model.embed_tokens.weight"}),
])  # fmt: skip
def test_muon_gets_the_matrices_between_embeddings_and_head(fields: dict[str, Any], left_out: set[str]) -> None:
    model = build(fields)
    matrices = {name for name, p in model.named_parameters() if p.ndim == 2}
    assert hidden_matrices(model) == matrices - left_out
    assert left_out < matrices
    config = OptimizerConfig(name="muon", learning_rate=1e-3, adamw_learning_rate=4e-3)
    optimizer = build_optimizer(model, config)
    set_learning_rate(optimizer, 5e-4)
    names = {p: name for name, p in model.named_parameters()}
    groups = [
        ({names[p] for p in group["params"]}, group["lr"], group["weight_decay"]) for group in optimizer.param_groups
    ]
    rest = set(names.values()) - matrices
    assert groups == [(matrices - left_out, 5e-4, 0.1), (left_out, 2e-3, 0.1), (rest, 2e-3, 0.0)]


def build(fields: dict[str, Any], **settings: Any) -> Any:
    from acc_lm.config import ModelConfig, TokenizerConfig
    from acc_lm.modeling.build import build_model
    from acc_lm.text.tokenizer import make_tokenizer

    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    return build_model(ModelConfig(config=fields, **settings), tokenizer, 16, 0)[0]


@cache
def one_process(*scenarios: Scenario) -> list[Curve]:
    return run_backend("single", 1, list(scenarios))


@pytest.mark.parametrize(
    ("config", "num_processes"),
    [("ddp", 2), ("fsdp2", 2), *(pytest.param(*other, marks=pytest.mark.slow)
     for other in [("ddp", 3), ("fsdp2", 3), ("fsdp2_grad_op", 2), ("fsdp2_offload", 2), ("hsdp", 4)])],
)  # fmt: skip
def test_swap_the_yaml_keep_the_curve(config: str, num_processes: int) -> None:
    curves = run_backend(config, num_processes, SCENARIOS)
    for scenario, expected, got in zip(SCENARIOS, one_process(*SCENARIOS), curves, strict=True):
        assert (got.strategy, got.num_processes) == (STRATEGY[config][0], num_processes)
        assert expected.metrics[1]["train/loss"] - expected.metrics[STEPS]["train/loss"] > 0.1, "the run must learn"
        differences = largest_differences(expected.metrics, got.metrics)
        print(scenario, {name: f"{value:.1e}" for name, value in differences.items()})
        assert {name for name, value in differences.items() if value > BOUNDS[name]} == set()
        assert (got.start, got.ledger) == (expected.start, expected.ledger)


def test_parts_that_are_made_orthogonal_by_themselves_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above, and proof that it is no test of AdamW."""
    (expected,) = one_process(SCENARIOS[0])
    monkeypatch.setattr(
        "acc_lm.optimization.muon.whole", lambda tensor: getattr(tensor.detach(), "_local_tensor", tensor.detach())
    )
    monkeypatch.setattr("acc_lm.optimization.muon.part_of", lambda tensor, like: tensor)
    (broken,) = run_backend("fsdp2", 2, [replace(SCENARIOS[0], fault="parts made orthogonal")])
    assert largest_differences(expected.metrics, broken.metrics)["train/loss"] > 1e-4
    (adamw,) = one_process(Scenario("gpt2"))
    assert largest_differences(expected.metrics, adamw.metrics)["train/loss"] > 1e-3


@pytest.mark.parametrize(
    "names", [("single", "fsdp2"), pytest.param(("single", "ddp", "fsdp2", "hsdp"), marks=pytest.mark.slow)]
)
def test_one_engine_resumes_from_another_and_from_itself_bit_for_bit(names: tuple[str, ...], tmp_path: Path) -> None:
    engines = {name: (name, {"single": 1, "hsdp": 4}.get(name, 2)) for name in names}
    matrix = whole_matrix(SCENARIOS[0], tmp_path, engines)
    for writer, row in matrix.items():
        assert set(row) == set(engines)
        for reader, (difference, same) in row.items():
            assert difference <= BOUNDS["train/grad_norm"], (writer, reader)
            assert same or writer != reader, f"{writer} continues as if uninterrupted, bit for bit"


@pytest.mark.parametrize("fault", ["momentum not restored", "step count not restored"])
def test_state_that_is_not_restored_is_detected(fault: str, tmp_path: Path) -> None:
    whole = run_backend("single", 1, [replace(SCENARIOS[0], save=tmp_path)])[0]
    load = tmp_path / f"checkpoints/step-{STEPS // 2:08d}"
    intact, broken = run_backend(
        "single", 1, [replace(SCENARIOS[0], load=load), replace(SCENARIOS[0], load=load, fault=fault)]
    )
    expected = {step: whole.metrics[step] for step in intact.metrics}
    assert max(largest_differences(expected, intact.metrics).values()) == 0
    assert max(largest_differences(expected, broken.metrics).values()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("config", "num_processes"), [("ddp", 3), ("fsdp2", 2), ("hsdp", 4)])
def test_a_resumed_run_is_the_uninterrupted_one(
    config: str, num_processes: int, tiny_recipe: Path, tmp_path: Path
) -> None:
    arguments = [*with_dropout(tiny_recipe), "training.micro_batch_size=1", MUON]
    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", num_processes)
    run_training([*arguments, f"output_dir={tmp_path / 'whole'}"], num_processes, environment)
    found = json.loads((tmp_path / "whole/environment.json").read_text())
    assert (found["strategy"], found["num_processes"]) == (STRATEGY[config][0], num_processes)
    resume_from(tmp_path / "whole", 4, tmp_path / "resumed", arguments, num_processes, environment)
    assert_equal_runs(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.slow
def test_killed_at_random_it_resumes_and_ends_the_same(tiny_recipe: Path, tmp_path: Path) -> None:
    assert kill_at_random([*with_dropout(tiny_recipe), MUON], tmp_path, kills=2, seed=0).in_save >= 1


def test_a_run_from_dry_run_to_export(tiny: list[str], tmp_path: Path) -> None:
    """With a search for the micro-batch, a skipped step, and a checkpoint that another optimizer cannot read."""
    from acc_lm.checkpointing.loading import read_tensors

    arguments = [*tiny, MUON, "training.find_micro_batch_size=true"]
    assert run_training([*arguments, "--dry-run"]).code == 0
    finished = train_with_bad_losses(arguments, (3,), 2, float("nan"))
    assert finished.codes == [0, 0], finished.outputs
    folder = tmp_path / "run/checkpoints/step-00000006"
    assert json.loads((folder / "state.json").read_text())["num_updates"] == 5
    kinds: dict[str, set[str]] = {}
    for key, tensor in read_tensors(folder):
        kind, _, name = key.partition("/")
        kinds.setdefault(name, set()).add(kind)
        assert tensor.isfinite().all()
    assert kinds["model.layers.0.mlp.up_proj.weight"] == {"param", "momentum_buffer"}
    assert kinds["lm_head.weight"] == kinds["model.norm.weight"] == {"param", "exp_avg", "exp_avg_sq"}
    assert (tmp_path / "run/final/model.safetensors").exists()
    other = [*tiny, "training.max_steps=8"]
    assert "optimizer.name" in " ".join(run_training(other, expect=5).errors)
    (line,) = run_training([*other, "checkpoint.allow_changed_recipe=true"], expect=None).errors
    assert "must be of a run with the same optimizer" in line


@pytest.mark.parametrize("config", ["deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"])
def test_an_engine_without_full_matrices_refuses_in_one_line(config: str, tiny: list[str]) -> None:
    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", 2)
    finished = run_training([*tiny, MUON], 2, environment, expect=None)
    assert finished.codes == [4, 4], finished.outputs
    (line,) = finished.errors
    assert line.startswith("error: optimizer.name must be adamw under DeepSpeed")
    assert line.endswith("got muon; set optimizer.name=adamw, or use accelerate_configs/fsdp2.yaml")


def test_settings_that_do_not_go_with_muon_are_refused() -> None:
    recipe: dict[str, Any] = {
        "model": {"name_or_path": "some/model"}, "adapter": {"kind": "lora"},
        "training": {"max_steps": 9, "global_batch_size": 2, "micro_batch_size": 2}, "schedule": {"warmup_steps": 0},
    }  # fmt: skip
    Config.model_validate(recipe)
    with pytest.raises(ValueError, match=r"optimizer\.name must be adamw with an adapter, got muon"):
        Config.model_validate(recipe | {"optimizer": {"name": "muon"}})
    with pytest.raises(ValueError, match=r"adamw_learning_rate must be null for adamw, got 0\.001"):
        OptimizerConfig(adamw_learning_rate=1e-3)
    model = build({"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
                  freeze=("model.layers.*",))  # fmt: skip
    with pytest.raises(ConfigError, match=r"optimizer\.name must be adamw when no matrix of a hidden layer is trained"):
        build_optimizer(model, OptimizerConfig(name="muon"))


def test_parity_leaves_out_configs_that_would_refuse_muon_whatever_their_name(
    tiny_recipe: Path, tmp_path: Path
) -> None:
    from acc_lm.studies.parity import _cases

    mine = tmp_path / "mine.yaml"
    shutil.copy(ROOT / "accelerate_configs/deepspeed_zero2.yaml", mine)
    names = ["single:1", "fsdp2:2", f"{mine}:2"]
    chosen, left_out = _cases(names, load_config(tiny_recipe, ["optimizer.name=muon"]))
    assert [case.name for case in chosen] == ["single x1", "fsdp2 x2"]
    (line,) = left_out
    assert line.startswith("mine x2, because optimizer.name must be adamw under DeepSpeed")
    assert len(_cases(names, load_config(tiny_recipe, []))[0]) == 3, "AdamW runs on all of them"
