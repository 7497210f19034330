"""Change how many instances of a role a deployment has, without its file.

The base is the topology of the last `up`, which every host of the deployment keeps. The result is
carried out as an `up` of it would be. A later `up FILE` goes back to what the file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pdctl.errors import UsageError
from pdctl.events import Event, Report
from pdctl.find import ANYWHERE, Where, known_of, located
from pdctl.scaling import from_record, scaled
from pdctl.up import UpOptions, UpResult, bring_up
from pdctl.wanted import wanted_of


def scale(
    name: str | None,
    replicas: Mapping[str, int],
    options: UpOptions,
    report: Report,
    where: Where = ANYWHERE,
) -> UpResult:
    """Role -> instances; roles that are not named stay as they are. Raises UsageError for what
    cannot serve.
    """
    report(Event("phase", "asking the hosts"))
    with located(name, where) as found:
        before = found.known
        if not found.records or not before.recorded:
            raise UsageError(
                f"there is no deployment {found.name} whose topology is known",
                hint="`pdctl up TOPOLOGY` starts it, and records it",
            )
        base, numbers = from_record(before.recorded), {**before.replicas, **replicas}
        wanted = scaled(base, numbers)
        path = Path(before.topology or f"{base.name}.yaml")
        known = known_of(wanted, path)
        known = replace(
            known,
            topology=before.topology,
            hosts={**before.hosts, **known.hosts},
            recorded=before.recorded,
            replicas=numbers,
        )
        return bring_up(wanted_of(wanted, path, known), "scale", options, report, found=found)
