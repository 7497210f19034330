"""Asks an interpreter of this host which runtime it would run: it may be another than our own."""

from __future__ import annotations

import json
import os
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSIONS = os.path.join(os.path.dirname(__file__), "versions.py")
TIMEOUT_S = 30.0


def ask(python: str) -> dict[str, Any]:
    """`versions.report` of that interpreter, or {"error": why there is no answer}."""
    with open(VERSIONS) as f:
        source = f.read()
    try:
        done = subprocess.run(
            [python, "-"], input=source, capture_output=True, text=True, cwd="/", timeout=TIMEOUT_S
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    except FileNotFoundError:
        return {"error": "does not exist"}
    except subprocess.TimeoutExpired:
        return {"error": f"does not answer within {TIMEOUT_S:.0f} s"}
    except OSError as e:
        return {"error": e.strerror or str(e)}
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"error": f"is no working Python: {last}"}
