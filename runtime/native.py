"""Says plainly when the C++ extension is missing.

`pip install` succeeds without a compiler, as the command line and the router need none. Processes
that hold KV cache call `require` before they import anything that uses `runtime._native`.
"""

from __future__ import annotations

import importlib

from runtime.errors import ConfigError

HINT = (
    "install a C++ compiler (Debian, Ubuntu: apt install g++) and install again: "
    "pip install --force-reinstall --no-deps --no-cache-dir <pdctl>; with `-v` pip shows the build"
)


def require() -> None:
    """Load the extension. Raises ConfigError saying what is missing and how to get it."""
    try:
        importlib.import_module("runtime._native")
    except ModuleNotFoundError as e:
        if e.name != "runtime._native":
            raise
        message = "runtime._native is missing: pdctl was installed here without a C++ compiler"
        raise ConfigError(message, hint=HINT) from e
    except ImportError as e:
        # Built for another Python or C library, for example on another host.
        raise ConfigError(f"runtime._native does not load: {e}", hint=HINT) from e
