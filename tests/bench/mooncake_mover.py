"""Mooncake's TCP transport as a mover of transfer.py; runs in an environment of its own.

Usage: `mooncake_mover.py BACKEND receiver|sender JSON`. Imports nothing of this project.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65536")
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
from mooncake.engine import TransferEngine

BATCH = 1024
"""It refuses much longer ones."""


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def engine() -> Any:
    made = TransferEngine()
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        sys.exit("mooncake: cannot initialize")
    return made


def register(made: Any, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    address = int(memory.ctypes.data)
    if made.register_memory(address, memory.nbytes):
        sys.exit("mooncake: cannot register memory")
    return address


def receiver(blocks: int, size: int, **_: Any) -> None:
    made = engine()
    memory = np.zeros(blocks * size, dtype=np.uint8)
    address = register(made, memory)
    say(ready={"host": f"127.0.0.1:{made.get_rpc_port()}", "address": address})
    sys.stdin.read()


def sender(blocks: int, size: int, host: str, address: int, **_: Any) -> None:
    made = engine()
    memory = np.random.default_rng(1).integers(0, 256, blocks * size, dtype=np.uint8)
    base = register(made, memory)
    rng = np.random.default_rng(7)
    source = (base + rng.permutation(blocks) * size).tolist()
    target = (address + rng.permutation(blocks) * size).tolist()
    say(ready=True)
    for _line in sys.stdin:
        for at in range(0, blocks, BATCH):
            end = min(at + BATCH, blocks)
            lengths = [size] * (end - at)
            if made.batch_transfer_sync_write(host, source[at:end], target[at:end], lengths):
                sys.exit("mooncake: a transfer failed")
        say(moved=blocks * size)


if __name__ == "__main__":
    {"receiver": receiver, "sender": sender}[sys.argv[2]](**json.loads(sys.argv[3]))
