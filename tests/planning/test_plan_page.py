"""acc-lm plan --html: a complete page for every number of GPUs, with the figures of the JSON and no markup of a recipe."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from acc_lm.cli import main
from acc_lm.config import Config
from acc_lm.planning.probe import Probe

MODEL = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4000,
}  # fmt: skip
HOSTILE = "<script>alert(1)<img src=x onerror=alert(2)>'\""
VOID = {"meta", "input", "line", "polyline", "circle", "polygon"}
PROBES: dict[str, Probe] = {}


@pytest.fixture(autouse=True)
def one_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def cached(config: Config, vocab_size: int) -> Probe:
        key = config.model.model_dump_json()
        return PROBES.setdefault(key, PROBES.get(key) or Probe(config, vocab_size))

    monkeypatch.setattr("acc_lm.planning.probe.Probe", cached)


class Elements(HTMLParser):
    """Elements that a page opens, and its visible text by number of GPUs; fails at markup that a browser would repair."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.shown, self.texts = "", dict[str, str]()
        self._open: list[tuple[str, str | None]] = []
        self.feed(page)
        self.close()
        assert [tag for tag, _ in self._open] == ["html"]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        own = dict(attributes)
        self.tags.append((tag, own))
        if tag not in VOID:
            at = own.get("data-at") or (self._open[-1][1] if self._open else None)
            self._open.append((tag, "hidden" if "hidden" in own and at is None else at))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][0] not in ("script", "style"):
            at = self._open[-1][1] or ""
            self.texts[at] = f"{self.texts.get(at, '')} {data}"


def write_recipe(folder: Path, name: str = "small", **training: Any) -> str:
    given = {"max_steps": 1000, "mixed_precision": "fp16", "global_batch_size": 32, "micro_batch_size": 1} | training
    recipe = {"model": {"config": MODEL}, "tokenizer": {"kind": "byte"}, "data": {"sequence_length": 512}}
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps({"output_dir": "runs/x", **recipe, "training": given}))
    return str(file)


def page_and_json(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, Any, int]:
    file = tmp_path / "pages/plan.html"
    code = main(["plan", *arguments, "--json", "--html", str(file)])
    return file.read_text(), json.loads(capsys.readouterr().out), code


def test_a_page_has_every_number_of_gpus_and_the_figures_of_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path)
    page, found, code = page_and_json(
        [recipe, "--gpus", "24xT4", "--price", "2", "training.global_batch_size=48"], tmp_path, capsys
    )
    assert code == 0
    assert len(page) < 200_000
    seen = Elements(page)
    slider = next(own for tag, own in seen.tags if tag == "input")
    counts = (slider["data-counts"] or "").split()
    assert counts == ["1", "2", "4", "8", "16", "24", *(str(2**power) for power in range(5, 13))]
    at = slider["value"] or ""
    assert counts[int(at)] == "24"
    views = [(own["data-at"], "hidden" in own) for tag, own in seen.tags if "data-at" in own]
    assert len(views) == 4 * len(counts)
    assert {number for number, is_hidden in views if not is_hidden} == {at}, "without a script, what was asked for"

    best, text = found["recommended"], seen.texts[at]
    assert f"★ {best['config']}" in text
    for row in found["rows"]:
        memory = row["memory_gib"]
        assert "{:.1f} to {:.1f} of 14.6 GiB".format(memory["low"], memory["high"]) in text
    assert {"yes": "✓ fits", "no": "✗ does not fit", "tight": "≈ tight"}[best["fits"]] in text
    assert "--num_processes 24" in text
    assert "training.global_batch_size=48" in text, "the keys that it was planned with"
    hours = [48_000 * 512 / best["tokens_per_second"][end] / 3600 for end in ("high", "low")]
    assert "{:,.0f} to {:,.0f}".format(*(hour * 24 * 2 for hour in hours)) in text
    assert "extrapolated: communication takes " in text
    assert "No published run on a T4 was found" in seen.texts[""]
    last = seen.texts[str(len(counts) - 1)]
    assert "with 4,096 rows a step instead of 48" in last
    assert "training.global_batch_size=4096" in last
    assert "training.global_batch_size=48" not in last
    assert "extrapolated: more than 512 GPUs" in last


def test_the_page_runs_its_own_script_only_whatever_the_recipe_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, "<script>alert(3)<img>")
    page, _, _ = page_and_json([recipe, "--gpus", "H100", f"output_dir={HOSTILE}"], tmp_path, capsys)
    assert "&lt;script&gt;alert(1)&lt;img src=x onerror=alert(2)&gt;" in page
    assert "<title>Plan of &lt;script&gt;alert(3)&lt;img&gt;</title>" in page
    seen = Elements(page)
    assert {tag for tag, _ in seen.tags} <= {
        "html", "meta", "title", "style", "h1", "h2", "nav", "a", "section", "dl", "div", "dt", "dd", "p", "small", "input", "b", "i",
        "u", "span", "details", "summary", "pre", "table", "tr", "th", "td", "figure", "figcaption", "svg", "line", "text",
        "polyline", "circle", "ul", "li", "footer", "script",
    }  # fmt: skip
    assert not [name for _, own in seen.tags for name in own if name.startswith("on") or name in ("src", "srcset")]
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(own["content"] for tag, own in seen.tags if own.get("http-equiv") == "Content-Security-Policy")
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert "http://" not in page
    assert "https://" not in page


def test_a_page_where_nothing_fits_or_a_number_has_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, global_batch_size=24)
    arguments = [
        recipe,
        "--gpus",
        "T4",
        "--config",
        "ddp",
        "training.micro_batch_size=8",
        "model.config.num_hidden_layers=200",
    ]
    page, found, code = page_and_json(arguments, tmp_path, capsys)
    assert (code, found["recommended"]) == (4, None)
    texts = Elements(page).texts
    assert "1 x T4: nothing fits" in texts["0"]
    assert "✗ does not fit" in texts["0"]
    assert "no plan: training.micro_batch_size must divide the 12 rows of a process, got 8" in texts["1"]


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["plan", write_recipe(tmp_path), "--gpus", "H100", "--html", str(tmp_path / "file/plan.html")]) == 2
    assert "plan.html must be in a folder that can be written" in capsys.readouterr().err
