"""Hosts reached by SSH: "if `ssh host` works, pdctl works".

config       what OpenSSH would use for a destination, asked of `ssh -G`
known_hosts  which host keys the user trusts; new ones are appended, the file is never rewritten
login        the keys we show, in OpenSSH's order
connect      from a destination to a connection, step by step, through jump hosts
host         `Host` over such a connection

Fabric and paramiko are imported in here only, and only when a host needs them.
"""

from __future__ import annotations

from pdctl.remote.connect import Routes
from pdctl.remote.host import SshHost

__all__ = ["Routes", "SshHost"]
