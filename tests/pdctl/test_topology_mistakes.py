"""Bad topologies: every mistake at once, each with file, line, field, what is wrong and right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.errors import TopologyError
from pdctl.topology import load

HEAD = "name: t\nmodel: m\nhosts: {a: {}}\n"
PAIR = HEAD + "prefill: [{}]\ndecode: [{}]\n"
TWO = "name: t\nmodel: m\nhosts:\n  a: {address: 10.0.0.1}\n  b: {address: 10.0.0.2}\n"


def mistakes(tmp_path: Path, text: str | bytes) -> list[str]:
    """The problems' lines, without the file's name."""
    path = tmp_path / "t.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(TopologyError) as caught:
        load(path)
    assert caught.value.exit_code == 2
    lines = str(caught.value).splitlines()
    assert len(lines) == len(caught.value.problems)
    assert all(line.startswith(f"{path}:") for line in lines)
    return [line.removeprefix(f"{path}:").strip() for line in lines]


CASES = {
    "a typo in a top-level key suggests it, and what follows from it is not reported": (
        HEAD + "prefill: [{}]\ndecod: [{}]\n",
        ["5: decod: unknown key; did you mean 'decode'?"],
    ),
    "a typo in a required key is one mistake": (
        PAIR.replace("name:", "nmae:"),
        ["1: nmae: unknown key; did you mean 'name'?"],
    ),
    "a typo in a nested key": (
        HEAD + "prefill: [{}]\ndecode:\n  - cpu_bufer: 1GiB\n",
        ["6: decode[0].cpu_bufer: unknown key; did you mean 'cpu_buffer'?"],
    ),
    "a hyphen for an underscore": (
        HEAD + "prefill: [{}]\ndecode:\n  - cpu-buffer: 1GiB\n",
        ["6: decode[0].cpu-buffer: unknown key; did you mean 'cpu_buffer'?"],
    ),
    "a key that is far from all lists the known ones": (
        PAIR + "router:\n  zzz: 1\n",
        ["7: router.zzz: unknown key; known keys: host, port, bind, policy, api_keys, retries"],
    ),
    "another role's key": (
        HEAD + "decode: [{}]\nprefill:\n  - cpu_buffer: 1GiB\n",
        ["6: prefill[0].cpu_buffer: unknown key; only decode takes it"],
    ),
    "text for a number": (
        PAIR + "router:\n  port: http\n",
        ["7: router.port: must be a whole number, not 'http'; write digits only"],
    ),
    "a quoted number": (
        PAIR + "router:\n  port: '8000'\n",
        ["7: router.port: must be a whole number, not '8000'; remove the quotes"],
    ),
    "true for a number": (
        PAIR + "router: {port: true}\n",
        ["6: router.port: must be a whole number, not true"],
    ),
    "a number for a text": (
        PAIR.replace("name: t", "name: 5"),
        ["1: name: must be text, not 5; put it in quotes"],
    ),
    "a mapping for a list": (
        HEAD + "prefill:\n  threads: 2\ndecode: [{}]\n",
        [
            "4: prefill: must be a list, each item starting with `- `, not a mapping; "
            "put `- ` before its first key"
        ],
    ),
    "nothing for a list": (
        HEAD + "prefill:\ndecode: [{}]\n",
        ["4: prefill: must be a list, each item starting with `- `, not nothing"],
    ),
    "a number for a group": (
        HEAD + "prefill: [5]\ndecode: [{}]\n",
        ["4: prefill[0]: must be a mapping of keys to values, not 5"],
    ),
    "a yes for a true is text in quotes": (
        HEAD + "prefill: [{prefix_cache: 'yes'}]\ndecode: [{}]\n",
        ["4: prefill[0].prefix_cache: must be true or false, not 'yes'"],
    ),
    "a duplicate key": (
        PAIR + "router:\n  port: 1\n  retries: 1\n  port: 2\n",
        ["9: router.port: the key is there twice, first on line 7; keep one of them"],
    ),
    "a duplicate key at the top": (
        PAIR + "name: u\n",
        ["6: name: the key is there twice, first on line 1; keep one of them"],
    ),
    "an unknown host suggests one": (
        "name: t\nmodel: m\nhosts: {gpu-a: {}}\nmixed:\n  - host: gpu-b\n",
        ["5: mixed[0].host: there is no host 'gpu-b'; did you mean 'gpu-a'?"],
    ),
    "an unknown host far from all": (
        "name: t\nmodel: m\nhosts: {gpu-a: {}}\nmixed:\n  - host: zzz\n",
        ["5: mixed[0].host: there is no host 'zzz'; known hosts: gpu-a"],
    ),
    "no host where several could be meant": (
        TWO + "mixed:\n  - host: a\nrouter:\n  port: 80\n",
        ["8: router: host is missing; say which of a, b runs it"],
    ),
    "no instances": (HEAD, ["1: has no instances; add prefill and decode, or mixed"]),
    "empty lists": (
        HEAD + "prefill: []\ndecode: []\n",
        ["1: has no instances; add prefill and decode, or mixed"],
    ),
    "prefill alone": (
        HEAD + "prefill: [{}]\n",
        ["4: prefill: has no decode to hand over to; add decode, or use mixed"],
    ),
    "decode alone": (
        HEAD + "decode: [{}]\n",
        ["4: decode: has no prefill to receive from; add prefill, or use mixed"],
    ),
    "no hosts": (
        PAIR.replace("{a: {}}", "{}"),
        ["3: hosts: is empty; add `hosts: {local: {}}` for this machine"],
    ),
    "nothing but a key": (
        "mixed: [{}]\n",
        [
            "1: hosts: is missing; add `hosts: {local: {}}` for this machine",
            "1: model: is missing; add `model: smollm2-135m`, a path, or a Hugging Face id",
            "1: name: is missing; add `name: my-deployment`",
        ],
    ),
    "two services on one port": (
        HEAD + "router: {port: 8100}\nprefill: [{}]\ndecode:\n  - port: 8100\n",
        [
            "7: decode[0].port: port 8100 is wanted for decode-0 and for router on host a; "
            "choose another, or leave it out"
        ],
    ),
    "replicas counted into another's port": (
        HEAD + "prefill:\n  - replicas: 3\n    port: 8100\ndecode:\n  - port: 8102\n",
        [
            "8: decode[0].port: port 8102 is wanted for decode-0 and for prefill-2 on host a; "
            "choose another, or leave it out"
        ],
    ),
    "a peer port equal to the port": (
        HEAD + "decode: [{}]\nprefill:\n  - port: 8100\n    peer_port: 8100\n",
        [
            "7: prefill[0].peer_port: port 8100 is wanted for prefill-0's peers and for "
            "prefill-0 on host a; choose another, or leave it out"
        ],
    ),
    "replicas beyond the last port": (
        HEAD + "mixed:\n  - replicas: 2\n    port: 65535\n",
        ["6: mixed[0].port: reaches 65536 for mixed-1; start lower"],
    ),
    "a port out of range": (
        PAIR + "router: {port: 70000}\n",
        ["6: router.port: must be at most 65535, not 70000"],
    ),
    "no replicas": (
        HEAD + "mixed:\n  - replicas: 0\n",
        ["5: mixed[0].replicas: must be at least 1, not 0"],
    ),
    "GPUs for tensor parallelism": (
        HEAD + "mixed:\n  - tp_size: 2\n    replicas: 2\n    devices: [0, 1]\n",
        [
            "7: mixed[0].devices: names 2 GPUs for 2 replicas of tp_size 2; "
            "give 2 GPU numbers for each replica"
        ],
    ),
    "tensor parallelism of prefill on GPUs": (
        HEAD + "prefill:\n  - tp_size: 2\n    devices: [0, 1]\ndecode: [{devices: 2}]\n",
        [
            "5: prefill[0].tp_size: 2 GPUs for one instance work for mixed ones only; "
            "use 1, and more replicas for more throughput"
        ],
    ),
    "more GPUs than replicas": (
        HEAD + "mixed:\n  - devices: [0, 1]\n",
        ["5: mixed[0].devices: names 2 GPUs for 1 replicas; give one GPU number for each replica"],
    ),
    "a device that is none": (
        HEAD + "mixed:\n  - devices: gpu\n",
        ["5: mixed[0].devices: must be cpu or GPU numbers; write `cpu`, `0` or `[0, 1]`"],
    ),
    "a CPU and a GPU without a dtype": (
        HEAD + "prefill: [{}]\ndecode: [{devices: 0}]\n",
        [
            "5: decode[0].devices: a GPU would use bfloat16 and a CPU float32, and prefill[0] "
            "has the other kind; set dtype to float32 or bfloat16 for all"
        ],
    ),
    "an ambiguous size": (
        HEAD + "prefill: [{}]\ndecode:\n  - cpu_buffer: 512M\n",
        [
            "6: decode[0].cpu_buffer: '512M' has an unknown unit 'M'; "
            "write 512MiB (1024) or 512MB (1000)"
        ],
    ),
    "a size that is none": (
        HEAD + "mixed:\n  - kv_cache: lots\n",
        ["5: mixed[0].kv_cache: 'lots' is not a size; write it like 512MiB, 2GB or 65536"],
    ),
    "no memory": (
        HEAD + "mixed:\n  - kv_cache: 0\n",
        ["5: mixed[0].kv_cache: '0' is no memory at all; write a size like 512MiB"],
    ),
    "a transfer that is none": (
        HEAD + "prefill: [{}]\ndecode:\n  - transfer: pigeon\n",
        ["6: decode[0].transfer: must be auto, cuda_ipc, shm, rdma or tcp, not 'pigeon'"],
    ),
    "RDMA devices for other replicas": (
        HEAD + "prefill: [{}]\ndecode:\n  - {replicas: 3, rdma: {device: [mlx5_0, mlx5_1]}}\n",
        [
            "6: decode[0].rdma.device: names 2 RDMA devices for 3 replicas; "
            "give one device, or one for each replica"
        ],
    ),
    "unequal block sizes": (
        HEAD + "prefill: [{}]\ndecode:\n  - block_size: 32\n",
        [
            "6: decode[0].block_size: 32 differs from 16 in prefill[0]; "
            "prefill and decode need the same one"
        ],
    ),
    "shm across hosts": (
        TWO + "router: {host: a}\nprefill: [{host: a}]\ndecode:\n  - host: b\n    transfer: shm\n",
        [
            "10: decode[0].transfer: shm needs prefill on the same host, but there is some on a; "
            "use auto or tcp"
        ],
    ),
    "a loopback address among several hosts": (
        TWO.replace("10.0.0.2", "127.0.0.1")
        + "router: {host: a}\nprefill: [{host: a}]\ndecode: [{host: b}]\n",
        [
            "5: hosts.b.address: 127.0.0.1 does not lead here from the other hosts; "
            "give an address in their network"
        ],
    ),
    "docker's own address among several hosts": (
        TWO.replace("10.0.0.2}", "10.0.0.2, advertise: 172.17.0.1}")
        + "router: {host: a}\nprefill: [{host: a}]\ndecode: [{host: b}]\n",
        [
            "5: hosts.b.advertise: 172.17.0.1 does not lead here from the other hosts; "
            "leave it out: 10.0.0.2 is used then"
        ],
    ),
    "this machine among several hosts": (
        TWO.replace("{address: 10.0.0.1}", "{}")
        + "router: {host: a}\nprefill: [{host: a}]\ndecode: [{host: b}]\n",
        [
            "4: hosts.a: has no address that the other hosts could reach; "
            "add `advertise:` with an address of this machine in their network"
        ],
    ),
    "a router that the other hosts cannot reach": (
        TWO + "router: {host: a, bind: 127.0.0.1}\nprefill: [{host: a}]\ndecode: [{host: b}]\n",
        [
            "6: router.bind: 127.0.0.1 cannot be reached by instances on other hosts; "
            "leave it out, or give an address of that host"
        ],
    ),
    "one machine under two names": (
        HEAD.replace("{a: {}}", "{a: {}, b: {}}") + "router: {host: a}\nmixed: [{host: a}]\n",
        [
            "3: hosts.b: is this machine, and so is a; "
            "keep one of them, or give the other its address"
        ],
    ),
    "an address with a port": (
        PAIR.replace("{a: {}}", "{a: {address: 'gpu-a:22'}}"),
        [
            "3: hosts.a.address: 'gpu-a:22' is not an address; "
            "write an IP address or a host name, without a port"
        ],
    ),
    "a name that is none": (
        PAIR.replace("name: t", "name: My Deployment"),
        [
            "1: name: 'My Deployment' is not a name; use up to 40 of a-z, 0-9 and -, "
            "with a letter or digit at both ends"
        ],
    ),
    "a host that is a path": (
        PAIR.replace("{a: {}}", "{../a: {}}"),
        ["3: hosts.../a: '../a' is not a host name; use letters, digits, `.`, `_` and `-`"],
    ),
    "a variable that is boolean": (
        HEAD + "mixed:\n  - env: {A: true}\n",
        ['5: mixed[0].env.A: must be text; put it in quotes, like "true"'],
    ),
    "a variable in env and secrets": (
        HEAD + "mixed:\n  - env: {A: x}\n    secrets: [A]\n",
        ["5: mixed[0].env.A: A is in secrets too; keep the one in secrets"],
    ),
    "an endless timeout": (
        PAIR + "startup_timeout: .inf\n",
        ["6: startup_timeout: must be a number of seconds, not inf"],
    ),
    "a model that is not there": (
        PAIR.replace("model: m", "model: ./no.gguf"),
        [
            "2: model: {tmp}/no.gguf does not exist; give a .gguf file or a model folder; "
            "relative paths count from the topology file"
        ],
    ),
    "an empty file": ("", ["is empty; write a topology; `pdctl init` gives one to start from"]),
    "only comments": (
        "# x\n",
        ["is empty; write a topology; `pdctl init` gives one to start from"],
    ),
    "a list": ("- a\n", ["is not a mapping of keys to values; start with `name: ...`"]),
    "a text": ("hello\n", ["is not a mapping of keys to values; start with `name: ...`"]),
    "a tab": (
        "name: t\nhosts:\n\ta: {}\n",
        ["3: not valid YAML: a tab character; indent with spaces"],
    ),
    "a bracket left open": (
        "name: t\nhosts: {a: {}\nmodel: m\n",
        [
            "3: not valid YAML: expected ',' or '}', but got '<scalar>'; "
            "check the indentation and quotes near this line"
        ],
    ),
    "a bad indentation": (
        "name: t\n model: m\n",
        [
            "2: not valid YAML: mapping values are not allowed here; "
            "check the indentation, or quote a value holding `: `"
        ],
    ),
    "two documents": (
        PAIR + "---\n" + PAIR,
        ["6: holds more than one document; one topology per file: remove the `---`"],
    ),
    "a tag": (
        PAIR.replace("name: t", "name: !!python/name:os.system t"),
        [
            "1: name: cannot be read as tag:yaml.org,2002:python/name:os.system; "
            "remove the tag or quote it",
        ],
    ),
    "a self-reference": (
        HEAD + "prefill: &a [*a]\ndecode: [{}]\n",
        [
            "4: prefill[0]: refers to itself; remove the alias",
        ],
    ),
    "a key that is a number": (
        PAIR.replace("{a: {}}", "{a: {}, 1: {}}"),
        ["3: hosts: the key 1 is not text; put it in quotes"],
    ),
    "not UTF-8": (
        b"name: t\nmodel: caf\xe9\n",
        ["2: is not UTF-8 text; save the file as UTF-8"],
    ),
    "a control character": (
        "name: t\nmodel: a\x07b\n",
        ["2: holds a character that YAML does not allow: '\\x07'"],
    ),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mistake_is_one_clear_line(tmp_path: Path, case: str) -> None:
    text, expected = CASES[case]
    assert mistakes(tmp_path, text) == [e.replace("{tmp}", str(tmp_path)) for e in expected]


def test_everything_is_reported_at_once_in_file_order(tmp_path: Path) -> None:
    text = """\
name: T
model: m
hosts: {a: {adress: x}}
router:
  port: 99999
prefill:
  - host: b
    tp_size: 0
  - 7
decode:
  - kv_cache: 1XB
    port: 8100
  - port: 8100
"""
    fields = [line.split(": ")[1] for line in mistakes(tmp_path, text)]
    assert fields == [
        "name",
        "hosts.a.adress",
        "router.port",
        "prefill[0].host",
        "prefill[0].tp_size",
        "prefill[1]",
        "decode[0].kv_cache",
        "decode[1].port",
    ]


@pytest.mark.parametrize(
    "text",
    [
        PAIR + "router: {api_keys: sk-hunter2}\n",
        PAIR + "router: {api_keys: [sk-hunter2]}\n",
        HEAD + "mixed: [{secrets: [sk-hunter2]}]\n",
        HEAD + "mixed: [{secrets: sk-hunter2}]\n",
        HEAD + "mixed: [{secrets: {TOKEN: sk-hunter2}}]\n",
        HEAD + "mixed: [{env: sk-hunter2}]\n",
        HEAD + "mixed: [{env: {TOKEN: [sk-hunter2]}}]\n",
    ],
)
def test_a_secret_written_where_its_name_belongs_is_not_repeated(tmp_path: Path, text: str) -> None:
    (line,) = mistakes(tmp_path, text)
    assert "hunter2" not in line


def test_aliases_that_multiply_are_refused_quickly(tmp_path: Path) -> None:
    text = PAIR + "x0: &x0 [a, a, a, a, a, a, a, a, a, a]\n"
    for i in range(12):
        text += f"x{i + 1}: &x{i + 1} [{', '.join([f'*x{i}'] * 10)}]\n"
    assert any("is too large to be a topology" in line for line in mistakes(tmp_path, text))


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    (line,) = mistakes(tmp_path, "[" * 5000)
    assert "nested too deeply" in line or "not valid YAML" in line


def test_a_directory_a_missing_and_an_unreadable_file(tmp_path: Path) -> None:
    for path, words in [
        (tmp_path, "is a directory; give the path of a YAML file"),
        (tmp_path / "no.yaml", "does not exist; `pdctl init` writes one to start from"),
        (tmp_path / "t.yaml" / "x", "cannot be read: Not a directory"),
    ]:
        (tmp_path / "t.yaml").touch()
        with pytest.raises(TopologyError) as caught:
            load(path)
        assert str(caught.value) == f"{path}: {words}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(PAIR)
    path.chmod(0)
    with pytest.raises(TopologyError, match="cannot be read: Permission denied"):
        load(path)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    assert mistakes(tmp_path, "#" * (2 << 20)) == ["is larger than 1 MiB; give a topology file"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["host", "port", "env", "replicas", "devices", "cpu_buffer", "secrets"])
            | st.text(max_size=4),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
KEYS = st.sampled_from(["name", "model", "hosts", "router", "prefill", "decode", "mixed", "dtype"])


@settings(max_examples=300, deadline=None)
@given(document=st.dictionaries(KEYS, VALUES))
def test_no_document_gets_past_the_error_tree(
    document: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    import yaml

    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(document, allow_unicode=True))
    try:
        load(path)
    except TopologyError as e:
        assert e.problems


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=80))
def test_no_text_gets_past_the_error_tree(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(TopologyError):
        load(path)
