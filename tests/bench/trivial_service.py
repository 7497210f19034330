"""Stands in for `python -m runtime` where only its life is of interest: ready at once, light.

Run with `-I -S` and a folder: `versions.json` is what an interpreter answers when it is asked for
its versions, `instances.json` what a router says of instances. Ends on SIGTERM.

Hundreds of it start on one machine while something else is measured: it loads nothing that is not
built into python, for json and socket cost it twice what all the rest does.
"""

import _signal
import _socket
import os
import sys

TIMEOUT_S = 5


def main() -> None:
    if "--config" in sys.argv:
        serve(sys.argv[sys.argv.index("--config") + 1])
    print(contents("versions.json"))


def contents(name: str) -> str:
    with open(os.path.join(sys.argv[1], name), encoding="utf-8") as f:
        return f.read()


def serve(config: str) -> None:
    _signal.signal(_signal.SIGTERM, lambda *_: os._exit(0))
    with open(config, encoding="utf-8") as f:
        listen = f.read().partition('"listen"')[2].partition("}")[0]
    host = listen.partition('"host"')[2].split('"')[1]
    port = int(listen.partition('"port"')[2].strip(": ").split(",")[0])
    server = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    server.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
    server.bind((host, port))
    server.listen()
    instances = contents("instances.json")
    answers = {
        "/ready": f'{{"ready": true, "pid": {os.getpid()}, "peers": {{}}}}',
        "/internal/instances": f'{{"instances": {instances}}}',
        "/ledger": '{"idle": true, "front_requests": 0, "ledger": {}, "counters": {}, "peers": {}}',
    }
    while True:
        handle, _ = server._accept()
        connection = _socket.socket(fileno=handle)
        connection.settimeout(TIMEOUT_S)
        path = (connection.recv(65536).split() or [b""] * 2)[1].decode()
        body = answers.get(path, "{}").encode()
        status = b"200 OK" if path in answers else b"404 Not Found"
        head = b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % (status, len(body)) + body)
        connection.close()


main()
