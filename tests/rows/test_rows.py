"""Rows of plain text at their edges, and the workers that read them ahead."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest
import torch

from acc_lm.rows.batch import IGNORE_INDEX
from acc_lm.rows.loader import build_loader
from acc_lm.rows.text_rows import Rows


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(2, 1), (4, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_every_token_but_the_first_is_a_target_once(num_tokens: int, num_rows: int) -> None:
    rows = Rows(np.arange(100, 100 + num_tokens, dtype=np.uint16), 4)
    assert len(rows) == num_rows
    batch = rows.__getitems__(range(num_rows))
    targets = batch["targets"][batch["targets"] != IGNORE_INDEX]
    assert targets.tolist() == list(range(101, 100 + num_tokens))
    assert rows.count_targets(np.arange(num_rows)) == num_tokens - 1
    assert batch["input_ids"].shape == batch["targets"].shape == (num_rows, 4)
    numbers = rows.units_of(np.arange(num_rows), batch)[(batch["targets"] != IGNORE_INDEX).numpy()]
    assert numbers.tolist() == list(range(1, num_tokens))


def test_documents_kept_apart_count_their_places_from_the_token_before_them() -> None:
    batch = Rows(np.array([7, 0, 8, 9, 0, 5, 6, 3, 4], dtype=np.uint16), 4, end=0)[0]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2]]
    assert batch["document_ids"].tolist() == [[0, 1, 1, 1]]


class Handlers(Rows):
    def __getitems__(self, rows: Any) -> Any:
        return {
            "ignored": torch.tensor([signal.getsignal(n) == signal.SIG_IGN for n in (signal.SIGINT, signal.SIGTERM)])
        }


@pytest.mark.parametrize("num_workers", [0, 1])
def test_only_workers_leave_a_ctrl_c_to_the_training_process(num_workers: int) -> None:
    rows = Handlers(np.arange(9, dtype=np.uint16), 4)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell ignores it in what runs in the background
    try:
        (batch,) = build_loader(rows, [np.array([0])], num_workers, pin_memory=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert batch["ignored"].tolist() == [num_workers == 1] * 2
