"""Push to the Hub, against a stand-in of its HTTP interface: private, complete or not at all, and never the end of a run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import TOKEN, HubServer, hub_server
from processes import Launch, run_training

from acc_lm.cli import main
from acc_lm.config.loading import load_config, shareable_recipe
from acc_lm.export import card as cards
from acc_lm.export import hub

Push = Callable[..., tuple[int, str]]


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub_server() as running:
        yield running


@pytest.fixture(scope="module")
def final(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """final/ of a run with a license, launched with a config file that names a machine."""
    run = tmp_path_factory.mktemp("pushed") / "run"
    config = run.parent / "config.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmain_process_ip: 10.1.2.3\nmixed_precision: 'no'\n"
    )
    options = [
        "--config",
        str(tiny_recipe),
        f"output_dir={run}",
        "export.license=apache-2.0",
        "export.sample_prompt=/etc is",
    ]
    run_training(options, environment={"ACC_LM_CONFIG_FILE": str(config)})
    return run / "final"


def talk_to(server: HubServer, home: Path, change: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let huggingface_hub talk to the stand-in; it has read its environment before. Xet's protocol has no stand-in."""
    import huggingface_hub.constants as constants

    for name, value in {"ENDPOINT": server.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True,
                        "HF_TOKEN_PATH": str(home / "token"), "HF_STORED_TOKENS_PATH": str(home / "tokens"),
                        "HF_HUB_CACHE": str(home),
                        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}"}.items():  # fmt: skip
        change(constants, name, value)


@pytest.fixture
def push(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Push:
    """`acc-lm push` with these words; its exit code and output."""
    talk_to(server, tmp_path, monkeypatch.setattr)

    def run(*words: str, token: str | None = TOKEN) -> tuple[int, str]:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        code = main(["push", *words])
        shown = "".join(capsys.readouterr())
        assert token is None or token not in shown
        return code, shown

    return run


def test_a_folder_is_pushed_private_and_its_card_read_back(server: HubServer, final: Path, push: Push) -> None:
    from huggingface_hub import ModelCard

    code, said = push(str(final), "me/model")
    assert (code, said.splitlines()[0]) == (0, f"pushed {final} to {server.url}/me/model (private)"), said
    assert server.private == {"me/model": True}
    assert server.files["me/model"] == {path.name: path.read_bytes() for path in final.iterdir()}
    assert server.large, "weights go as a large file"
    data = ModelCard.load("me/model", token=TOKEN).data
    results = {result.metric_type: result.metric_value for result in data.eval_results}
    assert (data.license, data.library_name, data.model_name) == ("apache-2.0", "transformers", "run")
    metrics = json.loads((final.parent / "summary.json").read_text())
    assert results["loss"] == pytest.approx(metrics["eval_loss"]["last"], abs=1e-5)
    assert set(results) == {"loss", "perplexity", "accuracy", "bits_per_byte"}
    # Again, public: an existing repository stays as it is.
    assert push(str(final), "me/model", "--public")[1].splitlines()[0].endswith("(private)")
    assert push(str(final), "me/open", "--public")[1].splitlines()[0].endswith("(public)")


def test_the_card_names_no_machine(final: Path) -> None:
    text = (final / "README.md").read_text()
    assert str(final.parent.parent) not in text
    assert "output_dir: run\n" in text
    assert "sample_prompt: /etc is\n" in text
    assert "## Accelerate config\n\n```yaml\ncompute_environment: LOCAL_MACHINE\n" in text
    assert "10.1.2.3" not in text


def test_addresses_of_local_files_are_shared_by_name(final: Path) -> None:
    config = load_config(
        str(final.parent / "config.yaml"),
        [
            "data.files=['file:///home/me/a.txt', ~/b.txt, 's3://bucket/c.txt', texts/d.txt]",
            "data.eval_files=[/home/me/e.txt]",
            "tokenizer.add_tokens=[/think]",
        ],
    )
    shared = shareable_recipe(config)
    assert "- /think\n" in shared, "a token is no path"
    assert [line[4:] for line in shared.splitlines() if ".txt" in line] == [
        "a.txt", "b.txt", "s3://bucket/c.txt", "texts/d.txt", "e.txt",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("broken", "token", "said"),
    [
        ("PUT /large", TOKEN, "Error while uploading"),
        ("POST .*/commit/", TOKEN, "storage limit"),
        (None, None, "401"),
        (None, "hf_" + "w" * 34, "401"),
    ],
    ids=["in the middle", "at the end", "no token", "a wrong token"],
)
def test_a_push_that_fails_leaves_nothing_and_says_the_command(
    broken: str | None, token: str | None, said: str, server: HubServer, final: Path, push: Push
) -> None:
    server.broken = broken
    code, shown = push(str(final), "me/model", token=token)
    assert code == 4
    (line,) = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert f"the Hub must take {final} as me/model" in line
    assert said in line or (token is None and "oken" in line)
    assert line.endswith(f"then: acc-lm push {final} me/model")
    assert "Traceback" not in shown
    assert not server.files.get("me/model"), "a commit is complete or not there"
    if broken:
        server.broken = None
        assert push(str(final), "me/model")[0] == 0


@pytest.mark.parametrize("silent", ["POST /api/repos/create", "POST .*/commit/", "GET /api/models"])
def test_a_hub_that_never_answers_holds_no_run(
    silent: str, server: HubServer, final: Path, push: Push, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "SILENCE_SECONDS", 0.2)
    server.silent = silent
    code, shown = push(str(final), "me/model")
    assert code == 4
    assert "timed out" in shown
    assert f"then: acc-lm push {final} me/model" in shown


def test_a_stop_during_the_push_leaves_a_completed_run(server: HubServer, tiny: list[str], tmp_path: Path) -> None:
    server.silent = "POST /api/repos/create"

    def function() -> int:
        import train

        talk_to(server, tmp_path)
        return train.main([*tiny, "export.push_to_hub=me/model"])

    launch = Launch(function, 1, {"HF_TOKEN": TOKEN})
    assert server.heard.wait(60)
    os.kill(launch.pids[0], signal.SIGTERM)
    finished = launch.wait(60)
    final = tmp_path / "run/final"
    assert finished.codes == [0], finished.output
    assert (
        f"warning: the push of {final} was interrupted; the run itself is complete; to push: acc-lm push {final} me/model"
        in finished.output
    )
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("completed", 0)


@pytest.mark.parametrize(("base", "has_note"), [("org/base", False), ("/home/me/base", True)])
def test_an_adapter_says_when_others_lack_its_base(base: str, has_note: bool, push: Push, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    code, said = push(str(folder), "me/adapter")
    assert code == 0
    assert ("acc-lm export --merge" in said) == has_note


@pytest.mark.parametrize("broken", [None, "POST .*/commit/"], ids=["pushed", "refused"])
def test_a_run_pushes_at_its_end_and_a_failure_costs_a_line(
    broken: str | None, server: HubServer, tiny: list[str], tmp_path: Path
) -> None:
    server.broken = broken

    def function() -> int:
        import train

        talk_to(server, tmp_path)
        return train.main([*tiny, "export.push_to_hub=me/model"])

    finished = Launch(function, 2, {"HF_TOKEN": TOKEN}).wait(120)
    assert finished.codes == [0, 0], finished.output
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("completed", 0)
    final, last = tmp_path / "run/final", finished.output.splitlines()[-1]
    if broken:
        assert last.startswith(f"warning: the Hub must take {final} as me/model, got: ")
        assert last.endswith(f"then: acc-lm push {final} me/model; the run itself is complete")
        assert not server.files["me/model"]
    else:
        assert last == f"pushed {final} to {server.url}/me/model (private)"
        assert server.files["me/model"].keys() == {path.name for path in final.iterdir()}
    assert not [
        file for file in (tmp_path / "run").rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()
    ]


@pytest.mark.parametrize(
    ("typed", "said"),
    [(["{final}", "model"], "NAME must be owner/name"), (["{final}/..", "me/model"], "FOLDER must be a model folder")],
)
def test_what_is_no_model_is_not_pushed(
    typed: list[str], said: str, final: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", *(word.replace("{final}", str(final)) for word in typed)]) == 2
    assert said in capsys.readouterr().err


def test_a_repository_in_the_recipe_has_an_owner(tiny: list[str]) -> None:
    finished = run_training([*tiny, "export.push_to_hub=model"], expect=2)
    assert "export.push_to_hub must be owner/name on the Hub, got 'model'" in finished.errors[0]


def test_datasets_and_bases_are_named_by_their_ids_alone(final: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    config = load_config(str(final.parent / "config.yaml"))
    data = config.data.model_copy(update={"source": "hub", "dataset": "org/words", "files": ()})
    metrics: dict[str, Any] = {"eval/loss": 2.0, "eval/perplexity": float("inf"), "eval/token_accuracy": 0.5}
    model = config.model.model_copy(update={"name_or_path": "org/base", "config": None})
    facts = type("Facts", (), {"source": {}, **dict.fromkeys(
        ("train_documents", "train_bytes", "train_tokens", "eval_documents", "eval_bytes"), 1)})  # fmt: skip
    text = cards.model_card(config.model_copy(update={"data": data, "model": model}), facts, metrics, 6, 10)  # type: ignore[arg-type]
    found = ModelCard(text).data
    assert (found.datasets, found.base_model) == (["org/words"], "org/base")
    assert "Measured on" not in text
    part = {"training": config.training.model_copy(update={"eval_batches": 2})}
    facts.eval_tokens = 2 * config.training.global_batch_size * config.data.sequence_length + 2
    text_of_part = cards.model_card(config.model_copy(update=part), facts, metrics, 6, 10)  # type: ignore[arg-type]
    assert f"Measured on {2 * config.training.global_batch_size} rows of it" in text_of_part
    assert {result.metric_type: result.metric_value for result in found.eval_results} == {"loss": 2.0, "accuracy": 0.5}
    merged = ModelCard(cards.merged_card(text, "org/base", "merged", "float32")).data
    assert (merged.license, merged.datasets, merged.base_model, merged.model_name) == (
        "apache-2.0",
        ["org/words"],
        "org/base",
        "merged",
    )
    assert len(merged.eval_results) == 2
    edited = cards.merged_card("---\n: [\n---\nmine", "org/base", "merged", "float32")
    assert ModelCard(edited).data.base_model == "org/base"
    local = cards.merged_card(None, str(tmp_path), "merged", "float32")
    assert ModelCard(local).data.base_model is None
