"""Makes a folder of text files, whole or not at all: how the other files here come to a host.

Comes there first, by itself: imports nothing of the others.
"""

from __future__ import annotations

import errno
import os
import sys
import time

MAIN = "__main__.py"
MADE = "pdctl: made"


def unpack(folder: str, files: dict[str, str]) -> None:
    """Private; parents are made, 0700. There already, also meanwhile: nothing is done."""
    parent = os.path.dirname(folder)
    _private_parents(parent)
    new = os.path.join(parent, f".new-{os.getpid()}-{time.time_ns()}")
    os.mkdir(new, 0o700)
    try:
        for name, text in files.items():
            path = os.path.join(new, name)
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as f:
                f.write(text)
        os.rename(new, folder)
    except BaseException as e:
        import shutil

        shutil.rmtree(new, ignore_errors=True)
        if not isinstance(e, OSError) or not os.path.isdir(folder):
            raise


def _private_parents(path: str) -> None:
    """`os.makedirs` gives its mode to the last directory only."""
    if os.path.isdir(path):
        return
    _private_parents(os.path.dirname(path))
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):  # else another run made it meanwhile
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None


def put_and_become(folder: str, files: dict[str, str], arguments: list[str]) -> None:
    """Put a program there, say so, and go on as that program: python is started once for both."""
    os.umask(0o077)
    try:
        unpack(folder, files)
    except OSError as e:
        sys.exit(f"{e.filename or folder}: {e.strerror}")
    print(MADE, flush=True)
    main = os.path.join(folder, MAIN)
    sys.argv = [main, *arguments]
    with open(main, encoding="utf-8") as f:
        program = compile(f.read(), main, "exec")
    exec(program, {"__name__": "__main__", "__file__": main})
