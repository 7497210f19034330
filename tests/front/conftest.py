"""A byte-level tokenizer small enough to reason about, and the real HTTP app over a scripted
core."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime.config import Address, ModelConfig, PeerConfig, WorkerConfig
from runtime.front.auth import Gate
from runtime.front.core_client import CoreClient
from runtime.front.instance import Instance, own_leg
from runtime.front.metrics import Metrics
from runtime.front.server import build_app
from runtime.front.tokenizer import load_tokenizer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOKEN = b"deployment-token"
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def alphabet() -> list[str]:
    """GPT-2's printable character for each byte."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: byte b is token b, then <s> 256, </s> 257, and a plain added token
    258."""
    folder = tmp_path_factory.mktemp("byte-model")
    vocab = {char: byte for byte, char in enumerate(alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_bytes(TOKEN)
    return path


def worker_config(model: Path, token_file: Path, **changes: Any) -> WorkerConfig:
    defaults: dict[str, Any] = {
        "deployment": "test",
        "name": "decode-0",
        "role": "decode",
        "token_file": str(token_file),
        "listen": Address("127.0.0.1", 0),
        "advertise": "127.0.0.1",
        "model": ModelConfig(str(model), "tiny"),
        "kv_cache_bytes": 1 << 20,
        "cpu_buffer_bytes": 1 << 20,
        "prefill_peers": [PeerConfig("prefill-0", Address("127.0.0.1", 1))],
        "shm_prefix": "pdctl.test.decode-0",
        "request_timeout_s": 20.0,
    }
    return WorkerConfig(**(defaults | changes))


class RunningFront:
    """The app on a loopback port, on a loop in a thread of its own, over a fake core process."""

    def __init__(
        self,
        config: WorkerConfig,
        keys: tuple[bytes, ...] = (),
        core_options: Sequence[str] = (),
        wait: bool = True,
    ) -> None:
        self.config = config
        self._core_options = core_options
        self._wait = wait
        self.url = ""
        self._gate = Gate(TOKEN, keys, config.request_timeout_s)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._started.wait(20), "the front did not start"

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        config = self.config
        core = CoreClient(self._argv, own_leg=own_leg(config), instance=config.name)
        tokenizer = load_tokenizer(Path(config.model.path))
        self.instance = Instance(config, tokenizer, core, Metrics())
        os.environ["PYTHONPATH"] = str(ROOT)
        await core.start()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        runner = web.AppRunner(
            build_app(self.instance, self._gate), handler_cancellation=True, shutdown_timeout=1.0
        )
        await runner.setup()
        await web.SockSite(runner, listener).start()
        async with asyncio.timeout(20):
            while self._wait and self.instance.waiting_for() is not None:
                await asyncio.sleep(0.01)
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()
        await core.stop(2.0)

    def _argv(self, fd: int) -> list[str]:
        script = str(HERE / "fake_core.py")
        return [sys.executable, script, str(fd), self.config.name, *self._core_options]

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
            document: dict[str, Any] = json.load(answer)
        return document

    def counters(self) -> dict[str, float]:
        counters: dict[str, float] = self.get("/ledger")["counters"]
        return counters

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)


@pytest.fixture(scope="module")
def front(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    """One decode instance for a module's tests."""
    config = worker_config(byte_model, tmp_path_factory.mktemp("state") / "token")
    running = RunningFront(config)
    yield running
    running.stop()


@pytest.fixture
def start_front(byte_model: Path, token_file: Path) -> Iterator[Callable[..., RunningFront]]:
    """Starts fronts with changed configurations; all are stopped at the end."""
    fronts: list[RunningFront] = []

    def start(
        keys: tuple[bytes, ...] = (),
        core_options: Sequence[str] = (),
        wait: bool = True,
        folder: Path = byte_model,
        **changes: Any,
    ) -> RunningFront:
        config = worker_config(folder, token_file, **changes)
        fronts.append(RunningFront(config, keys, core_options, wait))
        return fronts[-1]

    yield start
    for front in fronts:
        front.stop()
