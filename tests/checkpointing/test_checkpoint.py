"""A checkpoint is complete or absent; a damaged one is named and skipped; one that belongs to something else is refused."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import ROOT, launcher_environment, run_everywhere, run_training, start_training
from test_resume import different, tensors_of, wait_for

from acc_lm.checkpointing import resuming, rotation
from acc_lm.checkpointing.format import FORMAT, Checkpoint, problem_with
from acc_lm.config import TokenizerConfig
from acc_lm.config.loading import load_config
from acc_lm.errors import CheckpointError, ConfigError
from acc_lm.run_files.metrics_file import read
from acc_lm.run_files.names import MANIFEST, STATE
from acc_lm.run_files.summary import write_failure
from acc_lm.text.tokenizer import make_tokenizer

TENSORS = "tensors-00000-of-00001.safetensors"


@pytest.fixture(scope="module")
def finished_run(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints at 2, 4 and 6."""
    run = tmp_path_factory.mktemp("finished") / "run"
    run_training(
        ["--config", str(tiny_recipe), f"output_dir={run}", "checkpoint.keep_last=null", "checkpoint.keep_best=0"]
    )
    assert steps_of(run) == [2, 4, 6]
    return run


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run", symlinks=True))


def steps_of(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000006"


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-10]),
    "flipped": flip_a_byte,
    "swapped": lambda file: shutil.copy(file.parent.parent / "step-00000004" / file.name, file),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [TENSORS, STATE, MANIFEST])
def test_a_damaged_newest_checkpoint_is_named_and_the_previous_one_is_used(
    name: str, damage: str, run: Path, tiny: list[str]
) -> None:
    DAMAGES[damage](newest(run) / name)
    if (name, damage) == (MANIFEST, "flipped"):
        assert json.dumps(json.loads((newest(run) / STATE).read_text()))  # the state itself is fine
    finished = run_training(tiny)
    assert f"{newest(run)} was skipped: " in finished.output
    assert "resumed from" in finished.output
    assert "at step 4" in finished.output
    assert (run / "checkpoints/aside-step-00000006").is_dir(), "set aside, not deleted"
    assert (run / "checkpoints/step-00000006" / MANIFEST).is_file(), "and written again"


def test_verification_by_size_detects_only_truncation_and_changed_headers(run: Path, tiny: list[str]) -> None:
    """`checkpoint.verify=size` reads no tensor: a changed byte in one is loaded, a truncated file or a changed header is not."""
    by_size, tensors = [*tiny, "checkpoint.verify=size"], newest(run) / TENSORS
    written = tensors.read_bytes()
    header = 8 + int.from_bytes(written[:8], "little")
    # The lowest bits of the last number.
    tensors.write_bytes(written[:-4] + bytes([written[-4] ^ 1]) + written[-3:])
    assert "step-00000006 at step 6 (checked by size in 0." in run_training(by_size).output
    assert (
        "does not match its checksum"
        in run_training([*tiny, f"checkpoint.resume={tensors.parent}"], expect=5).errors[0]
    )
    cases = {
        "tensors-00000-of-00001.safetensors has": written[:-1],
        "is not a safetensors file": written[:20] + b"}" + written[21:],
    }
    for says, data in cases.items():
        tensors.write_bytes(data)
        finished = run_training([*by_size, f"checkpoint.resume={tensors.parent}"], expect=5)
        assert says in finished.errors[0]
    tensors.write_bytes(written[:header].replace(b'"pieces"', b'"piecez"') + written[header:])
    finished = run_training(by_size, expect=5)
    (line,) = finished.errors
    assert f"{tensors} must hold pieces of tensors, got: 'pieces'; remove it, or set checkpoint.verify=full" in line
    tensors.write_bytes(written)
    flip_a_byte(tensors.parent / STATE)
    assert "state.json does not match its checksum" in run_training(by_size).output


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_a_checkpoint_of_several_processes_needs_all_of_its_parts(damage: str, tiny: list[str], tmp_path: Path) -> None:
    run_training([*tiny, "training.micro_batch_size=6"], num_processes=2)
    run = tmp_path / "run"
    parts = sorted(file.name for file in newest(run).glob("tensors-*"))
    assert parts == ["tensors-00000-of-00002.safetensors", "tensors-00001-of-00002.safetensors"]
    DAMAGES[damage](newest(run) / parts[1])
    finished = run_training(tiny)
    assert f"{newest(run)} was skipped: {parts[1]} " in finished.output
    assert "at step 4" in finished.output


def test_a_manifest_that_leaves_a_part_out_is_refused(tiny: list[str], tmp_path: Path) -> None:
    run_training([*tiny, "training.micro_batch_size=6"], num_processes=2)
    manifest = json.loads((newest(tmp_path / "run") / MANIFEST).read_text())
    del manifest["files"]["tensors-00001-of-00002.safetensors"]
    (newest(tmp_path / "run") / MANIFEST).write_text(json.dumps(manifest))
    assert "was skipped: manifest.json lists ['state.json', 'tensors-00000-of-00002" in run_training(tiny).output


def pieces_in(folder: Path) -> dict[str, torch.Tensor]:
    """kind/name -> the full tensor, flat, from the pieces of all processes: each element once, none left out."""
    from safetensors import safe_open

    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("tensors-*.safetensors")):
        with safe_open(path, "pt") as file:
            starts, shapes = json.loads(file.metadata()["pieces"]).values()
            for key in file.keys():  # noqa: SIM118 - no mapping
                parts.setdefault(key, []).append((starts[key.partition("/")[2]], file.get_tensor(key)))
    wholes = {}
    for key, pieces in parts.items():
        pieces.sort(key=lambda piece: piece[0])
        end = 0
        for start, tensor in pieces:
            assert start == end, f"{key}: a piece begins at {start}, the one before it ends at {end}"
            end += tensor.numel()
        assert end == math.prod(shapes[key.partition("/")[2]]), key
        wholes[key] = torch.cat([tensor for _, tensor in pieces])
    assert {key.partition("/")[2] for key in wholes} == set(shapes)
    assert {key.partition("/")[0] for key in wholes} == {"param", "exp_avg", "exp_avg_sq"}
    return wholes


@pytest.mark.parametrize(
    ("config", "num_processes"),
    [
        ("ddp", 3), ("fsdp2", 3), ("hsdp", 4), ("deepspeed_zero2", 3), ("deepspeed_zero3", 3),
        *(pytest.param(*other, marks=pytest.mark.slow)
          for other in [("ddp", 2), ("fsdp2", 2), ("deepspeed_zero1", 2), ("deepspeed_zero3", 2)]),
    ],
)  # fmt: skip
def test_every_engine_saves_bit_for_bit_what_it_loaded(
    config: str, num_processes: int, run: Path, tiny: list[str], tmp_path: Path
) -> None:
    """Weights and moments of one process, loaded and saved again by other engines before any step, then loaded by one process."""

    def again() -> None:
        from acc_lm import runtime
        from acc_lm.checkpointing import loading
        from acc_lm.checkpointing.format import open_checkpoint
        from acc_lm.checkpointing.saving import save_checkpoint
        from acc_lm.config.loading import load_config
        from acc_lm.modeling.build import build_empty_model, build_model
        from acc_lm.optimization.optimizer import build_optimizer
        from acc_lm.text.tokenizer import make_tokenizer

        recipe = load_config(run / "config.yaml", ["training.micro_batch_size=1"])
        found = open_checkpoint(newest(run))
        accelerator = runtime.build_accelerator(recipe)
        tokenizer = make_tokenizer(recipe.tokenizer, [])
        model, _ = runtime.initialise_once(
            accelerator,
            lambda: build_model(recipe.model, tokenizer, 32, seed=99),  # other weights than were saved
            lambda facts: build_empty_model(recipe.model, tokenizer, 32, facts),
        )
        model, optimizer = runtime.prepare(accelerator, model, build_optimizer(model, recipe.optimizer))
        progress = loading.load_checkpoint(accelerator, found, model, optimizer)
        saved = save_checkpoint(accelerator, tmp_path / "again", model, optimizer, progress, recipe, "")
        assert open_checkpoint(saved).state["num_updates"] == found.state["num_updates"] == 6

    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", num_processes)
    run_everywhere(again, num_processes, environment=environment)
    saved = newest(tmp_path / "again")
    assert len(list(saved.glob("tensors-*"))) == num_processes
    before, after = pieces_in(newest(run)), pieces_in(saved)
    assert before.keys() == after.keys()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    assert any(tensor.any() for key, tensor in after.items() if key.startswith("exp_avg_sq/"))
    sizes = [file.stat().st_size for file in saved.glob("tensors-*")]
    assert max(sizes) < 2 * min(sizes), "every process writes its share"


def test_when_all_are_damaged_nothing_is_deleted_and_no_run_starts(run: Path, tiny: list[str]) -> None:
    for step in steps_of(run):
        flip_a_byte(run / f"checkpoints/step-{step:08d}" / TENSORS)
    before = sorted(str(path) for path in run.rglob("*"))
    finished = run_training(tiny, expect=5)
    assert len(finished.errors) == 4
    assert all("does not match its checksum" in line for line in finished.errors[:3])
    assert "nothing was deleted; choose another output_dir" in finished.errors[3]
    assert sorted(str(path) for path in run.rglob("*")) == before
    assert json.loads((run / "summary.json").read_text())["status"] == "checkpoint_error"


@pytest.mark.parametrize(("number", "age"), [(99, "newer"), (1, "older")])
def test_a_checkpoint_of_another_format_is_named(number: int, age: str, run: Path, tiny: list[str]) -> None:
    manifest = json.loads((newest(run) / MANIFEST).read_text())
    (newest(run) / MANIFEST).write_text(json.dumps(manifest | {"format": number}))
    finished = run_training([*tiny, f"checkpoint.resume={newest(run)}"], expect=5)
    assert f"it has format {number}, {age} than the {FORMAT} that this version reads" in finished.errors[0]


def test_leftovers_of_a_killed_save_are_removed(run: Path, tiny: list[str]) -> None:
    (run / "checkpoints/tmp-step-00000008").mkdir()
    (run / "checkpoints/tmp-step-00000008" / TENSORS).write_bytes(b"half")
    run_training(tiny)
    assert not list((run / "checkpoints").glob("tmp-*"))


def test_foreign_content_in_the_place_of_a_checkpoint_is_kept(run: Path, tiny: list[str]) -> None:
    for number, place in enumerate((run / "checkpoints/step-00000004", run / "checkpoints/step-00000006")):
        shutil.rmtree(place, ignore_errors=True)
        if number:
            place.symlink_to("somewhere")
        else:
            place.write_text("mine")
    run_training(tiny)
    assert (run / "checkpoints/aside-step-00000004").read_text() == "mine"
    assert (run / "checkpoints/aside-step-00000006").readlink() == Path("somewhere")
    assert (run / "checkpoints/step-00000006/manifest.json").is_file()


def test_resume_never_refuses_a_folder_with_checkpoints(run: Path, tiny: list[str]) -> None:
    finished = run_training([*tiny, "checkpoint.resume=never"], expect=2)
    assert (
        "which holds checkpoints up to step 6, got never; choose another output_dir, or checkpoint.resume=auto"
        in finished.errors[0]
    )


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nowhere", "no such folder"),
        ("run/final", "an exported model, not a checkpoint"),
        ("run", "the folder of a run; its newest checkpoint is"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_refused(
    target: str, says: str, run: Path, tiny: list[str], tmp_path: Path
) -> None:
    finished = run_training(
        [*tiny, f"output_dir={tmp_path / 'other'}", f"checkpoint.resume={tmp_path / target}"], expect=5
    )
    assert says in finished.errors[0]


def test_a_path_starts_another_run_from_there(run: Path, tiny: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    run_training([*tiny, f"output_dir={other}", f"checkpoint.resume={run}/checkpoints/step-00000004"])
    assert different(tensors_of(other, 6), tensors_of(run, 6)) == []
    assert json.loads((other / "summary.json").read_text())["resumed_from"] == str(run / "checkpoints/step-00000004")


def test_resuming_from_a_path_again_continues_the_run_that_it_started(
    run: Path, tiny: list[str], tmp_path: Path
) -> None:
    """Also when the path is a link that points elsewhere by then, or the former target of that link."""
    other, link = tmp_path / "other", tmp_path / "best"
    link.symlink_to(run / "checkpoints/step-00000002")
    command = [*tiny, f"output_dir={other}", f"checkpoint.resume={link}"]
    run_training([*command, "training.max_steps=8"])
    link.unlink()
    link.symlink_to(run / "checkpoints/step-00000006")
    again = run_training([*command, "training.max_steps=10"])
    assert f"resumed from {other}/checkpoints/step-00000008 at step 8" in again.output
    path = f"checkpoint.resume={run}/checkpoints/step-00000002"
    assert "step-00000010 at step 10" in run_training([*command, "training.max_steps=10", path]).output
    assert not list((other / "checkpoints").glob("aside-*"))


def test_a_rewound_run_moves_its_old_course_aside(run: Path, tiny: list[str]) -> None:
    """Including its record, and a file that a user has put into final/."""
    record = (run / "metrics.jsonl").read_text()
    (run / "final/thesis.txt").write_text("the only copy")
    finished = run_training([*tiny, f"checkpoint.resume={run}/checkpoints/step-00000002"])
    assert "at step 2" in finished.output
    assert (run / "aside-metrics.jsonl").read_text() == record
    assert (run / "aside-final/thesis.txt").read_text() == "the only copy"
    assert not (run / "final/thesis.txt").exists()
    assert {path.name for path in (run / "checkpoints").glob("aside-*")} == {
        "aside-step-00000004",
        "aside-step-00000006",
    }


def test_an_edited_card_outlives_the_command_run_again(run: Path, tiny: list[str]) -> None:
    """A recipe that changes the card gets its new one, and the edited one stays next to it."""
    run_training(tiny)
    card = run / "final/README.md"
    written = card.read_text()
    card.write_text(edited := written + "Mine.\n")
    for _ in range(2):
        assert "already complete" in run_training(tiny).output
        assert card.read_text() == edited
    again = run_training([*tiny, "export.license=mit"])
    assert f"{card} had been edited, and is kept as {run}/aside-README.md" in again.output
    assert "license: mit" in card.read_text()
    assert "Mine." not in card.read_text()
    assert (run / "aside-README.md").read_text() == edited
    run_training(tiny)
    assert card.read_text() == written
    assert [path.name for path in run.glob("aside-*")] == ["aside-README.md"]


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_finished_run_that_lost_its_checkpoints_does_not_start_over(run: Path, tiny: list[str]) -> None:
    """It would overwrite its own record and model; also after an error in between, and with another recipe."""
    shutil.rmtree(run / "checkpoints")
    write_failure(str(run), "data_error", 3, "no text", True)
    before = contents(run)
    finished = run_training([*tiny, "training.micro_batch_size=6"], 2)
    assert f"already complete: step 6, exported to {run}/final" in finished.output
    after = contents(run)
    assert after.pop(str(run / "train.log")) != before.pop(str(run / "train.log")), "it says so there, too"
    assert after == before

    def start(*overrides: str) -> str | None:
        return resuming._already_complete(run, load_config(Path(tiny[1]), [tiny[2], *overrides]))

    with pytest.raises(CheckpointError) as refused:
        start("training.max_steps=8")
    assert refused.value.problems == (
        f"{run}/final was made by another recipe: training.max_steps was 6, is 8",
        f"it has no checkpoint to resume from; choose another output_dir (output_dir={run}-2), or remove {run}/final to "
        "start from scratch",
    )
    with pytest.raises(CheckpointError, match="seed was 7, is 8"):
        start("seed=8")
    recipe = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(recipe.replace("chat_template_date: null", "chat_template_date: '2026-07-26'"))
    assert (run / "config.yaml").read_text() != recipe
    assert "already complete" in str(start()), "the date of a chat is that of the run"
    with pytest.raises(CheckpointError, match=r"checkpoint\.resume was 'auto', is '/elsewhere'"):
        start("checkpoint.resume=/elsewhere")
    with pytest.raises(ConfigError, match=r"checkpoint\.resume must be auto for .* holds a finished run, got never"):
        start("checkpoint.resume=never")
    (run / "summary.json").write_text("{}")
    with pytest.raises(CheckpointError, match="must belong to a known run, got one without checkpoints"):
        start()
    shutil.rmtree(run / "final")
    assert start() is None


def test_damaged_records_stop_neither_a_run_nor_the_record_of_its_failure(run: Path, tiny: list[str]) -> None:
    """Records damaged as by a power cut; folders named STOP and SAVE request nothing."""
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\x00\x00\xff\xfe\x00\n1\n[2]\n{}\n" + b'{"step": "x"}\n{"step": 6, "train/loss": "low"}\n')
    for values in ('{"attempt": "x"}', "[" * 100_000, "\xff\xfe"):
        (run / "summary.json").write_bytes(values.encode("latin-1"))
        write_failure(str(run), "data_error", 3, "no text", True)
        assert json.loads((run / "summary.json").read_text())["status"] == "data_error"
    (run / "STOP").mkdir()
    (run / "SAVE").mkdir()
    before = [entry["step"] for entry in read(run)]
    run_training([*tiny, "training.max_steps=8"])
    assert [entry["step"] for entry in read(run)] == [*before, 8, 8]
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"


def test_another_precision_is_another_recipe(run: Path, tiny: list[str]) -> None:
    finished = run_training(tiny, environment={"ACCELERATE_MIXED_PRECISION": "bf16"}, expect=5)
    assert finished.errors[0].endswith("training.mixed_precision was 'no', is 'bf16'")


def test_a_changed_number_of_processes_is_reported(run: Path, tiny: list[str]) -> None:
    finished = run_training([*tiny, "training.max_steps=8", "training.micro_batch_size=6"], num_processes=2)
    assert "the checkpoint was written by 1 process, now 2: the same rows and rates" in finished.output


def test_a_diverged_run_is_not_saved_and_exits_6(tiny: list[str], tmp_path: Path) -> None:
    huge = [
        "optimizer.learning_rate=1e30",
        "optimizer.max_grad_norm=null",
        "schedule.warmup_steps=4",
        "training.max_steps=40",
    ]
    finished = run_training([*tiny, *huge, "training.log_every=1"], expect=6)
    (line,) = finished.errors
    assert "the gradient must be finite, got 3 of 3 tolerated non-finite steps in a row, in step" in line
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "diverged"
    for step in steps_of(tmp_path / "run"):
        from safetensors.torch import load_file

        tensors = load_file(tmp_path / "run" / f"checkpoints/step-{step:08d}" / TENSORS)
        assert all(tensor.isfinite().all() for name, tensor in tensors.items() if name.startswith("param/")), step


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("optimizer.learning_rate=5e-4", "optimizer.learning_rate was 0.001, is 0.0005"),
        ("training.global_batch_size=24", "training.global_batch_size was 12, is 24"),
        ("training.max_steps=5", "training.max_steps was 6, is 5"),
        ("seed=8", "seed was 7, is 8"),
    ],
)
def test_another_recipe_is_refused_and_both_ways_out_are_named(
    change: str, line: str, run: Path, tiny: list[str]
) -> None:
    finished = run_training([*tiny, change], expect=5)
    assert len(finished.errors) == 2
    assert finished.errors[0].endswith(line)
    assert f"output_dir={run}-2" in finished.errors[1]
    assert "checkpoint.allow_changed_recipe=true" in finished.errors[1]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "checkpoint_error"
    assert summary["bits_per_byte"], "what the run reached is still there"


def test_a_run_with_an_allowed_change_resumes_and_says_so(run: Path, tiny: list[str]) -> None:
    finished = run_training(
        [*tiny, "optimizer.learning_rate=5e-4", "training.max_steps=8", "checkpoint.allow_changed_recipe=true"]
    )
    assert "recipe changed, as checkpoint.allow_changed_recipe permits: optimizer.learning_rate" in finished.output
    assert json.loads((run / "summary.json").read_text())["step"] == 8


@pytest.mark.parametrize("change", ["model.config.hidden_size=32", "tokenizer.kind=char"])
def test_another_shape_or_tokenizer_cannot_be_allowed(change: str, run: Path, tiny: list[str]) -> None:
    finished = run_training([*tiny, change, "checkpoint.allow_changed_recipe=true"], expect=5)
    assert "allow_changed_recipe" not in finished.errors[-1]


def test_other_text_under_the_same_name_is_refused(run: Path, tiny: list[str], text_file: Path) -> None:
    original = text_file.read_text()
    try:
        text_file.write_text(original + json.dumps({"text": "one more document " * 20}) + "\n")
        finished = run_training(tiny, expect=5)
        assert "must have been trained on this text, got other text" in finished.errors[0]
    finally:
        text_file.write_text(original)


def test_text_tokenizer_and_base_are_identified_by_content_wherever_they_are(
    finished_run: Path, tiny: list[str], text_file: Path, tmp_path: Path
) -> None:
    """On another machine all paths differ; other weights are another base, reported in one line."""
    for name in ("here", "there", "changed"):
        shutil.copytree(finished_run / "final", tmp_path / name)
    shutil.copy(text_file, tmp_path / "there")
    flip_a_byte(tmp_path / "changed/model.safetensors")
    here = [f"model.name_or_path={tmp_path}/here", f"tokenizer.name_or_path={tmp_path}/here"]
    run_training([*tiny, "model.config=null", *here, "training.max_steps=2"])
    there = [word.replace("/here", "/there") for word in here]
    there.append(f"data.files={tmp_path}/there/{text_file.name}")
    moved = run_training([*tiny, "model.config=null", *there, "training.max_steps=3"])
    assert "step-00000002 at step 2" in moved.output
    changed = [*here, f"model.name_or_path={tmp_path}/changed"]
    refused = run_training([*tiny, "model.config=null", *changed, "training.max_steps=4"], expect=5)
    (line,) = refused.errors
    assert (
        f"step-00000003 must have started from the base model at {tmp_path}/changed, got one that started from other"
        in line
    )


def test_ids_that_stand_for_other_tokens_cannot_be_allowed(tiny: list[str], tmp_path: Path) -> None:
    """Such as the ids of a tokenizer trained on the text, when the text is another one."""
    config = load_config(Path(tiny[1]), [tiny[2], "checkpoint.allow_changed_recipe=true"])
    old, new = (make_tokenizer(TokenizerConfig(kind="char"), [text]) for text in ("abc", "abd"))
    checkpoint = Checkpoint(tmp_path, {"data_key": "x", **resuming.origin_of(old, "")})
    resuming.check_same_origin(checkpoint, config, "y", resuming.origin_of(old, ""))
    with pytest.raises(
        CheckpointError, match="trained with this tokenizer, got one in which ids stand for other tokens"
    ):
        resuming.check_same_origin(checkpoint, config, "y", resuming.origin_of(new, ""))


def test_newest_and_best_are_kept_and_known(tiny: list[str], tmp_path: Path) -> None:
    arguments = [
        *tiny,
        "training.max_steps=12",
        "checkpoint.every=1",
        "training.eval_every=3",
        "checkpoint.keep_last=2",
        "optimizer.learning_rate=1e-2",
    ]
    run_training(arguments)
    run = tmp_path / "run"
    losses = {
        e["step"]: e["eval/loss"]
        for e in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if "eval/loss" in e
    }
    best = min(losses, key=losses.__getitem__)
    assert steps_of(run) == sorted({11, 12, best})
    assert os.readlink(run / "checkpoints/latest") == "step-00000012"
    assert os.readlink(run / "checkpoints/best") == f"step-{best:08d}"
    summary = json.loads((run / "summary.json").read_text())
    assert Path(summary["last_checkpoint"]).name == "step-00000012"
    assert Path(summary["best_checkpoint"]).name == f"step-{best:08d}"
    assert summary["eval_loss"]["best_step"] == best


def test_a_run_that_was_copied_without_its_links_resumes(finished_run: Path, tiny: list[str], tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    assert (run / "checkpoints/latest/manifest.json").is_file()
    assert not (run / "checkpoints/latest").is_symlink()
    run_training([*tiny, "training.max_steps=8", "checkpoint.keep_last=null"])
    assert os.readlink(run / "checkpoints/latest") == "step-00000008"
    assert steps_of(run) == [2, 4, 6, 8]
    best = run / "checkpoints/best"
    if best.is_symlink():
        best.unlink()
    shutil.copytree(run / "checkpoints/step-00000008", best, dirs_exist_ok=True)
    rotation._link_best(run / "checkpoints", "eval/of_nothing/loss")
    assert not best.exists(), "nothing is the best by what was never measured"


def test_a_good_evaluation_is_saved_even_when_no_save_is_due(tiny: list[str], tmp_path: Path) -> None:
    run_training([*tiny, "checkpoint.every=null", "training.eval_every=2", "optimizer.learning_rate=1e-2"])
    losses = [
        e["eval/loss"]
        for e in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        if "eval/loss" in e
    ]
    assert losses == sorted(losses, reverse=True), "each evaluation was the best so far"
    assert steps_of(tmp_path / "run") == [4, 6], "the newest two, 6 being the best"


def test_rotation_orders_by_step_number_and_counts_best_separately(tmp_path: Path) -> None:
    from acc_lm.checkpointing.rotation import rotate
    from acc_lm.config import CheckpointConfig

    losses = {1: 2.0, 2: 1.0, 3: 3.0, 4: math.nan, 5: 1.5, 6: None}
    for step, loss in losses.items():
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        (folder / STATE).write_text(json.dumps({"eval_loss": loss}))
        (folder / MANIFEST).touch()
        os.utime(folder, (1000 - step, 1000 - step))
    rotate(tmp_path, CheckpointConfig(keep_last=2, keep_best=2))
    assert sorted(path.name[-1] for path in tmp_path.glob("step-*")) == ["2", "5", "6"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_is_exit_code_8_and_older_checkpoints_are_intact(
    tiny: list[str], small_disk: Path
) -> None:
    run = small_disk / "run"
    launch = start_training(
        [*tiny, f"output_dir={run}", "checkpoint.every=1", "training.max_steps=400", "training.eval_every=null"]
    )
    wait_for(run / "checkpoints/step-00000003" / MANIFEST)
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    finished = launch.wait()
    assert finished.code == 8, finished.output
    (line,) = finished.errors
    assert "must have room for a checkpoint, got: No space left on device (0 MiB free" in line
    assert not list((run / "checkpoints").glob("tmp-*"))
    assert steps_of(run)
    assert [problem_with(run / f"checkpoints/step-{step:08d}") for step in steps_of(run)] == [None] * len(steps_of(run))
    (small_disk / "filler").unlink()
    more = [*tiny, f"output_dir={run}", "training.max_steps=400", "checkpoint.every=null", "training.eval_every=null"]
    assert "resumed from" in run_training(more).output


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(tiny: list[str], small_disk: Path) -> None:
    big = ["model.config.hidden_size=256", "model.config.intermediate_size=512"]
    finished = run_training([*tiny, *big, f"output_dir={small_disk / 'run'}"], expect=8)
    (line,) = finished.errors
    assert "must have room for 4 checkpoints of" in line
    assert "lower checkpoint.keep_last or keep_best" in line
    assert "step 1/" not in finished.output


def test_the_optimizer_state_is_restored_exactly_and_its_absence_is_detected() -> None:
    """Negative control of every resume test: without a moment or the step count the next weights differ."""

    def run() -> dict[str, float]:
        from test_step import RaggedRows, make_config, make_model

        from acc_lm.runtime import Gradients, build_accelerator
        from acc_lm.training.step import train_step

        accelerator = build_accelerator(make_config(4, 4))

        def steps(forget: str | None) -> torch.Tensor:
            model = make_model("llama", "float32")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            gradients = Gradients(accelerator, model)
            for step in range(1, 7):
                if step == 4 and forget:
                    for state in optimizer.state.values():
                        state[forget].zero_()
                train_step(accelerator, model, optimizer, [RaggedRows(set()).__getitems__([step, 2, 3, 9])], step=step, seed=0,
                           num_targets=40, max_grad_norm=1.0, gradients=gradients)  # fmt: skip
            return torch.cat([p.detach().flatten() for p in model.parameters()])

        whole = steps(None)
        return {key: float((steps(key) - whole).abs().max()) for key in ("step", "exp_avg", "exp_avg_sq")}

    (differences,) = run_everywhere(run)
    assert all(difference > 1e-4 for difference in differences.values()), differences


def test_a_buffer_without_dimensions_is_restored(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from acc_lm.checkpointing.loading import load_checkpoint, read_tensors
    from acc_lm.progress import Progress

    weights = {f"{kind}/weight": torch.full((2,), 2.0) for kind in ("param", "exp_avg", "exp_avg_sq")}
    pieces = json.dumps({"shapes": {"weight": [1, 2]}, "starts": {"weight": 0}})
    tensors = {**weights, "buffer/scale": torch.tensor(3.0)}
    save_file(tensors, tmp_path / "tensors-0.safetensors", {"pieces": pieces})
    read = dict(read_tensors(tmp_path))["buffer/scale"]
    assert (read.shape, read.item()) == ((), 3.0)
    model = torch.nn.Linear(2, 1, bias=False)
    model.register_buffer("scale", torch.tensor(1.0))
    state = {"num_updates": 1, "progress": asdict(Progress()), "loss_scaler": None}
    accelerator: Any = SimpleNamespace(num_processes=1, scaler=None)
    load_checkpoint(accelerator, Checkpoint(tmp_path, state), model, torch.optim.AdamW(model.parameters()))
    assert (model.scale.item(), model.weight.tolist()) == (3.0, [[2.0, 2.0]])
