"""The recipe: precedence, types, ranges, spelling; every problem in one line, all of them at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT
from pydantic import ValidationError

from acc_lm.cli.train import parse_train_arguments
from acc_lm.config import Config, Mode, learned_changes
from acc_lm.config.loading import dump_config, load_config, model_config_problems
from acc_lm.config.messages import FOREIGN_NAMES
from acc_lm.config.reference import describe_keys, json_schema, markdown
from acc_lm.errors import ConfigError

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def problems(*overrides: str, file: Path = QUICKSTART) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return list(caught.value.problems)


def test_the_command_line_wins_over_the_file_and_the_last_value_over_the_first() -> None:
    config = load_config(
        QUICKSTART, ["optimizer.learning_rate=1e-4", "training.max_steps=200", "training.max_steps=250"]
    )
    assert config.optimizer.learning_rate == 1e-4
    assert config.training.max_steps == 250
    assert config.data.sequence_length == 128, "from the file"
    assert config.distributed.bucket_cap_mb == 25, "from the default"


def test_a_dumped_config_loads_as_the_same_config(tmp_path: Path) -> None:
    config = load_config(
        QUICKSTART, ["optimizer.learning_rate=5e-4", "data.text_column='no'", "schedule.arguments={lr_end: 1e-7}"]
    )
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("text", "value"),
    [("5e-4", 5e-4), ("2.0e-05", 2e-5), ("1e5", 1e5), ("3", 3.0)],
)
def test_numbers_are_read_as_yaml_1_2_says(text: str, value: float) -> None:
    assert (
        load_config(
            QUICKSTART, [f"optimizer.learning_rate={text}", "schedule.min_learning_rate=0"]
        ).optimizer.learning_rate
        == value
    )


def test_yaml_1_1_surprises_are_gone() -> None:
    assert load_config(QUICKSTART, ["training.max_steps=0300"]).training.max_steps == 300, "not octal"
    assert load_config(QUICKSTART, ["training.mixed_precision=no"]).training.mixed_precision == "no", "not false"
    assert load_config(QUICKSTART, ["tracking.run_name=12:30:45"]).tracking.run_name == "12:30:45", "not seconds"
    assert load_config(QUICKSTART, ["tracking.run_name=on"]).tracking.run_name == "on", "not true"


def test_a_file_name_alone_is_a_list_of_one() -> None:
    assert load_config(QUICKSTART, ["data.source=files", "data.files=a.txt"]).data.files == ("a.txt",)


@pytest.mark.parametrize(
    ("key", "source"),
    [
        ("data.files=a.txt", "files"),
        ("data.dataset=org/name", "hub"),
        ("data.mixture=[{files: a.txt, weight: 1}]", "mixture"),
    ],
)
@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_text_on_the_command_line_replaces_that_of_any_recipe(recipe: Path, key: str, source: str) -> None:
    config = load_config(recipe, [key])
    assert config.data.source == source
    before = load_config(recipe)
    if before.data.source != source:
        assert (config.export.sample_prompt, config.tracking.sample_prompts) == (None, ()), (
            "they belong to the other text"
        )
        assert (config.data.eval_files, config.data.eval_split, config.data.dataset_config) == ((), None, None)
    else:
        assert config.export.sample_prompt == before.export.sample_prompt


def test_prompts_and_sources_that_are_typed_are_kept() -> None:
    config = load_config(QUICKSTART, ["data.files=a.txt", "export.sample_prompt=Once", "data.eval_files=b.txt"])
    assert (config.export.sample_prompt, config.data.eval_files) == ("Once", ("b.txt",))
    with pytest.raises(ConfigError, match=r"data\.files must be empty for source synthetic"):
        load_config(QUICKSTART, ["data.files=a.txt", "data.source=synthetic"])


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda file: file.stem)
def test_any_recipe_can_be_made_short_or_measured_in_epochs(recipe: Path) -> None:
    short = load_config(recipe, ["training.max_steps=20"])
    assert (short.training.max_steps, short.training.num_epochs) == (20, None)
    assert 1 <= short.schedule.count_warmup_steps(20) <= 2
    assert load_config(recipe, ["training.num_epochs=2"]).training.max_steps is None


def test_recipes_have_names_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("quickstart") == load_config("recipes/quickstart.yaml") == load_config(QUICKSTART)
    with pytest.raises(
        ConfigError,
        match="quickstrat must be a recipe file, or the name of a recipe, got nothing there; nearest: quickstart",
    ):
        load_config("quickstrat")
    (tmp_path / "recipes").mkdir()
    own = (tmp_path / "recipes/quickstart.yaml").write_text(QUICKSTART.read_text().replace("seed: 42", "seed: 1"))
    assert own
    assert load_config("quickstart").seed == 1, "the project of this folder comes first"


def test_another_model_type_replaces_the_models_mapping() -> None:
    config = load_config(QUICKSTART, ["model.config={model_type: gpt2, n_embd: 64}"])
    assert config.model.config == {"model_type": "gpt2", "n_embd": 64}
    config = load_config(QUICKSTART, ["model.config={num_hidden_layers: 3}"])
    assert config.model.config is not None
    assert (config.model.config["num_hidden_layers"], config.model.config["hidden_size"]) == (3, 128)


def test_keys_of_a_choice_may_stay_when_the_choice_is_changed(tmp_path: Path) -> None:
    """A recipe that lacks the choice is refused, because they have no effect alone; a complete one has it."""
    chosen = ("optimizer.name=muon", "optimizer.momentum=0.9", "tokenizer.name_or_path=org/text", "tokenizer.revision=v1",
              "distributed.comm_hook=power_sgd", "distributed.comm_hook_arguments={matrix_approximation_rank: 4}")  # fmt: skip
    file = tmp_path / "complete.yaml"
    file.write_text(dump_config(load_config(QUICKSTART, chosen)))
    others = ["optimizer.name=adamw", "tokenizer.name_or_path=null", "distributed.comm_hook=none"]
    assert load_config(file, others).optimizer.momentum == 0.9


def test_a_config_cannot_be_changed() -> None:
    config = load_config(QUICKSTART)
    with pytest.raises(ValidationError):
        config.training.max_steps = 5  # type: ignore[misc]


LINES = [
    # override, the key that must be named, what the line must contain
    ("training.max_stpes=3", "training.max_stpes", "did you mean max_steps?"),
    ("learning_rate=1", "learning_rate", "did you mean optimizer.learning_rate?"),
    ("trainign.max_steps=3", "trainign", "did you mean training?"),
    ("optimizer.learning_rate=fast", "optimizer.learning_rate", "must be a number, got 'fast'"),
    ("optimizer.learning_rate=0", "optimizer.learning_rate", "must be a number > 0, got 0"),
    ("optimizer.learning_rate=.nan", "optimizer.learning_rate", "must be"),
    ("distributed.comm_hook_arguments={x: .inf}", "distributed.comm_hook_arguments", "must hold finite numbers"),
    ("model.config={rope_theta: .nan}", "model.config", "must hold finite numbers"),
    (
        "optimizer.momentum=0.9",
        "optimizer.name",
        "must be set with momentum, got 0.9 without it, which AdamW does not read",
    ),
    ("tokenizer.revision=v1", "tokenizer.name_or_path", "must be set with revision, got v1 without it"),
    ("distributed.comm_hook_arguments={a: 1}", "distributed.comm_hook", "must be set with comm_hook_arguments"),
    ("training.log_every='8'", "training.log_every", "must be a whole number, got '8' (a string)"),
    ("training.log_every=true", "training.log_every", "must be a whole number, got True"),
    ("training.log_every=2.5", "training.log_every", "must be a whole number, got 2.5"),
    ("training.log_every=[1]", "training.log_every", "got [1] (a list)"),
    ("data.eval_fraction=2.0", "data.eval_fraction", "must be a number < 1, got 2.0"),
    ("data.source=fils", "data.source", "did you mean files?"),
    ("training.mixed_precision=bf8", "training.mixed_precision", "must be one of no, bf16, fp16, fp8"),
    ("schedule.name=reduce_lr_on_plateau", "schedule.name", "must be one of constant"),
    ("schedule.name=greedy", "schedule.name", "must be one of constant"),
    ("schedule.warmup_steps=4000", "schedule.warmup_steps", "at most training.max_steps 3000"),
    ("schedule.min_learning_rate=0.5", "schedule.min_learning_rate", "at most optimizer.learning_rate"),
    ("schedule.name=linear", "schedule.min_learning_rate", "must be 0 for schedule linear"),
    ("training={max_steps: 5, num_epochs: 1}", "training", "exactly one of max_steps and num_epochs, got both"),
    (
        "schedule.warmup_steps=3001",
        "schedule.warmup_steps",
        "at most training.max_steps 3000, got 3001; lower it, or write a share",
    ),
    (
        "schedule.warmup_steps=1.0",
        "schedule.warmup_steps",
        "a whole number of steps, or a share of the run below 1, got 1.0",
    ),
    (
        "schedule.warmup_steps=-1",
        "schedule.warmup_steps",
        "a whole number of steps, or a share of the run below 1, got -1",
    ),
    (
        "schedule.warmup_steps=few",
        "schedule.warmup_steps",
        "a whole number of steps, or a share of the run below 1, got 'few'",
    ),
    ("training.max_steps=null", "training", "exactly one of max_steps and num_epochs, got neither"),
    (
        "training.micro_batch_size=3",
        "training.global_batch_size",
        "multiple of micro_batch_size 3, got 8; nearest: 6, 9",
    ),
    (
        "model={name_or_path: gpt2, config: {model_type: gpt2}}",
        "model",
        "exactly one of name_or_path and config, got both",
    ),
    ("model.config={model_type: lama}", "model.config.model_type", "did you mean llama?"),
    ("model.config.hiden_size=3", "model.config.hiden_size", "did you mean hidden_size?"),
    ("model.config.num_attention_heads=5", "model.config", "not a multiple of the number of attention heads (5)"),
    ("model.config.hidden_size=many", "model.config.hidden_size", "expected int"),
    ("data.eval_files=a.txt", "data.eval_files", "set data.source to files"),
    ("data.source=files", "data.files", "add data.files"),
    ("data.source=hub", "data.dataset", "add data.dataset"),
    ("checkpoint.keep_last=1", "checkpoint.keep_last", "must be a number >= 2, got 1"),
    ("tracking.report_to=[wanbd]", "tracking.report_to.0", "did you mean wandb?"),
    ("hub_token=abc", "hub_token", "use the environment"),
    ("tracking.api_key=abc", "tracking.api_key", "use the environment"),
    ("recipes/x.yaml", "", "pass a recipe with --config recipes/x.yaml"),
    ("training", "", "must be key=value, got 'training'"),
    ("training.max_steps.more=3", "training.max_steps.more", "which is a value"),
    ("training=[", "training", "must have a YAML value"),
    ("model=null", "model", "must be a section of keys"),
]


@pytest.mark.parametrize(("override", "key", "says"), LINES, ids=[line[0] for line in LINES])
def test_a_problem_is_one_line_that_names_key_value_and_remedy(override: str, key: str, says: str) -> None:
    found = problems(override)
    assert len(found) == 1, found
    assert found[0].startswith(f"command line: {key}") or (found[0].startswith(str(QUICKSTART)) and key in found[0])
    assert says in found[0]
    assert "\n" not in found[0]
    assert "; " in found[0], "what to change"


def test_an_undeclared_field_that_the_models_code_reads_is_accepted(tmp_path: Path) -> None:
    """Every published config.json of Qwen3's mixture of experts has a head_dim, and its config class declares none."""
    taken = {"model_type": "qwen3_moe", "head_dim": 8, "hidden_size": 16}
    assert model_config_problems(taken) == []
    ((key, problem),) = model_config_problems({**taken, "head_dims": 8})
    assert (key, problem.partition(";")[2]) == ("head_dims", " did you mean head_dim?")
    for model_type, field in (
        ("qwen3_moe", "to_dict"),
        ("qwen3_moe", "_attn_implementation"),
        ("llama", "kv_head_dim"),
    ):
        assert [key for key, _ in model_config_problems({"model_type": model_type, field: 1})] == [field]


def test_a_requirement_of_the_command_is_reported_against_the_command() -> None:
    """The recipe itself was valid before."""
    assert problems("data.source=files")[0].startswith("command line: data.files must name at least one file")
    assert problems("optimizer.learning_rate=1e-5")[0].startswith(f"{QUICKSTART}:"), "the line that no longer fits"


@pytest.mark.parametrize("name", sorted(FOREIGN_NAMES))
def test_names_of_other_tools_are_answered_with_ours(name: str) -> None:
    (line,) = problems(f"{name}=1")
    assert f"{name} is another tool's name, here it is {FOREIGN_NAMES[name]}" in line
    target = FOREIGN_NAMES[name].split(" ")[0]
    assert target in {key for key, *_ in describe_keys()} | {"seed", "output_dir"}


def test_all_problems_come_at_once_with_file_and_line(tmp_path: Path) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(
        QUICKSTART.read_text().replace("max_steps:", "max_stpes:").replace("seed: 42", "seed: many") + "extra: 1\n"
    )
    number = {text.split(":")[0].strip(): i for i, text in enumerate(recipe.read_text().splitlines(), start=1)}
    found = problems("optimizer.betas=[0.9, 2.0]", file=recipe)
    assert any(
        line.startswith(f"{recipe}:{number['max_stpes']}: training.max_stpes must be a known key") for line in found
    )
    assert any(line.startswith(f"{recipe}:{number['seed']}: seed must be a whole number") for line in found)
    assert any(line.startswith(f"{recipe}:{number['extra']}: extra must be a known key") for line in found)
    assert any(line.startswith("command line: optimizer.betas.1 must be a number < 1, got 2.0") for line in found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", ":1: must be YAML"),
        ("a: 1\na: 2\n", "must be YAML, got found duplicate key"),
        ("- 1\n", "must be a mapping of keys, got list"),
        ("a: !!python/object/apply:os.system [echo]\n", ":1: must be YAML"),
        ("\tb: 1", "must be YAML"),
        ("model: &m {config: *m}\n", "must be a tree of keys, got a value that contains itself"),
        ("data: " + "[" * 5000 + "]" * 5000, "must be a tree of keys"),
        (": nothing\n", ": keys must be words, got None in the recipe"),
        ("data: {source: files, files: a, 3: x}\n", ": keys must be words, got 3 in data"),
        ("model: {config: {id2label: {0: a}}}\n", ": keys must be words, got 0 in model.config.id2label"),
        (
            "compute_environment: LOCAL_MACHINE\nnum_processes: 2\n",
            "must be a recipe, got a config file of Accelerate; pass that to the launcher",
        ),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_with_its_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    (line,) = problems(file=tmp_path / "x.yaml")
    assert says in line


def test_a_missing_recipe_names_the_nearest() -> None:
    (line,) = problems(file=ROOT / "recipes" / "quikstart.yaml")
    assert line.endswith(f"nearest: {QUICKSTART}")


def test_options_with_dashes_get_a_hint() -> None:
    for argument, says in (
        ("--learning_rate=1", "section.key=value"),
        ("--max_seq_length", "data.sequence_length=VALUE"),
        ("--conf", "--config"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_train_arguments([argument], QUICKSTART)
        assert says in str(caught.value)


def test_dry_run_is_an_option_next_to_the_recipe() -> None:
    """It may be anywhere on the line and is not part of the recipe: the same run follows it."""
    for arguments, mode in (
        ([], Mode.TRAIN),
        (["--dry-run"], Mode.DRY_RUN),
        (["seed=3", "--dry-run", "training.log_every=1"], Mode.DRY_RUN),
        (["seed=3", "--eval-only"], Mode.EVAL_ONLY),
    ):
        parsed = parse_train_arguments(arguments, QUICKSTART)
        assert parsed is not None
        overrides = [argument for argument in arguments if "=" in argument]
        assert parsed == (load_config(QUICKSTART, overrides), mode)
    with pytest.raises(
        ConfigError,
        match=r"must be --config, --dry-run, --eval-only, --print-config or section\.key=value, got '--dry_run'",
    ):
        parse_train_arguments(["--dry_run"], QUICKSTART)


def test_help_lists_every_key_fast_and_without_torch() -> None:
    code = (
        "import sys, time, resource; sys.argv = ['train.py', '--help']\n"
        "import runpy\n"
        "try: runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "heavy = sorted({'torch', 'transformers', 'accelerate', 'deepspeed', 'wandb', 'evaluate', 'matplotlib'} & set(sys.modules))\n"
        "print(heavy, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    for key, kind, default, description in describe_keys():
        assert f"{key}  ({kind}; " in done.stdout
        assert description, f"{key} has no description"
        assert "Undefined" not in default, f"{key} has no default that can be shown"
        assert default in done.stdout
    assert done.stderr.strip() == "[]", "nothing heavy may be imported for --help"


def test_print_config_prints_the_recipe_that_reproduces_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_train_arguments(["--print-config", "training.max_steps=123"], QUICKSTART) is None
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "printed.yaml") == load_config(QUICKSTART, ["training.max_steps=123"])


def test_schema_and_reference_are_fresh() -> None:
    assert (ROOT / "recipes/schema.json").read_text() == json_schema(), "run `make docs`"
    assert (ROOT / "docs/reference/recipe.md").read_text() == markdown(), "run `make docs`"
    schema = json.loads(json_schema())
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["TrainingConfig"]["properties"]["global_batch_size"]["description"]


def test_keys_of_training_are_distinguished_from_keys_of_execution() -> None:
    base = load_config(QUICKSTART).model_dump(mode="json")

    def changes(*overrides: str) -> dict[str, tuple[object, object]]:
        return learned_changes(base, load_config(QUICKSTART, overrides).model_dump(mode="json"))

    assert changes("output_dir=x", "training.micro_batch_size=2", "data.num_workers=3", "tracking.report_to=[]", "checkpoint.every=7",
                   "distributed.bucket_cap_mb=1", "training.log_every=1", "training.max_steps=5000") == {}  # fmt: skip
    assert changes("training.max_steps=200") == {"training.max_steps": (3000, 200)}
    assert changes("optimizer.learning_rate=1e-3", "seed=1") == {
        "optimizer.learning_rate": (6e-3, 1e-3),
        "seed": (42, 1),
    }
    assert "model.config.hidden_size" in changes("model.config.hidden_size=64")
    assert changes("distributed.comm_hook=fp16") == {"distributed.comm_hook": ("none", "fp16")}, "other numbers"
    places = ("data.files=[x]", "data.source=files", "tokenizer.name_or_path=y", "model.trust_remote_code=true")
    assert changes(*places) == {"data.source": ("python_stdlib", "files")}, "what is there is known by its content"
    one, other = ({"data": {"mixture": [{"files": [name], "weight": 1}]}} for name in "xy")
    assert learned_changes(one, other) == {}


def test_defaults_are_those_of_the_design() -> None:
    config = Config.model_validate({"model": {"config": {"model_type": "llama"}}, "training": {"max_steps": 100}})
    assert (
        config.seed,
        config.data.sequence_length,
        config.training.global_batch_size,
        config.tokenizer.vocab_size,
    ) == (42, 128, 16, 4096)
    assert (
        config.optimizer.learning_rate,
        config.optimizer.betas,
        config.schedule.name,
        config.schedule.warmup_steps,
    ) == (3e-3, (0.9, 0.95), "cosine", 0.03)
    assert (
        config.checkpoint.every,
        config.checkpoint.keep_last,
        config.checkpoint.keep_best,
        config.checkpoint.resume,
    ) == (100, 2, 1, "auto")
    assert (config.tracking.report_to, config.schedule.min_learning_rate, config.distributed.timeout_seconds) == (
        ("wandb",),
        0.0,
        600,
    )
