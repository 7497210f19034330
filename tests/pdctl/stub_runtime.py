"""Stands in for `python -m runtime` in tests of supervision: HTTP, readiness, and bad manners.

Started as `<wrapper> -m runtime KIND --config FILE`. STUB_* variables make it misbehave.
"""

from __future__ import annotations

import ctypes
import http.server
import json
import os
import signal
import sys
import threading
import time
from typing import Any

PR_SET_NAME = 15


def escape(name: str) -> None:
    """Double-fork a daemon in a session of its own, under another name, deaf to SIGTERM."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    for deaf in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(deaf, signal.SIG_IGN)
    with open("escaped.pid", "w") as f:
        f.write(str(os.getpid()))
    time.sleep(600)
    os._exit(0)


class Handler(http.server.BaseHTTPRequestHandler):
    config: dict[str, Any]
    begun: float

    def do_GET(self) -> None:
        name = self.config["name"]
        late = time.monotonic() - self.begun < float(os.environ.get("STUB_DELAY", "0"))
        peers = {p["name"]: {"path": "shm"} for p in self.config.get("prefill_peers", [])}
        if os.environ.get("STUB_NO_PATH"):
            peers = {p: {"path": None} for p in peers}
        answers = {
            "/ready": {
                "ready": not late,
                "pid": os.getpid(),
                "waiting_for": "the model to load" if late else None,
                "peers": peers,
            },
            "/ledger": {
                "name": name,
                "idle": True,
                "ledger": {"requests": 0},
                "counters": {"kv_bytes_shm": 4096.0, "requests_finished": 2.0},
                "peers": peers,
            },
            "/internal/instances": {"instances": [], "pairs": 1, "mixed": 0},
        }
        body = json.dumps(answers.get(self.path, {"error": "no such page"})).encode()
        status = 200 if self.path in answers else 404
        self.send_response(503 if late and self.path == "/ready" else status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    with open(sys.argv[sys.argv.index("--config") + 1]) as f:
        config = json.load(f)
    print(f"stub {config['name']} starts", flush=True)
    if os.environ.get("STUB_EXIT"):
        print("no such device: the stub gives up", flush=True)
        sys.exit(int(os.environ["STUB_EXIT"]))
    if os.environ.get("STUB_IGNORE_TERM"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if "shm_prefix" in config:
        with open(f"/dev/shm/{config['shm_prefix']}.0.stub", "wb") as f:
            f.write(b"x" * 4096)
    if os.environ.get("STUB_ESCAPE"):
        escape("kworker/9:9")
    Handler.config, Handler.begun = config, time.monotonic()
    listen = config["listen"]
    server = http.server.ThreadingHTTPServer((listen["host"], listen["port"]), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        time.sleep(600)


main()
