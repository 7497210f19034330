"""As many machines as one likes, each with a service that does nothing: what pdctl and SSH take."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cluster import Cluster

from pdctl.shim import versions

SERVICE = Path(__file__).parent / "bench" / "trivial_service.py"


def many_hosts(root: Path, count: int) -> tuple[Cluster, str]:
    """A cluster that its caller closes, and a topology with a mixed instance on every machine."""
    known = [{"name": f"mixed-{i}", "state": "ready", "incarnation": "1"} for i in range(count)]
    (root / "versions.json").write_text(json.dumps(versions.report()))
    (root / "instances.json").write_text(json.dumps(known))
    cluster = Cluster(root, interpreter=[sys.executable, "-I", "-S", SERVICE, root])
    try:
        cluster.add(*(f"host-{i:02}" for i in range(count)))
        keys = list(cluster.machines)
        mixed = [{"host": key, "kv_cache": "1MiB"} for key in keys]
        path = cluster.topology(router={"host": keys[0]}, mixed=mixed, prefill=[], decode=[])
    except BaseException:
        cluster.close()
        raise
    return cluster, str(path)
