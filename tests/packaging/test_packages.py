"""The packages of `make dist`, each installed into an empty place, where it runs the example.

Other systems: ROOMMATE_ROOTS names folders with a root file system each (as debootstrap makes them,
with python3-venv); as root, everything is tried in each of them as well.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIST = Path(os.environ.get("ROOMMATE_DIST") or ROOT / "dist")
SCRIPT = ROOT / "tests/packaging/empty-place.sh"
HERE = Path("/")
ROOTS = [HERE, *(Path(r) for r in os.environ.get("ROOMMATE_ROOTS", "").split(":") if r)]
KINDS = {"wheel": "*.whl", "deb": "*.deb", "gnu": "*-gnu.tar.gz", "static": "*-static.tar.gz"}


def the(pattern: str) -> Path:
    (found,) = DIST.glob(pattern)
    return found


class Place:
    """An empty folder, on this system or in another root."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder

    def inside(self, path: Path) -> str:
        return str(path) if self.root == HERE else f"/{path.relative_to(self.root)}"

    def bring(self, path: Path) -> str:
        """A path of this repository, as it is named in there."""
        if self.root == HERE:
            return str(path)
        to = self.folder.parent / "brought" / path.name
        if not to.exists():
            to.parent.mkdir(exist_ok=True)
            (shutil.copytree if path.is_dir() else shutil.copy)(path, to)
        return self.inside(to)

    def run(self, *words: str) -> str:
        """Runs a command in the folder, without the environment of the tests."""
        path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        env = {"PATH": path, "HOME": self.inside(self.folder)}
        if self.root != HERE:
            inner = f'mount -t proc proc "{self.root}/proc" && exec chroot "{self.root}" "$@"'
            cd = ["sh", "-c", 'cd "$0" && exec "$@"', self.inside(self.folder)]
            words = ("unshare", "--mount", "sh", "-c", inner, "sh", *cd, *words)
        done = subprocess.run(words, cwd=self.folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(params=ROOTS, ids=lambda root: root.name or "here")
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    root: Path = request.param
    if root == HERE:
        (tmp_path / "empty").mkdir()
        yield Place(root, tmp_path / "empty")
        return
    folder = root / f"tmp/roommate-{os.getpid()}"
    (folder / "empty").mkdir(parents=True)
    yield Place(root, folder / "empty")
    shutil.rmtree(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_each_package_runs_a_mix_in_an_empty_place(place: Place, kind: str) -> None:
    python = sys._base_executable if place.root == HERE else "/usr/bin/python3"
    brought = [place.bring(p) for p in (ROOT / "python/roommate", ROOT / "examples")]
    said = place.run("sh", place.bring(SCRIPT), kind, place.bring(the(KINDS[kind])), python, *brought)
    assert f"program: {place.inside(place.folder)}/place/" in said
    assert "same: " in said, "the journal of the mix replays"
    results = json.loads((place.folder / "examples/compare.json").read_text())["results"]
    assert [r["policy"] for r in results] == ["fifo", "tiresias"]
    assert results[0]["finished"] == results[0]["jobs"] == 500
    mix = json.loads((place.folder / "examples/mix.json").read_text())
    figures = json.dumps(mix)
    assert '"finished": 4' in figures, figures


def test_the_platform_of_the_wheel_is_what_it_needs(tmp_path: Path) -> None:
    with zipfile.ZipFile(the("*.whl")) as wheel:
        wheel.extractall(tmp_path)
    elf = [p for p in tmp_path.rglob("*") if p.is_file() and p.read_bytes()[:4] == b"\x7fELF"]
    assert sorted(p.name for p in elf) == ["libroommate_gate.so", "roommate"]
    needed = subprocess.check_output(["readelf", "-VW", *elf], text=True)
    versions = {(int(a), int(b)) for a, b in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", needed)}
    tags = [(int(a), int(b)) for a, b in re.findall(r"manylinux_(\d+)_(\d+)_", the("*.whl").name)]
    assert tags and versions and min(tags) >= max(versions), (tags, versions)


def test_the_wheel_records_what_it_has(tmp_path: Path) -> None:
    with zipfile.ZipFile(the("*.whl")) as wheel:
        names = wheel.namelist()
        (record,) = (n for n in names if n.endswith("RECORD"))
        listed = {line.split(",")[0] for line in wheel.read(record).decode().splitlines()}
        assert listed == set(names) and len(names) == len(listed)
        (about,) = (n for n in names if n.endswith("METADATA"))
        assert b"Name: roommate-gpu" in wheel.read(about)
        assert b"Provides-Extra: lab" in wheel.read(about)


def test_the_static_program_needs_no_library(tmp_path: Path) -> None:
    with tarfile.open(the("*-static.tar.gz")) as archive:
        assert {"roommate", "LICENSE"} == set(archive.getnames())
        archive.extractall(tmp_path, filter="data")
    program = tmp_path / "roommate"
    assert "NEEDED" not in subprocess.check_output(["readelf", "-dW", program], text=True)
    # Nothing but itself: an empty root.
    if os.geteuid() == 0:
        said = subprocess.check_output(["chroot", tmp_path, "/roommate", "--version"], text=True)
        assert said.startswith("roommate ")


def test_without_a_dynamic_linker_no_driver_is_loaded(tmp_path: Path) -> None:
    with tarfile.open(the("*-static.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    words = [tmp_path / "roommate", "up", "--device", "cuda", "--state", tmp_path / "s"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "static" in done.stderr, "it says that this program cannot, not that there is no driver"


def test_the_debian_package_has_unit_pages_and_completions(tmp_path: Path) -> None:
    deb = the("*.deb")
    subprocess.check_call(["dpkg-deb", "-R", deb, tmp_path])
    unit = (tmp_path / "usr/lib/systemd/system/roommate.service").read_text()
    assert "ExecStart=/usr/bin/roommate up" in unit
    page = gzip.decompress((tmp_path / "usr/share/man/man1/roommate-submit.1.gz").read_bytes())
    assert b"Submit jobs" in page
    assert "_roommate" in (tmp_path / "usr/share/bash-completion/completions/roommate").read_text()
    assert (tmp_path / "usr/bin/kubectl-roommate").resolve() == tmp_path / "usr/bin/roommate"
    control = subprocess.check_output(["dpkg-deb", "-f", deb], text=True)
    assert "Depends: libc6 (>= 2." in control and "@" not in control.replace("@example.org", "")
    for script in ("postinst", "prerm", "postrm"):
        subprocess.check_call(["sh", "-n", tmp_path / "DEBIAN" / script])


def test_the_manifest_of_krew_names_its_archive() -> None:
    manifest = (DIST / "krew.yaml").read_text()
    archive = the("*-static.tar.gz")
    assert f"/{archive.name}\n" in manifest and "@" not in manifest
    assert hashlib.sha256(archive.read_bytes()).hexdigest() in manifest
    with tarfile.open(archive) as tar:
        assert set(re.findall(r"- from: (\S+)", manifest)) <= set(tar.getnames())


def test_the_recipe_of_images_finds_the_archives() -> None:
    lines = (ROOT / "packaging/container/Containerfile").read_text().splitlines()
    added = [line.split()[1:] for line in lines if line.startswith("ADD ")]
    programs = {}
    for pattern, to in added:
        (archive,) = ROOT.glob(pattern) if DIST == ROOT / "dist" else DIST.glob(Path(pattern).name)
        with tarfile.open(archive) as tar:
            programs |= {to + name: archive for name in tar.getnames() if Path(name).name == "roommate"}
    starts = [json.loads(line.partition(" ")[2])[0] for line in lines if line.startswith("ENTRYPOINT")]
    assert sorted(starts) == ["/roommate", "/usr/local/bin/roommate"]
    assert set(starts) <= set(programs), programs


def test_sums_are_those_of_all_files() -> None:
    lines = [line.split("  ") for line in (DIST / "SHA256SUMS").read_text().splitlines()]
    listed = {name: digest for digest, name in lines}
    others = [path for path in DIST.iterdir() if path.name != "SHA256SUMS"]
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in others}
    assert listed == found
