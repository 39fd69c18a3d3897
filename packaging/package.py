#!/usr/bin/env python3
"""Puts what was built into packages: archives, a wheel, a Debian package, krew's manifest.

usage: package.py --gnu FOLDER --static FOLDER --releases URL OUT

--gnu has `roommate` and `libroommate_gate.so` for an old GNU C library, --static a `roommate`
without any (docs/decisions/013-two-builds.md). --releases is where archives will be found, for
krew. `make dist` builds both and calls this.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import tomllib
from wheel_file import carry

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "packaging"
VERSION = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]

# Libraries that every manylinux platform has, and that are a part of the GNU C library.
USUAL = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"}
USUAL |= {"libutil.so.1", "ld-linux-x86-64.so.2"}


def say(*words: str | Path, **run: object) -> str:
    return subprocess.run([*words], check=True, text=True, stdout=subprocess.PIPE, **run).stdout  # type: ignore[call-overload,no-any-return]


def glibc_of(*files: Path) -> tuple[int, int]:
    """The oldest GNU C library that has every symbol that these files need."""
    versions = [(2, 2)]
    for file in files:
        needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", say("readelf", "-dW", file)))
        if needed - USUAL:
            sys.exit(f"error: {file} needs {', '.join(needed - USUAL)}, which not every Linux has")
        found = re.findall(r"Name: GLIBC_(\d+)\.(\d+)", say("readelf", "-VW", file))
        versions += [(int(major), int(minor)) for major, minor in found]
    return max(versions)


def must_be_static(program: Path) -> None:
    if "(NEEDED)" in say("readelf", "-dW", program):
        sys.exit(f"error: {program} is not a static program")


def pages(program: Path, into: Path) -> None:
    """Pages of the manual and completions, below `share` as systems expect them."""
    say(program, "man", into / "man/man1")
    for shell, place in [
        ("bash", "bash-completion/completions/roommate"),
        ("zsh", "zsh/site-functions/_roommate"),
        ("fish", "fish/vendor_completions.d/roommate.fish"),
    ]:
        (into / place).parent.mkdir(parents=True, exist_ok=True)
        (into / place).write_text(say(program, "completions", shell))


def tree(gnu: Path, root: Path) -> Path:
    """What is installed on a machine, below a prefix."""
    install(gnu / "roommate", root / "bin/roommate", 0o755)
    install(gnu / "libroommate_gate.so", root / "lib/roommate/libroommate_gate.so", 0o644)
    # By this name kubectl finds it.
    (root / "bin/kubectl-roommate").symlink_to("roommate")
    pages(gnu / "roommate", root / "share")
    return root


def install(source: Path, to: Path, mode: int) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, to)
    to.chmod(mode)


def archive(to: Path, root: Path) -> None:
    """A compressed archive in which nothing depends on when and by whom it was made."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        member.mtime = EPOCH
        return member

    with gzip.GzipFile(to, "wb", mtime=EPOCH) as out, tarfile.open(fileobj=out, mode="w") as tar:
        for path in sorted(root.iterdir()):
            tar.add(path, path.name, filter=plain)


def debian(to: Path, built: Path, root: Path, glibc: tuple[int, int]) -> None:
    shutil.copytree(built, root / "usr", symlinks=True)
    share = root / "usr/share"
    (share / "zsh/site-functions").rename(share / "zsh/vendor-completions")
    for page in (share / "man/man1").iterdir():
        compress(page)
    unit = (HERE / "roommate.service").read_text().replace("/usr/local/bin", "/usr/bin")
    place = root / "usr/lib/systemd/system/roommate.service"
    place.parent.mkdir(parents=True)
    place.write_text(unit)
    docs = share / "doc/roommate"
    docs.mkdir(parents=True)
    shutil.copyfile(HERE / "debian/copyright", docs / "copyright")
    shutil.copyfile(ROOT / "CHANGELOG.md", docs / "changelog")
    compress(docs / "changelog")
    scripts = root / "DEBIAN"
    scripts.mkdir()
    size_kib = sum(f.lstat().st_size for f in root.rglob("*") if f.is_file()) // 1024
    control = (HERE / "debian/control").read_text()
    for name, value in [("VERSION", VERSION), ("SIZE", size_kib), ("GLIBC", f"{glibc[0]}.{glibc[1]}")]:
        control = control.replace(f"@{name}@", str(value))
    (scripts / "control").write_text(control)
    for name in ["postinst", "prerm", "postrm"]:
        install(HERE / "debian" / name, scripts / name, 0o755)
    for folder in [root, *(p for p in root.rglob("*") if p.is_dir())]:
        folder.chmod(0o755)
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)}
    say("dpkg-deb", "--build", "--root-owner-group", "-Zxz", root, to, env=env)


def compress(file: Path) -> None:
    file.with_name(file.name + ".gz").write_bytes(gzip.compress(file.read_bytes(), mtime=0))
    file.unlink()


def krew(to: Path, plugin: Path, releases: str) -> None:
    # What stands above the manifest is for those who fill it in.
    text = (HERE / "krew/roommate.yaml").read_text()
    text = text[text.index("apiVersion:") :]
    sha256 = hashlib.sha256(plugin.read_bytes()).hexdigest()
    url = f"{releases}/v{VERSION}/{plugin.name}"
    for name, value in [("VERSION", VERSION), ("URL", url), ("SHA256", sha256)]:
        text = text.replace(f"@{name}@", value)
    to.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Puts what was built into packages.")
    parser.add_argument("--gnu", type=Path, required=True)
    parser.add_argument("--static", type=Path, required=True)
    parser.add_argument("--releases", required=True, metavar="URL")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    out: Path = args.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    gnu, static = args.gnu.resolve(), args.static.resolve()
    glibc = glibc_of(gnu / "roommate", gnu / "libroommate_gate.so")
    must_be_static(static / "roommate")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        built = tree(gnu, work / "gnu")
        carry(ROOT / "python", VERSION, built, glibc, EPOCH, out)
        debian(out / f"roommate_{VERSION}_amd64.deb", built, work / "debian", glibc)
        install(HERE / "roommate.service", built / "lib/systemd/system/roommate.service", 0o644)
        install(ROOT / "LICENSE", built / "LICENSE", 0o644)
        archive(out / f"roommate-{VERSION}-linux-x86_64-gnu.tar.gz", built)
        plugin = work / "static"
        install(static / "roommate", plugin / "roommate", 0o755)
        install(ROOT / "LICENSE", plugin / "LICENSE", 0o644)
        static_archive = out / f"roommate-{VERSION}-linux-x86_64-static.tar.gz"
        archive(static_archive, plugin)
        krew(out / "krew.yaml", static_archive, args.releases)
    names = sorted(path.name for path in out.iterdir())
    digests = [hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names]
    lines = [f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True)]
    (out / "SHA256SUMS").write_text("".join(lines))


def epoch() -> int:
    """When the sources were committed: packages of the same sources are the same."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return int(given or say("git", "-C", ROOT, "log", "-1", "--format=%ct"))


if __name__ == "__main__":
    EPOCH = epoch()
    main()
