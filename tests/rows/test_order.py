"""The rows of a step are a pure function of seed, step and global batch size."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import run_training

from acc_lm.progress import Progress, extend_ledger
from acc_lm.rows.loader import MicroBatches, by_length, evaluation_batches
from acc_lm.rows.order import SORTED_ROWS, Bijection, RowOrder, SourceOrder, StreamOrder, own_seed, permutation


def test_every_row_comes_once_per_epoch_and_no_batch_is_short() -> None:
    order = RowOrder(seed=5, num_rows=37, global_batch_size=8)
    places = np.concatenate([order.rows_at(step) for step in range(1, 38)])
    assert len(places) == 37 * 8
    for epoch in range(8):
        assert sorted(places[epoch * 37 : (epoch + 1) * 37]) == list(range(37))


def test_epochs_and_seeds_differ() -> None:
    orders = [permutation(seed, epoch, 1000) for seed in (0, 1) for epoch in (0, 1)]
    assert len({order.tobytes() for order in orders}) == 4
    assert (np.abs(np.corrcoef(orders)[~np.eye(4, dtype=bool)]) < 0.15).all()


def test_an_order_that_is_cached_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        permutation(0, 0, 5)[0] = 1


def test_the_order_never_changes_between_versions() -> None:
    assert RowOrder(42, 100, 5).rows_at(7).tolist() == [62, 92, 96, 43, 85]

    assert RowOrder(42, 10**9, 5).rows_at(7).tolist() == LARGE
    assert RowOrder(42, SORTED_ROWS, 2).rows_at(1).tolist() == permutation(42, 0, SORTED_ROWS)[:2].tolist()


LARGE = [185852424, 413918084, 248399009, 828436579, 877703724]


@pytest.mark.parametrize("num_rows", [*range(1, 70), 127, 128, 129, 255, 256, 257, 1000, 4096, 65537])
def test_single_places_form_a_permutation_of_any_size(num_rows: int) -> None:
    places = np.arange(num_rows)
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (2**31, 12345), (own_seed(7, 3), 2)):
        bijection = Bijection(seed, epoch, num_rows)
        rows = bijection.rows_at(places)
        assert (np.sort(rows) == places).all()
        assert (bijection.places_of(rows) == places).all()


def test_all_orders_of_few_rows_occur_equally_often() -> None:
    """Chi-square of 24 orders in 4,800 epochs: with 23 degrees of freedom, 60 has a probability of 4e-5."""
    orders = [tuple(Bijection(0, epoch, 4).rows_at(np.arange(4))) for epoch in range(4800)]
    counts = [orders.count(order) for order in itertools.permutations(range(4))]
    assert sum((count - 200) ** 2 / 200 for count in counts) < 60


@pytest.mark.parametrize("num_rows", [10**5, 10**7 + 1, 2**33 + 5, 10**12])
def test_large_orders_look_random(num_rows: int) -> None:
    """Neighbouring places, neighbouring epochs and seeds are unrelated, and every region of the rows is hit equally often."""
    count = 1 << 15
    places = np.arange(min(num_rows - count, 3 * 10**9), min(num_rows, 3 * 10**9 + count))[:count]
    share = {key: Bijection(*key, num_rows).rows_at(places) / num_rows for key in ((0, 0), (0, 1), (1, 0))}
    for values in share.values():
        assert 0 <= values.min() <= values.max() < 1
        bins = np.bincount((values * 64).astype(int), minlength=64)
        assert ((bins - count / 64) ** 2 / (count / 64)).sum() < 125, "chi-square, 63 degrees of freedom: p = 1e-5"
        steps = np.sort(np.diff(values) % 1)
        assert np.abs(steps - np.linspace(0, 1, len(steps))).max() < 0.0125, "Kolmogorov-Smirnov: p = 1e-4"
    a, b, c = share.values()
    for one, other in ((a, b), (a, c), (a[1:], a[:-1]), (a[2:], a[:-2])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.025, "4.5 standard deviations"
    low_bits = (a * num_rows).round().astype(np.int64) & 1
    assert abs(low_bits.mean() - 0.5) < 0.0125


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("num_rows", "version"), [(50, 2), (50, 1), (SORTED_ROWS + 1000, 2), (SORTED_ROWS + 1000, 1)])
def test_rows_of_a_source_are_its_epochs_one_after_the_other(num_rows: int, version: int, shuffle: bool) -> None:
    order = SourceOrder(3, num_rows, shuffle, version)
    epochs = [order.rows_at(epoch * num_rows, num_rows) for epoch in (0, 1)]
    assert all((np.sort(rows) == np.arange(num_rows)).all() for rows in epochs)
    assert (epochs[0] == epochs[1]).all() != shuffle
    if version == 1 and shuffle:
        assert (epochs[1] == permutation(3, 1, num_rows)).all()
    at = np.random.default_rng(0).integers(0, 2 * num_rows - 9, 20).tolist()
    both = np.concatenate(epochs)
    assert all((order.rows_at(place, 9) == both[place : place + 9]).all() for place in at)
    assert [order.place_of(1, row) for row in epochs[1][:5].tolist()] == [0, 1, 2, 3, 4]


def test_without_shuffling_the_order_is_that_of_the_text() -> None:
    assert RowOrder(5, 10, 4, shuffle=False).rows_at(3).tolist() == [8, 9, 0, 1]


@pytest.mark.parametrize(("num_processes", "micro_batch_size"), [(1, 12), (1, 3), (2, 3), (3, 4), (4, 1), (6, 2)])
def test_processes_share_the_rows_of_each_step_without_overlap(num_processes: int, micro_batch_size: int) -> None:
    order = RowOrder(seed=0, num_rows=31, global_batch_size=12)
    per_process = [
        list(
            MicroBatches(
                order,
                micro_batch_size=micro_batch_size,
                process=process,
                num_processes=num_processes,
                first_step=3,
                last_step=9,
            )
        )
        for process in range(num_processes)
    ]
    assert len(MicroBatches(order, micro_batch_size=2, process=0, num_processes=1, first_step=3, last_step=9)) == 7 * 6
    accumulation = 12 // (num_processes * micro_batch_size)
    for i, step in enumerate(range(3, 10)):
        mine = [np.concatenate(batches[i * accumulation : (i + 1) * accumulation]) for batches in per_process]
        assert np.concatenate(mine).tolist() == order.rows_at(step).tolist()
        assert all(len(batch) == micro_batch_size for batches in per_process for batch in batches)


def test_processes_take_turns_in_getting_the_longer_rows() -> None:
    lengths = np.arange(16) * 5 % 16
    rows = by_length(np.arange(16), lengths, num_processes=2, micro_batch_size=2)
    assert lengths[rows].tolist() == [15, 14, 9, 8, 7, 6, 1, 0, 13, 12, 11, 10, 5, 4, 3, 2]


def test_a_batch_larger_than_the_data_wraps_around() -> None:
    rows = RowOrder(seed=1, num_rows=3, global_batch_size=8).rows_at(1)
    assert np.bincount(rows).tolist() in ([3, 3, 2], [3, 2, 3], [2, 3, 3])


def test_steps_of_epochs() -> None:
    order = RowOrder(seed=1, num_rows=25, global_batch_size=8)
    assert (order.count_steps(1), order.count_steps(2), order.count_steps(0.5)) == (4, 7, 2)
    assert [step for step in range(1, 20) if order.completes_epochs(step, 1)] == [4, 7, 10, 13, 16, 19]
    assert RowOrder(0, 200, 8).count_steps(2.2) == 55, "as typed, not as a float has it"
    assert not any(order.completes_epochs(step, None) for step in range(1, 20))
    assert order.epochs_at(40) == 1.6


def test_with_another_global_batch_the_position_continues() -> None:
    before = RowOrder(seed=1, num_rows=25, global_batch_size=8)
    progress = Progress()
    for step in range(1, 5):
        progress = progress.advance(before.rows_at(step), 1)
    assert progress.lag(8) == 0
    for size in (12, 5):
        order = RowOrder(1, 25, size, progress.lag(size))
        rows = np.concatenate([order.rows_at(step) for step in range(5, 5 + 60 // size)])
        assert rows.tolist() == np.concatenate([before.rows_at(step) for step in range(5, 13)])[: len(rows)].tolist()
        assert order.count_steps(3) == 4 + -(-(75 - 32) // size)
    assert [step for step in range(5, 16) if RowOrder(1, 25, 5, progress.lag(5)).completes_epochs(step, 1)] == [8, 13]
    # One step further it is the same order: only the progress has to be remembered.
    order = RowOrder(1, 25, 12, progress.lag(12))
    assert progress.advance(order.rows_at(5), 1).lag(12) == progress.lag(12)


def test_the_ledger_records_order_and_position() -> None:
    rows = [np.array([1, 2]), np.array([3])]
    chained = extend_ledger(extend_ledger("", rows[0]), rows[1])
    assert chained != extend_ledger(extend_ledger("", rows[1]), rows[0])
    assert chained == Progress().advance(rows[0], 5).advance(rows[1], 2).ledger
    assert Progress().advance(rows[0], 5).advance(rows[1], 2).tokens == 7


@pytest.mark.parametrize("num_rows", [1, 2, 5, 9])
@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_evaluation_covers_every_row_once_in_equal_rounds(num_rows: int, num_processes: int) -> None:
    shares = [
        evaluation_batches(num_rows, batch_size=2, process=p, num_processes=num_processes) for p in range(num_processes)
    ]
    assert {len(share) for share in shares} == {-(-num_rows // (2 * num_processes))}, "and no round more than needed"
    rows = np.concatenate([batch for share in shares for batch in share])
    assert sorted(rows[rows >= 0]) == list(range(num_rows))


def test_rows_of_streams_are_taken_stream_by_stream() -> None:
    order = StreamOrder(seed=0, num_rows=0, global_batch_size=6, num_streams=3)
    assert [order.rows_at(step).tolist() for step in (1, 2)] == [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]


class Rows12(RowOrder):
    def rows_at(self, step: int) -> np.ndarray:
        return np.array([4, 7, 0, 11, 3, 9, 1, 10, 6, 2, 8, 5])


def test_rows_of_similar_length_share_a_micro_batch_and_processes_alternate() -> None:
    """Rows 0 to 11 have the lengths 12 to 1, and row 9 that of row 8: rows of equal length stay in the batch's order."""
    lengths = np.array([12, 11, 10, 9, 8, 7, 6, 5, 4, 4, 2, 1])
    shares = [
        [batch.tolist() for batch in MicroBatches(
            Rows12(0, 12, 12), micro_batch_size=2, process=process, num_processes=2, first_step=1, last_step=1, lengths=lengths,
        )] for process in (0, 1)
    ]  # fmt: skip
    assert shares == [[[0, 1], [6, 7], [9, 8]], [[2, 3], [4, 5], [10, 11]]]


def test_an_evaluation_begins_with_the_longest_rows() -> None:
    lengths = np.array([3, 9, 5, 7, 5])
    shares = [evaluation_batches(5, batch_size=2, process=p, num_processes=2, lengths=lengths) for p in (0, 1)]
    assert [[batch.tolist() for batch in share] for share in shares] == [[[1, 3], [0, -1]], [[2, 4], [-1, -1]]]


def test_an_older_checkpoint_goes_through_its_rows_in_the_order_it_began_with(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state does not name a version; a new run of the same recipe has other rows."""
    from acc_lm.checkpointing.format import checksum
    from acc_lm.rows import order

    monkeypatch.setattr(order, "SORTED_ROWS", 16)  # in the processes of the run too, which are forked from this one
    arguments, run = [*tiny, "data.sequence_length=16", "checkpoint.every=2"], tmp_path / "run"

    def state_at(step: int) -> dict[str, Any]:
        return dict(json.loads((run / f"checkpoints/step-{step:08}/state.json").read_text()))

    def ledger(version: int, steps: int) -> str:
        epoch = re.search(r"rows +([\d,]+) of 16 tokens", first.output)
        assert epoch is not None
        found, rows = Progress(), RowOrder(state["recipe"]["seed"], int(epoch[1].replace(",", "")), 12, version=version)
        for step in range(1, steps + 1):
            found = found.advance(rows.rows_at(step), 1)
        return found.ledger

    first = run_training([*arguments, "training.max_steps=2"])
    state, folder = state_at(2), run / "checkpoints/step-00000002"
    assert state.pop("row_order") == 2
    assert state["progress"]["ledger"] == ledger(2, 2) != ledger(1, 2)
    state["progress"]["ledger"] = ledger(1, 2)  # as a version that sorted every epoch would have left it
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = {"size": (folder / "state.json").stat().st_size, "xxh3_128": checksum(folder / "state.json")}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"files": manifest["files"] | {"state.json": entry}}))
    run_training([*arguments, "training.max_steps=4"])
    assert state_at(4)["row_order"] == 1
    assert state_at(4)["progress"]["ledger"] == ledger(1, 4)
