"""The course's machinery: commands found on a page, outputs put into it, answers judged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import check
import compare
import pages
import pytest
import update

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


def fill_places(page: Path, twin: Path) -> None:
    for file in (page, twin):
        file.write_text("<!-- measured -->\n<!-- /measured -->\n" + PAGE)


def test_both_languages_get_the_same_outputs_and_their_own_line(page: Path) -> None:
    twin = pages.in_chinese(page)
    fill_places(page, twin)
    update.write(page, {0: "two\n", 2: "five\n"}, {"count": 4, "seconds": 1200.0, "cpu": 2.0})
    english, chinese = page.read_text(), twin.read_text()
    assert "4 commands: 1,200 s, 2 s of CPU time" in english
    assert "4 個指令：共 1,200 秒，CPU 時間 2 秒" in chinese
    assert pages.OUTPUT.findall(english) == pages.OUTPUT.findall(chinese)
    assert "```text\ntwo\n```" in english
    update.write(page, {0: "three\n"}, None)
    assert page.read_text() == english.replace("```text\ntwo", "```text\nthree"), "a part leaves the rest as it was"


def test_a_page_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert update.main(["99_none"]) == 2
    assert re.fullmatch(r"error: LAB must be .*, got 99_none; give one of .*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ([], 0, "01.1  4 machines"),
        (["01.1"], 0, "4 machines"),
        (["01.1", "2", "5"], 0, "right: "),
        (["01.1", "2, 5"], 0, "right: "),
        (["01.1", "3", "6"], 1, "not yet: all ranks count from 0"),
        (["01.1", "5", "2"], 1, "not yet: both numbers"),
        (["01.1", "2"], 2, "error: the answer must be two numbers, got 2; "),
        (["01.1", "two", "5"], 2, "error: the answer must be a number, got two; "),
        (["01.1", "nan", "5"], 2, "error: the answer must be a whole number, got nan; "),
        (["01.2", "4"], 1, "not yet: that is how many all"),
        (["01.2", "inf"], 2, "error: the answer must be a whole number, got inf; "),
        (["01.3", "nowhere"], 2, "error: the answer must be the folder of a run"),
        (["09.1", "2"], 2, "error: the exercise must be one of 01.1, "),
    ],
)  # fmt: skip
def test_an_answer_is_right_or_gets_a_hint_or_one_line(
    arguments: list[str], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(arguments) == code
    said = capsys.readouterr()
    assert (said.err if code == 2 else said.out).startswith(line)
    assert len((said.out + said.err).splitlines()) == 1 or not arguments


def test_answers_from_runs_are_those_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, losses in {
        "one": [3.0, 2.0],
        "by-hand": [3.0, 2.000001],
        "no-sum": [3.0, 2.1],
        "other": [3.1, 2.1],
    }.items():
        folder = tmp_path / "runs/course" / name
        folder.mkdir(parents=True)
        lines = [json.dumps({"step": step, "train/loss": loss}) for step, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    codes = {name: check.main(["02.1", f"runs/course/{name}"]) for name in ("no-sum", "by-hand", "other", "nowhere")}
    assert codes == {"no-sum": 0, "by-hand": 1, "other": 1, "nowhere": 2}
    assert compare.main(["runs/course/one", "runs/course/no-sum"]) == 0
    assert "no-sum               2     2.1000  5.0e-02" in capsys.readouterr().out
    assert compare.main(["runs/course/one"]) == compare.main(["runs/course/one", "nowhere"]) == 2
    assert "warning: " not in capsys.readouterr().err
    with (tmp_path / "runs/course/one/metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 3, "train/loss": 2.0}) + "\n")
    assert compare.main(["runs/course/one", "runs/course/no-sum"]) == 0
    assert "no-sum ends at step 2, runs/course/one at step 3" in capsys.readouterr().err
    for exercise, section in ("04.2", 6), ("04.3", 5), ("06.2", 7), ("07.1", 1):
        assert check.main([exercise, "383"]) == 2
        assert f"run the commands of section {section} first" in capsys.readouterr().err
    for name, reason, code in (
        ("alone", "all 2 processes must come to the rendezvous", 1),
        ("many", "must not start more", 0),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(
            json.dumps({"status": "environment_error", "exit_code": 4, "reason": reason})
        )
        assert check.main(["01.3", name]) == code

    profile = tmp_path / "runs/course/profiled/profile"
    profile.mkdir(parents=True)
    (profile / "summary.txt").write_text(
        "  mean   share\n\ncompute   80.0   80.0%   1\ncommunication  10.0   10.5%  1\nwaiting for others  5.0   4.5%  1\n"
    )
    answers = {"03.1": ("15", "0.15", "80"), "03.3": ("1.667", "2", "1.2")}
    codes = {(number, answer): check.main([number, answer]) for number in answers for answer in answers[number]}
    assert [answer for answer, code in codes.items() if code == 0] == [("03.1", "15"), ("03.3", "1.667")]
    assert set(codes.values()) == {0, 1}


@pytest.mark.parametrize("page", pages.lab_pages("0[1-3]"), ids=lambda page: page.stem)
def test_every_place_of_an_output_is_filled(page: Path) -> None:
    for file in (page, pages.in_chinese(page)):
        text = file.read_text()
        empty = [
            place[1] for place in pages.OUTPUT.finditer(text) if not re.search(r"```text\n.+\n```", place[2], re.DOTALL)
        ]
        assert empty == [], f"run python docs/course/code/update.py {page.stem}"
        (line,) = pages.MEASURED.findall(text)
        assert re.search(r"commit [0-9a-f]{7,}, .*, torch ", line)
