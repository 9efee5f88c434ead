"""New tokens: found in text, given rows that every engine draws and trains alike, exported with an adapter, loaded by others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from backends import LENGTH, MODELS, Curve, Scenario, run_backend
from processes import ROOT, Launch, launcher_environment, run_everywhere, run_training
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from acc_lm.cli import main
from acc_lm.config import AdapterConfig, ModelConfig, TokenizerConfig
from acc_lm.errors import ConfigError
from acc_lm.export.exported import load_exported
from acc_lm.modeling.build import build_model
from acc_lm.modeling.checks import check_model
from acc_lm.run_files.differences import largest_differences
from acc_lm.text.tokenizer import build_encoder, load_tokenizer, make_tokenizer, new_tokens

ENGINES = {
    "ddp x2": ("ddp", 2), "fsdp2 x2": ("fsdp2", 2), "deepspeed_zero2 x2": ("deepspeed_zero2", 2),
    "deepspeed_zero3 x2": ("deepspeed_zero3", 2), "sequence_parallel x4": ("sequence_parallel", 4),
}  # fmt: skip
STEPS, TOKENS, NUM_IDS = 8, ("<tool>", "日本 🙂"), 257
TABLES = {"llama": "[embed_tokens, lm_head]", "gpt2": "[wte]", "gemma2": "[embed_tokens]"}
"""Value of `also_train` for each model: Gemma's and GPT-2's heads share the embeddings' weight."""
WTE = {"llama": "model.embed_tokens", "gpt2": "transformer.wte", "gemma2": "model.embed_tokens"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tokenizer, folders = make_tokenizer(TokenizerConfig(kind="byte"), []), {}
    for name in TABLES:
        folders[name] = tmp_path_factory.mktemp("bases") / name
        build_model(ModelConfig(config=MODELS[name]), tokenizer, LENGTH, 0)[0].save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


def tokenizer_of(base: Path, **section: Any) -> Any:
    return load_tokenizer(TokenizerConfig(**section), ModelConfig(name_or_path=str(base)))


# --- the same on every engine --------------------------------------------------------------------------------------


def scenarios(bases: dict[str, Path]) -> dict[str, Scenario]:
    def of(model: str, *overrides: str, **fields: Any) -> Scenario:
        tokens = f"tokenizer.add_tokens=[{', '.join(TOKENS)}]"
        return Scenario(
            model, steps=STEPS, overrides=("model.config=null", f"model.name_or_path={bases[model]}", tokens, *overrides), **fields
        )  # fmt: skip

    lora = ("adapter.kind=lora", "adapter.rank=4", "adapter.alpha=64")
    return {
        "llama": of("llama", *lora, f"adapter.also_train={TABLES['llama']}"),
        "gpt2": of("gpt2", *lora, f"adapter.also_train={TABLES['gpt2']}", accumulation=2, gradient_checkpointing=True),
        "gemma2": of("gemma2", *lora, f"adapter.also_train={TABLES['gemma2']}"),
        "all weights": of("gpt2"),
    }


@pytest.fixture(scope="module")
def single(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Curve]:
    """Curves of one process, each with its checkpoint after half of the steps."""
    wanted = {
        name: replace(each, save=tmp_path_factory.mktemp("single")) for name, each in scenarios(bases).items()
    }  # fmt: skip
    found = dict(zip(wanted, run_backend("single", 1, [*wanted.values()]), strict=True))
    for name, curve in found.items():
        curve.extra["saved"] = wanted[name].save / f"checkpoints/step-{STEPS // 2:08d}"
    return found


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[pytest.mark.slow] if name[:3] in ("ddp", "seq") else []) for name in ENGINES]
)
def test_new_rows_learn_the_same_on_every_engine(
    engine: str, bases: dict[str, Path], single: dict[str, Curve], tmp_path: Path
) -> None:
    """Whole, resumed from its own checkpoint bit for bit, and resumed from that of one process."""
    wanted = scenarios(bases)
    if engine.startswith("sequence"):  # Gemma's soft caps allow no rows in parts
        del wanted["gemma2"]
    own = [replace(each, save=tmp_path / name) for name, each in wanted.items()]
    from_single = [replace(each, load=single[name].extra["saved"]) for name, each in wanted.items()]
    ran = run_backend(*ENGINES[engine], [*own, *from_single])
    from_own = replace(wanted["llama"], load=tmp_path / f"llama/checkpoints/step-{STEPS // 2:08d}")
    resumed = run_backend(*ENGINES[engine], [from_own])[0]
    assert resumed.end == ran[0].end
    assert all(resumed.metrics[step] == ran[0].metrics[step] for step in resumed.metrics)
    for name, whole, half in zip(wanted, ran, ran[len(wanted) :], strict=False):
        expected = single[name]
        assert whole.start == expected.start, "the same rows are drawn everywhere"
        assert whole.end != whole.start
        for curve in (whole, half):
            differences = largest_differences({step: expected.metrics[step] for step in curve.metrics}, curve.metrics)
            print(engine, name, differences)
            assert max(differences.values()) <= 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize(("config", "num_processes"), [
    ("ddp", 3), ("hsdp", 4), ("fsdp2_grad_op", 2), ("fsdp2_offload", 2), ("deepspeed_zero1", 2), ("deepspeed_zero2_offload", 2),
    ("deepspeed_zero3_offload", 2), ("ddp_sequence", 2), ("deepspeed_zero3_sequence", 2),
])  # fmt: skip
def test_new_rows_learn_the_same_on_the_other_engines(
    config: str, num_processes: int, bases: dict[str, Path], single: dict[str, Curve]
) -> None:
    names = ("llama", "gpt2", "all weights")
    for name, curve in zip(
        names, run_backend(config, num_processes, [scenarios(bases)[name] for name in names]), strict=True
    ):
        assert max(largest_differences(single[name].metrics, curve.metrics).values()) <= 1e-6, name


# --- rows at the start ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_new_rows_start_as_transformers_draws_them_from_the_seed(model: str, bases: dict[str, Path]) -> None:
    config, tokenizer = ModelConfig(name_or_path=str(bases[model])), tokenizer_of(bases[model], add_tokens=TOKENS)

    @cache
    def rows(seed: int) -> tuple[torch.Tensor, ...]:
        torch.rand(seed)  # whatever was drawn before
        built, _ = build_model(config, tokenizer, LENGTH, seed)
        assert (built.get_input_embeddings().weight is built.get_output_embeddings().weight) == (model == "gpt2")
        assert built.config.vocab_size == NUM_IDS + len(TOKENS)
        return built.get_input_embeddings().weight.detach(), built.get_output_embeddings().weight.detach()

    base = AutoModelForCausalLM.from_pretrained(bases[model])
    before = base.get_input_embeddings().weight.detach().clone()
    torch.manual_seed(5)
    base.resize_token_embeddings(NUM_IDS + len(TOKENS))
    assert torch.equal(rows(5)[0], base.get_input_embeddings().weight)
    assert torch.equal(rows(5)[1], base.get_output_embeddings().weight)
    assert torch.equal(rows(5)[0][:NUM_IDS], before)
    assert not torch.equal(rows(5)[0], rows(6)[0])


def test_the_number_of_threads_changes_no_row(monkeypatch: pytest.MonkeyPatch, bases: dict[str, Path]) -> None:
    """A matrix product adds in another order with more threads; the rows are drawn with one.

    In a process of its own: a process that has begun threads can no longer be forked.
    """
    seen: list[int] = []
    resize = AutoModelForCausalLM.from_pretrained(bases["llama"]).__class__.resize_token_embeddings

    def record(self: Any, *arguments: Any, **keywords: Any) -> Any:
        seen.append(torch.get_num_threads())
        return resize(self, *arguments, **keywords)

    def build() -> tuple[list[int], int]:
        torch.set_num_threads(2)
        build_model(ModelConfig(name_or_path=str(bases["llama"])), tokenizer, LENGTH, 0)
        return seen, torch.get_num_threads()

    monkeypatch.setattr("transformers.PreTrainedModel.resize_token_embeddings", record)
    tokenizer = tokenizer_of(bases["llama"], add_tokens=TOKENS)
    assert run_everywhere(build) == [([1], 2)]


def test_rows_that_a_model_has_to_spare_are_used_as_they_are(tmp_path: Path, bases: dict[str, Path]) -> None:
    wide = AutoModelForCausalLM.from_pretrained(bases["llama"])
    wide.resize_token_embeddings(NUM_IDS + 7, mean_resizing=False)
    wide.save_pretrained(tmp_path)
    tokenizer_of(bases["llama"]).save_pretrained(tmp_path)
    built, _ = build_model(
        ModelConfig(name_or_path=str(tmp_path)), tokenizer_of(tmp_path, add_tokens=TOKENS), LENGTH, 0
    )
    assert torch.equal(built.get_input_embeddings().weight, wide.get_input_embeddings().weight)


def test_a_model_from_scratch_has_rows_for_its_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte", add_tokens=TOKENS, add_special_tokens=("<|x|>",)), [])
    built, _ = build_model(ModelConfig(config=MODELS["llama"]), tokenizer, LENGTH, 0)
    assert built.get_input_embeddings().weight.shape[0] == NUM_IDS + 3
    small = MODELS["llama"] | {"vocab_size": NUM_IDS}
    with pytest.raises(ConfigError, match=r"vocab_size must be at least the tokenizer's 260 ids, got 257"):
        build_model(ModelConfig(config=small), tokenizer, LENGTH, 0)


# --- tokens in text ------------------------------------------------------------------------------------------------


def test_tokens_are_found_in_text_and_special_ones_are_not(bases: dict[str, Path]) -> None:
    tokenizer = tokenizer_of(bases["llama"], add_tokens=(*TOKENS, " a b", "é b"), add_special_tokens=("<|x|>",))
    assert sorted(new_tokens(tokenizer)) == sorted((*TOKENS, " a b", "é b", "<|x|>"))
    encoder, spelled = build_encoder(tokenizer), build_encoder(tokenizer_of(bases["llama"]))
    text = "x<tool>y 日本 🙂 a b é b e\u0301 b <|x|>"
    ids = encoder.encode([text])[0].tolist()
    assert [number for number in ids if number >= NUM_IDS] == [257, 258, 259, 260]
    assert NUM_IDS + 4 not in ids, "text that spells a special token is text"
    assert tokenizer.decode(ids) == text
    rest = spelled.encode(["x", "y ", " ", " e\u0301 b <|x|>"])
    assert [number for number in ids if number < NUM_IDS] == np.concatenate(rest).tolist()
    assert tokenizer("<|x|>")["input_ids"] == [NUM_IDS + 4], "a prompt can write it"
    assert tokenizer.decode([65, NUM_IDS + 4, NUM_IDS], skip_special_tokens=True).endswith("<tool>")


def test_tiktoken_leaves_text_with_new_tokens_to_tokenizers(bases: dict[str, Path]) -> None:
    encoder = build_encoder(tokenizer_of(bases["llama"], add_tokens=TOKENS))
    encoder.expect(1 << 30)
    assert encoder.engine == "tiktoken"
    texts = ["plain", "with <tool> inside", "日本 🙂", "日本"]
    expected = [encoder.backend.encode(text, add_special_tokens=False).ids for text in texts]
    assert [ids.tolist() for ids in encoder.encode(texts)] == expected
    assert [NUM_IDS in ids for ids in expected] == [False, True, False, False]


def test_so_many_tokens_that_looking_for_them_would_take_long_are_left_to_tokenizers(bases: dict[str, Path]) -> None:
    tokens = tuple(f"<tok_{i}>" for i in range(3000))
    encoder = build_encoder(tokenizer_of(bases["llama"], add_tokens=tokens))
    encoder.expect(1 << 30)
    assert encoder.engine == "tokenizers, because 3,000 added tokens are to be found in text"
    assert encoder.encode(["<tok_2999> <tok_0>"])[0].tolist()[::2] == [NUM_IDS + 2999, NUM_IDS]


def test_a_token_of_the_vocabulary_keeps_its_id_and_gets_no_row(bases: dict[str, Path], tmp_path: Path) -> None:
    first = tokenizer_of(bases["llama"], add_tokens=TOKENS)
    first.save_pretrained(tmp_path)
    again = load_tokenizer(
        TokenizerConfig(name_or_path=str(tmp_path), add_tokens=(*TOKENS[::-1], "e")), ModelConfig(config=MODELS["llama"])
    )  # fmt: skip
    assert again is not None
    assert new_tokens(again) == frozenset()
    assert len(again) == len(first)
    assert again.convert_tokens_to_ids(list(TOKENS)) == [NUM_IDS, NUM_IDS + 1]


@pytest.mark.parametrize(("token", "becomes"), [("é", "�"), ("Ġ", " "), ("über", "�ber")])
def test_a_token_that_could_not_be_decoded_is_refused(token: str, becomes: str, bases: dict[str, Path]) -> None:
    """A byte-level vocabulary writes each byte as a character: such characters alone are read as bytes, even in an added token."""
    with pytest.raises(ConfigError, match=rf"got '{token}', which would become '{becomes}'; choose another token"):
        tokenizer_of(bases["llama"], add_tokens=(token,))
    tokenizer = tokenizer_of(bases["llama"], add_tokens=(f"<|{token} |>",))
    assert tokenizer.decode([NUM_IDS]) == f"<|{token} |>"


def test_a_vocabulary_with_gaps_is_refused(tmp_path: Path) -> None:
    """tokenizers would give a new token the id of another one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    gaps = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 3, "d": 4}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=gaps, eos_token="a").save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"must be empty for a vocabulary whose ids have gaps, got '<t>' with the id 5 of|got '<t>' with",
    ):
        load_tokenizer(
            TokenizerConfig(name_or_path=str(tmp_path), add_tokens=("<t>",)), ModelConfig(config=MODELS["llama"])
        )


# --- a complete run ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe(tiny_recipe: Path, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Text with the new tokens in it."""
    file = tmp_path_factory.mktemp("text") / "tools.jsonl"
    file.write_text("".join(json.dumps({"text": text.replace("red", "<tool>")}) + "\n" for text in words))
    return ["--config", str(tiny_recipe), "model.config=null", f"data.files=[{file}]", "optimizer.learning_rate=1e-2"]


def lora(model: str, base: Path) -> list[str]:
    return [
        f"model.name_or_path={base}", "adapter.kind=lora", "adapter.rank=4", f"adapter.also_train={TABLES[model]}",
        f"tokenizer.add_tokens=[{', '.join(TOKENS)}]", "tokenizer.add_special_tokens=[<|x|>]",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run_of(
    recipe: list[str], bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Function: model -> folder of its finished run, each trained once."""

    @cache
    def run(model: str) -> Path:
        folder = tmp_path_factory.mktemp("runs") / model
        finished = run_training([*recipe, *lora(model, bases[model]), f"output_dir={folder}"])
        assert "new tokens    3 with ids 257 to 259" in finished.output
        return folder

    return run


@pytest.mark.parametrize("model", TABLES)
def test_trained_rows_are_exported_merged_and_loaded_by_others(
    model: str, run_of: Callable[[str], Path], bases: dict[str, Path], tmp_path: Path
) -> None:
    run, merged, converted = run_of(model), tmp_path / "merged", tmp_path / "converted"
    settings = json.loads((run / "final/adapter_config.json").read_text())
    assert settings["modules_to_save"] == [WTE[model], "lm_head"]
    saved = load_file(run / "final/adapter_model.safetensors")
    table = saved[f"base_model.model.{WTE[model]}.weight"]
    before = AutoModelForCausalLM.from_pretrained(bases[model]).get_input_embeddings().weight
    assert table.shape[0] == NUM_IDS + 3
    assert (table[NUM_IDS] - table[NUM_IDS + 1]).norm() > 1e-3, (
        "rows start almost equal, and one of them is in the text"
    )
    assert not torch.equal(table[:NUM_IDS], before), "the other rows are trained as well"
    assert {name for name in saved if ".lora_" not in name} == {
        f"base_model.model.{name}.weight" for name in (WTE[model], "lm_head")
    }
    assert main(["export", "--merge", str(run / "final"), str(merged)]) == 0
    assert main(["checkpoint", "convert-to-hf", str(run / "checkpoints/latest"), str(converted)]) == 0
    for folder in (run / "final", merged):  # each card's own words load the model
        code = (folder / "README.md").read_text().partition("```python\n")[2].partition("print(")[0]
        values: dict[str, Any] = {}
        exec(code.replace("path/to/this/folder", str(folder)), values)
        assert values["generate"].model.config.vocab_size == NUM_IDS + 3
    tokenizer = AutoTokenizer.from_pretrained(merged)
    ids = tokenizer("x<tool>y<|x|>", return_tensors="pt")["input_ids"]
    assert ids[0, [1, 3]].tolist() == [NUM_IDS, NUM_IDS + 2]
    alone = AutoModelForCausalLM.from_pretrained(merged)
    assert alone.config.vocab_size == NUM_IDS + 3
    is_tied = model != "llama"
    assert alone.config.tie_word_embeddings == is_tied
    assert ("lm_head.weight" in load_file(merged / "model.safetensors")) != is_tied
    others = {
        "peft": peft.AutoPeftModelForCausalLM.from_pretrained(run / "final"),
        "converted": load_exported(converted),
        "merged": alone,
    }
    with torch.no_grad():
        expected = load_exported(run / "final").eval()(ids).logits
        for name, other in others.items():
            assert (other.eval()(ids).logits - expected).abs().max() <= 2e-6, name
    assert run_everywhere(lambda: main(["evaluate", str(run / "final")])) == [0]


def test_other_tokens_are_not_resumed(run_of: Callable[[str], Path], recipe: list[str], bases: dict[str, Path]) -> None:
    arguments = [*recipe, *lora("llama", bases["llama"]), f"output_dir={run_of('llama')}"]
    for override in ("tokenizer.add_tokens=[<tool>]", "adapter.also_train=[embed_tokens, lm_head, norm]"):
        refused = run_training([*arguments, override, "checkpoint.allow_changed_recipe=true"], expect=5)
        assert f"was made by another recipe: {override.partition('=')[0]} was " in refused.errors[0]


def test_trained_modules_of_a_base_in_16_bits_are_in_32(bases: dict[str, Path], tmp_path: Path) -> None:
    """Outside of autocast too; and what they learn is merged without rounding."""
    from acc_lm.export.exported import merge
    from acc_lm.modeling.adapter import save_adapter

    config = ModelConfig(name_or_path=str(bases["llama"]), dtype="bfloat16")
    section = AdapterConfig(kind="lora", also_train=("embed_tokens", "lm_head", "norm", "input_layernorm"))
    tokenizer = tokenizer_of(bases["llama"], add_tokens=TOKENS)
    model, facts = build_model(config, tokenizer, LENGTH, 0, section)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {
        "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
        "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight",
    }  # fmt: skip
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    ids = torch.tensor([[1, NUM_IDS, 3, NUM_IDS + 1]])
    loss = model(input_ids=ids, targets=ids)
    loss.backward()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(input_ids=ids, targets=ids).item() == pytest.approx(loss.item(), rel=2e-2)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        model.model.embed_tokens.weight[NUM_IDS] += 1e-4  # lost in 16 bits
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    save_adapter(tmp_path / "final", weights, model.peft_config["default"], config, facts.base)
    tokenizer.save_pretrained(tmp_path / "final")
    merge(tmp_path / "final", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(merged.get_input_embeddings().weight, weights["model.embed_tokens.weight"])
    assert load_exported(tmp_path / "final").eval()(ids).logits.isfinite().all()


@pytest.mark.parametrize(
    ("model", "engine", "precision"),
    [
        ("llama", ("single", 1), "no"),
        ("llama", ("fsdp2", 2), "bf16"),
        ("gpt2", ("fsdp2", 2), "no"),
        ("gpt2", ("single", 1), "bf16"),
    ],
)
def test_an_adapter_on_16_bits_is_scored_as_it_was_trained(
    model: str, engine: tuple[str, int], precision: str, recipe: list[str], bases: dict[str, Path], tmp_path: Path
) -> None:
    """Trained weights stay in 32 bits, and tied tables tied; GPT-2's head has the weight of its embeddings.

    GPT-2's LayerNorm takes no inputs wider than its weights on a CPU, under autocast neither.
    """
    name, num_processes = engine
    environment = (
        launcher_environment(ROOT / f"accelerate_configs/{name}.yaml", num_processes) if num_processes > 1 else {}
    )
    run = tmp_path / "run"
    precisions = ["model.dtype=bfloat16", f"training.mixed_precision={precision}"]
    training = [*recipe, *lora(model, bases[model]), *precisions, f"output_dir={run}"]
    run_training(training, num_processes, environment)
    known = json.loads((run / "summary.json").read_text())["eval_loss"]["last"]
    finished = Launch(lambda: main(["evaluate", str(run), "--json"]), num_processes, environment).wait()
    assert finished.codes == [0] * num_processes, finished.output
    scored = json.loads(finished.output[finished.output.index("{") :].splitlines()[0])
    assert scored["loss"] == pytest.approx(known, rel=1e-6)


# --- refusals ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[list[str], str]] = {
    "an empty token": (["tokenizer.add_tokens=['']"], "tokenizer.add_tokens must name each token once, got an empty one; remove it"),
    "a token twice": (["tokenizer.add_tokens=[a, b, a]"], "tokenizer.add_tokens must name each token once, got 'a' twice"),
    "a token of both kinds": (
        ["tokenizer.add_tokens=[a]", "tokenizer.add_special_tokens=[a]"], "tokenizer.add_special_tokens must name each token once, got 'a' twice",
    ),
    "a number": (["tokenizer.add_tokens=[1]"], "tokenizer.add_tokens.0 must be a string, got 1"),
    "half a character": (['tokenizer.add_tokens=["\\uD83D"]'], "tokenizer.add_tokens must be one line without control characters"),
    "no adapter": (["adapter.kind=none"], "adapter.also_train must be empty without an adapter, which trains all modules, got ['embed_tokens', 'lm_head']"),
    "an unknown module": (
        ["adapter.also_train=[embed_tokens, wte]"],
        "adapter.also_train must be among embed_tokens, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, "
        "input_layernorm, post_attention_layernorm, norm, lm_head, modules of the model with weights of their own, got 'wte'",
    ),
    "a module of modules": (["adapter.also_train=[mlp]"], "got 'mlp'; name some of these"),
    "frozen embeddings": (["adapter.also_train=[]"], "got []; add embed_tokens, lm_head, or leave tokenizer.add_tokens out"),
    "a frozen head": (["adapter.also_train=[embed_tokens]"], "got ['embed_tokens']; add lm_head, or"),
    "a module in both": (
        ["adapter.also_train=[embed_tokens, lm_head, q_proj]", "adapter.target_modules=[q_proj]"],
        "adapter.target_modules must be layers that adapter.also_train leaves out, got 'q_proj', which is model.layers.0.self_attn.q_proj in both",
    ),
    "moments in 8 bits": (["optimizer.name=adamw_8bit"], "optimizer.name must be adamw or muon, got 'adamw_8bit', whose rounded moments"),
    "another tool's name": (["adapter.modules_to_save=[lm_head]"], "modules_to_save is another tool's name, here it is adapter.also_train"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_each_refusal_is_one_line(what: str, tiny_recipe: Path, bases: dict[str, Path]) -> None:
    from acc_lm.config.loading import load_config

    overrides, says = REFUSED[what]
    given = ["model.config=null", *(o for o in lora("llama", bases["llama"]) if "special" not in o), *overrides]

    def check() -> None:
        config = load_config(tiny_recipe, given)
        tokenizer = load_tokenizer(config.tokenizer, config.model)
        check_model(config.model, tokenizer, NUM_IDS, LENGTH, False, config.adapter)

    with pytest.raises(ConfigError) as refusal:
        check()
    assert len(refusal.value.problems) == 1
    assert says in refusal.value.problems[0]


def test_one_name_of_a_tied_table_is_enough(bases: dict[str, Path]) -> None:
    tokenizer, config = tokenizer_of(bases["gpt2"], add_tokens=TOKENS), ModelConfig(name_or_path=str(bases["gpt2"]))
    for name in ("wte", "lm_head"):
        model = check_model(config, tokenizer, 0, LENGTH, False, AdapterConfig(kind="lora", also_train=(name,)))
        assert model.peft_config["default"].modules_to_save == ["transformer.wte", "lm_head"]
    with pytest.raises(ConfigError, match=r"got \['ln_f'\]; add wte, or leave"):
        check_model(config, tokenizer, 0, LENGTH, False, AdapterConfig(kind="lora", also_train=("ln_f",)))


def test_new_tokens_and_trained_modules_are_in_a_plan(bases: dict[str, Path], tiny_recipe: Path) -> None:
    from acc_lm.config.loading import load_config
    from acc_lm.planning.probe import Probe, vocabulary_of

    config = load_config(tiny_recipe, ["model.config=null", *lora("llama", bases["llama"])])
    counted = Probe(config, vocabulary_of(config)).parameters
    tokenizer = load_tokenizer(config.tokenizer, config.model)
    assert tokenizer is not None
    _, facts = build_model(config.model, tokenizer, LENGTH, 0, config.adapter)
    assert (counted.total, counted.trained) == (facts.num_parameters, facts.num_trainable)
    assert counted.trains_head


def test_the_hash_of_a_tokenizer_without_new_tokens_is_the_former_one() -> None:
    """Rows and checkpoints of tokenizers that were built before these keys existed keep their keys."""
    former = '{"name_or_path":null,"revision":null,"kind":"bpe","vocab_size":4096}'
    assert TokenizerConfig().content() == former
    assert TokenizerConfig(add_tokens=("a",)).content() != former
