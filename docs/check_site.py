"""Check that every link of a built site leads to a file, every anchor to a place on it, and that no page loads from another host.

python docs/check_site.py build/site
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

ADDRESSES = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "src", "iframe": "src"}
HERE = "https://this.site/"


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        """(address, tag) of what the page links to or loads."""
        self.anchors: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.update(value for name in ("id", "name") if (value := values.get(name)))
        is_loaded = tag != "link" or values.get("rel") in ("stylesheet", "icon", "preload", "modulepreload")
        if is_loaded and (link := values.get(ADDRESSES.get(tag, ""))):
            self.links.append((link, tag))


def check(site: Path) -> tuple[list[str], int]:
    """(one line per problem, number of links)."""
    pages = {file: Page(file) for file in sorted(site.rglob("*.html")) if file != site / "404.html"}
    problems = []
    for file, page in pages.items():
        name = file.relative_to(site).as_posix()
        for link, tag in page.links:
            address, anchor = urldefrag(urljoin(HERE + name, link))
            if address.startswith(HERE):
                target = site / unquote(urlsplit(address).path).lstrip("/")
                target = target / "index.html" if target.is_dir() else target
                if not target.is_file():
                    problems.append(f"{name}: {link} leads nowhere")
                elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                    problems.append(f"{name}: {link} leads to no place on its page")
            elif tag != "a" and not address.startswith("data:"):
                problems.append(f"{name}: {link} is loaded from another host")
    return problems, sum(len(page.links) for page in pages.values())


def main(arguments: list[str]) -> int:
    site = Path(arguments[0] if arguments else "build/site")
    if not (site / "index.html").is_file():
        print(f"error: the argument must be a folder with index.html, got {site}; run make site", file=sys.stderr)
        return 2
    problems, count = check(site)
    print("\n".join([*problems, f"{count:,} links checked, {len(problems)} problems"]))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
