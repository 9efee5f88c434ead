"""The site: each page is in its navigation, each link leads somewhere, and a browser shows it well. Workflows: what they run exists."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT
from ruamel.yaml import YAML

HOOKS = runpy.run_path(str(ROOT / "docs/site_hooks.py"))
CHECK = runpy.run_path(str(ROOT / "docs/check_site.py"))


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages as MkDocs gets them."""
    folder = tmp_path_factory.mktemp("pages")
    HOOKS["stage"](folder)
    return folder


def anchors_of(text: str) -> list[str]:
    """Anchors of a staged page: of its headings, and those that are written into it."""
    prose = "".join(HOOKS["FENCE"].split(text)[::2])
    return [HOOKS["anchor_of"](heading) for heading in HOOKS["HEADING"].findall(prose)] + re.findall(
        r'<a id="([^"]+)">', prose
    )


def test_links_of_the_staged_pages_lead_to_staged_pages(staged: Path) -> None:
    pages = sorted(staged.rglob("*.md"))
    assert {"index.md", "project/readme.md", "project/readme.zh-TW.md", "files/accelerate_configs/ddp-yaml.md"} <= {
        page.relative_to(staged).as_posix() for page in pages
    }
    links = 0
    for page in pages:
        text = "".join(HOOKS["CODE"].split(page.read_text())[::2])
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", path) or (path and not Path(path).suffix):
                continue  # another host, or the translation, which only the built site has
            target = (page.parent / path) if path else page
            assert target.exists(), f"{page.relative_to(staged)}: {link}"
            if page.name.endswith(".zh-TW.md") and target.with_name(f"{target.stem}.zh-TW.md").exists():
                target = target.with_name(f"{target.stem}.zh-TW.md")
            assert not anchor or anchor in anchors_of(target.read_text()), f"{page.relative_to(staged)}: {link}"
            links += 1
    assert links > 500


def test_a_chinese_page_has_the_anchors_of_both_languages() -> None:
    page = HOOKS["with_english_anchors"]("# 一\n\n```\n# no\n```\n## 二\n", "# One\n\n```\n# no\n```\n## And `two`\n")
    assert anchors_of(page) == ["一", "二", "and-two"]


def test_a_page_gets_the_blank_lines_that_the_site_needs() -> None:
    page = "Text:\n| a |\n|---|\n| b |\nText:\n- one\n  more\n- two\n\n```\n# | no\ntext\n- no\n```\nEnd\n"
    assert HOOKS["with_blank_lines"](page) == (
        "Text:\n\n| a |\n|---|\n| b |\n\nText:\n\n- one\n  more\n- two\n\n```\n# | no\ntext\n- no\n```\n\nEnd\n"
    )


def nav_files(entries: Any) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    return [file for entry in (entries.values() if isinstance(entries, dict) else entries) for file in nav_files(entry)]


def test_every_page_is_in_the_navigation_once(staged: Path) -> None:
    text = re.sub(r"!!\S+|!ENV", "", (ROOT / "mkdocs.yml").read_text())
    navigation = nav_files(YAML(typ="safe").load(text)["nav"])
    pages = [
        page.relative_to(staged).as_posix() for page in staged.rglob("*.md") if not page.name.endswith(".zh-TW.md")
    ]
    assert sorted(navigation) == sorted(page for page in pages if not page.startswith("files/"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The built site, and what the build printed."""
    for package in ("mkdocs", "material", "mkdocs_static_i18n", "mkdocstrings", "jieba"):
        pytest.importorskip(package, reason=f"{package} is not installed; pip install -e '.[site-test]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "SITE_URL": "", "REPOSITORY_URL": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout + done.stderr


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_its_links_lead_somewhere(site: tuple[Path, str]) -> None:
    folder, log = site
    assert "WARNING" not in log
    assert "ERROR" not in log
    problems, links = CHECK["check"](folder)
    assert problems == []
    assert links > 10_000
    titles = {
        entry["location"]: entry["title"]
        for entry in json.loads((folder / "search/search_index.json").read_text())["docs"]
    }
    assert titles["reference/glossary/"] == "Glossary"
    assert titles["zh-TW/reference/glossary/"].replace("\u200b", "") == "詞彙表"


def test_a_broken_link_and_a_foreign_script_are_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<a href="#here" id="here">a</a> <a href="#there">b</a> <a href="no/">c</a> <a href="https://example.org">d</a>'
        '<script src="https://example.org/x.js"></script>'
    )
    assert CHECK["check"](tmp_path)[0] == [
        "index.html: #there leads to no place on its page",
        "index.html: no/ leads nowhere",
        "index.html: https://example.org/x.js is loaded from another host",
    ]


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Server of files that prints nothing."""

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: tuple[Path, str]) -> Iterator[str]:
    """Address at which the built site is served."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(site[0])))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


VIEWS = {
    "": ("acc-lm - acc-lm", "en"),
    "zh-TW/": ("acc-lm - acc-lm", "zh-TW"),
    "course/02_train/": ("Lab 02", "en"),
    "zh-TW/course/02_train/": ("02", "zh-TW"),
    "zh-TW/course/theory/": ("分散式訓練：理論", "zh-TW"),
    "reference/recipe/": ("The recipe, key by key", "en"),
    "zh-TW/project/readme/": ("README", "zh-TW"),
    "reference/api/config/": ("acc_lm.config", "en"),
}


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("page", VIEWS)
def test_a_browser_shows_a_page_well(browser: Any, address: str, page: str, width: int, tmp_path: Path) -> None:
    title, language = VIEWS[page]
    problems: list[str] = []
    view = browser.new_page(viewport={"width": width, "height": 844})
    view.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    view.on("pageerror", lambda error: problems.append(str(error)))
    view.on(
        "request",
        lambda request: (
            problems.append(request.url) if not request.url.startswith((address, "data:", "blob:")) else None
        ),
    )
    assert view.goto(address + page, wait_until="networkidle").status == 200
    assert title in view.title()
    assert view.evaluate("document.documentElement.lang") == language
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    assert view.evaluate("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)") == []
    drawn = view.evaluate(
        "[...document.querySelectorAll('div.mermaid')].map(picture => picture.getBoundingClientRect().height)"
    )
    assert all(height > 50 for height in drawn)
    assert len(drawn) == view.evaluate("document.querySelectorAll('.mermaid').length")
    assert problems == []
    view.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "words", "found"),
    [("", "communication hook", "reference/glossary/"), ("zh-TW/", "學習率", "zh-TW/reference/glossary/")],
)
def test_the_search_finds_both_languages(browser: Any, address: str, start: str, words: str, found: str) -> None:
    view = browser.new_page(viewport={"width": 1280, "height": 844})
    view.goto(address + start, wait_until="networkidle")
    view.fill("input.md-search__input", words)
    view.wait_for_selector("a.md-search-result__link")
    links = [link.get_attribute("href") for link in view.query_selector_all("a.md-search-result__link")]
    assert any(link.startswith(address + found) for link in links), links
    view.close()


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_the_workflows_run_what_is_here() -> None:
    assert [file.stem for file in WORKFLOWS] == ["site", "tests", "wheel"]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    ran = []
    for file in WORKFLOWS:
        workflow = YAML(typ="safe").load(file)
        assert workflow["permissions"] == {"contents": "read"}, "each job asks for what it needs beyond reading"
        assert "pull_request" in workflow["on"]
        for job in workflow["jobs"].values():
            assert job["runs-on"] == "ubuntu-latest"
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step)
                assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/x@v1"))
                ran += step.get("run", "").splitlines()
    for line in ran:
        if line.startswith("make "):
            assert line.split()[1] in targets
        if line.startswith("bash "):
            assert (ROOT / line.split()[1]).is_file()
    assert {"bash .ci/run", "make site", "python -m twine check --strict dist/*"} <= set(ran)


def test_the_workflow_tests_every_python_that_the_package_names() -> None:
    tested = YAML(typ="safe").load(ROOT / ".github/workflows/tests.yml")["jobs"]["tests"]["strategy"]["matrix"][
        "python"
    ]
    assert tested == re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
