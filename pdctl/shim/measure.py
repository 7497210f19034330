"""Whether hosts reach each other, and how fast: a small server, and who asks it. For `doctor`.

The server listens on the addresses and ports that services are to have, nowhere else, for as long
as its stdin is open and no longer than it was told. It answers only to the run's token.
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
import select
import socket
import sys
import tempfile
import threading
import time
from typing import Any

from .files import base_of
from .probe import SHM, shm_room

PIECE = 1 << 20
HELLO_BYTES = 512
CONNECT_S = 3.0
ANSWER_S = 5.0
MOST_S = 5.0
"""Longest stream of one measurement, whatever is asked for."""
COPY_BYTES = 128 << 20


# ---- the server ----------------------------------------------------------------------------------


def listen() -> None:
    """Print {"ports": those that are served, "any": one more, "failed": {port: why}}, then serve.

    The request: `binds` ([port, address]), `any` (address), `token`, `name`, `seconds`.
    """
    request = json.loads(sys.stdin.readline())
    base_of(request)
    server = Server(request["token"], request["name"])
    failed = {}
    for port, bind in request["binds"]:
        try:
            server.add(bind, port)
        except OSError as e:
            failed[str(port)] = e.strerror or str(e)
    spare = 0
    try:
        spare = server.add(request["any"], 0)
    except OSError as e:
        failed["any"] = e.strerror or str(e)
    print(json.dumps({"ok": True, "any": spare, "failed": failed}), flush=True)
    server.serve(time.monotonic() + float(request["seconds"]))


class Server:
    def __init__(self, token: str, name: str) -> None:
        self.token = token
        self.name = name
        self.sockets: list[socket.socket] = []

    def add(self, bind: str, port: int) -> int:
        found = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        s = socket.socket(family, kind, protocol)
        try:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
            s.listen(64)
        except OSError:
            s.close()
            raise
        self.sockets.append(s)
        return int(s.getsockname()[1])

    def serve(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            handles = {s.fileno(): s for s in self.sockets}
            ready = select.select([0, *handles], [], [], 1.0)[0]
            if 0 in ready:
                return  # pdctl has what it wanted, or is gone
            for s in map(handles.__getitem__, ready):
                connection = s.accept()[0]
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        """One line of JSON asks; our name answers, then `seconds` of bytes."""
        with connection:
            try:
                connection.settimeout(ANSWER_S)
                question = json.loads(connection.makefile("rb").readline(HELLO_BYTES))
                if not hmac.compare_digest(str(question["token"]), self.token):
                    return
                connection.sendall(json.dumps({"name": self.name}).encode() + b"\n")
                deadline = time.monotonic() + min(float(question["seconds"]), MOST_S)
                piece = bytes(PIECE)
                while time.monotonic() < deadline:
                    connection.sendall(piece)
            except (OSError, ValueError, KeyError, TypeError):
                return  # a stranger, or one who has heard enough


# ---- who asks ------------------------------------------------------------------------------------


def reach(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Ask all `targets` at once; each: address, port, seconds, and `plain` to only connect.

    Each answer: `error` (empty: reached), `name` of who answered, `rate` in bytes a second.
    """
    targets = request["targets"]
    answers: list[dict[str, Any]] = [{}] * len(targets)

    def ask(index: int) -> None:
        answers[index] = _ask(targets[index], request["token"])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"answers": answers}


def _ask(target: dict[str, Any], token: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"error": "", "name": "", "rate": 0.0}
    where = (target["address"], target["port"])
    try:
        with socket.create_connection(where, timeout=CONNECT_S) as s:
            if target["plain"]:
                return answer
            s.settimeout(ANSWER_S)
            question = {"token": token, "seconds": target["seconds"]}
            s.sendall(json.dumps(question).encode() + b"\n")
            stream = s.makefile("rb", buffering=0)
            line = stream.readline(HELLO_BYTES)
            answer["name"] = str(json.loads(line)["name"])
            answer["rate"] = _rate(s)
    except TimeoutError:
        answer["error"] = "no answer"
    except ConnectionRefusedError:
        answer["error"] = "connection refused"
    except OSError as e:
        answer["error"] = (e.strerror or str(e)).lower()
    except (ValueError, KeyError, TypeError):
        answer["error"] = "another program answers there"
    return answer


def _rate(s: socket.socket) -> float:
    """Bytes a second from the first one to the end of the stream."""
    buffer = bytearray(PIECE)
    total, begun = 0, 0.0
    while n := s.recv_into(buffer):
        begun = begun or time.perf_counter()
        total += n
    seconds = time.perf_counter() - begun
    return total / seconds if total > PIECE and seconds > 0 else 0.0


def copy(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Bytes a second into shared memory, by one thread; 0 where there is too little of it."""
    nbytes = min(COPY_BYTES, shm_room()["free"] // 2) // PIECE * PIECE
    if nbytes < 4 * PIECE:
        return {"rate": 0.0}
    piece = bytes(PIECE)
    try:
        with tempfile.TemporaryFile(dir=SHM) as f:
            os.posix_fallocate(f.fileno(), 0, nbytes)
            with mmap.mmap(f.fileno(), nbytes) as room:
                _fill(room, piece)  # the first time, pages are made
                begun = time.perf_counter()
                _fill(room, piece)
                return {"rate": nbytes / (time.perf_counter() - begun)}
    except OSError:
        return {"rate": 0.0}


def _fill(room: mmap.mmap, piece: bytes) -> None:
    for offset in range(0, len(room), len(piece)):
        room[offset : offset + len(piece)] = piece
