"""Rectangles of a tensor: consecutive elements of some of its columns, as blocks that can be copied at once."""

from __future__ import annotations

from typing import NamedTuple


class Rectangle(NamedTuple):
    """Rows [top, bottom) and columns [left, right) of a tensor [R, C]."""

    top: int
    bottom: int
    left: int
    right: int
    at: int = 0
    """Position of its first element among the elements that it is a part of; the others follow row by row."""

    @property
    def size(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)

    def within(self, other: Rectangle) -> Rectangle | None:
        """Elements that are in both, with the position of the first one among those of `other`; None if there are none."""
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        if top >= bottom or left >= right:
            return None
        width = other.right - other.left
        return Rectangle(top, bottom, left, right, other.at + (top - other.top) * width + left - other.left)


def rectangles(start: int, length: int, first_column: int, num_columns: int) -> list[Rectangle]:
    """Cut consecutive elements into at most three rectangles: the rest of a row, complete rows, the beginning of a row.

    Args:
        start: position of the first element among those of the columns, counted row by row.
        first_column, num_columns: the columns that the elements are taken from.
    """
    found, at = [], 0
    while at < length:
        row, column = divmod(start + at, num_columns)
        rows = (length - at) // num_columns if column == 0 else 0
        width = num_columns if rows else min(num_columns - column, length - at)
        left = first_column + column
        found.append(Rectangle(row, row + max(rows, 1), left, left + width, at))
        at += found[-1].size
    return found
