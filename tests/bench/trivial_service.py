"""Stands in for `python -m runtime` where only its life is of interest: ready at once, light.

Run with `-I -S` and a folder: `versions.json` is what an interpreter answers when it is asked for
its versions, `instances.json` what a router says of instances. Ends on SIGTERM.
"""

import os
import sys


def main() -> None:
    if "--config" in sys.argv:
        serve()
    with open(os.path.join(sys.argv[1], "versions.json")) as f:
        print(f.read())


def serve() -> None:
    import json
    import signal
    import socket

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with open(sys.argv[sys.argv.index("--config") + 1]) as f:
        config = json.load(f)
    with open(os.path.join(sys.argv[1], "instances.json")) as f:
        instances = json.load(f)
    listen = config["listen"]
    server = socket.create_server((listen["host"], listen["port"]))
    answers = {
        "/ready": {"ready": True, "pid": os.getpid(), "peers": {}},
        "/internal/instances": {"instances": instances},
        "/ledger": {"idle": True, "front_requests": 0, "ledger": {}, "counters": {}, "peers": {}},
    }
    while True:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(5)
            path = (connection.recv(65536).split() or [b""] * 2)[1].decode()
            body = json.dumps(answers.get(path, {})).encode()
            status = b"200 OK" if path in answers else b"404 Not Found"
            head = b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % (status, len(body)) + body)


main()
