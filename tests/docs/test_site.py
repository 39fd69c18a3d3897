"""The documentation's table of contents and the check of its links."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import book  # noqa: E402
import links  # noqa: E402


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text('<h1 id="top">one</h1>\n<a href="a/two.html#here">two</a>')
    (tmp_path / "a/two.html").write_text('<a name="here"></a><a href="../index.html#top">one</a>')
    return tmp_path


def test_a_site_without_broken_links_passes(site: Path) -> None:
    assert links.broken(site) == []


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        ('<a href="gone.html">', 'index.html:3: link "gone.html": no such file'),
        ('<img src="a/gone.svg">', 'index.html:3: link "a/gone.svg": no such file'),
        ('<a href="a">', 'index.html:3: link "a": no such file'),
        ('<a href="#gone">', 'index.html:3: link "#gone": no such anchor in index.html'),
        ('<a href="a/two.html#gone">', 'index.html:3: link "a/two.html#gone": no such anchor in a/two.html'),
        ('<a href="../gone.html">', 'index.html:3: link "../gone.html": leads out of the site'),
    ],
)
def test_a_broken_link_is_found(site: Path, tag: str, why: str) -> None:
    with (site / "index.html").open("a") as file:
        file.write(f"\n{tag}")
    assert links.broken(site) == [why]
    done = subprocess.run([sys.executable, ROOT / "scripts/links.py", site], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"error: {why}\n")


@pytest.mark.parametrize("tag", ['<a href="https://example.org/gone">', '<a href="mailto:a@example.org">'])
def test_other_hosts_are_not_asked(site: Path, tag: str) -> None:
    with (site / "index.html").open("a") as file:
        file.write(tag)
    assert links.broken(site) == []


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    folder = tmp_path / "guides"
    folder.mkdir()
    (tmp_path / "README.md").write_text("# Front\n\n[told](guides/z.md), [more](more/far.md)\n")
    (folder / "README.md").write_text("# Guides\n\n- [z](z.md)\n- [b](b.md)\n")
    for name in ["a", "b", "z"]:
        (folder / f"{name}.md").write_text(f"# About `{name}`\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more/far.md").write_text("# Far\n")
    return tmp_path


def test_a_new_page_comes_after_those_of_the_readme(pages: Path) -> None:
    assert book.summary(pages, book.contents(pages, ["guides"])).splitlines() == [
        "# Summary",
        "",
        "[Front](README.md)",
        "",
        "- [Guides](guides/README.md)",
        "  - [About z](guides/z.md)",
        "  - [About b](guides/b.md)",
        "  - [About a](guides/a.md)",
        "- [Far](more/far.md)",
    ]


def test_a_page_without_a_heading_is_refused(pages: Path) -> None:
    (pages / "guides/a.md").write_text("no heading\n")
    with pytest.raises(book.Failure, match=r"guides/a\.md: no heading"):
        book.summary(pages, book.contents(pages, ["guides"]))


def test_links_in_blocks_of_code_are_not_followed(pages: Path) -> None:
    (pages / "guides/a.md").write_text("# A\n\n```text\n[code](../more/far.md)\n```\n")
    assert list(book.linked(pages, "guides/a.md")) == []


def test_every_page_of_the_documentation_is_listed() -> None:
    listed = {page for _, page in book.contents(ROOT)}
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")} <= listed


def test_readme_links_lead_to_the_index(tmp_path: Path, pages: Path) -> None:
    (pages / "docs").mkdir()
    for name in ["book.toml", "site.css"]:
        shutil.copyfile(ROOT / "docs" / name, pages / "docs" / name)
    (pages / "README.md").write_text("# Front\n\n[guides](guides/README.md#how), [code](guides/x.py)\n")
    (pages / "guides/x.py").write_text("pass\n")
    book.stage(pages, tmp_path / "book", ["guides"])
    staged = (tmp_path / "book/src/README.md").read_text()
    assert "(guides/index.md#how)" in staged
    assert (tmp_path / "book/src/guides/x.py").is_file()
