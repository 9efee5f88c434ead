"""Packed rows: every item is in one of them, and no number differs from that of the items alone."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends import BACKENDS, GLOBAL_BATCH, LENGTH, Scenario, make_config
from processes import ROOT, launcher_environment, run_everywhere, run_training
from releases import needs_transformers
from test_model import MOE, SeenAttention, build
from torch import nn

import acc_lm.modeling.loss_head
from acc_lm.errors import ConfigError
from acc_lm.modeling.attention import (
    CAUSAL,
    block_mask,
    causal_attention,
    choose_attention,
    document_mask,
    use_block_masks,
)
from acc_lm.modeling.checks import check_packing
from acc_lm.modeling.loss_head import install_loss
from acc_lm.rows.loader import MicroBatches, evaluation_batches
from acc_lm.rows.order import RowOrder
from acc_lm.rows.packing import CHUNK_TOKENS, WIDTH, PackedRows, one_per_row, pack
from acc_lm.rows.text_rows import Rows
from acc_lm.run_files.metrics_file import read

PLACES = 48


def alpaca_lengths(num_items: int = 52_000) -> np.ndarray:
    """Lengths of items like Alpaca's: 120 in the mean, log-normal, cut at 512."""
    logarithms = np.random.default_rng(0).normal(np.log(95), 0.7, num_items)
    return np.clip(np.exp(logarithms), 1, 512).astype(np.int64)


def make_rows(num_items: int = 24, places: int = PLACES, vocab_size: int = 64, **keywords: Any) -> PackedRows:
    """Items of 2 to 3/4 of a row, some tokens are not targets; the first item has none, and one fills a row."""
    choose = np.random.default_rng(3)
    sizes = choose.integers(2, places * 3 // 4, num_items)
    sizes[1] = places + 1
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    tokens = choose.integers(0, vocab_size, offsets[-1]).astype(np.uint16)
    is_target = choose.random(offsets[-1]) < 0.7
    is_target[: offsets[1]] = False
    packing = one_per_row if keywords.get("padded") else pack
    bits = np.packbits(is_target, bitorder="little")
    bytes_of_token = (tokens % 5).astype(np.uint32)
    return PackedRows(
        tokens, bits, offsets, packing(sizes - 1, places), places, bytes_of_token=bytes_of_token, **keywords
    )


def items_of(rows: PackedRows, chosen: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids, targets), int64 [1, n], of each item, read from the arrays one token after the other."""
    found = []
    for row in chosen:
        for item in rows.packing.items[rows.packing.row_offsets[row] : rows.packing.row_offsets[row + 1]]:
            places = range(rows.item_offsets[item], rows.item_offsets[item + 1])
            ids = torch.tensor([int(rows.tokens[place]) for place in places])
            counts = torch.tensor([bool(rows.is_target[place // 8] >> (place % 8) & 1) for place in places])
            found.append((ids[None, :-1], ids[1:].masked_fill(~counts[1:], -100)[None]))
    return found


# --- which item goes where -----------------------------------------------------------------------------------------


def test_packed_alpaca_leaves_few_positions_empty_and_every_item_is_in_one_row() -> None:
    lengths = alpaca_lengths()
    packing = pack(lengths, 512)
    assert np.array_equal(np.sort(packing.items), np.arange(len(lengths)))
    taken = np.add.reduceat(lengths[packing.items], packing.row_offsets[:-1])
    assert taken.max() <= 512
    pad_share = 1 - taken.mean() / 512
    print(f"pad share {pad_share:.2%}, one item a row {1 - lengths.mean() / 512:.0%}")
    assert pad_share < 0.02


def test_packing_is_a_function_of_the_lengths_and_ordered_by_first_items() -> None:
    lengths = alpaca_lengths(2000)
    packing, again = pack(lengths, 512), pack(lengths.astype(np.uint16), 512)
    assert all(np.array_equal(a, b) for a, b in zip(packing, again, strict=True))
    rows = np.split(packing.items, packing.row_offsets[1:-1])
    assert all((np.diff(row) > 0).all() for row in rows)
    assert (np.diff([row[0] for row in rows]) > 0).all(), "the longest items must not all come first"


@pytest.mark.parametrize(("lengths", "expected"), [
    ([3, 5, 5, 3, 2], [[0, 2], [1, 3], [4]]),
    ([8, 4, 4, 4, 4], [[0], [1, 2], [3, 4]]),
    ([6, 5, 3, 2], [[0, 3], [1, 2]]),
    ([1], [[0]]),
])  # fmt: skip
def test_the_fullest_row_with_room_is_taken(lengths: list[int], expected: list[list[int]]) -> None:
    packing = pack(np.array(lengths), 8)
    assert [row.tolist() for row in np.split(packing.items, packing.row_offsets[1:-1])] == expected


@pytest.mark.parametrize("make", [pack, one_per_row])
@pytest.mark.parametrize(("length", "says"), [(9, "item 1 must take 1 to 8 places of a row, got 9"), (0, "got 0")])
def test_items_that_fit_no_row_are_refused(make: Any, length: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make(np.array([8, length]), 8)


# --- rows ----------------------------------------------------------------------------------------------------------


def test_rows_are_their_items_one_after_the_other() -> None:
    rows = make_rows()
    chosen = [2, 0, -1]
    batch = rows.__getitems__(chosen)
    assert set(batch) == {"input_ids", "targets", "position_ids", "document_ids"}
    assert all(tensor.shape == (3, PLACES) and tensor.dtype == torch.int64 for tensor in batch.values())
    for i, row in enumerate(chosen[:2]):
        items = items_of(rows, [row])
        place = 0
        for number, (ids, targets) in enumerate(items):
            here = slice(place, place + ids.shape[1])
            assert torch.equal(batch["input_ids"][i, here], ids[0])
            assert torch.equal(batch["targets"][i, here], targets[0])
            assert torch.equal(batch["position_ids"][i, here], torch.arange(ids.shape[1]))
            assert (batch["document_ids"][i, here] == number).all()
            place = here.stop
        assert (batch["targets"][i, place:] == -100).all()
        assert (batch["document_ids"][i, place:] == len(items)).all(), "padding is a document of its own"
        assert torch.equal(batch["position_ids"][i, place:], torch.arange(PLACES - place))
    assert (batch["targets"][2] == -100).all()
    assert torch.equal(batch["position_ids"][2], torch.arange(PLACES))


def test_targets_and_bytes_are_counted() -> None:
    rows = make_rows()
    for chosen in ([0], [1, 3], list(range(len(rows))), [2, -1]):
        targets = torch.cat([targets[0] for _, targets in items_of(rows, [row for row in chosen if row >= 0])])
        assert rows.count_targets(np.array(chosen)) == int((targets != -100).sum())
        assert rows.count_bytes(chosen) == int((targets[targets != -100] % 5).sum())
    assert rows.count_targets(np.array([0])) == (rows[0]["targets"] != -100).sum()


def test_each_target_belongs_to_its_item_and_the_fill_is_that_of_the_places() -> None:
    rows = make_rows(22)
    last = len(rows) - 1
    assert rows.lengths[last] < PLACES, "padding in the last row, after which there is no item"
    chosen = np.array([last, 0, -1, 1])
    batch = rows.__getitems__(chosen)
    units = np.broadcast_to(rows.units_of(chosen, batch), batch["targets"].shape)
    for row, targets_L, units_L in zip(chosen, batch["targets"], units, strict=True):
        items = (
            rows.packing.items[rows.packing.row_offsets[row] : rows.packing.row_offsets[row + 1]] if row >= 0 else []
        )
        expected = [item for item in items for _ in range(rows.item_offsets[item + 1] - rows.item_offsets[item] - 1)]
        is_target = (targets_L != -100).numpy()
        assert units_L[is_target].tolist() == np.array(expected)[is_target[: len(expected)]].tolist()
    empty = sum(int((batch["document_ids"] == len(items)).sum()) for batch, items in _rows_with_items(rows))
    name, text = rows.fill
    assert (name, text) == (
        "packing",
        f"{22 / len(rows):.1f} items a row, {empty / (len(rows) * PLACES):.1%} of the places empty",
    )
    assert 0 < empty < len(rows) * PLACES / 2


def _rows_with_items(rows: PackedRows) -> list[tuple[dict[str, torch.Tensor], np.ndarray]]:
    spans = zip(rows.packing.row_offsets, rows.packing.row_offsets[1:], strict=False)
    return [(rows[row], rows.packing.items[begin:end]) for row, (begin, end) in enumerate(spans)]


def test_counting_targets_reads_a_few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_rows(200).num_targets
    assert CHUNK_TOKENS % 8 == 0
    monkeypatch.setattr("acc_lm.rows.packing.CHUNK_TOKENS", 8)
    assert np.array_equal(make_rows(200).num_targets, whole)


def test_padded_rows_hold_one_item_each_and_are_as_wide_as_the_longest() -> None:
    rows = make_rows(places=100, padded=True)
    assert len(rows) == 24
    short = [row for row in range(24) if rows.lengths[row] <= 10][:2]
    batch = rows.__getitems__([short[0], -1])
    assert set(batch) == {"input_ids", "targets"}, "the path of a model that knows of no documents"
    assert batch["input_ids"].shape == (2, WIDTH)
    assert rows.__getitems__([short[0], 1])["input_ids"].shape == (2, 100)
    (ids, targets), length = items_of(rows, [short[0]])[0], rows.lengths[short[0]]
    assert torch.equal(batch["input_ids"][:1, :length], ids)
    assert torch.equal(batch["targets"][:1, :length], targets)
    assert (batch["targets"][0, length:] == -100).all()
    with pytest.raises(ValueError, match="packing must be for rows of 100 places"):
        PackedRows(rows.tokens, rows.is_target, rows.item_offsets, pack(rows.lengths, 100), 100, padded=True)


def test_grouping_by_length_keeps_the_batch_and_saves_padding() -> None:
    lengths = alpaca_lengths(480)
    order = RowOrder(1, 480, 48)

    def batches(num_processes: int, lengths: np.ndarray | None) -> list[list[np.ndarray]]:
        return [
            list(MicroBatches(
                order, micro_batch_size=4, process=process, num_processes=num_processes, first_step=1, last_step=10, lengths=lengths
            ))
            for process in range(num_processes)
        ]  # fmt: skip

    def count_places(batches: list[np.ndarray]) -> int:
        return sum(len(batch) * int(lengths[batch].max()) for batch in batches)

    for num_processes in (1, 2, 3):
        plain, grouped = batches(num_processes, None), batches(num_processes, lengths)
        per_step = 12 // num_processes
        for step in range(10):
            here = np.concatenate([b for process in grouped for b in process[step * per_step : (step + 1) * per_step]])
            assert np.array_equal(np.sort(here), np.sort(order.rows_at(step + 1)))
        plain_places, places = (sum(map(count_places, each)) for each in (plain, grouped))
        assert places < 1.2 * lengths.sum() < 1.5 * lengths.sum() < plain_places
        slowest, before = (
            sum(
                max(count_places(process[step * per_step : (step + 1) * per_step]) for process in each)
                for step in range(10)
            )
            for each in (grouped, plain)
        )
        assert slowest < 0.8 * before, "processes wait for the slowest one"
    evaluated = evaluation_batches(3, batch_size=2, process=0, num_processes=1, lengths=np.array([5, 9, 7, 1]))
    assert [batch.tolist() for batch in evaluated] == [[1, 2], [0, -1]]


# --- packed = alone ------------------------------------------------------------------------------------------------

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt_neox": ("gpt_neox", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"resid_pdrop": 0.0}),
    "gemma3": ("gemma3_text", {"head_dim": 8}),
    "gemma3 window": ("gemma3_text", {"sliding_window": 4, "head_dim": 8}),
    "mistral window": ("mistral", {"sliding_window": 7}),
    "gemma2 soft cap": ("gemma2", {"head_dim": 8, "sliding_window": 9, "attn_logit_softcapping": 1.0}),
    "gpt_oss sinks": ("gpt_oss", {"sliding_window": 6, **MOE}),
    "llama4 chunks": ("llama4_text", {"attention_chunk_size": 8, "head_dim": 8, "intermediate_size_mlp": 48, **MOE}),
    "cohere": ("cohere", {}),
    "mpt": ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}),
    "falcon": ("falcon", {}),
}  # fmt: skip


def skip_wrong_chunks(name: str) -> None:
    if name == "llama4 chunks":
        needs_transformers("5.23", "the chunks of Llama 4 do not begin with each document")


OURS = ["llama", "qwen3", "gpt2", "gpt_neox", "olmo2", "phi3", "gemma3", "cohere"]
# Norms that compute in float32 whatever the model's type
EXACT_IN_FLOAT64 = ["gpt2", "gpt_neox"]


def make_model(name: str, dtype: torch.dtype = torch.float32, checkpointing: bool = False) -> Any:
    model_type, fields = ARCHITECTURES[name]
    model = build(model_type, **fields)
    if name == "gemma2 soft cap":  # at initial weights no score is large enough for the cap to show
        for parameter in model.parameters():
            parameter.data *= 4 if parameter.ndim == 2 else 1
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    choose_attention(model, PLACES)
    install_loss(model)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model.train()


def reference(
    name: str, dtype: torch.dtype, items: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, dict[str, Any]]:
    """Summed loss and gradients of the items one by one, on transformers' own model and logits."""
    model_type, fields = ARCHITECTURES[name]
    plain = build(model_type, **fields)
    plain.load_state_dict(make_model(name).state_dict())
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(dtype)
    total = 0.0
    for ids, targets in items:
        logits = plain(ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.to(dtype).flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def differences(model: Any, loss: torch.Tensor, expected: tuple[float, dict[str, Any]]) -> tuple[float, float]:
    """Relative: of the loss, and the largest of any parameter's gradient (norm of the difference over the norm)."""
    off = [0.0]
    for name, parameter in model.named_parameters():
        want = expected[1].get(name)
        if want is not None and want.norm() > 0:
            assert parameter.grad is not None, name
            # A gradient that is 0 but for rounding (the bias of a key) has no digits to compare.
            floor = 1e-5 * max(float(gradient.norm()) for gradient in expected[1].values())
            off.append(float((parameter.grad - want).norm()) / max(float(want.norm()), floor))
    return abs(loss.item() - expected[0]) / expected[0], max(off)


@cache
def case(name: str, dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], tuple[float, dict[str, Any]]]:
    rows = make_rows()
    chosen = [0, 1, 2, 3]
    assert max(np.diff(rows.packing.row_offsets)[chosen]) >= 3
    return rows.__getitems__(chosen), reference(name, dtype, items_of(rows, chosen))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_packed_batch_has_the_loss_and_gradients_of_its_items_alone(name: str, checkpointing: bool) -> None:
    skip_wrong_chunks(name)
    batch, expected = case(name)
    model = make_model(name, checkpointing=checkpointing)
    assert (model.config._attn_implementation == CAUSAL) is (name in OURS)
    loss = model(**batch)
    loss.backward()
    loss_off, gradient_off = differences(model, loss, expected)
    print(f"{name}: loss {loss_off:.1e}, gradients {gradient_off:.1e}")
    assert loss_off <= 1e-6
    assert gradient_off <= 1e-6
    model.eval()
    sums = model(**batch)
    assert sums.num_targets == (batch["targets"] != -100).sum()
    assert abs(sums.nll.item() / expected[0] - 1) <= 1e-6


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral window"])
def test_documents_in_rows_of_plain_text_are_alone_too(name: str) -> None:
    end = 5
    tokens = np.random.default_rng(1).integers(0, 64, 3 * PLACES - 6).astype(np.uint16)
    tokens[[0, 20, 21, 47, 48, 49, 100]] = end  # at both edges of a row, and empty documents
    rows = Rows(tokens, PLACES, end=end)
    batch = rows.__getitems__([0, 1, 2, -1])
    assert {key: tuple(value.shape) for key, value in batch.items()} == dict.fromkeys(batch, (4, PLACES))
    pieces = []
    for row in range(3):
        ids, targets = batch["input_ids"][row], batch["targets"][row]
        begins = [0, *(place for place in range(1, PLACES) if ids[place] == end)]
        for begin, stop in itertools.pairwise([*begins, PLACES]):
            pieces.append((ids[None, begin:stop], targets[None, begin:stop]))
            assert torch.equal(batch["position_ids"][row, begin:stop], torch.arange(stop - begin))
    assert sum(int((targets != -100).sum()) for _, targets in pieces) == len(tokens) - 1, "no target is lost"
    assert len(pieces) >= 8
    expected = reference(name, torch.float32, [piece for piece in pieces if (piece[1] != -100).any()])
    model = make_model(name)
    loss = model(**batch)
    loss.backward()
    off = differences(model, loss, expected)
    assert max(off) < 1e-6, off
    across = make_model(name)
    loss = across(input_ids=batch["input_ids"], targets=batch["targets"])
    loss.backward()
    assert differences(across, loss, expected)[1] > 1e-2


@pytest.mark.parametrize(("config", "num_processes"), [pytest.param("ddp", 2, marks=pytest.mark.slow), ("fsdp2", 2)])
def test_a_run_that_keeps_documents_apart_is_the_same_on_any_backend(
    config: str, num_processes: int, tiny: list[str], tmp_path: Path
) -> None:
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "document {i} of {i % 7}"}}\n' for i in range(200)))
    recipe = [*tiny, f"data.files=[{tmp_path}/text.jsonl]", "training.micro_batch_size=6", "training.log_every=1"]
    alone = [*recipe, "data.attend_across_documents=false"]
    environment = launcher_environment(ROOT / f"accelerate_configs/{config}.yaml", num_processes)
    assert "none sees another" in run_training([*alone, f"output_dir={tmp_path}/one"]).output
    run_training([*alone, f"output_dir={tmp_path}/two"], num_processes, environment)
    assert json.loads((tmp_path / "two" / "environment.json").read_text())["strategy"] == config
    run_training([*recipe, f"output_dir={tmp_path}/across"])
    one, two, across = (
        [entry[key] for entry in read(tmp_path / name) for key in ("train/loss", "train/grad_norm", "eval/loss") if key in entry]
        for name in ("one", "two", "across")
    )  # fmt: skip
    assert np.allclose(one, two, rtol=1e-5)
    assert not np.allclose(one, across, rtol=1e-3)


@pytest.mark.parametrize("name", EXACT_IN_FLOAT64)
def test_in_float64_only_rounding_remains(name: str) -> None:
    batch, expected = case(name, torch.float64)
    model = make_model(name, torch.float64)
    loss = model(**batch)
    loss.backward()
    assert max(differences(model, loss, expected)) <= 1e-10


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3 window"])
def test_compiled_packing_is_the_same_in_one_graph(name: str) -> None:
    torch._dynamo.reset()
    batch, expected = case(name)
    model = make_model(name)
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch)
    loss.backward()
    assert max(differences(model, loss, expected)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("flex", [False, True], ids=["", "flex"])
def test_packing_compiled_by_the_compiler_of_a_run_is_the_same(
    name: str, flex: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the compiler that a run uses; a CPU has the forward pass of FlexAttention only."""
    from transformers.utils.output_capturing import _active_collector

    monkeypatch.setattr(_active_collector, "compiling", False)  # restored at the end, which transformers forgets
    torch._dynamo.reset()
    batch, expected = case(name)
    if flex:
        monkeypatch.setattr(acc_lm.modeling.loss_head, "document_mask", block_mask)
    model = make_model(name).eval()
    with torch.set_grad_enabled(not flex):
        sums = torch.compile(model, fullgraph=True)(**batch)
    assert abs(sums.nll.item() / expected[0] - 1) <= 1e-6
    if not flex:
        sums.nll.backward()
        assert max(differences(model, sums.nll, expected)) <= 1e-6


NO_PACKING = {
    "positions that restart, and no documents": lambda batch: {**batch, "document_ids": None},
    "documents, and positions that do not restart": lambda batch: {
        **batch, "position_ids": torch.arange(PLACES).expand(4, -1)
    },
    "documents that see each other": lambda batch: {**batch, "document_ids": batch["document_ids"] * 0},
    "a document that sees the one before it": lambda batch: {**batch, "document_ids": batch["document_ids"] // 2},
    "neither": lambda batch: {key: batch[key] for key in ("input_ids", "targets")},
}  # fmt: skip


@pytest.mark.parametrize("fault", NO_PACKING)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_wrong_packing_is_detected(name: str, fault: str) -> None:
    batch, expected = case(name)
    model = make_model(name)
    loss = model(**NO_PACKING[fault](batch))
    loss.backward()
    loss_off, gradient_off = differences(model, loss, expected)
    print(f"{name}, {fault}: loss {loss_off:.1e}, gradients {gradient_off:.1e}")
    # Rotary positions are relative: where no document sees another, only rounding would show a document's position.
    seen = name == "gpt2" or fault != "documents, and positions that do not restart"
    assert (loss_off > 1e-5 and gradient_off > 1e-2) is seen


@pytest.mark.parametrize("fault", ["documents, and positions that do not restart", "neither"])
def test_transformers_own_attention_separates_documents_by_the_positions(fault: str) -> None:
    batch, expected = case("gemma3 window")
    model = make_model("gemma3 window")
    loss = model(**NO_PACKING[fault](batch))
    loss.backward()
    assert differences(model, loss, expected)[1] > 1e-2


def test_one_mask_is_made_for_all_layers_and_none_without_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def note(document_ids: torch.Tensor) -> Any:
        made.append(document_mask(document_ids))
        return made[-1]

    batch = make_rows().__getitems__([0, 1])
    model = make_model("llama")
    monkeypatch.setattr(acc_lm.modeling.loss_head, "document_mask", note)
    seen = SeenAttention(monkeypatch)
    model(**batch)
    assert len(made) == 1
    assert seen.calls == [(False, False)] * 2
    model(batch["input_ids"], batch["targets"])
    assert len(made) == 1
    assert seen.calls[2:] == [(True, True)] * 2


def test_bf16_autocast_stays_within_its_band() -> None:
    batch, expected = case("llama")
    model = make_model("llama")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch)
    loss.backward()
    loss_off, gradient_off = differences(model, loss, expected)
    assert loss_off <= 2e-3
    assert gradient_off <= 5e-2


# --- architectures that cannot pack --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_that_can_pass_the_check(name: str) -> None:
    skip_wrong_chunks(name)
    model = make_model(name)
    check_packing(model, PLACES)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


CANNOT = [
    ("mamba", {"state_size": 4}), ("mamba2", {"state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 1}),
    ("bloom", {"n_layer": 2, "n_head": 4}), 
    ("recurrent_gemma", {"lru_width": 32}),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "fields"), CANNOT, ids=lambda value: str(value)[:20])
def test_architectures_that_cannot_are_refused(model_type: str, fields: dict[str, Any]) -> None:
    model = build(model_type, **fields)
    choose_attention(model, PLACES)
    install_loss(model)
    with pytest.raises(
        ConfigError,
        match=rf"^data.packing must be false for a model of type {model_type}, got true, .*; set data.packing: false",
    ) as error:
        check_packing(model, PLACES)
    assert "\n" not in str(error.value)
    print(error.value)


@pytest.mark.parametrize("sequence_length", [6, 8, 9, 30, 300])
def test_the_check_fits_into_any_row(sequence_length: int) -> None:
    model = build("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=max(sequence_length, 8))
    choose_attention(model, sequence_length)
    install_loss(model)
    check_packing(model, sequence_length)


FAULTS = ["sees the document before", "ignores positions", "leaks a gradient", "another loss", "another gradient"]


@pytest.mark.parametrize("fault", ["sees all before", *FAULTS])
def test_the_check_detects_what_it_is_for(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("gpt2" if fault == "ignores positions" else "llama")
    own, head = model.base_model.forward, model.lm_head.forward

    def faulty_head(hidden: torch.Tensor, targets: torch.Tensor) -> Any:
        if (targets != -100).all():  # a document alone
            return head(hidden, targets)
        if fault == "leaks a gradient":
            return head(hidden + 1e-9 * hidden.mean(dim=1, keepdim=True), targets)
        if fault == "another gradient":
            return head(hidden.detach() + 0.5 * (hidden - hidden.detach()), targets)
        sums = head(hidden, targets)
        return sums._replace(nll=sums.nll + 1)

    if fault == "sees all before":
        monkeypatch.setattr(acc_lm.modeling.loss_head, "document_mask", lambda documents: document_mask(documents // 2))
    elif fault == "sees the document before":  # the last but one only
        monkeypatch.setattr(
            acc_lm.modeling.loss_head,
            "document_mask",
            lambda documents: document_mask(documents - (documents == 2) * 1),
        )
    elif fault == "ignores positions":
        model.base_model.forward = lambda position_ids=None, **keywords: own(**keywords)
    else:
        model.lm_head.forward = faulty_head
    with pytest.raises(ConfigError, match="changes the losses of the documents in a row"):
        check_packing(model, PLACES)


@pytest.mark.parametrize("name", ["llama", "mistral window"])
def test_documents_without_positions_are_refused(name: str) -> None:
    batch = case(name)[0]
    with pytest.raises(ValueError, match="position_ids must restart in each of the document_ids, got none"):
        make_model(name)(**{**batch, "position_ids": None})


# --- FlexAttention, which a GPU uses -------------------------------------------------------------------------------


def test_the_blocks_of_a_gpu_are_the_mask_of_the_cpu() -> None:
    from torch.nn.attention.flex_attention import create_mask

    documents = torch.sort(torch.randint(0, 5, (3, 300), generator=torch.Generator().manual_seed(0)))[0]
    with torch.compiler.set_stance("force_eager"):  # only its values are needed
        blocks = block_mask(documents)
    assert torch.equal(create_mask(blocks.mask_mod, 3, 1, 300, 300, device="cpu"), document_mask(documents))
    computed = torch.zeros(3, 3, 3, dtype=torch.bool)
    for row in range(3):
        for query in range(3):
            computed[row, query, blocks.kv_indices[row, 0, query, : blocks.kv_num_blocks[row, 0, query]].long()] = True
            full = blocks.full_kv_indices[row, 0, query, : blocks.full_kv_num_blocks[row, 0, query]].long()
            computed[row, query, full] = True
    needed = nn.functional.pad(document_mask(documents)[:, 0], (0, 84, 0, 84)).view(3, 3, 128, 3, 128).any(4).any(2)
    assert torch.equal(computed, needed)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_flex_attention_gives_the_same_sums(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, expected = case(name)
    monkeypatch.setattr(acc_lm.modeling.loss_head, "document_mask", block_mask)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        sums = make_model(name).eval()(**batch)
    assert abs(sums.nll.item() / expected[0] - 1) <= 1e-6


@pytest.mark.parametrize("name", ["gemma2 soft cap", "mistral window", "llama4 chunks"])
def test_flex_attention_takes_windows_and_soft_caps(name: str) -> None:
    skip_wrong_chunks(name)
    batch, expected = case(name)
    model = make_model(name).eval()
    use_block_masks(model)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        sums = model(**batch)
    assert abs(sums.nll.item() / expected[0] - 1) <= 1e-6


def test_block_masks_are_for_runs_on_a_gpu_and_not_for_machines_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention has no backward on a CPU."""
    from acc_lm.modeling.build import _prepare_packing

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, own = make_model("mistral window"), "transformers' sdpa (sliding_window)"
    before = model.config._attn_implementation
    assert _prepare_packing(model, own, "cpu") == own
    assert model.config._attn_implementation == before
    assert _prepare_packing(model, own, "cuda") != own


def test_attention_dropout_is_refused_where_flex_attention_cannot_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acc_lm.modeling.loss_head, "document_mask", block_mask)
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(ConfigError, match=r"attention dropout must be 0 for packed rows on a GPU, got 0.1"),
    ):
        model(**case("llama")[0])


def test_heads_that_are_too_small_for_flex_attention_are_refused_on_a_gpu() -> None:
    """On fake tensors; a GPU would answer with a traceback of the compiler."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    blocks: Any = object()
    with FakeTensorMode():
        heads = torch.empty(2, 4, 8, 8, device="cuda")
    with pytest.raises(ConfigError, match=r"must have 16 or more elements .* on a GPU, got 8; "):
        causal_attention(nn.Module(), heads, heads, heads, None, document_mask=blocks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2 soft cap", "mistral window", "gpt_oss sinks"])
def test_packed_rows_equal_their_items_alone_on_a_gpu_too(name: str, compiled: bool) -> None:
    batch, expected = case(name)

    def run() -> float:  # in a separate process: this one must not initialise the device, or it could not fork
        model = make_model(name).cuda()
        if name not in OURS:
            use_block_masks(model)
        forward = torch.compile(model) if compiled else model
        loss = forward(**{key: tensor.cuda() for key, tensor in batch.items()})
        loss.backward()
        return max(differences(model.cpu(), loss, expected))

    assert run_everywhere(run)[0] <= 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_no_mask_of_a_full_row_exists() -> None:
    length = 32_768

    def run() -> int:
        documents = (torch.arange(length, device="cuda") // 1000)[None]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        block_mask(documents)
        return torch.cuda.max_memory_allocated() - before

    assert run_everywhere(run)[0] < length * length / 16


# --- on every backend ----------------------------------------------------------------------------------------------

STEPS = 6


def train_rows(scenario: Scenario, padded: bool) -> list[dict[str, float]]:
    """Train a few steps on packed rows, or on the same items one in a row; called by every process."""
    import os

    from acc_lm import runtime
    from acc_lm.config import TokenizerConfig
    from acc_lm.evaluation.held_out import evaluate_rows
    from acc_lm.modeling.build import build_empty_model, build_model
    from acc_lm.optimization.optimizer import build_optimizer
    from acc_lm.rows.loader import build_loader
    from acc_lm.text.tokenizer import make_tokenizer
    from acc_lm.training.step import train_step

    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    config = make_config(scenario, num_processes)
    runtime.quiet_libraries()
    accelerator = runtime.build_accelerator(config)
    assert accelerator.num_processes == num_processes
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [])
    model, _ = runtime.initialise_once(
        accelerator,
        lambda: build_model(config.model, tokenizer, LENGTH, config.seed),
        lambda facts: build_empty_model(config.model, tokenizer, LENGTH, facts),
    )
    model, optimizer = runtime.prepare(accelerator, model, build_optimizer(model, config.optimizer))
    packed = make_rows(400, LENGTH, 257)
    alone = make_rows(400, LENGTH, 257, padded=True)
    order = RowOrder(3, len(packed), GLOBAL_BATCH)
    rows = alone if padded else packed
    micro, accumulation = runtime.split_global_batch(config.training, num_processes)
    runtime.warm_up(accelerator, model, rows.__getitems__([0]))
    gradients = runtime.Gradients(accelerator, model)
    batches = MicroBatches(
        order, micro_batch_size=micro, process=accelerator.process_index,
        num_processes=num_processes, first_step=1, last_step=STEPS,
    )  # fmt: skip
    if padded:
        offsets = packed.packing.row_offsets
        chosen = [packed.packing.items[offsets[row] : offsets[row + 1]] for row in range(len(packed))]
        batches = [np.concatenate([chosen[row] for row in rows_of_step]) for rows_of_step in batches]  # type: ignore[assignment]
        assert accumulation == num_processes == 1
    results = []
    loader = iter(build_loader(rows, batches, 0, pin_memory=False))
    for step in range(1, STEPS + 1):
        num_targets = packed.count_targets(order.rows_at(step))
        outcome = train_step(
            accelerator, model, optimizer, [next(loader) for _ in range(accumulation)], step=step, seed=0,
            num_targets=num_targets, max_grad_norm=config.optimizer.max_grad_norm, gradients=gradients,
        )  # fmt: skip
        loss = accelerator.reduce(outcome.nll, reduction="sum").item() / num_targets
        results.append({"loss": loss, "grad_norm": float(outcome.grad_norm)})
    evaluated = evaluate_rows(accelerator, model, rows, 5)
    results.append({
        "eval loss": evaluated.loss, "accuracy": evaluated.token_accuracy, "bits": evaluated.bits_per_byte,
        "targets": evaluated.num_targets,
    })  # fmt: skip
    return results


@cache
def items_alone(scenario: Scenario) -> list[dict[str, float]]:
    return run_everywhere(lambda: train_rows(scenario, padded=True))[0]


@pytest.mark.parametrize(
    "name",
    [
        "single",
        "ddp x2",
        "deepspeed_zero3 x2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2 x2", "deepspeed_zero2 x2")),
    ],
)
@pytest.mark.parametrize(
    "scenario", [Scenario("llama", accumulation=2, gradient_checkpointing=True), Scenario("gpt2")], ids=str
)
def test_packed_rows_train_as_their_items_do_on_every_backend(name: str, scenario: Scenario) -> None:
    config, num_processes = BACKENDS.get(name, ("single", 1))
    environment = (
        {} if name == "single" else launcher_environment(ROOT / "accelerate_configs" / f"{config}.yaml", num_processes)
    )
    got = run_everywhere(lambda: train_rows(scenario, padded=False), num_processes, 120, environment)[0]
    whole = Scenario(scenario.model, gradient_checkpointing=scenario.gradient_checkpointing)
    off = [
        abs(mine[key] / its[key] - 1)
        for mine, its in zip(got, items_alone(whole), strict=True)
        for key in its
    ]  # fmt: skip
    print(f"{name} {scenario}: {max(off):.1e}")
    assert max(off) <= 3e-6
    assert got[0]["loss"] - got[STEPS - 1]["loss"] > 1e-2, "the run must learn"


def test_an_evaluation_of_packed_rows_is_the_sum_over_the_items() -> None:
    """Against transformers' own model, item by item."""

    def run() -> list[float]:
        from acc_lm.evaluation.held_out import evaluate_rows
        from acc_lm.runtime import build_accelerator

        accelerator = build_accelerator(make_config(Scenario("llama"), 2))
        found = evaluate_rows(accelerator, accelerator.prepare(make_model("llama")), make_rows(), 3)
        return [found.loss, found.token_accuracy, found.bits_per_byte, found.num_targets]

    plain, rows = build("llama"), make_rows()
    nll = correct = count = num_bytes = 0
    with torch.no_grad():
        for ids, targets in items_of(rows, range(len(rows))):
            logits, here = plain(ids).logits, targets != -100
            nll += nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
            correct += int((logits.argmax(-1) == targets)[here].sum())
            count += int(here.sum())
            num_bytes += int((targets[here] % 5).sum())
    expected = [nll / count, correct / count, nll / np.log(2) / num_bytes, count]
    for got in (run_everywhere(run, 1)[0], run_everywhere(run, 2)[0]):
        assert got == pytest.approx(expected, rel=1e-6)
