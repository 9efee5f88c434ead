"""Arbitrary input: a few hundred of the cases that `make fuzz` tries for as long as requested."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("hypothesis", reason="pip install 'acc-lm[dev]'")

from fuzz import PROPERTIES
from hypothesis import HealthCheck, Phase, given, settings

EXAMPLES = {"recipes run": 6, "files of a run": 12, "files of text": 60, "recipes read": 60}


@pytest.mark.parametrize("name", PROPERTIES)
def test_any_input_is_used_as_intended_or_refused(name: str) -> None:
    """The same inputs in every run of the tests."""
    checked, seen = PROPERTIES[name], Counter[str]()

    @settings(
        max_examples=EXAMPLES.get(name, 100), derandomize=True, deadline=None, database=None,
        phases=[Phase.generate] if checked.starts_processes else [Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(checked.inputs)
    def try_it(value: object) -> None:
        seen[checked.check(value)] += 1

    try_it()
    print(dict(seen))
    assert set(seen) == set(checked.outcomes)
