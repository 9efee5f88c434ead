"""Texts of the pictures in Traditional Chinese."""

from __future__ import annotations


class AsIs(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return key


CHINESE = AsIs()
