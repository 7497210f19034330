"""A topology, its ports and what is known of its hosts, to one `ServiceSpec` a service. Pure.

Owns argv, environment and the text of the config files that `runtime.config` reads. What is
particular to the engine is in `_worker_launch` and `_router_launch`: another kind of engine gets
functions of its own beside them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdctl.services import ServiceSpec
from pdctl.topology import (
    DecodeGroup,
    Instance,
    PrefillGroup,
    Topology,
    contact_address,
    listen_address,
)

Ports = Mapping[str, Mapping[str, int]]
"""Service -> purpose (`http`, `peer`) -> port."""

CONFIG_FILE = "config.json"
TOKEN_FILE = "token"
API_KEY_FILE = "api_keys"


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What has to be known of a host before a command can be written for it."""

    python: str
    """Absolute path of the interpreter that has the runtime installed."""
    home: str
    """Absolute path of pdctl's directory there; services live in `<home>/<deployment>/<name>`."""
    model_path: str
    model_name: str
    """What clients call the model when the topology does not say."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What one engine kind decides about a process."""

    argv: tuple[str, ...]
    env: dict[str, str]
    config: dict[str, Any]


def service_dir(home: str, deployment: str, service: str) -> str:
    return f"{home}/{deployment}/{service}"


def services(
    topology: Topology, ports: Ports, facts: Mapping[str, HostFacts]
) -> tuple[ServiceSpec, ...]:
    """Every service of the topology, router first. `ports` and `facts` cover all of them."""
    return (
        _router(topology, ports, facts),
        *(_instance(topology, instance, ports, facts) for instance in topology.instances()),
    )


def _router(topology: Topology, ports: Ports, facts: Mapping[str, HostFacts]) -> ServiceSpec:
    host = topology.host_of(topology.router)
    launch = _router_launch(topology, ports, facts[host])
    return ServiceSpec(
        deployment=topology.name,
        name="router",
        role="router",
        host=host,
        argv=launch.argv,
        env=launch.env,
        files={CONFIG_FILE: _text(launch.config)},
        secret_files=_secret_files(topology),
        ports=dict(ports["router"]),
        bind=listen_address(topology, host, topology.router.bind),
        url=_router_url(topology, ports),
        supervisor=topology.supervisor,
    )


def _instance(
    topology: Topology,
    instance: Instance,
    ports: Ports,
    facts: Mapping[str, HostFacts],
) -> ServiceSpec:
    group, host = instance.group, facts[instance.host]
    launch = _worker_launch(topology, instance, ports, host)
    return ServiceSpec(
        deployment=topology.name,
        name=instance.name,
        role=instance.role,
        host=instance.host,
        argv=launch.argv,
        env=launch.env,
        files={CONFIG_FILE: _text(launch.config)},
        secrets=group.secrets,
        secret_files=_secret_files(topology),
        ports=dict(ports[instance.name]),
        bind=listen_address(topology, instance.host),
        url=_url(contact_address(topology, instance.host), ports[instance.name]["http"]),
        shm_prefix=_shm_prefix(topology, instance.name, host),
        cpu_buffer_bytes=group.cpu_buffer if isinstance(group, DecodeGroup) else 0,
        supervisor=topology.supervisor,
    )


# ---- our runtime ---------------------------------------------------------------------------------


def _router_launch(topology: Topology, ports: Ports, host: HostFacts) -> Launch:
    router = topology.router
    bind = listen_address(topology, topology.host_of(router), router.bind)
    config = {
        "deployment": topology.name,
        "name": "router",
        "token_file": f"{{dir}}/{TOKEN_FILE}",
        "api_key_file": _api_key_file(topology),
        "listen": {"host": bind, "port": ports["router"]["http"]},
        "policy": router.policy,
        "request_timeout_s": topology.request_timeout,
        "drain_timeout_s": topology.drain_timeout,
        "retries": router.retries,
    }
    return Launch(_argv(host.python, "router"), {}, config)


def _worker_launch(
    topology: Topology,
    instance: Instance,
    ports: Ports,
    host: HostFacts,
) -> Launch:
    group, mine = instance.group, ports[instance.name]
    bind = listen_address(topology, instance.host)
    config: dict[str, Any] = {
        "deployment": topology.name,
        "name": instance.name,
        "role": instance.role,
        "token_file": f"{{dir}}/{TOKEN_FILE}",
        "api_key_file": _api_key_file(topology),
        "listen": {"host": bind, "port": mine["http"]},
        "advertise": contact_address(topology, instance.host),
        "model": {
            "path": host.model_path,
            "name": topology.model_name or host.model_name,
            "dtype": topology.dtype,
            "max_model_len": topology.max_model_len,
        },
        "block_size": group.block_size,
        "kv_cache_bytes": group.kv_cache,
        "tp_size": group.tp_size,
        "device": "cuda:0" if group.devices else "cpu",
        "threads": group.threads,
        "max_num_batched_tokens": group.max_num_batched_tokens,
        "max_num_seqs": group.max_num_seqs,
        "prefix_cache": group.prefix_cache,
        "router": _router_url(topology, ports),
        "shm_prefix": _shm_prefix(topology, instance.name, host),
        "request_timeout_s": topology.request_timeout,
        "drain_timeout_s": topology.drain_timeout,
    }
    if instance.role == "prefill":
        config["peer"] = {"host": bind, "port": mine["peer"]}
        if {decode.transfer for decode in topology.decode} == {"rdma"}:
            # So that it fails to start where it could serve nobody.
            config["transfer"] = "rdma"
    if isinstance(group, DecodeGroup):
        # Its peers it learns from the router: prefill may be scaled while decode runs.
        config["cpu_buffer_bytes"] = group.cpu_buffer
        config["transfer"] = group.transfer
    if isinstance(group, PrefillGroup | DecodeGroup):
        config |= {"rdma": named} if (named := group.rdma.of_replica(instance.replica)) else {}
    return Launch(_argv(host.python, "worker"), _worker_env(instance), config)


def _argv(python: str, command: str) -> tuple[str, ...]:
    return (python, "-m", "runtime", command, "--config", f"{{dir}}/{CONFIG_FILE}")


def _worker_env(instance: Instance) -> dict[str, str]:
    """The topology's `env` has the last word."""
    group, env = instance.group, {}
    if group.threads is not None:
        env = {name: str(group.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    if group.devices:
        # The instance sees only its own GPUs, from cuda:0 on: nothing it does can touch another.
        first = instance.replica * group.tp_size
        own = group.devices[first : first + group.tp_size]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, own))
    return env | group.env


# ---- addresses and names -------------------------------------------------------------------------


def _router_url(topology: Topology, ports: Ports) -> str:
    router = topology.router
    address = contact_address(topology, topology.host_of(router), router.bind)
    return _url(address, ports["router"]["http"])


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _shm_prefix(topology: Topology, service: str, host: HostFacts) -> str:
    """Two users, or two homes, with a deployment of the same name on one host do not meet."""
    directory = service_dir(host.home, topology.name, service)
    return f"pdctl.{topology.name}.{service}.{hashlib.sha256(directory.encode()).hexdigest()[:8]}"


def _secret_files(topology: Topology) -> dict[str, str]:
    keys = topology.router.api_keys
    return {} if keys is None else {API_KEY_FILE: keys}


def _api_key_file(topology: Topology) -> str | None:
    return None if topology.router.api_keys is None else f"{{dir}}/{API_KEY_FILE}"


def _text(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=2) + "\n"
