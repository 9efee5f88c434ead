"""Input from elsewhere is read and never run, a run stays inside its folder, and secrets stay hidden."""

from __future__ import annotations

import functools
import json
import os
import pickle
import pty
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from processes import ROOT, Launch, run_everywhere, run_training
from test_resume import metrics_of

from acc_lm import cli
from acc_lm.checkpointing import format
from acc_lm.cli.train import parse_train_arguments
from acc_lm.errors import ConfigError, DataError, UserError, print_problems
from acc_lm.redaction import redact, redact_words
from acc_lm.runtime.settings.config_file import read_config
from acc_lm.text import files
from acc_lm.text.documents import Skipped, text_in
from acc_lm.text.files import read_files

CANARY = "canary-4f1d9c27"
PICKLED = (
    "custom_checkpoint_0.pkl", "random_states_0.pkl", "optimizer.bin", "scheduler.bin", "sampler.bin", "scaler.pt", "training_args.bin",
    "pytorch_model.bin", ".metadata", "__0_0.distcp", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt",
    "data.npy", "tokenizer.pkl",
)  # fmt: skip


class Payload:
    """A payload: code that unpickles it, as pickle or as torch does, creates the file PWNED."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "PWNED"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.file), "w")

    def plant(self, folder: Path) -> None:
        for number, name in enumerate(PICKLED):
            if number % 2:
                torch.save(self, folder / name)
            else:
                (folder / name).write_bytes(pickle.dumps(self))
        folder.chmod(0o777)


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    return Payload(tmp_path)


@pytest.fixture(scope="module")
def finished_run(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps with checkpoints at 2 and 4."""
    run = tmp_path_factory.mktemp("finished") / "run"
    run_training(["--config", str(tiny_recipe), f"output_dir={run}", "training.max_steps=4", "checkpoint.keep_best=0"])
    return run


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run", symlinks=True))


def rewrite(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- nothing is executed -------------------------------------------------------------------------------------------


def test_code_planted_in_a_checkpoint_never_runs(run: Path, tiny: list[str], payload: Payload) -> None:
    pickle.loads(pickle.dumps(payload)).close()
    assert payload.file.exists(), "the payload must work, else nothing is shown"
    payload.file.unlink()
    for folder in (run / "checkpoints").glob("step-*"):
        payload.plant(folder)
    finished = run_training([*tiny, "training.max_steps=5"])
    assert "resumed from" in finished.output
    assert not payload.file.exists()


def test_a_checkpoint_whose_tensors_are_pickled_is_named_and_skipped(
    run: Path, tiny: list[str], payload: Payload
) -> None:
    folder = run / "checkpoints/step-00000004"
    (file,) = folder.glob("tensors-*")
    torch.save(payload, file)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][file.name] = {"size": file.stat().st_size, "xxh3_128": format.checksum(file)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    finished = run_training([*tiny, "training.max_steps=4"])
    assert f"{folder} was skipped: {file.name} is not a safetensors file" in finished.output
    assert "step-00000002 at step 2" in finished.output
    assert not payload.file.exists()


def test_code_planted_among_the_token_rows_never_runs(tiny: list[str], tmp_path: Path, payload: Payload) -> None:
    arguments = [*tiny, f"data.cache_dir={tmp_path / 'rows'}", "training.max_steps=2"]
    run_training([*arguments, f"output_dir={tmp_path / 'before'}"])
    (folder,) = (path.parent for path in (tmp_path / "rows").rglob("train.bin"))
    payload.plant(folder)
    payload.plant(folder / "tokenizer")
    (folder / "tokenizer/code.py").write_text(f"open({str(payload.file)!r}, 'w')\n")
    rewrite(folder / "tokenizer/tokenizer_config.json", auto_map={"AutoTokenizer": ["code.T", "code.T"]})
    facts = json.loads((folder / "facts.json").read_text())
    facts["files"]["tokenizer/tokenizer_config.json"] = (folder / "tokenizer/tokenizer_config.json").stat().st_size
    (folder / "facts.json").write_text(json.dumps(facts))
    run_training([*arguments, f"output_dir={tmp_path / 'after'}"])
    for damage in (pickle.dumps(payload), b"[]", b'{"files": 1}'):
        (folder / "facts.json").write_bytes(damage)
        run_training([*arguments, f"output_dir={tmp_path / 'again'}", "checkpoint.resume=auto"])
    assert metrics_of(tmp_path / "before") == metrics_of(tmp_path / "after")
    assert not payload.file.exists()


def test_code_planted_in_a_model_folder_never_runs(
    finished_run: Path, tiny: list[str], tmp_path: Path, payload: Payload
) -> None:
    model = Path(shutil.copytree(finished_run / "final", tmp_path / "model"))
    payload.plant(model)
    run_training([*tiny, "model.config=null", f"model.name_or_path={model}", "training.max_steps=2"])
    assert cli.main(["generate", str(model), "--max-new-tokens", "2"]) == 0
    (model / "code.py").write_text(f"open({str(payload.file)!r}, 'w')\n")
    with_code(model, payload)
    assert cli.main(["generate", str(model), "--max-new-tokens", "2"]) == 2
    assert not payload.file.exists()


def with_code(folder: Path, payload: Payload) -> None:
    """A custom model type, whose classes are in the folder."""
    rewrite(
        folder / "config.json",
        model_type="strange",
        auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    )


def tokenizer_with_code(folder: Path, payload: Payload) -> None:
    rewrite(
        folder / "tokenizer_config.json",
        tokenizer_class="Strange",
        auto_map={"AutoTokenizer": ["code.T", "code.T"]},
    )


def generation_with_code(folder: Path, payload: Payload) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate/generate.py").write_text(f"open({str(payload.file)!r}, 'w')\n")


def kernel_of_the_hub(folder: Path, payload: Payload) -> None:
    rewrite(folder / "config.json", attn_implementation="someone/attention")


def only_pickle(folder: Path, payload: Payload) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(payload, folder / "pytorch_model.bin")


def index_of_pickles(folder: Path, payload: Payload) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    torch.save(payload, folder / "shard.bin")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "shard.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


UNTRUSTED: dict[Callable[[Path, Payload], None], tuple[int, str]] = {
    with_code: (2, "read it, then set model.trust_remote_code=true"),
    tokenizer_with_code: (2, "must be a tokenizer without its own code, got"),
    generation_with_code: (0, ""),
    kernel_of_the_hub: (
        2,
        "got the attention 'someone/attention', which is code from the Hub; read it, then set model.",
    ),
    only_pickle: (2, "convert them (weights in pickle are not loaded)"),
    index_of_pickles: (2, "model.name_or_path must be"),
}


@pytest.mark.parametrize("terminal", [False, True], ids=["stdin closed", "at a terminal"])
@pytest.mark.parametrize("change", UNTRUSTED, ids=lambda change: change.__name__)
def test_no_code_of_a_model_folder_runs_and_no_question_is_asked(
    change: Callable[[Path, Payload], None],
    terminal: bool,
    finished_run: Path,
    tiny: list[str],
    tmp_path: Path,
    payload: Payload,
) -> None:
    model = Path(shutil.copytree(finished_run / "final", tmp_path / "model"))
    (model / "code.py").write_text(f"open({str(payload.file)!r}, 'w')\n")
    change(model, payload)
    code, says = UNTRUSTED[change]
    good_tokenizer = [f"tokenizer.name_or_path={finished_run / 'final'}"] if change is with_code else []
    arguments = [
        *tiny, "model.config=null", f"model.name_or_path={model}", *good_tokenizer, "training.max_steps=1", "schedule.warmup_steps=0",
        "export.sample_tokens=2",
    ]  # fmt: skip
    ours, theirs = pty.openpty()
    os.write(ours, b"y\nyes\n")  # a question would have been answered

    def train_there() -> int:
        import train

        if terminal:
            os.dup2(theirs, 0)
            sys.stdin = os.fdopen(0, closefd=False)
        else:
            os.close(0)
            sys.stdin = None  # type: ignore[assignment]
        sys.argv = ["train.py", *arguments]
        return train.main(arguments)

    finished = Launch(train_there).wait(60)
    os.close(ours)
    os.close(theirs)
    assert finished.code == code, finished.output
    assert not payload.file.exists()
    assert "[y/N]" not in finished.output
    assert len(finished.errors) == (code > 0)
    assert all(says in line for line in finished.errors)
    assert "Traceback" not in finished.output


def test_code_of_a_model_folder_runs_with_its_flag(
    finished_run: Path, tiny: list[str], tmp_path: Path, payload: Payload
) -> None:
    """The converse: the folder that was refused above does contain code that would run."""
    model = Path(shutil.copytree(finished_run / "final", tmp_path / "model"))
    (model / "code.py").write_text(f"open({str(payload.file)!r}, 'w')\n")
    with_code(model, payload)
    good_tokenizer = f"tokenizer.name_or_path={finished_run / 'final'}"
    trusting = ["model.config=null", f"model.name_or_path={model}", "model.trust_remote_code=true", good_tokenizer]
    run_training([*tiny, *trusting], environment={"HF_MODULES_CACHE": str(tmp_path / "modules")}, expect=2)
    assert payload.file.exists()


def test_yaml_that_calls_python_is_refused_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = f"!!python/object/apply:os.system ['touch {tmp_path / 'PWNED'}']"
    recipe, launch = tmp_path / "recipe.yaml", tmp_path / "launch.yaml"
    recipe.write_text(f"seed: 1\noutput_dir: {call}\n")
    launch.write_text(f"distributed_type: 'NO'\nnum_processes: 1\nmain_training_function: {call}\n")
    with pytest.raises(ConfigError, match=re.escape(f"{recipe}:2: must be YAML, got could not determine a")):
        parse_train_arguments([], recipe)
    with pytest.raises(ConfigError, match="command line: seed must have a YAML value, got"):
        parse_train_arguments([f"seed={call}"], ROOT / "recipes/quickstart.yaml")
    with pytest.raises(UserError, match=re.escape(f"{launch}:3: must be YAML, got could not determine a")):
        read_config(launch)
    assert cli.main(["doctor", "--config_file", str(launch)]) == 4
    assert f"error: {launch}:3: must be YAML" in capsys.readouterr().err
    assert not (tmp_path / "PWNED").exists()


def test_a_data_set_with_a_script_is_refused(tiny: list[str], tmp_path: Path, payload: Payload) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "corpus.py").write_text(f"open({str(payload.file)!r}, 'w')\n")
    (folder / "data.pkl").write_bytes(pickle.dumps(payload))
    for dataset in (folder, folder / "corpus.py", "https://example.com/corpus.py"):
        finished = run_training([*tiny, "data.source=hub", "data.files=[]", f"data.dataset={dataset}"], expect=3)
        assert "data.dataset must be a dataset that can be loaded" in finished.errors[0]
    assert not payload.file.exists()


def test_the_oldest_libraries_allowed_have_no_known_hole() -> None:
    """Holes through which a file or a template from elsewhere could run code or leave its folder; first version without each."""
    mended = {
        "torch": "2.10",  # weights_only=True could be circumvented
        "pyarrow": "14.0.1",  # extension types were unpickled from Arrow and Parquet files
        "jinja2": "3.1.6",  # chat templates could leave the sandbox
        "tqdm": "4.66.3",
        "transformers": "4.53",
        "deepspeed": "0.15.1",
    }
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    minimums = dict(re.findall(r"([\w.-]+)>=([\d.]+)", " ".join(lines)))
    for name, first in mended.items():
        assert Version(minimums[name]) >= Version(first), name
        assert Version(version(name)) >= Version(minimums[name]), name


def test_the_tested_releases_are_written_down_for_every_direct_dependency() -> None:
    """`make` installs these; torch is left out because the build depends on the machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if not line.startswith("#")}
    wanted = [Requirement(text) for text in [*project["dependencies"], *extras["dev"], *extras["metrics"]]]
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        if name in ("torch", "acc-lm"):
            assert name not in tested
        else:
            assert name in tested, name
            assert requirement.specifier.contains(tested[name]), f"{name} {tested[name]}"


# --- nothing leaves the folder of the run --------------------------------------------------------------------------


def in_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], None]:
    def apply(folder: Path, outside: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"] = change(manifest["files"]) or manifest["files"]
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return apply


def renamed(new: str) -> Callable[[Path, Path], None]:
    return in_manifest(
        lambda files: {new if name.startswith("tensors") else name: line for name, line in files.items()}
    )


def of_size(size: Any) -> Callable[[Path, Path], None]:
    return in_manifest(lambda files: {name: line | {"size": size} for name, line in files.items()})


def twice(folder: Path, outside: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"files": {', '"files": {"state.json": {"size": 1}, ', 1))


def by_link(name: str) -> Callable[[Path, Path], None]:
    def apply(folder: Path, outside: Path) -> None:
        file = folder / name
        file.rename(outside / name)
        file.symlink_to(outside / name)

    return apply


def stranger(folder: Path, outside: Path) -> None:
    shutil.copy(folder / TENSORS, folder / "tensors-00001-of-00001.safetensors")


TENSORS = "tensors-00000-of-00001.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "upwards": (renamed("../outside/tensors-00000-of-00001.safetensors"), r"manifest.json lists \['../outside/tens"),
    "absolute": (renamed("/etc/passwd"), r"manifest.json lists \['/etc/passwd'"),
    "huge": (of_size(10**30), r"tensors-.* has \d+ bytes instead of 1000000000000000000000000000000"),
    "no number": (of_size("\x1b[2J"), r"tensors-.* has \d+ bytes instead of '\\x1b\[2J'"),
    "twice": (twice, r"manifest.json cannot be read \('state.json' is in it twice"),
    "nested": (lambda f, _: (f / "manifest.json").write_text("[" * 100_000), "manifest.json cannot be read"),
    "longer than any": (
        lambda f, _: os.truncate(f / "manifest.json", 1 << 30),
        r"manifest.json .*\(manifest.json has 1073741824 bytes",
    ),
    "no mapping": (
        lambda f, _: (f / "manifest.json").write_text('{"format": 2, "step": 4, "files": 7}'),
        "manifest.json cannot be read",
    ),
    "tensors by a link": (by_link(TENSORS), f"'{TENSORS}' is a link to '.*/outside/"),
    "manifest by a link": (by_link("manifest.json"), "'manifest.json' is a link to '.*/outside/"),
    "a stranger": (stranger, r"manifest.json does not list \['tensors-00001-of-00001.safetensors'\]"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_manifest_that_points_outside_is_no_checkpoint(name: str, run: Path, tmp_path: Path) -> None:
    damage, reason = DAMAGES[name]
    folder, outside = run / "checkpoints/step-00000004", tmp_path / "outside"
    outside.mkdir()
    assert format.problem_with(folder) is None
    damage(folder, outside)
    assert re.match(reason, format.problem_with(folder) or "")
    found = format._find(run, "auto")
    assert found.checkpoint is not None
    assert found.checkpoint.progress.step == 2
    assert [path.name for path, _ in found.damaged] == ["step-00000004"]


def test_a_run_touches_nothing_outside_its_folder(run: Path, tiny: list[str], tmp_path: Path) -> None:
    """Complete checkpoints replaced by links: skipped when newest, and rotation removes the link only."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("step-00000002", "step-00000004"):
        (run / "checkpoints" / name).rename(outside / name)
    (run / "checkpoints/step-00000004").symlink_to(outside / "step-00000004")
    before = contents(outside)
    finished = run_training([*tiny, "training.max_steps=6"], expect=5)
    assert "step-00000004 must be a complete checkpoint, got: a link to '" in finished.errors[0]
    shutil.copytree(outside / "step-00000004", run / "checkpoints/step-00000005")
    (run / "checkpoints/step-00000002").symlink_to(outside / "step-00000002")
    run_training([*tiny, "training.max_steps=8", "checkpoint.keep_best=0"])
    assert contents(outside) == before
    assert not (run / "checkpoints/step-00000002").is_symlink(), "rotated"


@pytest.mark.parametrize("name", ["config.yaml", ".summary.json", "tokenizer", "final", "tmp-final"])
def test_a_link_in_the_folder_of_a_run_is_not_written_through(name: str, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "outside")
    finished = run_training(tiny, expect=2)
    assert finished.errors == [
        f"error: {tmp_path / 'run' / name} must be the run's own, got a link to '{tmp_path / 'outside'}'; remove it"
    ]
    assert not list((tmp_path / "outside").iterdir())


ONE_LINE = "must be one line without control characters"
PLACES = {
    **{f"{key}, {kind}": ([f'{key}="x{text}y"'], 2, f"{key} {ONE_LINE}")
       for key in ("output_dir", "tracking.run_name", "data.files", "data.cache_dir", "checkpoint.resume", "model.name_or_path")
       for kind, text in (("NUL", r"\0"), ("line break", r"\n"), ("terminal escape", r"\e[31m"))},
    "unknown home": (["output_dir=~nobody-here/x"], 2, "output_dir must start with the home folder of an existing user"),
    "project, upwards": (["tracking.project=../../outside"], 2, "tracking.project must be a name without /"),
    "project, the folder above": (["tracking.project=.."], 2, "tracking.project must be a name without /"),
    "run_name, long": ([f"tracking.run_name={'x' * 300}"], 2, "tracking.run_name must have 1 to 128 characters, as trackers require, got 300"),
    "output_dir, long": ([f"output_dir=BASE/{'x' * 300}"], 2, "output_dir must be a folder that can be written"),
    "resume, long": ([f"checkpoint.resume=BASE/{'x' * 300}"], 5, "checkpoint.resume must be a checkpoint folder"),
    "resume, unknown home": (["checkpoint.resume=~nobody-here/x"], 5, "checkpoint.resume must be a checkpoint folder"),
    "cache_dir, long": ([f"data.cache_dir=BASE/{'x' * 300}"], 3, "data.cache_dir must be a writable folder"),
    "files, long": ([f"data.files=BASE/{'x' * 300}"], 3, "data.files must name an existing file"),
    "files, far": (["data.files=https://127.0.0.1:9/x.jsonl"], 3, "data.files must name remote files that can be read"),
    "files, upwards": (["data.files=BASE/../nothing-there.txt"], 3, "data.files must name an existing file"),
    "model, long": (["model.config=null", f"model.name_or_path=BASE/{'x' * 300}"], 2, "model.name_or_path must"),
    "data set, long": (["data.source=hub", "data.files=[]", f"data.dataset=BASE/{'x' * 300}"], 3, "data.dataset must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_a_strange_path_or_name_is_one_line(name: str, tiny: list[str], tmp_path: Path) -> None:
    arguments, code, says = PLACES[name]
    arguments = [*tiny, *(argument.replace("BASE", str(tmp_path)) for argument in arguments)]
    if code == 2 and "long" not in name:
        with pytest.raises(ConfigError) as caught:
            parse_train_arguments(arguments, ROOT / "recipes/quickstart.yaml")
        assert f"command line: {says}" in caught.value.problems[0]
        return
    finished = run_training(arguments, expect=code)
    (line,) = finished.errors
    assert says in line
    assert "Traceback" not in finished.output


def test_paths_are_expanded(tiny: list[str], tmp_path: Path) -> None:
    """The home folder, `..`, and a name that a picture's title could take for a formula."""
    arguments = [*tiny, "output_dir=~/runs/nothing/../costs $\\foo$ 5", "training.max_steps=2"]
    run_training(arguments, environment={"HOME": str(tmp_path)})
    assert (tmp_path / "runs/costs $\\foo$ 5/summary.json").is_file()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["costs $\\foo$ 5"]


def test_an_endless_line_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "fine"}\n')
    os.truncate(file, 800_000_000)

    def read() -> tuple[str, int]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(DataError) as caught:
            list(read_files([file], text_in("text"), Skipped(0)))
        return str(caught.value), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    ((message, kilobytes),) = run_everywhere(read)
    assert message.startswith(f"{file}:2: must be a line of at most 100 MB, got a longer one")
    assert kilobytes < 400_000


def test_an_endless_csv_field_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 1000)
    file = tmp_path / "x.csv"
    file.write_text(f"text\nfine\n{'x' * 1001}\n")
    with pytest.raises(DataError, match=re.escape(f"{file}:3: must be CSV, got: field larger than")):
        list(read_files([file], text_in("text"), Skipped(0)))


# --- secrets stay unseen, and nothing acts on a reader -------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (f"tracking.api_key={CANARY}", "must not be in a recipe"),
        (f"hf_token={CANARY}", "must not be in a recipe"),
        (f"WANDB_API_KEY={CANARY}", "must not be in a recipe"),
        (f"data.password={CANARY}", "must not be in a recipe"),
        (f"schedule.arguments.client_secret={CANARY}", "must not be in a recipe"),
        (f"tracking.wandb={{access_key: {CANARY}}}", "must not be in a recipe"),
        (f"data.dataset=https://user:{CANARY}@host/set", "must not hold a login in a URL"),
        (f"data.files=[s3://{CANARY}@bucket/x.jsonl]", "must not hold a login in a URL"),
        (f"tracking.api_key={{{CANARY}", "must "),
        (f"--hf-token={CANARY}", "got '--hf-token=***'"),
    ],
)
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(
    argument: str, says: str, tiny: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = [ROOT / "recipes/quickstart.yaml"]
    if not argument.startswith("--"):
        key, _, value = argument.partition("=")
        *sections, last = key.split(".")
        text = f"{last}: {value}"
        for section in reversed(sections):
            text = f"{section}: {{{text}}}"
        (tmp_path / "recipe.yaml").write_text(f"{text}\n")
        files.append(tmp_path / "recipe.yaml")
    for file, arguments in zip(files, ([argument], []), strict=False):
        with pytest.raises(ConfigError) as caught:
            parse_train_arguments(arguments, file)
        print_problems(caught.value)
        shown = capsys.readouterr().err
        assert says in shown
        assert CANARY not in shown


SECRETS = {
    "WANDB_API_KEY": f"{CANARY}-wandb-{'k' * 27}",
    "HF_TOKEN": f"hf_{CANARY}",
    "HTTPS_PROXY": f"http://someone:{CANARY}-proxy@127.0.0.1:9",
    "MIRROR_PASSWORD": f"{CANARY}-mirror",
}


@pytest.mark.parametrize("crash", [False, True], ids=["completed", "crashed"])
def test_secrets_of_the_environment_reach_no_file_and_no_line(
    crash: bool, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import acc_lm.training

    if crash:
        monkeypatch.setattr(acc_lm.training.step, "to_device", lambda *_: 1 / 0)
    words = ["--api-key", CANARY, f"export WANDB_API_KEY={CANARY}; accelerate launch", f"http://u:{CANARY}@host/"]
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", *words])
    monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
    places = {
        "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path), "WANDB_MODE": "offline", "ACCELERATE_MIXED_PRECISION": "no",
    }  # fmt: skip
    arguments = [*tiny, "tracking.report_to=[wandb, tensorboard]", "training.max_steps=2"]
    try:
        finished = run_training(arguments, environment=SECRETS | places, expect=int(crash))
    finally:
        launcher.kill()
        launcher.wait()
    command = json.loads((tmp_path / "run/environment.json").read_text())["launch_command"]
    assert command[-4:] == ["--api-key", "***", "export WANDB_API_KEY=*** accelerate launch", "http://***@host/"]
    assert (tmp_path / "run/summary.json").is_file()
    assert list((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert CANARY not in finished.output
    assert [name for name, content in contents(tmp_path).items() if CANARY.encode() in content] == []


def test_an_error_that_contains_a_secret_is_printed_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from acc_lm.run_files.summary import write_failure

    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    text = f"no answer through {SECRETS['HTTPS_PROXY']} with {SECRETS['HF_TOKEN']} and {CANARY}-proxy, token={CANARY}x"
    print_problems(DataError(text))
    write_failure(str(tmp_path), "data_error", 3, text)
    shown = capsys.readouterr().err + (tmp_path / "summary.json").read_text()
    assert CANARY not in shown
    assert shown.count("no answer through http://***@127.0.0.1:9 with *** and ***, token=***") == 2
    assert redact_words(["--num_machines", "2", "--aws_secret_access_key", CANARY]) == [
        "--num_machines", "2", "--aws_secret_access_key", "***",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("from https://user:p@ss@host/x?a=b", "from https://***@host/x?a=b"),
        ("s3://AKIA:key@bucket", "s3://***@bucket"),
        ("password: abc, user: x", "password: *** user: x"),
        ('{"api_key": "abc", "size": 3}', '{"api_key": "***", "size": 3}'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        (f"hf_{'a1' * 9} is not valid", "*** is not valid"),
        ("tokens: 12; the end token must be one; mail a@b.c of https://host/x", None),
    ],
)
def test_only_what_looks_like_a_secret_is_hidden(text: str, shown: str | None) -> None:
    assert redact(text) == (text if shown is None else shown)


def test_terminal_escapes_are_spelt_out(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import acc_lm.reporting.console

    escape = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
    (tmp_path / f"{escape}\nerror: fake.jsonl").write_bytes(b"")
    finished = run_training([*tiny, f"data.files={tmp_path}/*.jsonl"], expect=3)
    (line,) = finished.errors
    assert r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\nerror: fake.jsonl must hold text" in line
    monkeypatch.setattr(acc_lm.reporting.console, "sample_text", lambda *_, **__: f"{escape}one\n\ttwo ü日🙂")
    finished = run_training([*tiny, "export.sample_tokens=2", "training.max_steps=2"])
    assert "one\n\ttwo ü日🙂" in finished.output
    assert not set(finished.output) & set("\x1b\x07\x9b\u202e")


def test_a_list_of_checkpoints_shows_their_content_as_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newer = (run / "checkpoints" / name for name in ("step-00000002", "step-00000004"))
    rewrite(older / "state.json", mixed_precision="\x1b[2J", eval_loss="\x1b[2J")
    (older / "away").symlink_to("nowhere")
    (newer / "state.json").write_text("[1]")
    assert cli.main(["checkpoint", "list", str(run)]) == 0
    shown = capsys.readouterr().out
    assert r"\x1b[2J" in shown
    assert "'away' is a link to 'nowhere'" in shown
    assert "\x1b" not in shown


def test_a_model_card_shows_names_and_runs_none(tiny: list[str], tmp_path: Path, words: list[str]) -> None:
    name = "<img src=x onerror=alert(1)> [a](b) **_x_** `c` & ---"
    (tmp_path / "`](b)<script>.txt").write_text("\n".join(words))
    arguments = [
        *tiny, f"output_dir='{tmp_path / name}'", "data.files='BASE/`](b)<script>.txt'".replace("BASE", str(tmp_path)),
        'export.sample_prompt="a```\\n# Owned\\n</code><script> ' + f'{"x" * 120} ``` {"x" * 120}"', "training.max_steps=2",
    ]  # fmt: skip
    run_training(arguments)
    card = (tmp_path / name / "final/README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert re.findall(r"^(\S+):", front, re.MULTILINE) == ["library_name", "pipeline_tag", "tags", "model-index"]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", body, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks] == ["python", "yaml"]
    assert len(re.findall(r"^ *```", body, re.MULTILINE)) == 4
    outside = functools.reduce(lambda text, block: text.replace(block[1], ""), blocks, body)
    assert not re.search(r"<|\]\(|&(?!\s)|^# Owned", outside, re.MULTILINE)
    assert "\n# " in outside
    assert not re.search(r"(?<!\\)[*_]", next(line for line in outside.splitlines() if line.startswith("# ")))
