"""Container images made from files, without a registry and without a builder."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import tarfile
from pathlib import Path

BUSYBOX_COMMANDS = ["sh", "cat", "date", "echo", "env", "id", "ls", "ps", "sleep", "true", "wget"]


def write_image(
    path: Path,
    name: str,
    files: dict[str, Path],
    command: list[str],
    links: dict[str, str] | None = None,
) -> None:
    """Writes an image in the format of `docker save`. `files` are places in the image and what is there;
    libraries that a program needs come with it, at their places on this machine.
    """
    content = dict(files)
    for source in files.values():
        content |= libraries(source)
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        made: set[str] = set()
        for place, source in sorted(content.items()):
            add_parents(tar, place, made)
            info = tar.gettarinfo(str(source.resolve()), arcname=place.lstrip("/"))
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            with source.open("rb") as file:
                tar.addfile(info, file)
        for place, target in sorted((links or {}).items()):
            add_parents(tar, place, made)
            info = tarfile.TarInfo(place.lstrip("/"))
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
        for folder in ("tmp", "proc", "sys", "dev", "etc"):
            add_parents(tar, f"{folder}/x", made)
    layer_bytes = layer.getvalue()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": command, "Env": ["PATH=/bin:/usr/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer_bytes).hexdigest()}"]},
    }
    config_bytes = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(config_bytes).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as tar:
        for inside, data in (
            (config_name, config_bytes),
            ("layer.tar", layer_bytes),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            info = tarfile.TarInfo(inside)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def add_parents(tar: tarfile.TarFile, place: str, made: set[str]) -> None:
    for parent in reversed(list(Path(place.lstrip("/")).parents)[:-1]):
        if str(parent) not in made:
            made.add(str(parent))
            info = tarfile.TarInfo(str(parent))
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if str(parent) == "tmp" else 0o755
            tar.addfile(info)


def libraries(program: Path) -> dict[str, Path]:
    """Shared libraries of a program; none of a static one or of a file that is no program."""
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True)
    if listed.returncode:
        return {}
    found = re.findall(r"(?:=> |^\s*)(/\S+) \(0x", listed.stdout, re.MULTILINE)
    return {place: Path(place) for place in found}


def write_busybox(path: Path, name: str, busybox: Path) -> None:
    links = {f"/bin/{command}": "busybox" for command in BUSYBOX_COMMANDS}
    write_image(path, name, {"/bin/busybox": busybox}, ["/bin/sh"], links)


def write_pause(path: Path, name: str, busybox: Path) -> None:
    """What holds a pod's namespaces: a shell that waits, and ends when it is told to."""
    wait = "trap 'exit 0' TERM INT; while :; do sleep 86400 & wait $!; done"
    links = {f"/bin/{command}": "busybox" for command in ("sh", "sleep")}
    write_image(path, name, {"/bin/busybox": busybox}, ["/bin/sh", "-c", wait], links)
