"""A folder of stand-in wheels for everything the runtime asks for: small, and pip takes them."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from pathlib import Path

from pdctl import wheels

VERSIONS = {"torch": "9.9.9+cpu"}


def fill(folder: Path, extra: str = "runtime") -> None:
    folder.mkdir(exist_ok=True)
    for requirement in wheels.requirements([extra]):
        name, lowest = re.split(r"[><=~!]+", requirement)
        write(folder, name, VERSIONS.get(name, f"{lowest}.1"))


def write(folder: Path, name: str, version: str, payload: bytes = b"") -> None:
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}/__init__.py": b"",
        f"{module}/payload": payload,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}\n")
    files[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as z:
        for path, data in files.items():
            z.writestr(path, data)
