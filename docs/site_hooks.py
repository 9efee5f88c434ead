"""MkDocs hooks: stage the pages of docs/ and all that they link to, so that every link works on the site.

docs/**, README*.md, linked files  -->  build/pages  -->  MkDocs  -->  build/site

The pages are written to be read in the repository. Here they get what a site needs: files outside docs/ become pages (a Markdown file under
project/, any other file or folder under files/), links lead to those pages, and each public package gets a page of its API.
"""

from __future__ import annotations

import ast
import logging
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
log = logging.getLogger("mkdocs.hooks")
STAGED = ROOT / "build/pages"
MERMAID = "mermaid@11"
"""Library that draws the diagrams in the browser; served by the site itself, from the npm registry's package."""
CHINESE = ".zh-TW"
SHOWN_AS_THEY_ARE = {".png", ".svg", ".gif", ".jpg", ".webp", ".ipynb"}
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".sh": "bash",
    ".sbatch": "bash",
    ".toml": "toml",
}
CODE = re.compile(r"(^ *```.*?^ *```[^\n]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"(^ *```.*?^ *```[^\n]*$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
KINDS = {"code": " *```", "table": r"\|", "list": r" *[-*] | *\d+\. ", "text": r"\s*\S"}
"""Patterns of the first line of each kind of block."""
API_OPTIONS = """\
    options:
      docstring_options: {warn_unknown_params: false, warn_missing_types: false}
      docstring_style: google
      filters: ['!^_']
      heading_level: 2
      members_order: source
      separate_signature: true
      show_if_no_docstring: true
      show_root_full_path: false
      show_root_heading: true
      show_signature_annotations: true
      show_source: false"""


def on_config(config: Any) -> Any:
    """Stage the pages once per build; the second language is built from the same folder."""
    if Path(config.docs_dir) != STAGED:
        stage(STAGED)
        config.docs_dir = str(STAGED)
        if add_mermaid(STAGED):
            config.extra_javascript.append("mermaid.min.js")
    return config


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Make the header's links to translations work in any folder of a host.

    The head's own are left out: the theme asks for a sitemap next to each.
    """
    output = re.sub(r'\s*<link rel="alternate"[^>]*>', "", output)
    up = {"": "", "./": "", f"{CHINESE[1:]}/": "../"}.get(page.url)
    if up is None:
        return output
    return re.sub(
        r'<a href="[^"]*?(zh-TW/)?" hreflang', lambda link: f'<a href="{up or "./"}{link[1] or ""}" hreflang', output
    )


def stage(folder: Path) -> None:
    """Write every page of the site into a folder that is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pages = Pages(folder)
    for page in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        pages.place_of(page)
    pages.write()
    shutil.copy(ROOT / "docs/site.css", folder)
    for name, names in fronts().items():
        docstring = ast.get_docstring(ast.parse((ROOT / f"src/acc_lm/{name}/__init__.py").read_text())) or ""
        first, _, rest = docstring.partition("\n\n")
        parts = [f"# acc_lm.{name}", first, f"```text\n{rest}\n```" if rest else ""]
        parts += [f"::: acc_lm.{name}.{member}\n{API_OPTIONS}" for member in names if not member.isupper()]
        page = folder / f"reference/api/{name}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("\n\n".join(parts) + "\n")
        link = f"../../../../reference/api/{name}/"
        page.with_name(f"{name}{CHINESE}.md").write_text(
            f"# acc_lm.{name}\n\nAPI 的說明是英文：[acc_lm.{name}]({link})。\n"
        )


def fronts() -> dict[str, list[str]]:
    """Packages whose `__init__` lists what other rooms may import, with that list."""
    found = {}
    for file in sorted((ROOT / "src/acc_lm").glob("*/__init__.py")):
        for statement in ast.parse(file.read_text()).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
                found[file.parent.name] = list(ast.literal_eval(statement.value))
    return found


class Pages:
    """Places of files on the site, each added when a page first links to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[Path, str] = {}
        self.waiting: list[Path] = []

    def place_of(self, file: Path) -> str:
        """Path of a file in the staged folder."""
        if file not in self.places:
            self.places[file] = self._new_place(file)
            self.waiting.append(file)
        return self.places[file]

    def _new_place(self, file: Path) -> str:
        path = file.relative_to(ROOT).as_posix().lstrip(".")  # MkDocs leaves out folders that begin with a dot
        parent = path.rpartition("/")[0]
        if file.is_relative_to(ROOT / "docs") and (file.suffix == ".md" or file.suffix in SHOWN_AS_THEY_ARE):
            return path.removeprefix("docs/")
        if file.suffix == ".md":
            name = path.replace("/README", "").replace("/", "-").lower().replace(CHINESE.lower(), CHINESE)
            return f"project/{name if name.endswith('.md') else name + '.md'}"
        if file.suffix in SHOWN_AS_THEY_ARE:
            return f"files/{path}"
        return (
            f"files/{path}/index.md"
            if file.is_dir()
            else f"files/{parent + '/' if parent else ''}{file.name.replace('.', '-')}.md"
        )

    def write(self) -> None:
        while self.waiting:
            file = self.waiting.pop()
            staged = self.folder / self.places[file]
            staged.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".md":
                staged.write_text(self.page(file))
            elif file.suffix in SHOWN_AS_THEY_ARE:
                shutil.copy(file, staged)
            else:
                staged.write_text(self.listing(file) if file.is_dir() else shown_file(file))

    def page(self, file: Path) -> str:
        """Markdown of a page, with links to the places of the site."""
        text = re.sub(r"<!--.*?-->\n?", "", file.read_text(), flags=re.DOTALL)
        text = re.sub(r"^\[(English|繁體中文)\]\([^)]*\)\n+", "", text, flags=re.MULTILINE)  # the site's header has it
        text = re.sub(r" ?\[(English|繁體中文)\]\([^)]*\)$", "", text, flags=re.MULTILINE)
        parts = CODE.split(with_blank_lines(text))
        parts[::2] = [
            LINK.sub(lambda link: f"{link[1]}{self.link(file, link[2])}{link[3]}", part) for part in parts[::2]
        ]
        text = "".join(parts)
        if is_chinese(file):
            text = with_english_anchors(text, file.with_name(file.name.replace(CHINESE, "")).read_text())
        return text

    def link(self, page: Path, link: str) -> str:
        path, mark, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return link
        target = (page.parent / path).resolve()
        if not target.exists():
            log.warning(f"{page.relative_to(ROOT)}: {link} leads nowhere")
            return link
        here, place = self.places[page], self.place_of(target)
        if is_chinese(page) != is_chinese(target) and has_twin(target):
            return f"{self._to_other_language(here, place)}{mark}{anchor}"
        place = place.replace(f"{CHINESE}.md", ".md")  # MkDocs finds the page in the reader's language
        return quote(os.path.relpath(place, Path(here).parent)) + mark + anchor

    def _to_other_language(self, here: str, place: str) -> str:
        """Relative address of a page's translation, which is no file of this language's build."""
        up = "../" * (address(here).count("/") + is_chinese(here))
        return f"{up}{'' if is_chinese(here) else CHINESE[1:] + '/'}{address(place)}"

    def listing(self, folder: Path) -> str:
        """Page that lists the files of a folder which git knows."""
        names = subprocess.run(["git", "ls-files", "."], cwd=folder, capture_output=True, text=True).stdout.split("\n")
        files = [folder / name for name in names if name and "/" not in name] or sorted(folder.glob("[!.]*.*"))
        here = Path(self.places[folder]).parent
        rows = [f"- [{file.name}]({quote(os.path.relpath(self.place_of(file), here))})" for file in files]
        return header(folder) + "\n".join(rows) + "\n"


def is_chinese(page: Path | str) -> bool:
    return str(page).endswith(f"{CHINESE}.md")


def has_twin(page: Path) -> bool:
    """True if a page has a translation next to it."""
    return page.suffix == ".md" and (is_chinese(page) or page.with_name(f"{page.stem}{CHINESE}.md").exists())


HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchor_of(heading: str) -> str:
    """Anchor that GitHub and the site make of a heading."""
    words = re.sub(r"\]\([^)]*\)", "", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")


def with_english_anchors(chinese: str, english: str) -> str:
    """Chinese page with the anchors of the English headings too, for links from pages that are only in English."""
    anchors = iter([anchor_of(heading) for heading in HEADING.findall("".join(FENCE.split(english)[::2]))])

    def with_anchor(heading: re.Match[str]) -> str:
        anchor = next(anchors)  # the title has to stay the page's first line
        return heading[0] if heading[0].startswith("# ") else f'<a id="{anchor}"></a>\n\n{heading[0]}'

    parts = FENCE.split(chinese)
    parts[::2] = [HEADING.sub(with_anchor, part) for part in parts[::2]]
    return "".join(parts)


def address(place: str) -> str:
    """Address of a staged page, from the root of its language."""
    stem = place.replace(CHINESE, "").removesuffix(".md")
    last = stem.rpartition("/")[2]
    return stem.removesuffix(last) if last in ("index", "README") else f"{stem}/"


def header(file: Path) -> str:
    return f"---\nsearch:\n  exclude: true\n---\n\n# {file.relative_to(ROOT)}\n\n"


def shown_file(file: Path) -> str:
    """Page with the text of a file."""
    text = file.read_text()
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{header(file)}{fence}{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def with_blank_lines(text: str) -> str:
    """Blank lines between paragraphs, tables, lists and code that follow each other at once, as Python-Markdown needs them."""
    lines: list[str] = []
    fenced, before = False, ""
    for line in text.splitlines():
        is_fence = line.lstrip().startswith("```")
        if not fenced:
            kind = next((kind for kind, pattern in KINDS.items() if re.match(pattern, line)), "")
            kind = "list" if kind == "text" and before == "list" else kind  # a list item's next line
            if kind and before and kind != before:
                lines.append("")
            before = kind
        lines.append(line)
        fenced ^= is_fence
    return "\n".join(lines) + "\n"


def add_mermaid(folder: Path) -> bool:
    """Put the diagrams' library into the site; without npm, a reader's browser gets it from where the theme says."""
    kept = ROOT / "build/mermaid.min.js"
    if not kept.exists() and shutil.which("npm"):
        with tempfile.TemporaryDirectory() as place:
            command = ["npm", "pack", "--silent", MERMAID]
            done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                with tarfile.open(Path(place, done.stdout.split()[-1])) as package:
                    content = package.extractfile("package/dist/mermaid.min.js")
                    assert content is not None
                    kept.write_bytes(content.read())
    if not kept.exists():
        log.info("no npm that reaches its registry: the site's readers load Mermaid from another host")
        return False
    shutil.copy(kept, folder)
    return True
