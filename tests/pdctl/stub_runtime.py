"""Stands in for `python -m runtime` in tests of supervision: HTTP, readiness, registration at the
router, draining, and bad manners.

Started as `<wrapper> -m runtime KIND --config FILE`. STUB_* variables make it misbehave; a file
`busy` in its directory is a request under way.
"""

from __future__ import annotations

import ctypes
import http.client
import http.server
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
import uuid
from typing import Any, ClassVar

PR_SET_NAME = 15
HEARTBEAT_S = 0.1
DEAD_S = 3.0


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
    config: ClassVar[dict[str, Any]]
    peers: ClassVar[dict[str, Any]] = {}
    """Decode: the prefill instances that the router named, all linked at once."""
    registry: ClassVar[dict[str, dict[str, Any]]] = {}
    """Router: by name, what each said last, when, and whether it is drained."""

    def do_GET(self) -> None:
        name = self.config["name"]
        drained = drained_alone(self.registry)
        late = is_late() or bool(drained)
        path = None if os.environ.get("STUB_NO_PATH") else "shm"
        peers = {p: {"path": path, "requests": 0} for p in self.peers}
        busy = int(os.path.exists("busy"))
        answers = {
            "/ready": {
                "ready": not late,
                "pid": os.getpid(),
                "incarnation": INCARNATION,
                "waiting_for": drained or ("the model to load" if late else None),
                "peers": peers,
            },
            "/ledger": {
                "name": name,
                "idle": not busy,
                "front_requests": 0,
                "ledger": {"requests": busy},
                "counters": {"kv_bytes_shm": 4096.0, "requests_finished": 2.0},
                "peers": peers,
            },
            "/internal/instances": {
                "instances": [described(i) for i in list(self.registry.values())]
            },
        }
        status = 200 if self.path in answers else 404
        status = 503 if late and self.path == "/ready" else status
        self.answer(status, answers.get(self.path, {"error": "no such page"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {token(self.config)}":
            self.answer(401, {"error": {"message": "wrong token"}})
        elif self.path == "/internal/register":
            known = self.registry.get(body["name"], {})
            same = known.get("incarnation") == body["incarnation"]
            draining = known["draining"] if same else body["draining"]
            self.registry[body["name"]] = body | {
                "seen": time.monotonic(),
                "draining": draining,
                "heard": body["draining"],
            }
            prefills = [n for n, i in list(self.registry.items()) if i["role"] == "prefill"]
            named = {n: {"host": "127.0.0.1", "port": 1} for n in prefills}
            self.answer(200, {"draining": draining, "peers": named})
        elif body["name"] in self.registry:
            self.registry[body["name"]]["draining"] = body["draining"]
            self.answer(200, described(self.registry[body["name"]]))
        else:
            self.answer(404, {"error": {"message": f"no instance {body['name']} is registered"}})

    def answer(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


BEGUN = time.monotonic()
INCARNATION = uuid.uuid4().hex


def is_late() -> bool:
    return time.monotonic() - BEGUN < float(os.environ.get("STUB_DELAY", "0"))


def token(config: dict[str, Any]) -> str:
    with open(config["token_file"]) as f:
        return f.read().strip()


def drained_alone(registry: dict[str, dict[str, Any]]) -> str:
    """Router: who is drained without another of its role, so that nothing can be served."""
    serving = {i["role"] for i in list(registry.values()) if not i["draining"]}
    alone = (n for n, i in list(registry.items()) if i["role"] not in serving)
    return "".join(f"{name} is drained" for name in alone)


def described(instance: dict[str, Any]) -> dict[str, Any]:
    dead = time.monotonic() - instance["seen"] > DEAD_S
    state = "draining" if instance["draining"] else "ready" if instance["ready"] else "starting"
    links = [name for name, path in instance["peers"].items() if path]
    more = {"state": "dead" if dead else state, "reason": "", "links": links, "in_flight": 0}
    return {key: v for key, v in instance.items() if key != "seen"} | more


def register(config: dict[str, Any]) -> None:
    """For ever. A router that does not answer is asked again."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    path = None if os.environ.get("STUB_NO_PATH") else "shm"
    draining = False
    while True:
        body = {
            "name": config["name"],
            "role": config["role"],
            "incarnation": INCARNATION,
            "ready": not is_late(),
            "draining": draining,
            "peers": dict.fromkeys(Handler.peers, path),
        }
        headers = {"Authorization": f"Bearer {token(config)}"}
        url = f"{config['router']}/internal/register"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with opener.open(request, timeout=2) as response:
                reply = json.load(response)
            draining = reply["draining"]
            if config["role"] == "decode":
                Handler.peers = reply["peers"]
        except (OSError, http.client.HTTPException, ValueError):  # it may end in mid-answer
            pass
        time.sleep(HEARTBEAT_S)


def main() -> None:
    if "--config" not in sys.argv:  # asked for its versions: as the interpreter it stands in for
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    with open(sys.argv[sys.argv.index("--config") + 1]) as f:
        config = json.load(f)
    print(f"stub {config['name']} starts", flush=True)
    if os.environ.get("STUB_EXIT"):
        print("no such device: the stub gives up", flush=True)
        sys.exit(int(os.environ["STUB_EXIT"]))
    if os.environ.get("STUB_EXIT_UNLESS", config["name"]) != config["name"]:
        sys.exit(3)
    if os.environ.get("STUB_IGNORE_TERM"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if "shm_prefix" in config:
        with open(f"/dev/shm/{config['shm_prefix']}.0.stub", "wb") as f:
            f.write(b"x" * 4096)
    if os.environ.get("STUB_ESCAPE"):
        escape("kworker/9:9")
    Handler.config = config
    if "peer" in config:
        peers = socket.create_server((config["peer"]["host"], config["peer"]["port"]))
        threading.Thread(target=peers.accept, daemon=True).start()
    listen = config["listen"]
    server = http.server.ThreadingHTTPServer((listen["host"], listen["port"]), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if config.get("router"):
        register(config)
    while True:
        time.sleep(600)


main()
