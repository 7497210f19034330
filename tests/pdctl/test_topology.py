"""Good topologies: defaults, instances, addresses; and the example files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdctl.errors import TopologyError
from pdctl.topology import (
    DecodeGroup,
    Host,
    LoadedTopology,
    MixedGroup,
    PrefillGroup,
    Router,
    Topology,
    contact_address,
    listen_address,
    load,
)

TOPOLOGIES = Path(__file__).parents[2] / "topologies"
REFERENCE = TOPOLOGIES / "reference.yaml"

PAIR = "name: t\nmodel: m\nhosts: {a: {}}\nprefill: [{}]\ndecode: [{}]\n"


def loaded(tmp_path: Path, text: str) -> LoadedTopology:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    return load(path)


def test_the_shortest_topology_has_the_documented_defaults(tmp_path: Path) -> None:
    topology = loaded(tmp_path, PAIR).topology
    decode = topology.decode[0]
    assert (decode.cpu_buffer, decode.kv_cache) == (256 << 20, 512 << 20)
    assert (decode.transfer, decode.block_size, decode.devices) == ("auto", 16, ())
    assert topology.router == Router(port=8000, policy="least_loaded")
    assert topology.host_of(topology.router) == topology.host_of(decode) == "a"


def test_instances_are_numbered_per_role_across_groups(tmp_path: Path) -> None:
    text = (
        "name: t\nmodel: m\nhosts: {a: {}}\nmixed: [{}]\n"
        "prefill: [{replicas: 2, port: 8100, peer_port: 9200}, {}]\ndecode: [{}]\n"
    )
    instances = loaded(tmp_path, text).topology.instances()
    assert [i.name for i in instances] == [
        "prefill-0",
        "prefill-1",
        "prefill-2",
        "decode-0",
        "mixed-0",
    ]
    assert instances[1].wanted_ports() == {"http": 8101, "peer": 9201}
    assert instances[2].wanted_ports() == {"http": None, "peer": None}
    assert instances[3].wanted_ports() == {"http": None}


@pytest.mark.parametrize(
    ("hosts", "host", "bind", "listens", "found_at"),
    [
        ("{a: {}}", "a", None, "127.0.0.1", "127.0.0.1"),
        ("{a: {address: local}}", "a", None, "127.0.0.1", "127.0.0.1"),
        ("{a: {}}", "a", "0.0.0.0", "0.0.0.0", "127.0.0.1"),
        ("{a: {}}", "a", "::", "::", "::1"),
        ("{a: {advertise: 10.0.0.5}}", "a", "0.0.0.0", "0.0.0.0", "10.0.0.5"),
        ("{a: {bind: 10.0.0.5}}", "a", None, "10.0.0.5", "10.0.0.5"),
        ("{a: {address: 10.0.0.5}}", "a", None, "10.0.0.5", "10.0.0.5"),
        ("{a: {address: gpu-a, bind: 0.0.0.0}}", "a", None, "0.0.0.0", "gpu-a"),
        ("{a: {address: gpu-a, advertise: 10.0.0.5}}", "a", None, "10.0.0.5", "10.0.0.5"),
    ],
)
def test_services_bind_no_wider_than_asked(
    tmp_path: Path, hosts: str, host: str, bind: str | None, listens: str, found_at: str
) -> None:
    topology = loaded(tmp_path, PAIR.replace("{a: {}}", hosts)).topology
    assert listen_address(topology, host, bind) == listens
    assert contact_address(topology, host, bind) == found_at


def test_a_public_endpoint_without_keys_is_pointed_out(tmp_path: Path) -> None:
    text = PAIR + "router:\n  bind: 0.0.0.0\n"
    (warning,) = loaded(tmp_path, text).warnings
    assert warning.startswith(f"{tmp_path / 't.yaml'}:7: router.bind: listens on 0.0.0.0")
    assert "router.api_keys" in warning
    assert loaded(tmp_path, text + "  api_keys: KEYS\n").warnings == ()
    assert loaded(tmp_path, PAIR).warnings == ()


def test_merge_keys_and_anchors_work(tmp_path: Path) -> None:
    text = (
        "name: t\nmodel: m\nhosts: {a: {}}\n"
        "prefill:\n  - &common\n    threads: 3\n    kv_cache: 1GiB\n"
        "decode:\n  - <<: *common\n    threads: 5\n"
    )
    topology = loaded(tmp_path, text).topology
    assert (topology.decode[0].threads, topology.decode[0].kv_cache) == (5, 1 << 30)


def test_a_model_path_counts_from_the_file_and_remote_ones_are_not_looked_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "x.gguf").touch()
    assert loaded(tmp_path, PAIR.replace("model: m", "model: x.gguf")).topology.model == "x.gguf"
    remote = PAIR.replace("model: m", "model: /only/there").replace("{a: {}}", "{a: {address: g}}")
    assert loaded(tmp_path, remote).topology.model == "/only/there"


def test_environment_numbers_are_text(tmp_path: Path) -> None:
    text = PAIR.replace("decode: [{}]", 'decode: [{env: {A: 5, B: "true"}}]')
    assert loaded(tmp_path, text).topology.decode[0].env == {"A": "5", "B": "true"}


# ---- the example files ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(TOPOLOGIES.glob("*.yaml")), ids=lambda p: p.name)
def test_every_example_is_valid_and_named_after_its_file(path: Path) -> None:
    result = load(path)
    assert result.topology.name == path.stem
    assert result.warnings == ()


def test_the_quickstart_is_one_pair_on_this_machine() -> None:
    topology = load(TOPOLOGIES / "quickstart.yaml").topology
    assert topology.model == "smollm2-135m" and topology.router.port == 8000
    assert [i.name for i in topology.instances()] == ["prefill-0", "decode-0"]
    assert all(host.local for host in topology.hosts.values())
    assert topology.decode[0].cpu_buffer == 384 << 20


@pytest.mark.parametrize(
    ("section", "schema"),
    [
        ("", Topology),
        ("hosts", Host),
        ("router", Router),
        ("prefill", PrefillGroup),
        ("decode", DecodeGroup),
        ("mixed", MixedGroup),
    ],
)
def test_the_reference_has_exactly_the_keys_of_the_schema(
    section: str, schema: type[Topology]
) -> None:
    topology = load(REFERENCE).topology
    if section == "":
        keys = topology.model_fields_set
    elif section == "hosts":
        keys = set().union(*(host.model_fields_set for host in topology.hosts.values()))
    elif section == "router":
        keys = topology.router.model_fields_set
    else:
        keys = getattr(topology, section)[0].model_fields_set
    assert keys == set(schema.model_fields)


def test_every_key_of_the_reference_is_explained_where_it_is_first_used() -> None:
    explained: set[str] = set()
    above = ""
    for line in REFERENCE.read_text().splitlines():
        match = re.match(r"\s*(?:- )?([a-z_]+):", line)
        if match and match.group(1) not in explained:
            assert "#" in line or above.lstrip().startswith("#"), line
            explained.add(match.group(1))
        above = line


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (Router, {"port": "8000", "policy": "least_loaded", "retries": "1"}),
        (
            PrefillGroup,
            {
                "replicas": "1",
                "kv_cache": "512MiB",
                "block_size": "16",
                "max_num_batched_tokens": "512",
                "max_num_seqs": "64",
                "prefix_cache": "true",
            },
        ),
        (DecodeGroup, {"cpu_buffer": "256MiB", "transfer": "auto"}),
        (
            Topology,
            {"startup_timeout": "300", "request_timeout": "600", "drain_timeout": "30"},
        ),
    ],
)
def test_defaults_the_reference_states_are_the_real_ones(
    schema: type[Topology], values: dict[str, str]
) -> None:
    text = REFERENCE.read_text()
    for key, shown in values.items():
        stated = re.search(rf"^\s*{key}: .*Default:? (\S+)\.(\s|$)", text, re.MULTILINE)
        assert stated or key in ("replicas", "transfer"), key
        if stated:
            assert stated.group(1) == shown
        default = schema.model_fields[key].default
        plain = f"{default >> 20}MiB" if shown.endswith("MiB") else str(default).lower()
        assert plain.removesuffix(".0") == shown


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        ("{host: a, devices: 0}", "{host: a, devices: 1, transfer: cuda_ipc}", ""),
        ("{host: b, devices: 0}", "{host: a, devices: 1, transfer: cuda_ipc}", "the same host"),
        ("{host: a}", "{host: a, devices: 1, transfer: cuda_ipc}", "is between GPUs"),
        ("{host: a, devices: 0}", "{host: a, transfer: cuda_ipc}", "is between GPUs"),
    ],
)
def test_cuda_ipc_is_between_gpus_of_one_host(
    tmp_path: Path, prefill: str, decode: str, why: str
) -> None:
    hosts = "hosts: {a: {address: 10.0.0.1}, b: {address: 10.0.0.2}}\nrouter: {host: a}\n"
    text = f"name: t\nmodel: m\n{hosts}prefill: [{prefill}]\ndecode: [{decode}]\n"
    if not why:
        assert loaded(tmp_path, text).topology.decode[0].transfer == "cuda_ipc"
        return
    with pytest.raises(TopologyError, match=why):
        loaded(tmp_path, text)


def test_the_readme_shows_the_quickstart(tmp_path: Path) -> None:
    text = (TOPOLOGIES.parent / "README.md").read_text()
    (tmp_path / "t.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    shown, real = (load(p).topology for p in (tmp_path / "t.yaml", TOPOLOGIES / "quickstart.yaml"))
    without = {"decode": {0: {"threads"}}}
    assert shown.model_dump(exclude=without) == real.model_dump(exclude=without)


def test_the_torch_of_the_documentation_is_that_of_the_makefile() -> None:
    makefile = (TOPOLOGIES.parent / "Makefile").read_text()
    (pinned,) = re.findall(r"^TORCH \?= (torch==\S+)", makefile, re.M)
    named = re.findall(r"torch==[0-9.]+[0-9]", (TOPOLOGIES.parent / "docs/hosts.md").read_text())
    assert len(named) == 2 and set(named) == {pinned}
