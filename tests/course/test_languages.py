"""English pages and their Traditional Chinese twins hold the same headings, commands, numbers, keys and links.

docs/reference/glossary.zh-TW.md has the rules for the Chinese pages, and the table of words that is read here.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from processes import ROOT

CHINESE = ".zh-TW.md"
GLOSSARY = ROOT / f"docs/reference/glossary{CHINESE}"
RULES = "中文頁面"
"""Heading of the glossary's section that shows what the other pages must not contain."""
REQUIRED = ("README", "docs/index", "docs/architecture", "docs/reference/glossary")
PAGES = sorted(
    {
        *(ROOT / f"{name}.md" for name in REQUIRED),
        *(page for page in (ROOT / "docs/course").glob("*.md") if not page.name.endswith(CHINESE)),
        *(page.with_name(page.name.replace(CHINESE, ".md")) for page in (ROOT / "docs").rglob(f"*{CHINESE}")),
    }
)
TWINS = [page.with_name(page.name.replace(".md", CHINESE)) for page in PAGES]
PAIRS = list(zip(PAGES, TWINS, strict=True))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`[^`\n]+`")
NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*")
HAN = r"\u3400-\u9fff"
FULL_WIDTH = "，。：；？！、（）「」『』《》〈〉……——～．％"
COMMENTED = ("bash", "sh", "shell", "python", "yaml", "")
"""Languages of code blocks in which a comment after # may be translated."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_simplified(character: str) -> bool:
    """True if a character is in the encoding of Simplified Chinese and not in that of Taiwan."""

    def has(encoding: str) -> bool:
        try:
            return bool(character.encode(encoding))
        except UnicodeEncodeError:
            return False

    return character > "\x7f" and has("gb2312") and not has("cp950")


def without_rules(text: str) -> str:
    """Page without the body of the section that shows bad words on purpose."""
    return re.sub(rf"(^## {RULES}\n).*?(?=^#|\Z)", r"\1", text, flags=re.MULTILINE | re.DOTALL)


@functools.cache
def text_of(page: Path) -> str:
    text = page.read_text()
    if page == GLOSSARY:
        return without_rules(text)
    if page == GLOSSARY.with_name("glossary.md"):
        return re.sub(r"(^## Chinese pages\n).*?(?=^#|\Z)", r"\1", text, flags=re.MULTILINE | re.DOTALL)
    return text


def prose_of(text: str) -> str:
    """Text outside code blocks and HTML comments."""
    return COMMENT.sub("", FENCE.sub("", text))


def sections(text: str) -> list[tuple[str, str]]:
    """(heading with its marks, what follows up to the next heading), without code blocks."""
    parts = re.split(r"^(#{1,6} .*)$", prose_of(text), flags=re.MULTILINE)
    return list(zip(["", *parts[1::2]], parts[0::2], strict=True))


def code_of(text: str) -> list[tuple[str, str]]:
    """(language, content) of every code block, without comments, and of pictures in Mermaid without their words."""
    blocks = []
    text = re.sub(r"<!-- rooms: .*?<!-- /rooms -->", "", text, flags=re.DOTALL)  # test_readme.py keeps it fresh
    for _, language, content in FENCE.findall(text):
        if language == "mermaid":
            content = re.sub(r'"[^"\n]*"|\|[^|\n]*\||\[[^\]\n"]*\]|:.*|title .*|Note .*', "", content)
        elif language.split(" ")[0] in COMMENTED:
            content = re.sub(r"(^|\s)#(?!!).*$", "", content, flags=re.MULTILINE)
        blocks.append((language, "\n".join(line.rstrip() for line in content.splitlines() if line.strip())))
    return blocks


@functools.cache
def anchors_of(page: Path) -> list[str]:
    """Anchors that GitHub makes of the headings, in their order."""
    seen: Counter[str] = Counter()
    anchors = []
    for heading, _ in sections(page.read_text())[1:]:
        words = re.sub(r"\]\([^)]*\)", "", heading.lstrip("# ")).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        anchors.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def target_of(page: Path, link: str) -> str:
    """Target of a link, by language-free path and the place of the anchor's heading in its page."""
    if re.match(r"[a-z]+:", link):
        return link
    path, _, anchor = link.partition("#")
    file = (page.parent / path).resolve() if path else page
    place = ""
    if anchor and file.suffix == ".md":
        assert anchor in anchors_of(file), f"{name_of(page)}: {link} leads to no heading"
        place = f"#{anchors_of(file).index(anchor)}"
    return os.path.relpath(file, ROOT).replace(".zh-TW.", ".") + place


def differences(of: Counter[str], twin: Counter[str]) -> str:
    return f"only in English {sorted((of - twin).elements())}, only in Chinese {sorted((twin - of).elements())}"


@pytest.mark.parametrize(("page", "twin"), PAIRS, ids=NAMES)
def test_both_languages_say_the_same(page: Path, twin: Path) -> None:
    assert page.is_file()
    assert twin.is_file()
    english, chinese = sections(text_of(page)), sections(text_of(twin))
    levels = [[heading.split(" ")[0] for heading, _ in found] for found in (english, chinese)]
    assert levels[0] == levels[1], "headings differ"
    blocks = code_of(text_of(page)), code_of(text_of(twin))
    for number, (one, other) in enumerate(zip(*blocks, strict=False), 1):
        assert one == other, f"code block {number} differs"
    assert len(blocks[0]) == len(blocks[1])
    problems = []
    for (heading, one), (_, other) in zip(english, chinese, strict=True):
        found = []
        for text, file in ((one, page), (other, twin)):
            links = LINK.findall(text)
            plain = LINK.sub("]", text)
            found.append(
                {
                    "links": Counter(target_of(file, link) for link in links),
                    "keys and files": Counter(set(CODE.findall(plain))),
                    "numbers": Counter(NUMBER.findall(plain)),
                    "rows of tables": Counter([f"{len(re.findall('^ *[|]', plain, re.MULTILINE))} rows"]),
                }
            )
        for kind in found[0]:
            if found[0][kind] != found[1][kind]:
                problems.append(
                    f"{heading or 'before the first heading'}: {kind}: {differences(found[0][kind], found[1][kind])}"
                )
    assert problems == []


@pytest.mark.parametrize(("page", "twin"), PAIRS, ids=NAMES)
def test_both_languages_link_to_each_other(page: Path, twin: Path) -> None:
    assert f"[繁體中文]({twin.name})" in page.read_text()
    assert f"[English]({page.name})" in twin.read_text()


def words_to_avoid() -> dict[str, str]:
    """Words that are not used in Taiwan, with the words that are: the table in the glossary."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", GLOSSARY.read_text().partition(f"## {RULES}")[2], re.MULTILINE)
    return {word: right for left, right in rows[1:] for word in left.split("、")}


def chinese_text(twin: Path) -> str:
    """Words of a Chinese page: code is one Latin letter, a link its text, marks of emphasis are left out."""
    text = CODE.sub("x", prose_of(text_of(twin)))
    text = re.sub(r"!?\[([^\]\n]*)\]\([^)\s]+\)", r"\1", text)
    text = re.sub(r"<(https?://[^>]+)>|<[^>\n]+>", " ", text)
    return re.sub(r"\*+|(?<!\w)_|_(?!\w)", "", text)


@pytest.mark.parametrize("twin", TWINS, ids=NAMES)
def test_chinese_is_that_of_taiwan(twin: Path) -> None:
    complete = text_of(twin)
    simplified = sorted({character for character in complete if is_simplified(character)})
    assert simplified == []
    avoided = words_to_avoid()
    assert len(avoided) > 80
    for right in {word for words in avoided.values() for word in re.split("[、（）或]+", words) if word}:
        complete = complete.replace(right, " ")  # 演算法 holds 算法
    found = {word: right for word, right in avoided.items() if word in complete}
    assert found == {}


@pytest.mark.parametrize("twin", TWINS, ids=NAMES)
def test_chinese_punctuation_and_spaces(twin: Path) -> None:
    text = chinese_text(twin)
    rules = {
        "half-width punctuation after Chinese": rf"[{HAN}）」][,;:?!](?=\s|[{HAN}]|$)|[{HAN}）」]\.(?=\s|$)",
        "half-width brackets next to Chinese": rf"[{HAN}]\(|\)[{HAN}]|\([^()]*[{HAN}][^()]*\)|[{HAN}] \([A-Za-z ]+\)",
        "no space between Chinese and Latin or a number": rf"[{HAN}][A-Za-z0-9]|[A-Za-z0-9%][{HAN}]",
        "a space next to full-width punctuation": rf"[{HAN}A-Za-z0-9] +[{FULL_WIDTH}]|[，。：；？！、）」』] +[{HAN}A-Za-z0-9]",
        "straight quotes around Chinese": rf"[\"'][{HAN}]|[{HAN}][\"']",
    }
    found = [
        f"{rule}: {line.strip()[max(0, match.start() - 12) : match.end() + 12]}"
        for line in text.splitlines()
        for rule, pattern in rules.items()
        for match in re.finditer(pattern, line)
    ]
    assert found == []


@pytest.mark.parametrize("twin", TWINS, ids=NAMES)
def test_emphasis_is_seen_by_github(twin: Path) -> None:
    """CommonMark: marks with punctuation inside need a space or punctuation outside."""
    text = CODE.sub("x", prose_of(twin.read_text()))
    found = []
    for span in re.finditer(r"(\w?)(\*{1,2})(?=\S)([^*\n]*[^*\s])\2(\w?)", text):
        before, _, inside, after = span.groups()
        if (after and not re.match(r"\w", inside[-1])) or (before and not re.match(r"\w", inside[0])):
            found.append(span[0])
    assert found == []


def test_simplified_characters_are_seen() -> None:
    assert "".join(character for character in "默认内存进程数据" if is_simplified(character)) == "认内进数"
    assert not [character for character in "預設記憶體行程資料臺裡著，。「」ABC→×" if is_simplified(character)]
