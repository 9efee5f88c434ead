"""The course's machinery: commands found on a page, outputs put into it, answers judged."""

from __future__ import annotations

import re
from pathlib import Path

import pages
import pytest

PAGE = """
# Title
```bash
echo one  # a comment
echo two; echo three
```
<!-- output: t -->
<!-- /output -->

## Second
<!-- exit code 3 -->
```bash
sleep 9 &
exit 3
```

```python
print("# four")
print("five")
```
<!-- output -->
old
<!-- /output -->
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "page.md"
    file.write_text(PAGE)
    return file


def test_commands_are_found_and_run_and_their_outputs_filled_in(page: Path, tmp_path: Path) -> None:
    found = pages.commands_of(page)
    assert [(command.section, command.kind, command.code, command.block) for command in found] == [
        ("Title", "line", 0, 0), ("Title", "line", 0, 0), ("Second", "script", 3, 1), ("Second", "python", 0, 2),
    ]  # fmt: skip
    assert found[0].text == "echo one"
    outputs: dict[int, str] = {}
    for done in pages.run_commands(found, tmp_path, pages.learner_environment(tmp_path)):
        assert done.code == done.command.code
        outputs[done.command.block] = outputs.get(done.command.block, "") + done.output
    filled = pages.fill_outputs(PAGE, outputs)
    shown = [re.sub("```(text)?", "", place[2]).split() for place in pages.OUTPUT.finditer(filled)]
    assert shown == [["two", "three"], ["#", "four", "five"]]
    assert pages.fill_outputs(filled, outputs) == filled
    assert pages.fill_outputs(filled, {}) == filled


def test_lines_that_are_left_out_leave_dots_between_those_shown() -> None:
    assert pages.selected("a1\nb\nc\na2\nb\n", "^a") == "a1\n...\na2"
    assert pages.selected("a  \n\nb\n\n", None) == "a\n\nb"
