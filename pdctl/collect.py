"""A folder with what is needed to understand a deployment, or why `up` failed: private, redacted.

<folder>/summary.json               what, when, by which pdctl, and what could not be had
<folder>/status.json, topology.yaml
<folder>/<host>/facts.json, audit.log
<folder>/<host>/<service>/          logs, records, config, environment, ledger
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pdctl import __version__, topology
from pdctl.agent import shim_call
from pdctl.documents import topology_text, validate_document
from pdctl.errors import PdctlError, StateError
from pdctl.find import ANYWHERE, Where, located
from pdctl.fleet import Fleet, attempt_all, on_all
from pdctl.health import get, get_json
from pdctl.hosts import Host
from pdctl.records import ServiceRecord
from pdctl.shim import redact
from pdctl.shim.files import NAME
from pdctl.status import DeploymentStatus, assess

TIMEOUT_S = 120.0
_OF_HOST = ("facts.json", "known.json", "audit.log")
FAILURE_TIMEOUT_S = 20.0
"""The rollback waits for it."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was found, before it is written."""

    name: str
    topology: str
    """Path of the file; may be empty."""
    answers: Mapping[str, Mapping[str, Any]]
    """Host -> its shim's `collect`."""
    records: tuple[ServiceRecord, ...]
    status: DeploymentStatus | None
    missing: Mapping[str, str] = field(default_factory=dict)
    """Host, or host/service -> why nothing came from it."""
    error: str = ""
    """Why `up` failed."""


@dataclass(frozen=True, slots=True)
class Collected:
    path: Path
    missing: Mapping[str, str]
    """As in `Evidence`."""

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "pdctl.collect/1",
            "path": str(self.path),
            "missing": dict(self.missing),
        }


def collect(name: str | None, folder: Path | None, where: Where = ANYWHERE) -> Collected:
    """Ask all hosts and write a new folder. Raises PdctlError when it cannot be made."""
    with located(name, where) as found:
        status = assess(found)

        def ask(host: Host) -> dict[str, Any]:
            payload = {"deployment": found.name}
            return shim_call(host, "collect", payload, timeout=TIMEOUT_S)

        hosts = found.reachable()
        answers = attempt_all(hosts, ask, undone=False)
        outcomes = dict(zip((h.name for h in hosts), answers, strict=True))
        failed = {n: str(e) for n, e in outcomes.items() if isinstance(e, PdctlError)}
        evidence = Evidence(
            found.name,
            found.known.topology,
            {n: o for n, o in outcomes.items() if not isinstance(o, PdctlError)},
            found.records,
            status,
            {**found.lost(), **failed},
        )
    return save(evidence, folder or _fresh(f"pdctl-collect-{evidence.name}"))


def collect_failure(fleet: Fleet, path: Path, error: PdctlError) -> Path:
    """The same of locked hosts, after `up` failed and before what it started is stopped."""
    fleet.tolerate()
    records = fleet.observe(scan=False)
    answers = fleet.on_sessions(lambda s: s.call("collect", {}, timeout=FAILURE_TIMEOUT_S))
    missing = {host: str(e) for host, e in fleet.lost.items()}
    text = f"{error}\n{error.hint}".strip()
    evidence = Evidence(fleet.deployment, str(path), dict(answers), records, None, missing, text)
    return save(evidence, _fresh("pdctl-failure")).path


def save(evidence: Evidence, folder: Path) -> Collected:
    """Write it all. Directories are 0700, files 0600, from the first byte."""
    evidence = _without_bad_names(evidence)
    try:
        folder.mkdir(mode=0o700, parents=True)
        for name, text in _files(evidence).items():
            _write(folder, name, text)
    except FileExistsError as e:
        raise StateError(f"{folder} is there already", hint="name another with -o") from e
    except OSError as e:
        raise StateError(f"{e.filename or folder}: {e.strerror}", hint="use -o DIR") from e
    return Collected(folder.resolve(), evidence.missing)


def _without_bad_names(evidence: Evidence) -> Evidence:
    """A host gives names to files here, and may be in anybody's hands: none leaves its folder."""
    answers: dict[str, Mapping[str, Any]] = {}
    missing = dict(evidence.missing)
    for host, answer in evidence.answers.items():
        if "/" in host or host in (".", ".."):  # from the word of another host
            missing[host] = f"{host!r} cannot be the name of a folder"
            continue
        services = dict(answer["services"])
        for service in answer["services"]:
            names = (service, *services[service])
            if service in _OF_HOST or not all(map(NAME.match, names)):
                missing[f"{host}/{service}"] = f"{host}: {service!r} or a file of it has a bad name"
                del services[service]
        answers[host] = {**answer, "services": services}
    return replace(evidence, answers=answers, missing=missing)


def _fresh(stem: str) -> Path:
    """A folder below the current one that is not there yet."""
    base = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (base, *(f"{base}-{number}" for number in range(2, 100)))
    return Path(next(n for n in names if not os.path.lexists(n)))


def _write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    for parent in reversed(path.relative_to(folder).parents[:-1]):
        (folder / parent).mkdir(mode=0o700, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as f:
        f.write(text)


def _files(evidence: Evidence) -> dict[str, str]:
    """Path in the folder -> text."""
    files = {"summary.json": _json(_summary(evidence))}
    if evidence.status is not None:
        files["status.json"] = _json(evidence.status.to_json())
    files["topology.yaml"] = _topology(evidence.topology)
    for host, answer in evidence.answers.items():
        files[f"{host}/facts.json"] = _json(answer["facts"])
        files[f"{host}/known.json"] = answer["known"]
        files[f"{host}/audit.log"] = answer["audit"]
        for service, found in answer["services"].items():
            files.update((f"{host}/{service}/{n}", text) for n, text in found.items())
    where = {
        (record.name, record.host): host
        for host, answer in evidence.answers.items()
        for record in evidence.records
        if record.name in answer["services"]
    }
    alive = [r for r in evidence.records if r.alive and r.spec and (r.name, r.host) in where]
    for record, (ledger, metrics) in zip(alive, on_all(alive, _asked, undone=False), strict=True):
        folder = f"{where[record.name, record.host]}/{record.name}"
        files[f"{folder}/ledger.json"] = ledger
        files[f"{folder}/metrics.txt"] = metrics
    return {name: text for name, text in files.items() if text}


def _asked(record: ServiceRecord) -> tuple[str, str]:
    """What the service itself says; empty when it does not answer."""
    assert record.spec is not None
    _, ledger = get_json(f"{record.spec.url}/ledger")
    status, metrics = get(f"{record.spec.url}/metrics")
    text = redact.text(_json(ledger), ()) if ledger else ""
    return text, redact.text(metrics, ()) if status == 200 else ""


def _summary(evidence: Evidence) -> dict[str, Any]:
    return {
        "schema": "pdctl.collect/1",
        "name": evidence.name,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "pdctl": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "hosts": sorted(evidence.answers),
        "missing": dict(evidence.missing),
        "error": redact.text(evidence.error, ()),
    }


def _topology(path: str) -> str:
    """With every default filled in; why not, when it cannot be."""
    if not path:
        return ""
    try:
        return topology_text(validate_document(topology.load(Path(path))))
    except PdctlError as e:
        return f"# {e}\n"


def _json(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
