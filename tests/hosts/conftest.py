"""Several real machines for a test of pdctl, made of namespaces on this one (root and sshd needed).

    def test_it(cluster: Cluster) -> None:
        a, b, c = cluster.add("gpu-a", "gpu-b", "gpu-c")   # three hosts, each with a real sshd
        path = cluster.topology()                          # stub services on them, or sections=...
        assert cluster.pdctl("up", str(path)).rc == 0      # the real command line, on the laptop
        assert cluster.pdctl("down", "demo").rc == 0
        assert a.clean() and b.clean() and c.clean()       # no process, port, segment or file left

Each machine has its own network, pid space, /dev/shm (64 MiB), boot id, HOME, keys and sshd_config
(`add(sshd={...})` changes options). `machine.sh(script)` acts on it without SSH; `halt`,
`stop_sshd`, `freeze_sshd`, `go_silent` and `cluster.reboot` break it; `processes`, `listening`,
`segments`, `files` tell what is on it. `cluster.write_ssh_config(gpu_a="  Port 2222")` and
`cluster.known_hosts` are the user's files. Nothing outlives the test: its end kills every process
of every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from cluster import Cluster, why_not

why_not_here = cache(why_not)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A laptop without machines yet; `cluster.add(...)` makes them."""
    if reason := why_not_here():
        pytest.skip(reason)
    cluster = Cluster(tmp_path)
    try:
        yield cluster
    finally:
        cluster.close()
