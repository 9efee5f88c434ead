"""`acc-lm checkpoint`: work with a checkpoint without the run that wrote it."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from processes import ROOT, launcher_environment, run_training

from acc_lm.checkpointing.format import checksum
from acc_lm.cli import main
from acc_lm.run_files.names import MANIFEST

KINDS = {"single": 1, "fsdp2": 2, "deepspeed_zero1": 2, "deepspeed_zero3": 2}
DAMAGES = ("missing", "empty", "truncated", "flipped", "of another step")


@pytest.fixture(scope="module")
def runs(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return finished_runs(tiny_recipe, tmp_path_factory.mktemp("runs"))


def finished_runs(recipe: Path, folder: Path) -> dict[str, Path]:
    """The tiny recipe, finished, by one process and by engines that shard tensors differently."""
    for config, count in KINDS.items():
        environment = (
            {} if config == "single" else launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", count)
        )
        arguments = ["--config", str(recipe), "training.micro_batch_size=6", f"output_dir={folder / config}"]
        run_training(arguments, count, environment)
    return {config: folder / config for config in KINDS}


@pytest.mark.parametrize("config", ["single", "fsdp2", "deepspeed_zero1", "deepspeed_zero3"])
def test_a_checkpoint_of_any_engine_becomes_the_model_that_the_run_exported(
    config: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    latest = runs[config] / "checkpoints/latest"
    assert main(["checkpoint", "convert-to-hf", str(latest), str(tmp_path / "model")]) == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "model", use_safetensors=True).state_dict()
    final = AutoModelForCausalLM.from_pretrained(runs[config] / "final", use_safetensors=True).state_dict()
    assert ours.keys() == final.keys()
    assert all(torch.equal(ours[name], final[name]) for name in final)
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")("red tree")["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(runs[config] / "final")("red tree")["input_ids"]
    assert main(["checkpoint", "export", str(latest), str(tmp_path / "all.safetensors")]) == 0
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "all.safetensors")
    assert {name.split("/")[0] for name in tensors} == {"param", "exp_avg", "exp_avg_sq"}
    assert all(
        torch.equal(tensors[f"param/{name}"], weight) for name, weight in final.items() if f"param/{name}" in tensors
    )
    assert tensors["param/lm_head.weight"].shape == tensors["exp_avg/lm_head.weight"].shape


def test_a_converted_folder_is_the_exported_one_and_nothing_near_it_is_touched(
    runs: dict[str, Path], tiny_recipe: Path, tmp_path: Path
) -> None:
    base, run, model = tmp_path / "base", tmp_path / "run", tmp_path / "model"
    shutil.copytree(runs["single"] / "final", base)
    settings = json.loads((base / "generation_config.json").read_text())
    settings |= {"eos_token_id": [0, 5], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (base / "generation_config.json").write_text(json.dumps(settings))
    run_training(["--config", str(tiny_recipe), "model.config=null", f"model.name_or_path={base}", f"output_dir={run}"])
    (tmp_path / "tmp-model").mkdir()
    (tmp_path / "tmp-model/thesis.txt").write_text("mine")
    before = {path.name for path in tmp_path.iterdir()}
    assert main(["checkpoint", "convert-to-hf", str(run / "checkpoints/latest"), str(model)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == before | {"model"}
    assert (tmp_path / "tmp-model/thesis.txt").read_text() == "mine"
    assert model.stat().st_mode == run.stat().st_mode
    final = {file.name: file.read_bytes() for file in (run / "final").iterdir() if file.name != "README.md"}
    steps = json.loads(final.pop("run.json"))
    assert steps.pop("card"), "of a card that a converted folder has not"
    assert json.loads((model / "run.json").read_text()) == steps
    assert {file.name: file.read_bytes() for file in model.iterdir() if file.name != "run.json"} == final
    assert json.loads(final["generation_config.json"])["eos_token_id"] == [0, 5]


@pytest.mark.parametrize("full", [True, False])
def test_a_file_of_all_tensors_is_complete_or_absent(
    full: bool,
    runs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import safetensors.torch

    output = tmp_path / "new/all.safetensors"
    seen = []

    def save_file(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        seen.append(output.exists())
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    latest = str(runs["single"] / "checkpoints/latest")
    assert main(["checkpoint", "export", latest, str(output)]) == (8 if full else 0)
    assert seen == [False]
    assert [path.name for path in output.parent.iterdir()] == ([] if full else ["all.safetensors"])
    says = f"error: {output} must be writable, got: No space left on device; free some space"
    assert (says in capsys.readouterr().err) == full


@pytest.mark.parametrize("action", ["export", "convert-to-hf"])
def test_an_output_that_cannot_be_new_is_refused_in_one_line(
    action: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link is the user's, wherever it leads, and a file has no folders in it."""
    latest, link, file = str(runs["single"] / "checkpoints/latest"), tmp_path / "a.safetensors", tmp_path / "file"
    link.symlink_to(tmp_path / "unmounted")
    file.touch()
    assert main(["checkpoint", action, latest, str(link)]) == 2
    assert main(["checkpoint", action, latest, str(file / "b.safetensors")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: OUTPUT must be a new f")
    assert link.is_symlink()
    assert second == (
        f"error: {file}/b.safetensors must be in a folder that can be written, got: File exists; choose another path"
    )


@pytest.mark.parametrize(
    ("moved", "says"), [(0, "pieces that overlap at element 0"), (257, "a gap at element 256")], ids=["overlap", "gap"]
)
def test_pieces_that_do_not_fit_together_are_no_checkpoint(
    moved: int, says: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However the lengths add up, and whatever the manifest says."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    run, name = tmp_path / "run", "model.layers.0.mlp.up_proj.weight"
    shutil.copytree(runs["fsdp2"], run, symlinks=True)
    folder = run / "checkpoints/step-00000006"
    file = folder / "tensors-00001-of-00002.safetensors"
    with safe_open(file, "pt") as opened:
        pieces = json.loads(opened.metadata()["pieces"])
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no mapping
    assert pieces["starts"][name] == tensors[f"param/{name}"].numel() == 256
    pieces["starts"][name] = moved
    save_file(tensors, file, {"pieces": json.dumps(pieces)})
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][file.name] = {"size": file.stat().st_size, "xxh3_128": checksum(file)}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    for arguments in (["verify", str(folder)], ["convert-to-hf", str(folder), str(tmp_path / "model")]):
        assert main(["checkpoint", *arguments]) == 5
        assert f"{name} once, got {says}" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_list_and_verify_name_what_is_damaged(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["fsdp2"], run, symlinks=True)
    newest = run / "checkpoints/step-00000006"
    assert main(["checkpoint", "verify", str(newest)]) == 0
    assert "is intact: step 6, 63 tensors" in capsys.readouterr().out
    file = newest / "tensors-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["checkpoint", "list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert "2 processes, no" in lines[-1]
    assert f"{file.name} does not match its checksum" in lines[-1]
    assert lines[-2].split("  ")[-1].strip().endswith(("intact", "intact, the best"))
    for arguments in (["verify", str(newest)], ["export", str(newest), str(tmp_path / "x.safetensors")],
                      ["convert-to-hf", str(newest), str(tmp_path / "x")]):  # fmt: skip
        assert main(["checkpoint", *arguments]) == 5
        assert f"{file.name} does not match its checksum" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def damage(file: Path, how: str, other: Path) -> None:
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
        return
    if how == "empty":
        content = bytearray()
    elif how == "truncated":
        del content[len(content) // 2 :]
    elif how == "flipped":
        content[len(content) // 3] ^= 1
    elif how == "of another step":
        content = bytearray((other / file.name).read_bytes())
    file.write_bytes(content)


def damage_everything(whole: Path, folder: Path) -> int:
    """Apply each damage to each file of a run's newest checkpoint: it must be named, and the previous one found; returns how many.

    Tests the search itself; test_checkpoint.py shows that a run starts from its result.
    """
    from acc_lm.checkpointing.format import _find

    files = sorted(path.name for path in (whole / "checkpoints/step-00000006").iterdir())
    for how in DAMAGES:
        for name in files:
            run = folder / f"{how}-{name}"
            shutil.copytree(whole / "checkpoints", run / "checkpoints", symlinks=True)
            steps = sorted(path for path in (run / "checkpoints").glob("step-*") if not path.is_symlink())
            newest, before = steps[-1], steps[-2]
            damage(newest / name, how, before)
            found = _find(run, "auto")
            assert found.checkpoint is not None
            assert found.checkpoint.folder == before.resolve(), (how, name)
            ((folder_found, problem),) = found.damaged
            assert folder_found == newest
            # A manifest of another step makes the first file that it lists look wrong.
            is_named = name in problem or (name == "manifest.json" and how in ("flipped", "of another step"))
            assert is_named, (how, name, problem)
    return len(DAMAGES) * len(files)


@pytest.mark.parametrize("config", KINDS)
def test_every_damage_to_every_file_is_named_and_the_previous_checkpoint_is_used(
    config: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    assert damage_everything(runs[config], tmp_path) == 5 * (3 if config == "single" else 4)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["list", "nowhere"], 5, "nowhere must hold checkpoints, got none"),
        (["verify", "nowhere"], 5, "no such folder"),
        (["export", "LATEST", "there.bin"], 2, "must be a new file that ends in .safetensors"),
        (["convert-to-hf", "LATEST", "."], 2, "OUTPUT must be a new folder"),
    ],
)
def test_bad_arguments_get_one_line(
    arguments: list[str], code: int, says: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    latest = str(runs["single"] / "checkpoints/latest")
    assert main(["checkpoint", *[latest if word == "LATEST" else word for word in arguments]]) == code
    assert says in capsys.readouterr().err


def test_an_older_checkpoint_cannot_be_converted_and_says_so(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from acc_lm.cli import checkpoint

    run = tmp_path / "run"
    shutil.copytree(runs["single"], run, symlinks=True)
    file = run / "checkpoints/step-00000006/state.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "model_config"}))
    monkeypatch.setattr(checkpoint, "_whole", lambda folder: None)  # its checksum is not the subject here
    assert main(["checkpoint", "convert-to-hf", str(file.parent), str(tmp_path / "model")]) == 5
    assert "must describe its model, got no model_config in its state.json" in capsys.readouterr().err


def test_a_checkpoint_that_was_moved_needs_a_tokenizer(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "elsewhere/step-00000006"
    shutil.copytree(runs["single"] / "checkpoints/step-00000006", moved)
    assert main(["checkpoint", "convert-to-hf", str(moved), str(tmp_path / "model")]) == 2
    assert "pass its folder as --tokenizer" in capsys.readouterr().err
    tokenizer = str(runs["single"] / "final")
    assert main(["checkpoint", "convert-to-hf", str(moved), str(tmp_path / "model"), "--tokenizer", tokenizer]) == 0
    assert json.loads((tmp_path / "model/config.json").read_text())["hidden_size"] == 16


@pytest.mark.parametrize("content", ["[]", "", '{"added_tokens": 1}', "null"])
def test_a_damaged_tokenizer_is_one_line_of_every_verb_that_reads_one(
    content: str, runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["single"], run, symlinks=True)
    for folder in (run / "tokenizer", run / "final"):
        (folder / "tokenizer.json").write_text(content)
    latest, model = str(run / "checkpoints/latest"), str(tmp_path / "model")
    for code, place, arguments in (
        (5, run / "tokenizer", ["checkpoint", "convert-to-hf", latest, model]),
        (2, run / "final", ["checkpoint", "convert-to-hf", latest, model, "--tokenizer", str(run / "final")]),
        (2, run / "final", ["generate", str(run / "final"), "--prompt", "red"]),
    ):
        assert main(arguments) == code
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert str(place) in line
    assert not Path(model).exists()
