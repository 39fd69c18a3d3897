"""The wheel: the SDK as setuptools packs it, and the program beside it.

pip puts what is below `*.data/scripts` beside Python and what is below `*.data/data` below the
prefix of the environment: `bin/roommate` and `lib/roommate/libroommate_gate.so`, where the program
looks for it.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path


def carry(sdk: Path, version: str, built: Path, glibc: tuple[int, int], epoch: int, out: Path) -> None:
    """Writes the wheel into `out`; the program needs at least this GNU C library."""
    platforms = [f"manylinux_{glibc[0]}_{glibc[1]}_x86_64"]
    if glibc <= (2, 17):
        # The same by the name that installers of before know.
        platforms = ["manylinux_2_17_x86_64", "manylinux2014_x86_64"]
    name = f"roommate_gpu-{version}"
    files = {path: text for path, text in _of_sdk(sdk, name).items() if not path.endswith("/RECORD")}
    files[f"{name}.dist-info/WHEEL"] = _about(platforms)
    data = f"{name}.data"
    files[f"{data}/scripts/roommate"] = (built / "bin/roommate").read_bytes()
    for path in [built / "lib/roommate/libroommate_gate.so", *sorted((built / "share").rglob("*"))]:
        if path.is_file():
            files[f"{data}/data/{path.relative_to(built)}"] = path.read_bytes()
    record = f"{name}.dist-info/RECORD"
    files[record] = _record(files, record)
    to = out / f"{name}-py3-none-{'.'.join(platforms)}.whl"
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, text in files.items():
            member = zipfile.ZipInfo(path, time.gmtime(epoch)[:6])
            mode = 0o755 if "/scripts/" in path else 0o644
            member.external_attr = (0o100000 | mode) << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(member, text)


def _of_sdk(sdk: Path, name: str) -> dict[str, bytes]:
    """The files of the SDK's own wheel, which has no program."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        # setuptools leaves its work beside the sources.
        sources = shutil.copytree(sdk, Path(folder) / "sources", ignore=shutil.ignore_patterns("*.egg-info"))
        subprocess.run([*pip, "--wheel-dir", folder, sources], check=True)
        (plain,) = Path(folder).glob("*.whl")
        if not plain.name.startswith(f"{name}-"):
            sys.exit(f"error: the SDK is {plain.name}, the program {name}: make them one version")
        with zipfile.ZipFile(plain) as wheel:
            return {path: wheel.read(path) for path in wheel.namelist()}


def _about(platforms: list[str]) -> bytes:
    tags = "".join(f"Tag: py3-none-{platform}\n" for platform in platforms)
    return f"Wheel-Version: 1.0\nGenerator: roommate\nRoot-Is-Purelib: false\n{tags}".encode()


def _record(files: dict[str, bytes], own: str) -> bytes:
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text)}\n")
    return "".join([*lines, f"{own},,\n"]).encode()
