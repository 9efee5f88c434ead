"""Pieces of a matrix in any division: contiguous ranges, and ranges of a block of columns; each is put together from any other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from acc_lm.checkpointing.loading import _assemble, _Extent
from acc_lm.errors import CheckpointError
from acc_lm.runtime import rectangles

ROWS, COLUMNS = 5, 12
MATRIX = torch.arange(ROWS * COLUMNS, dtype=torch.float32)


def values_of(extent: _Extent) -> torch.Tensor:
    """Elements of an extent, taken one by one."""
    first, width = extent.columns or (0, COLUMNS)
    places = [divmod(extent.start + i, width) for i in range(extent.length)]
    return torch.stack([MATRIX[row * COLUMNS + first + column] for row, column in places])


def division(blocks: int, cuts: int, draw: random.Random) -> list[_Extent]:
    """A matrix in blocks of columns, each in ranges of any length; one block: without naming its columns."""
    width = COLUMNS // blocks
    found = []
    for block in range(blocks):
        ends = sorted(draw.sample(range(1, ROWS * width), cuts))
        for start, end in zip([0, *ends], [*ends, ROWS * width], strict=True):
            found.append(_Extent(start, end - start, (block * width, width) if blocks > 1 else None))
    return found


def saved(extents: list[_Extent]) -> list[tuple[_Extent, Any]]:
    return [(extent, values_of(extent)) for extent in extents]


def test_rectangles_are_the_elements_in_order() -> None:
    for start, length, first, width in (
        (0, 12, 0, 4),
        (3, 2, 0, 4),
        (3, 9, 4, 4),
        (5, 3, 8, 4),
        (2, 1, 0, 12),
        (0, 60, 0, 12),
    ):
        found = rectangles(start, length, first, width)
        assert len(found) <= 3
        elements = []
        for each in found:
            assert each.at == len(elements)
            elements += [
                (row, column) for row in range(each.top, each.bottom) for column in range(each.left, each.right)
            ]
        assert elements == [((start + i) // width, first + (start + i) % width) for i in range(length)]


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_every_division_is_read_from_every_other(blocks: int) -> None:
    draw = random.Random(blocks)
    for others in (1, 2, 3, 4, 6):
        for _ in range(20):
            parts = saved(division(blocks, draw.randint(0, 6), draw))
            for wanted in division(others, draw.randint(0, 6), draw):
                got = _assemble(Path("x"), "param/w", parts, wanted, (ROWS, COLUMNS))
                assert torch.equal(got, values_of(wanted)), (parts, wanted)


def test_vectors_and_matrices_of_one_column_are_read_as_before() -> None:
    parts = [(_Extent(0, 2), MATRIX[:2]), (_Extent(2, 3), MATRIX[2:5])]
    assert torch.equal(_assemble(Path("x"), "param/b", parts, _Extent(1, 3), (5,)), MATRIX[1:4])


def test_gaps_and_elements_that_are_there_twice_are_refused() -> None:
    parts = saved(division(2, 2, random.Random(0)))
    whole = _Extent(0, ROWS * COLUMNS)
    left_twice = saved([_Extent(0, 30, (0, 6)), _Extent(0, 30, (0, 6))])
    overlaps = [*parts, parts[0]], [*parts[:-1], (_Extent(0, 12), MATRIX[:12])], left_twice
    for broken in (parts[1:], parts[:-1], *overlaps):
        with pytest.raises(
            CheckpointError, match=r"must hold each element of param/w once, got .*; name another checkpoint"
        ):
            _assemble(Path("x"), "param/w", broken, whole, (ROWS, COLUMNS))
