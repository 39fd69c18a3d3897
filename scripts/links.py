#!/usr/bin/env python3
"""Checks the links of a site of HTML files without network: scripts/links.py SITE.

Every local `href` and `src` has to name a file of the site, and an anchor an element in it.
Addresses of other hosts are not asked for.
"""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, with the line, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[tuple[int, str]] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src", "poster", "data") and value is not None and tag != "base":
                self.targets.append((self.getpos()[0], value))
            elif value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)


@cache
def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    page.close()
    return page


def problem(site: Path, page: Path, target: str) -> str | None:
    """Why a link of a page does not hold."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return None
    path = page
    if parts.path:
        start = site if parts.path.startswith("/") else page.parent
        path = (start / unquote(parts.path).lstrip("/")).resolve()
    if not path.is_relative_to(site):
        return "leads out of the site"
    if not path.is_file():
        return "no such file"
    anchor = unquote(parts.fragment)
    if anchor and path.suffix == ".html" and anchor not in read(path).anchors:
        return f"no such anchor in {path.relative_to(site)}"
    return None


def broken(site: Path) -> list[str]:
    """All links that do not hold, one line each."""
    site = site.resolve()
    lines = []
    for page in sorted(site.rglob("*.html")):
        for line, target in read(page).targets:
            if why := problem(site, page, target):
                lines.append(f'{page.relative_to(site)}:{line}: link "{target}": {why}')
    return lines


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print("usage: scripts/links.py SITE, a folder of HTML files", file=sys.stderr)
        return 2
    lines = broken(Path(sys.argv[1]))
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
