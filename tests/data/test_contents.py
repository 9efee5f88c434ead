"""A second start reads no text; any change of a file is noticed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from acc_lm.config import DataConfig, TokenizerConfig
from acc_lm.data import build_data
from acc_lm.errors import DataError
from acc_lm.text import contents
from acc_lm.text.contents import content_keys, read_keys

TEXT = "the quick brown fox jumps over the lazy dog\n"


def age(*files: Path) -> None:
    """Let the files look as if they had been written a minute ago (the time of the file itself cannot be set)."""
    for file in files:
        os.utime(file, (time.time() - 60,) * 2)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "SETTLED_SECONDS", 0.0)


def bytes_read(work: Callable[[], object]) -> int:
    """Bytes that a new process reads while it works."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            before = _read_so_far()
            work()
            os.write(writer, str(_read_so_far() - before).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as found:
        return int(found.read())


def _read_so_far() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel counts no bytes")
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "json", "csv"])
def test_a_second_start_reads_none_of_the_text(suffix: str, tmp_path: Path) -> None:
    file, held_out, size = tmp_path / f"a.{suffix}", tmp_path / "b.jsonl", 3_000_000
    records = [{"text": TEXT * 20 + str(number)} for number in range(size // len(TEXT) // 20)]
    held_out.write_text(json.dumps({"text": TEXT * 3}) + "\n")
    forms = {
        "txt": lambda: "".join(record["text"] for record in records),
        "jsonl": lambda: "\n".join(map(json.dumps, records)),
        "json": lambda: json.dumps(records),
        "csv": lambda: "text\n" + "\n".join(f'"{record["text"]}"' for record in records),
    }
    file.write_text(forms[suffix]())
    config = DataConfig(
        source="files",
        files=(str(file),),
        eval_files=(str(held_out),),
        sequence_length=64,
        cache_dir=str(tmp_path / "c"),
    )

    def start() -> None:
        build_data(config, TokenizerConfig(kind="byte"), None, 0, 4)

    assert bytes_read(start) > 3 * size, "the hash, the split and the rows"
    assert bytes_read(start) < 300_000
    with file.open("a") as stream:  # one more byte, and everything is read again
        stream.write("\n")
    assert bytes_read(start) > size


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_every_kind_of_change_is_noticed(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "one two")
    age(file)
    times = file.stat()

    def key() -> str:
        found = content_keys([file], "", str(tmp_path / "cache"))
        assert found == read_keys([file], "")
        return found[0]

    first = key()
    assert key() == first
    file.write_text("one six")  # the same size, and the time of the content put back
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_mtime_ns == times.st_mtime_ns
    second = key()
    assert second != first
    other = write(tmp_path / "b.txt", "two six")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(file)
    assert key() not in (first, second)
    assert content_keys([file], "another column", str(tmp_path / "cache")) == read_keys([file], "another column")


def test_a_file_that_has_just_been_written_is_always_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "SETTLED_SECONDS", 1000.0)
    content_keys([write(tmp_path / "a.txt", "text")], "", str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, original = write(tmp_path / "a.txt", "text"), contents.read_keys

    def slow(files: list[Path], extra: str) -> tuple[str, str | None]:
        keys = original(files, extra)
        file.write_text("others")
        return keys

    monkeypatch.setattr(contents, "read_keys", slow)
    content_keys([file], "", str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").rglob("facts.json"))


def test_a_cache_that_cannot_be_written_to_only_costs_the_reading(tmp_path: Path) -> None:
    file, in_the_way = write(tmp_path / "a.txt", "text"), write(tmp_path / "cache", "")
    assert content_keys([file], "", str(in_the_way)) == read_keys([file], "")


def test_a_file_that_cannot_be_read_is_still_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(b"no gzip at all")
    with pytest.raises(DataError, match=r"a\.txt\.gz must be a complete \.gz file"):
        content_keys([tmp_path / "a.txt.gz"], "", str(tmp_path / "cache"))
