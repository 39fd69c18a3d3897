#!/usr/bin/env python3
"""The documentation as a site of mdBook, checked: scripts/book.py [--mdbook PROGRAM] [OUT].

Pages keep their paths of the repository, so that links between them hold in both. A folder of
PARTS lists its pages in the order in which its README.md links to them; one that is not linked
there comes after them. What pages link to is taken along: other pages in a part of their own,
other files as they are.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import links

ROOT = Path(__file__).resolve().parent.parent
FRONT = "README.md"
PARTS = [
    "docs/start",
    "docs/concepts",
    "docs/guides",
    "docs/why-not.md",
    "docs/results.md",
    "docs/reference",
    "docs/decisions",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
"""What the table of contents has, in its order: pages, and folders of pages."""

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


class Failure(Exception):
    """What is wrong and where."""


def title(page: Path) -> str:
    """The first heading of a page, without what the table of contents cannot show."""
    found = re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)
    if not found:
        raise Failure(f"{page}: no heading; the table of contents takes its title from it")
    return found[1].replace("`", "")


def linked(root: Path, page: str) -> Iterator[str]:
    """Paths in the repository to which a page links."""
    text = FENCE.sub("", (root / page).read_text())
    for target in LINK.findall(text):
        path = target.partition("#")[0]
        if path and ":" not in path:
            found = (root / page).parent.joinpath(path).resolve()
            if found.is_relative_to(root) and found.is_file():
                yield found.relative_to(root).as_posix()


def pages_in(root: Path, folder: str) -> list[str]:
    """The pages of a folder but its README.md, in the order of the table of contents."""
    all_pages = sorted(path.relative_to(root).as_posix() for path in (root / folder).glob("*.md"))
    all_pages.remove(f"{folder}/README.md")
    order = list(linked(root, f"{folder}/README.md"))
    place = {page: order.index(page) if page in order else len(order) for page in all_pages}
    return sorted(all_pages, key=lambda page: place[page])


def contents(root: Path, parts: Iterable[str] = PARTS) -> list[tuple[int, str]]:
    """Pages in the order of the table of contents, each with its depth."""
    found = [(0, FRONT)]
    for part in parts:
        if part.endswith(".md"):
            found.append((0, part))
        else:
            found.append((0, f"{part}/README.md"))
            found.extend((1, page) for page in pages_in(root, part))
    listed = [page for _, page in found]
    for page in listed:
        # The list grows by what its pages link to.
        others = [path for path in linked(root, page) if path.endswith(".md")]
        listed.extend(path for path in dict.fromkeys(others) if path not in listed)
    more = listed[len(found) :]
    return found + [(0, page) for page in more]


def summary(root: Path, pages: list[tuple[int, str]]) -> str:
    (_, front), *others = pages
    lines = ["# Summary", "", f"[{title(root / front)}]({front})", ""]
    lines += [f"{'  ' * depth}- [{title(root / page)}]({page})" for depth, page in others]
    return "\n".join([*lines, ""])


def stage(root: Path, book: Path, parts: Iterable[str] = PARTS) -> None:
    """Lays everything that mdBook reads into the folder `book`."""
    pages = contents(root, parts)
    files = {path for _, page in pages for path in [page, *linked(root, page)]}
    for path in files:
        target = book / "src" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".md":
            # mdBook makes index.html of a README.md and leaves the links to it as they are.
            text = (root / path).read_text()
            target.write_text(re.sub(r"(\]\([^)\s]*)README\.md", r"\1index.md", text))
        else:
            shutil.copyfile(root / path, target)
    (book / "src/SUMMARY.md").write_text(summary(root, pages))
    for name in ["book.toml", "site.css"]:
        shutil.copyfile(root / "docs" / name, book / name)


def build(root: Path, mdbook: str, out: Path) -> None:
    book = out.parent / f"{out.name}.tmp"
    shutil.rmtree(book, ignore_errors=True)
    stage(root, book)
    done = subprocess.run([mdbook, "build", book], capture_output=True, text=True)
    # mdBook says what it could not read as a warning, and goes on.
    if done.returncode or re.search(r"\b(WARN|ERROR)\b", done.stderr):
        raise Failure(f"{mdbook} build {book}:\n{done.stderr.rstrip()}")
    shutil.rmtree(out, ignore_errors=True)
    (book / "site").rename(out)
    shutil.rmtree(book)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mdbook", default="mdbook", help="the program")
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "out/docs")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        build(ROOT, arguments.mdbook, out)
    except (Failure, OSError) as problem:
        print(f"error: could not build the documentation: {problem}", file=sys.stderr)
        return 2
    broken = links.broken(out)
    for line in broken:
        print(f"error: {line}", file=sys.stderr)
    if broken:
        return 1
    print(f"{out}/index.html: {len(list(out.rglob('*.html')))} pages, no broken link")
    return 0


if __name__ == "__main__":
    sys.exit(main())
