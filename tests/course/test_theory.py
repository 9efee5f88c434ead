"""The theory of the course: its commands run, its faults differ from what is right, which is the library's, and its pictures are drawn."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from processes import LAUNCH_VARIABLES, ROOT, build_extensions_once, launcher_environment, run_everywhere
from torch import Tensor, nn

COURSE = ROOT / "docs/course"
PICTURES = COURSE / "pictures"
sys.path.insert(0, str(COURSE / "code"))

import all_reduce  # noqa: E402
import data_parallel  # noqa: E402
import draw  # noqa: E402
import wrong_curves  # noqa: E402

PAGE = COURSE / "theory.md"
SVG = "{http://www.w3.org/2000/svg}"
FEW = 60
"""Steps in which the faults show: one and a half epochs."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every command block of a page."""
    return re.findall(r"^```(bash|python)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_python_blocks_of_the_page_print_what_it_shows() -> None:
    text = PAGE.read_text()
    shown = re.findall(
        r"^```python\n(.*?)^```\n<!-- output -->\n```text\n(.*?)```\n<!-- /output -->", text, re.DOTALL | re.MULTILINE
    )
    assert len(shown) >= 5
    for code, output in shown:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(PAGE), "exec"), {})
        assert printed.getvalue() == output


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    """Typed word for word, in a folder where the project's files are."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (tmp_path / path.name).symlink_to(path)
    environment = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.match(name)}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "ACC_LM_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    build_extensions_once(needs_nvme=False)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/torch_extensions").symlink_to(Path(os.environ["ACC_LM_CACHE"]) / "torch_extensions")
    lines = [line for language, block in blocks(PAGE) if language == "bash" for line in block.splitlines()]
    assert len(lines) >= 12
    for line in lines:
        if line.startswith("accelerate launch"):  # other tests take the default port at the same time
            line = line.replace("accelerate launch", "accelerate launch --main_process_port 0", 1)
        done = subprocess.run(
            shlex.split(line), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == (4 if "1xH100" in line and "11b" in line else 0), (
            f"{line}\n{done.stdout}{done.stderr}"
        )
    results = json.loads((tmp_path / "runs/theory/wrong_curves.json").read_text())
    assert results["empty_export"]["elements"] == [wrong_curves.SYMBOLS**2, 0]
    assert results["empty_export"]["right"][-1] < results["empty_export"]["wrong"][-1] - 1
    traces = json.loads((tmp_path / "runs/theory/overlap.json").read_text())
    hidden = {name: hidden_share(trace) for name, trace in traces.items()}
    assert hidden["buckets"] > 0.3 > 0.1 > hidden["one_bucket"], hidden


def hidden_share(trace: dict[str, Any]) -> float:
    """Share of the time of all-reduces in which backward computes."""
    total = sum(end - begin for begin, end in trace["all_reduce"])
    both = sum(
        max(0.0, min(end, stop) - max(begin, start))
        for begin, end in trace["all_reduce"]
        for start, stop in trace["backward"]
    )
    return both / total


@functools.cache
def trained(fault: str | None) -> dict[str, Any]:
    """Result of two processes that train with DDP."""

    def run() -> dict[str, Any]:
        from accelerate import Accelerator

        return wrong_curves.train(Accelerator(cpu=True), fault, FEW)

    environment = launcher_environment(ROOT / "accelerate_configs/ddp.yaml", 2)
    first, second = run_everywhere(run, 2, environment=environment)
    assert torch.equal(first["weights"], second["weights"]), "the copies drifted apart"
    found: dict[str, Any] = first
    return found


class Summed(nn.Module):
    """The script's model with the interface that the library's step expects."""

    def __init__(self) -> None:
        super().__init__()
        self.bare = wrong_curves.Transitions()

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.bare(input_ids), targets, reduction="sum")


def trained_by_the_library(num_steps: int) -> tuple[Tensor, list[float]]:
    """Weights and losses after the same steps on one process, with the library's step and the rows of all processes."""

    def run() -> tuple[Tensor, list[float]]:
        from torch.utils.data import DistributedSampler
        from transformers import get_cosine_schedule_with_warmup

        from acc_lm import runtime
        from acc_lm.config.loading import load_config
        from acc_lm.training.step import train_step

        batch = wrong_curves.GLOBAL_BATCH
        settings = [f"training.global_batch_size={batch}", "training.micro_batch_size=1", "tracking.report_to=[]"]
        accelerator = runtime.build_accelerator(load_config(ROOT / "recipes/pretrain_synthetic.yaml", settings))
        rows, bare = wrong_curves.make_rows(wrong_curves.ROWS, seed=1), Summed()
        plain = torch.optim.Adam(bare.parameters(), lr=wrong_curves.LEARNING_RATE)
        schedule = get_cosine_schedule_with_warmup(plain, wrong_curves.WARM_UP, wrong_curves.STEPS)
        model, optimizer = runtime.prepare(accelerator, bare, plain)
        gradients, losses = runtime.Gradients(accelerator, model), []
        for step in range(num_steps):
            epoch, place = divmod(step, wrong_curves.ROWS // batch)
            numbers: list[int] = []
            for rank in range(2):
                sampler: Any = DistributedSampler(rows, 2, rank, shuffle=True, seed=3)  # type: ignore[arg-type]
                sampler.set_epoch(epoch)
                numbers += list(sampler)[place * batch // 2 : (place + 1) * batch // 2]
            micro_batches: Any = [{"input_ids": rows[n][:-1], "targets": rows[n][1:]} for n in numbers]
            result = train_step(
                accelerator, model, optimizer, micro_batches, step=step + 1, seed=0, gradients=gradients,
                num_targets=sum(len(rows[n]) - 1 for n in numbers), max_grad_norm=None,
            )  # fmt: skip
            schedule.step()
            losses.append(float(result.nll) / result.num_targets)
        return bare.bare.table.weight.detach().clone(), losses

    weights, losses = run_everywhere(run)[0]
    return weights, losses


def test_the_right_curve_is_the_librarys_and_a_mean_of_means_is_not() -> None:
    right = trained(None)
    weights, losses = trained_by_the_library(FEW)
    assert right["loss"] == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(right["weights"], weights, atol=1e-5)
    wrong = trained("mean_of_means")
    assert wrong["loss"][0] == pytest.approx(right["loss"][0]), "the same weights and rows at the start"
    assert wrong["held_out"][-1] > right["held_out"][-1] + 0.05

    by_one, *_, by_sixteen = right["by_batch_means"][-1]
    assert by_one > right["held_out"][-1] + 0.05, "of the same model"
    assert by_sixteen != pytest.approx(by_one, rel=0.01)


def test_accelerates_schedule_advances_once_for_each_process() -> None:
    right, wrong = trained(None), trained("schedule_per_process")
    assert wrong["learning_rate"][:20] == right["learning_rate"][:40:2]
    assert wrong["held_out"][-1] != pytest.approx(right["held_out"][-1], rel=1e-4)


def test_without_set_epoch_every_epoch_repeats_the_first() -> None:
    right, wrong = trained(None), trained("no_set_epoch")
    steps_of_epoch = wrong_curves.ROWS // wrong_curves.GLOBAL_BATCH
    assert (right["different_batches"], wrong["different_batches"]) == (FEW, steps_of_epoch)
    assert wrong["loss"][:steps_of_epoch] == right["loss"][:steps_of_epoch]
    assert wrong["loss"][steps_of_epoch:] != right["loss"][steps_of_epoch:]


@pytest.mark.slow
def test_a_state_dict_under_zero3_is_empty() -> None:
    environment = launcher_environment(ROOT / "accelerate_configs/deepspeed_zero3.yaml", 2)
    found = run_everywhere(lambda: wrong_curves.train_and_export(FEW), 2, environment=environment)[0]
    assert found["elements"] == [wrong_curves.SYMBOLS**2, 0]
    assert len(set(found["wrong"])) == 1
    assert found["right"][-1] < found["wrong"][-1] - 0.2


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ring_and_tree_sum_in_the_rounds_and_bytes_of_their_formulas(world: int) -> None:
    size = 4 * 12  # bytes: divides by all these numbers

    def run() -> list[dict[str, Any]]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rows = all_reduce.measure((size,), repeats=1)  # which checks the sums
        dist.barrier()
        dist.destroy_process_group()
        return rows

    found = {row["algorithm"]: row for row in run_everywhere(run, world)[0]}
    assert found["ring"]["rounds"] == all_reduce.cost("ring", size, world)[0] == 2 * (world - 1)
    assert found["ring"]["bytes_sent"] == 2 * (world - 1) * size // world
    assert found["tree"]["rounds"] == all_reduce.cost("tree", size, world)[0]
    assert found["tree"]["bytes_sent"] == size * (world - 1).bit_length()


def test_the_fit_finds_latency_and_bandwidth_again() -> None:
    latency, bandwidth = 2e-5, 3e9
    rows = []
    for name in ("ring", "tree"):
        for num_bytes in all_reduce.SIZES:
            rounds, passed = all_reduce.cost(name, num_bytes, 8)
            rows.append(
                {"algorithm": name, "bytes": num_bytes, "fastest_seconds": rounds * latency + passed / bandwidth}
            )
    assert all_reduce.fit(rows, 8) == pytest.approx((latency, bandwidth))
    limit = all_reduce.break_even(latency, bandwidth, 8)
    times = {}
    for name in ("ring", "tree"):
        rounds, passed = all_reduce.cost(name, int(limit), 8)
        times[name] = rounds * latency + passed / bandwidth
    assert times["ring"] == pytest.approx(times["tree"], rel=1e-4)


def test_dataparallel_by_hand_takes_the_step_of_one_process() -> None:
    from concurrent.futures import ThreadPoolExecutor

    by_hand, plain = data_parallel.build(3, 8), data_parallel.build(3, 8)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert torch.allclose(data_parallel.data_parallel_step(*by_hand, pool), data_parallel.plain_step(*plain))
    for ours, theirs in zip(by_hand[0].parameters(), plain[0].parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_the_rings_of_the_picture_end_with_sums_everywhere() -> None:
    for world in (2, 3, 5):
        columns = [[10**rank * (part + 1) for part in range(world)] for rank in range(world)]
        rounds = draw.ring_rounds(columns)
        assert len(rounds) == 1 + 2 * (world - 1)
        assert rounds[-1][0] == [[sum(parts) for parts in zip(*columns, strict=True)]] * world


def test_the_pictures_are_drawn_from_their_data_and_are_svg(tmp_path: Path) -> None:
    for name in draw.DATA:
        (tmp_path / f"{name}.json").write_text((PICTURES / f"{name}.json").read_text())
        draw.draw_data(name, tmp_path)
    for language in draw.LANGUAGES:
        for diagram in draw.DIAGRAMS:
            diagram(tmp_path, language)
    drawn = {file.name: file.read_text() for file in tmp_path.glob("*.svg")}
    assert drawn == {file.name: file.read_text() for file in PICTURES.glob("*.svg")}, "run docs/course/code/draw.py"
    for name, text in drawn.items():
        root = ElementTree.fromstring(text)
        assert root.tag == f"{SVG}svg", name
        assert root.get("aria-label"), name
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        assert "prefers-color-scheme:dark" in text, name
        for element in root.iter():
            for x, y in (("x", "y"), ("cx", "cy")):
                assert 0 <= float(element.get(x, 0)) <= width, f"{name}: {element.attrib}"
                assert 0 <= float(element.get(y, 0)) <= height, f"{name}: {element.attrib}"
        shown = re.findall(r"\]\(pictures/([\w.-]+)\)", (COURSE / "theory.md").read_text())
        shown += re.findall(r"\]\(pictures/([\w.-]+)\)", (COURSE / "theory.zh-TW.md").read_text())
        assert name in shown, f"{name} is on no page"


def without_links(text: str) -> str:
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"<!--.*?-->", "", text))


def test_both_languages_have_the_same_commands_headings_and_numbers() -> None:
    english, chinese = PAGE.read_text(), (COURSE / "theory.zh-TW.md").read_text()
    assert blocks(PAGE) == blocks(COURSE / "theory.zh-TW.md")
    assert re.findall(r"^#+", english, re.MULTILINE) == re.findall(r"^#+", chinese, re.MULTILINE)
    images = [re.findall(r"\]\(pictures/([\w]+)[\w.-]*\.svg\)", text) for text in (english, chinese)]
    assert images[0] == images[1]
    sections = [re.split(r"^## ", text, flags=re.MULTILINE)[1:] for text in (english, chinese)]
    for ours, theirs in zip(*sections, strict=True):
        numbers = [sorted(re.findall(r"\d[\d,.]*\d|\d", without_links(text))) for text in (ours, theirs)]
        assert numbers[0] == numbers[1], ours.splitlines()[0]


def test_links_within_the_pages_lead_to_headings() -> None:
    for page in (PAGE, COURSE / "theory.zh-TW.md"):
        text = page.read_text()
        slugs = {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        }
        targets = re.findall(r"\]\(#([^)]+)\)", text)
        assert len(targets) == 13
        assert set(targets) <= slugs, set(targets) - slugs
