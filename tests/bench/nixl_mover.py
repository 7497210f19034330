"""NIXL over UCX as a mover of tests/bench/transfer.py; runs in an environment of its own.

Usage: `nixl_mover.py tcp|any receiver|sender JSON`: over UCX's tcp only, or what UCX thinks best.
Imports nothing of this project. Its default progress thread is left on: writes need it.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any

import numpy as np

if sys.argv[1] == "tcp":
    os.environ["UCX_TLS"] = "tcp"
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
from nixl._api import nixl_agent, nixl_agent_config


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def registered(name: str, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent


def descriptors(agent: Any, base: int, order: np.ndarray[Any, Any], size: int) -> Any:
    return agent.get_xfer_descs([(int(base + b * size), size, 0) for b in order], "DRAM")


def receiver(blocks: int, size: int, **_: Any) -> None:
    memory = np.zeros(blocks * size, dtype=np.uint8)
    agent = registered("receiver", memory)
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    say(ready={"metadata": metadata, "address": int(memory.ctypes.data)})
    sys.stdin.read()


def sender(blocks: int, size: int, metadata: str, address: int, **_: Any) -> None:
    memory = np.random.default_rng(1).integers(0, 256, blocks * size, dtype=np.uint8)
    agent = registered("sender", memory)
    peer = agent.add_remote_agent(base64.b64decode(metadata))
    rng = np.random.default_rng(7)
    source = descriptors(agent, memory.ctypes.data, rng.permutation(blocks), size)
    target = descriptors(agent, address, rng.permutation(blocks), size)
    handle = agent.initialize_xfer("WRITE", source, target, peer)
    say(ready=True)
    for _line in sys.stdin:
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            sys.exit(f"nixl: the transfer ended as {state}")
        say(moved=blocks * size)


if __name__ == "__main__":
    {"receiver": receiver, "sender": sender}[sys.argv[2]](**json.loads(sys.argv[3]))
