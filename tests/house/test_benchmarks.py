"""Benchmarks: they run, compare only equal computations, and void what a noisy machine measured. No time is asserted here."""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, run_everywhere

from benchmarks import contenders, cpu, gpu, report, ring
from benchmarks.contenders import Job

ROW = {"id", "what", "contender", "median", "unit", "ratio", "low", "high", "goal", "met", "higher_is_better", "note"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    model = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 8,
             "activation_function": "gelu_pytorch_tanh", **cpu.NO_DROPOUT}  # fmt: skip
    job = Job("job", tmp_path_factory.mktemp("job"), model, 8, 2, 65, 40)
    ring.in_a_process(job.prepare, job.folder / "prepare")
    return job


def race(job: Job, folder: Path, runs: dict[str, Any], **how: Any) -> ring.Race:
    all_runs = {"bare loop": lambda: contenders.bare(job, default=True), **runs}
    return ring.race(all_runs, folder, steps=2, rounds=2, reference="bare loop", tolerance=1e-4, **how)


def test_a_small_suite_runs_and_its_page_says_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PEERS", raising=False)
    chosen = ["C1", "C4", "C5", "C9", "C12"]
    file = cpu.suite(cpu.TOY, chosen, tmp_path)
    result = json.loads(file.read_text())
    assert file.name == f"cpu-{result['date']}-{result['commit']}.json"
    assert result["failed"] == {}
    assert (result["schema"], result["complete"]) == (1, False)
    assert {row["id"] for row in result["figures"]} == {*chosen, "C6"}
    assert all(set(row) == ROW for row in result["figures"])
    char = result["races"]["char"]
    assert char["failed"] == {}
    assert {"ours", "bare loop", "bare loop, tuned", "Trainer", "Trainer, tuned", "ours again"} <= set(char["samples"])
    assert all(len(samples) == cpu.TOY.rounds for samples in char["samples"].values())
    assert max(max(check.values()) for check in char["checks"].values()) < 1e-4, "all compute the same"
    assert {"nanoGPT", "run_clm_no_trainer"} <= set(char["absent"])
    assert set(result["races"]["ddp"]["samples"]) == {"ours", "bare loop", "bare loop, tuned", "ours again"}
    report.write_page(tmp_path, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert page.count("\n| C") == len(result["figures"])
    assert "nanoGPT (char, absent): no folder nanoGPT in PEERS" in page
    assert page.split("## On a CPU\n\n")[1].startswith("**Absent: nanoGPT, ")
    assert ("**Void**" in page) == result["void"]


def test_the_figures_of_saves_starts_and_a_busy_machine_are_measured(tmp_path: Path) -> None:
    result = json.loads(cpu.suite(cpu.TOY, ["C8", "C14", "C15"], tmp_path).read_text())
    assert result["failed"] == {}
    found = {(row["id"], row["what"], row["contender"]) for row in result["figures"]}
    assert len(found) == len(result["figures"])
    for name in ("ours", "torch.save", "safetensors", "torch.distributed.checkpoint"):
        assert ("C8", "CPU time of a checkpoint per GB of weights and moments", name) in found
    for when in ("on a quiet machine", "next to 1 busy programs"):
        for name in ("ours", "Trainer"):
            assert ("C15", f"wall time of a step {when}", name) in found
    assert all(len(samples) == 2 for samples in result["samples"]["C15"]["on a quiet machine"].values())
    assert ("C14", "CPU time to the first batch of 1,000,000 rows", "ours") in found


def test_the_page_names_the_peers_that_took_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = tmp_path / "nanoGPT"
    clone.mkdir()
    (clone / "train.py").write_text("")
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setenv("PEERS", str(tmp_path))
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert report.peer_commits() == {"nanoGPT": commit}
    result = {
        "kind": "cpu",
        "peers": report.peers(),
        "peer_commits": report.peer_commits(),
        "versions": {"lightning": "2.6"},
    }
    result["peers"]["litgpt"] = None
    (line, _) = report._line_of_peers(result)
    assert line == (
        f"**Absent: litgpt, run_clm_no_trainer.** Peers, by commit, version or hash: nanoGPT {commit[:7]}, Lightning 2.6."
    )


def test_a_peer_that_computes_something_else_or_dies_is_listed_and_not_timed(job: Job, tmp_path: Path) -> None:
    def other_rate() -> None:
        contenders.LEARNING_RATE = 2e-3
        contenders.bare(job)

    def dies() -> None:
        raise ValueError("no such thing")

    def leaves() -> None:
        job_of_six = Job(**{**vars(job), "num_steps": 6})
        contenders.np.save(job.folder / "rows.npy", job_of_six.rows[:6])
        contenders.bare(job_of_six)

    whole = (job.folder / "rows.npy").read_bytes()
    lines: list[str] = []
    found = race(job, tmp_path, {"tuned": lambda: contenders.bare(job), "other rate": other_rate, "dies": dies, "leaves": leaves},
                 say=lines.append, together=1)  # fmt: skip
    (job.folder / "rows.npy").write_bytes(whole)
    assert set(found.samples) == {"bare loop", "tuned"}
    assert "losses differ by" in found.failed["other rate"]
    assert found.failed["dies"] == "ValueError: no such thing"
    assert found.failed["leaves"].startswith("ended by itself after 6 steps")
    assert len(lines) == 3


def test_when_the_time_is_up_no_race_or_round_begins_and_results_so_far_count(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = {"tuned": lambda: contenders.bare(job)}
    late = race(job, tmp_path / "late", tuned, deadline=time.monotonic() + ring.LEAST_SECONDS - 1)
    assert late.samples == {}
    assert late.failed["bare loop"] == ring.NOT_REACHED

    class Clock:  # each call takes a second
        now = 0.0

        def monotonic(self) -> float:
            self.now += 1
            return self.now

        def __getattr__(self, name: str) -> Any:
            return getattr(time, name)

    monkeypatch.setattr(ring, "time", Clock())
    lines: list[str] = []
    found = ring.race({"bare loop": lambda: contenders.bare(job), **tuned}, tmp_path / "cut", steps=1, rounds=30, reference="bare loop",
                      tolerance=1e-4, deadline=80.0, say=lines.append)  # fmt: skip
    assert found.failed == {}
    counts = {len(samples) for samples in found.samples.values()}
    assert len(counts) == 1
    assert 1 <= counts.pop() < 30
    assert lines[0].endswith("rounds of 30: the time was up")


def test_a_command_of_the_gpu_suite_without_time_lists_what_it_did_not_reach(tmp_path: Path) -> None:
    file = gpu.command("llama", gpu.TOY, tmp_path, seconds=0)
    result = json.loads(file.read_text())
    assert result["figures"] == []
    assert result["samples"]["llama"]["failed"]["bare loop at 8"] == ring.NOT_REACHED
    report.write_page(tmp_path, tmp_path / "page.md")
    assert f"bare loop at 8 (llama, failed): {ring.NOT_REACHED}" in (tmp_path / "page.md").read_text()


def test_every_technique_that_a_rung_adds_can_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`without` and the ladder know the same techniques, and a removed one is really gone."""
    import gc

    from acc_lm.modeling import losses
    from acc_lm.training import run as ours_run
    from acc_lm.training import step

    kept = gc.freeze, losses.padded_vocabulary, ours_run.build_loader, step.to_device

    def run() -> list[bool]:
        contenders.without("vocabulary", "transfer")
        now = gc.freeze, losses.padded_vocabulary, ours_run.build_loader, step.to_device
        return [mine is not its for mine, its in zip(kept, now, strict=True)]

    assert run_everywhere(run)[0] == [True] * 4
    assert math.prod(len(name) > 0 for name in gpu.LADDER)


def test_ours_is_train_py_itself_with_the_batches_of_all_peers(job: Job, tmp_path: Path) -> None:
    found = race(job, tmp_path, {"ours": lambda: contenders.ours(job), "bf16": lambda: contenders.ours(job, "training.mixed_precision=bf16")},
                 tolerances={"bf16": ring.TOLERANCE["bf16"]})  # fmt: skip
    assert found.failed == {}
    assert found.checks["ours"]["losses"] < 1e-5
    assert found.checks["bf16"]["norms"] > found.checks["ours"]["norms"]
    assert len(found.values("ours", "cpu")) == 2
    log = (tmp_path / "ours/output").read_text()
    assert log.startswith("strategy      single, 1 process"), "train.py says what it runs"


def test_a_run_whose_two_copies_of_ours_differ_in_speed_is_void() -> None:
    def timed(a: list[float], b: list[float]) -> ring.Race:
        return ring.Race({"ours": [{"cpu": s} for s in a], "ours again": [{"cpu": s} for s in b]}, {}, {}, {})

    why, noise = ring.why_void(timed([1.0, 1.01, 1.02], [1.0, 1.01, 1.02]), 0.02)
    assert (why, noise) == (None, (1.0, 1.0, 1.0))
    why, noise = ring.why_void(timed([1.1, 1.05, 1.06], [1.0, 1.01, 1.02]), 0.02)
    assert why == "ours took 1.050 times as long as ours again, allowed 0.98 to 1.02"
    gone = ring.Race({"ours": [{"cpu": 1.0}]}, {"ours again": "died: Killed"}, {}, {})
    assert ring.why_void(gone, 0.02) == ("ours again failed, died: Killed", None)


def test_a_ratio_is_of_medians_with_an_interval_over_rounds() -> None:
    ours, theirs = [1.0, 1.1, 0.9, 1.0, 5.0], [2.0, 2.2, 1.8, 2.0, 10.0]
    ratio, low, high = ring.ratio_of_medians(ours, theirs)
    assert (ratio, low, high) == (0.5, pytest.approx(0.5), pytest.approx(0.5)), "a slow round is slow for both"
    ratio, low, high = ring.ratio_of_medians([1.0, 1.1, 0.9], [2.0, 2.0, 2.0])
    assert low < ratio == 0.5 < high
    row = ring.figure("X", "what", "peer", ours=ours, theirs=theirs, unit="ms", scale=1e3, goal=ring.Goal(at_most=0.97))
    assert (row["median"], row["goal"], row["met"]) == (2000.0, "ratio at most 0.97", True)
    row = ring.figure("X", "what", "ours", ours=ours, unit="s", goal=ring.Goal("median", at_least=2.0))
    assert (row["median"], row["ratio"], row["met"]) == (1.0, None, False)


def test_the_page_shows_the_newest_complete_run_and_a_void_one_only_alone(tmp_path: Path) -> None:
    def put(commit: str, **values: Any) -> None:
        result = {
            "kind": "cpu",
            "date": "2026-01-01",
            "time": "00:00:00",
            "commit": commit,
            "complete": True,
            "void": False,
            **values,
        }
        report.write(result, tmp_path)

    put("a", void=True)
    assert report.newest(tmp_path, "cpu")["commit"] == "a"  # type: ignore[index]
    put("b")
    put("c", date="2026-01-02", complete=False)
    put("d", date="2026-01-03", void=True)
    assert report.newest(tmp_path, "cpu")["commit"] == "b"  # type: ignore[index]
    put("e", time="00:00:01")
    assert report.newest(tmp_path, "cpu")["commit"] == "e"  # type: ignore[index]
    assert report.newest(tmp_path, "gpu") is None


@pytest.mark.parametrize("void_again", [False, True])
def test_a_race_whose_control_failed_is_run_again_alongside_the_others(void_again: bool, tmp_path: Path) -> None:
    def row(id: str, median: float) -> dict[str, Any]:
        return {"id": id, "median": median}

    def result(races: list[str], suites: list[str], rows: list[dict[str, Any]], void: list[str]) -> dict[str, Any]:
        return {
            **report.header("cpu"), "complete": True, "figures": rows, "races": {key: {} for key in races}, "samples": {}, "failed": {},
            "seconds_of": dict.fromkeys(suites, 60.0), "void_because": void, "void": bool(void),
        }  # fmt: skip

    whole = result(
        ["char", "tiny"], ["C1", "C3"], [row("C1", 1.0), row("C3", 2.0), row("C4", 3.0)], ["tiny: noisy", "char: noisy"]
    )
    report.write(whole, tmp_path)
    why = ["tiny: still noisy"] if void_again else []
    both = report.merge_results(result(["tiny"], ["C3"], [row("C3", 5.0)], why), tmp_path)
    assert both["figures"] == [row("C1", 1.0), row("C3", 5.0), row("C4", 3.0)], "in their order"
    assert both["void_because"] == ["char: noisy", *why], "what was not run again stays void"
    assert both["again"] == ["tiny: noisy"]
    assert (set(both["races"]), both["seconds"]) == ({"char", "tiny"}, 120.0)


def test_the_page_is_made_from_the_results_that_are_committed(tmp_path: Path) -> None:
    report.write_page(report.RESULTS, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs/measured/benchmarks.md").read_text(), (
        "python -m benchmarks.report docs/measured/benchmarks.md"
    )


@pytest.mark.slow
def test_the_three_commands_for_a_gpu_run_here_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEERS", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpu.shutil, "rmtree", lambda *_, **__: None)
    files = {gpu.command(name, gpu.TOY, tmp_path) for name in ("ceilings", "gpt2", "llama")}
    assert len(files) == 1, "all write into one file"
    result = json.loads(files.pop().read_text())
    assert result["failed"] == {}
    assert set(result["seconds_of"]) == {"ceilings", "gpt2", "llama"}
    assert result["complete"] is False, "toy sizes are no measurement"
    assert {row["id"] for row in result["figures"]} == {"G0", "G1", "G2", "G3"}
    assert all(set(row) == ROW for row in result["figures"])
    logs = {log.parent.name: log.read_text() for log in tmp_path.glob("acc-lm-bench-*/ladder/ladder/*/output")}
    for number, (name, adds) in enumerate(gpu.LADDER.items()):
        log = logs["".join(c if c.isalnum() else "-" for c in name)]
        assert ("strategy      fsdp2, 1 process" in log) == (adds == "sharded"), "it is what its name says"
        assert ("attention: causal, no mask" in log) == (number >= 1)
        assert ("loss: fused with the head" in log) == (number >= list(gpu.LADDER.values()).index("loss"))
        compiled = {"compile": "as a whole", "sharded": "block by block"}.get(adds, "as a whole")
        is_compiled = number >= list(gpu.LADDER.values()).index("compile")
        assert (f"compiled by eager, {compiled}" in log) == is_compiled
        assert "bfloat16" in log
    assert len(logs) == len(gpu.LADDER)
    for name, expected in (
        ("ladder", 10),
        ("gpt2", 7),
        ("gpt2 accumulated", 2),
        ("llama 8", 2),
        ("llama 8, ours again", 2),
        ("llama 8, Trainer, tuned", 2),
    ):
        others = {"Lightning, tuned"} & set(result["races"][name]["samples"])
        assert {"pinned" in name for name in result["races"]["ladder"]["samples"]} == {True, False}
        assert result["races"][name]["failed"] == {}
        assert len(result["races"][name]["samples"]) == expected + len(others)
    assert result["samples"]["largest micro-batch"]["reached"] == {"ours": 2.0, "Trainer": 2.0}
    report.write_page(tmp_path, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text().count("\n| G") == len(result["figures"])


def test_flops_of_a_token_are_those_of_the_known_models() -> None:
    """nanoGPT's convention: 0.855 GFLOP for GPT-2 124M at 1024, 8.22 and 10.64 for Llama-3.2-1B at 2048 and 8192."""
    sizes = gpu.Sizes()
    shapes = (sizes.gpt2, *sizes.llamas)
    assert [shape.flops(causal=False) / 1e9 for shape in shapes] == pytest.approx([0.855, 8.22, 10.64], rel=1e-3)
    assert sizes.gpt2.flops(causal=False) - sizes.gpt2.flops(causal=True) == 6 * 12 * 768 * 1024
