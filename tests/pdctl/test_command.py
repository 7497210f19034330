"""Command text, word for word, and that `runtime.config` reads it as meant."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl import command, plan
from pdctl.command import HostFacts
from pdctl.services import ServiceSpec
from pdctl.topology import Topology, load

runtime_config = pytest.importorskip("runtime.config")

TOPOLOGIES = Path(__file__).parents[2] / "topologies"


def facts(topology: Topology) -> dict[str, HostFacts]:
    return {
        key: HostFacts(
            python=host.python or "/venv/bin/python",
            home=f"/home/{key}/.pdctl",
            model_path="/models/m.gguf",
            model_name="m",
        )
        for key, host in topology.hosts.items()
    }


def specs(
    topology: Topology, ports: Mapping[str, Mapping[str, int]] | None = None
) -> list[ServiceSpec]:
    ports = ports if ports is not None else plan.allocate_ports(topology, (), {})
    return list(command.services(topology, ports, facts(topology)))


def read_back(spec: ServiceSpec, tmp_path: Path) -> Any:
    path = tmp_path / f"{spec.name}.json"
    path.write_text(spec.files["config.json"])
    router = spec.role == "router"
    return runtime_config.load(
        path, runtime_config.RouterConfig if router else runtime_config.WorkerConfig
    )


def example(name: str) -> Topology:
    return load(TOPOLOGIES / f"{name}.yaml").topology


QUICKSTART_DECODE = {
    "deployment": "quickstart",
    "name": "decode-0",
    "role": "decode",
    "token_file": "{dir}/token",
    "api_key_file": None,
    "listen": {"host": "127.0.0.1", "port": 8101},
    "advertise": "127.0.0.1",
    "model": {"path": "/models/m.gguf", "name": "m", "dtype": "auto", "max_model_len": None},
    "block_size": 16,
    "kv_cache_bytes": 536870912,
    "tp_size": 1,
    "device": "cpu",
    "threads": 2,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 64,
    "prefix_cache": True,
    "router": "http://127.0.0.1:8000",
    "shm_prefix": "pdctl.quickstart.decode-0.b8e4a2cc",
    "request_timeout_s": 600.0,
    "drain_timeout_s": 30.0,
    "cpu_buffer_bytes": 402653184,
    "transfer": "auto",
}


def test_the_quickstarts_decode_word_for_word() -> None:
    _, _, decode = specs(example("quickstart"))
    assert decode.argv == (
        "/venv/bin/python",
        "-m",
        "runtime",
        "worker",
        "--config",
        "{dir}/config.json",
    )
    assert json.loads(decode.files["config.json"]) == QUICKSTART_DECODE
    assert decode.env == {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    assert decode.ports == {"http": 8101}
    assert decode.url == "http://127.0.0.1:8101"
    assert decode.bind == "127.0.0.1"
    assert decode.shm_prefix == QUICKSTART_DECODE["shm_prefix"]
    assert decode.cpu_buffer_bytes == 384 << 20
    assert (decode.secrets, decode.secret_files) == ((), {})


def test_the_quickstarts_router_word_for_word() -> None:
    router = specs(example("quickstart"))[0]
    assert (router.name, router.role) == ("router", "router")
    assert router.argv[2:4] == ("runtime", "router")
    assert json.loads(router.files["config.json"]) == {
        "deployment": "quickstart",
        "name": "router",
        "token_file": "{dir}/token",
        "api_key_file": None,
        "listen": {"host": "127.0.0.1", "port": 8000},
        "policy": "least_loaded",
        "request_timeout_s": 600.0,
        "drain_timeout_s": 30.0,
        "retries": 1,
    }
    assert (router.url, router.ports) == ("http://127.0.0.1:8000", {"http": 8000})
    assert (router.shm_prefix, router.cpu_buffer_bytes) == ("", 0)


def test_prefill_listens_for_peers_and_knows_none() -> None:
    prefill = specs(example("quickstart"))[1]
    config = json.loads(prefill.files["config.json"])
    assert config["peer"] == {"host": "127.0.0.1", "port": 9100}
    assert not {"cpu_buffer_bytes", "transfer"} & config.keys()
    assert prefill.ports == {"http": 8100, "peer": 9100}


@pytest.mark.parametrize("name", [p.stem for p in sorted(TOPOLOGIES.glob("*.yaml"))])
def test_the_runtime_reads_what_is_written(tmp_path: Path, name: str) -> None:
    for spec in specs(example(name)):
        config = read_back(spec, tmp_path)
        assert config.name == spec.name
        assert config.deployment == name


def test_across_hosts_everything_is_found_by_its_advertised_address(tmp_path: Path) -> None:
    router, prefill, decode = specs(example("two-hosts"))
    assert router.url == "http://192.0.2.11:8000"
    config = read_back(decode, tmp_path)
    assert config.router == router.url
    assert str(config.listen) == "192.0.2.12:8100"
    assert str(read_back(prefill, tmp_path).peer) == "192.0.2.11:9100"
    assert config.device == "cuda:0"
    assert decode.env == {"CUDA_VISIBLE_DEVICES": "0"}
    assert decode.argv[0] == "/venv/bin/python"
    assert decode.secret_files == {"api_keys": "PDCTL_API_KEYS"}
    assert config.api_key_file == "{dir}/api_keys"


def test_the_reference_uses_every_option(tmp_path: Path) -> None:
    by_name = {s.name: s for s in specs(example("reference"))}
    assert list(by_name) == ["router", "prefill-0", "prefill-1", "decode-0", "decode-1", "mixed-0"]
    prefill = by_name["prefill-1"]
    assert prefill.ports == {"http": 8101, "peer": 9101}
    assert prefill.env["TORCH_LOGS"] == "-all"
    assert prefill.secrets == ("HF_TOKEN",)
    assert prefill.bind == "0.0.0.0" and prefill.url == "http://192.0.2.10:8101"
    decode = read_back(by_name["decode-1"], tmp_path)
    assert by_name["decode-1"].env["CUDA_VISIBLE_DEVICES"] == "1"
    assert decode.model == runtime_config.ModelConfig(
        path="/models/m.gguf", name="smollm", dtype="bfloat16", max_model_len=4096
    )
    assert decode.rdma == runtime_config.RdmaConfig("mlx5_1", 1, 3)
    assert read_back(prefill, tmp_path).rdma == runtime_config.RdmaConfig("mlx5_0", 1, 3)


@pytest.mark.parametrize(
    ("decodes", "prefill"), [(["rdma"], "rdma"), (["rdma", "auto"], "auto"), (["shm"], "auto")]
)
def test_prefill_must_have_rdma_where_every_decode_asks_for_it(
    tmp_path: Path, decodes: list[str], prefill: str
) -> None:
    topology = Topology.model_validate(
        {
            "name": "t",
            "model": "m",
            "hosts": {"a": {}},
            "prefill": ({},),
            "decode": tuple({"transfer": kind} for kind in decodes),
        }
    )
    configs = [read_back(spec, tmp_path) for spec in specs(topology)[1:]]
    assert [config.transfer for config in configs] == [prefill, *decodes]


def test_each_replica_has_as_many_gpus_as_ranks() -> None:
    group = {"tp_size": 2, "replicas": 2, "devices": (4, 5, 2, 3)}
    topology = Topology.model_validate(
        {"name": "t", "model": "m", "hosts": {"a": {}}, "mixed": (group,)}
    )
    _, first, second = specs(topology)
    assert first.env["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert second.env["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_an_ipv6_host(tmp_path: Path) -> None:
    topology = Topology.model_validate(
        {
            "name": "t",
            "model": "m",
            "hosts": {"a": {"address": "2001:db8::1"}, "b": {"address": "2001:db8::2"}},
            "router": {"host": "a"},
            "prefill": ({"host": "a"},),
            "decode": ({"host": "b"},),
        }
    )
    router, prefill, decode = specs(topology)
    assert router.url == read_back(decode, tmp_path).router == "http://[2001:db8::1]:8000"
    assert str(read_back(prefill, tmp_path).peer) == "[2001:db8::1]:9100"


def test_decode_does_not_change_when_prefill_does() -> None:
    """Its peers come from the router, so scaling prefill restarts nothing."""
    one = example("quickstart")
    group = one.prefill[0].model_copy(update={"replicas": 2})
    two = one.model_copy(update={"prefill": (group,)})
    ports = {"router": {"http": 8000}, "decode-0": {"http": 8101}}
    ports |= {f"prefill-{n}": {"http": 8200 + n, "peer": 9200 + n} for n in range(2)}
    before, after = ({s.name: s.hash for s in specs(t, ports)} for t in (one, two))
    assert set(after) - set(before) == {"prefill-1"}
    assert before.items() <= after.items()


def test_the_files_last_word_is_the_topologys_env() -> None:
    topology = Topology.model_validate(
        {
            "name": "t",
            "model": "m",
            "hosts": {"a": {}},
            "mixed": ({"threads": 4, "env": {"OMP_NUM_THREADS": "9"}},),
        }
    )
    assert specs(topology)[1].env == {"OMP_NUM_THREADS": "9", "MKL_NUM_THREADS": "4"}


def test_equal_names_in_two_homes_share_no_segments() -> None:
    topology = example("quickstart")
    ports = plan.allocate_ports(topology, (), {})
    here = HostFacts("/p", "/home/ada/.pdctl", "/m", "m")
    there = HostFacts("/p", "/home/bob/.pdctl", "/m", "m")
    one = command.services(topology, ports, {"local": here})
    other = command.services(topology, ports, {"local": there})
    prefixes = [s.shm_prefix for s in (*one, *other) if s.shm_prefix]
    assert len(set(prefixes)) == len(prefixes) == 4


NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)


@settings(deadline=None, max_examples=50)
@given(name=NAMES, prefills=st.integers(1, 5), decodes=st.integers(1, 5))
def test_segment_names_fit_and_ports_are_unique(name: str, prefills: int, decodes: int) -> None:
    topology = Topology.model_validate(
        {
            "name": name,
            "model": "m",
            "hosts": {"a": {}},
            "prefill": ({"replicas": prefills},),
            "decode": ({"replicas": decodes},),
        }
    )
    found = specs(topology)
    assert len(found) == 1 + prefills + decodes
    # `<prefix>.<rank>.<incarnation>` has to fit in a file name, with room for a long incarnation.
    assert all(len(s.shm_prefix) <= 120 for s in found)
    ports = [port for s in found for port in s.ports.values()]
    assert len(set(ports)) == len(ports)
    assert len({s.name for s in found}) == len({s.hash for s in found}) == len(found)
