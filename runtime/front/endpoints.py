"""The small routes: models, tokenize, detokenize, health, readiness, ledger, metrics.

Owns their JSON. Health routes ask for no key and carry no secret.
"""

from __future__ import annotations

import os

import msgspec
from aiohttp import web

from runtime.answers import json_response
from runtime.errors import LegError, RequestError
from runtime.front.admission import understand
from runtime.front.auth import Gate
from runtime.front.instance import STATS_TIMEOUT_S, Instance
from runtime.front.openai_types import DetokenizeBody, TokenizeBody, parse_body
from runtime.protocol import Measure, PeerState, Stats

MEASURE_TIMEOUT_S = 60.0
"""The core has a shorter deadline of its own."""


class Endpoints:
    def __init__(self, instance: Instance, gate: Gate, created: int) -> None:
        self._instance = instance
        self._gate = gate
        self._created = created

    async def models(self, http: web.Request) -> web.Response:
        self._gate.admit(http)
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, http: web.Request) -> web.Response:
        self._gate.admit(http)
        self._instance.require_model(http.match_info["name"])
        return json_response(self._model())

    def _model(self) -> dict[str, object]:
        ready = self._instance.core.ready
        return {
            "id": self._instance.config.model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "pdctl",
            "max_model_len": ready.max_model_len if ready else None,
            "vocab_size": self._vocab_size(),
        }

    def _vocab_size(self) -> int:
        ready = self._instance.core.ready
        return ready.vocab_size if ready else self._instance.tokenizer.vocab_size

    async def tokenize(self, http: web.Request) -> web.Response:
        with self._instance.under_way(self._gate.admit(http).request_id):
            return await understand(http, self._tokenize)

    def _tokenize(self, raw: bytes) -> web.Response:
        body = parse_body(raw, TokenizeBody)
        self._instance.require_model(body.model)
        tokenizer = self._instance.tokenizer
        if body.messages is not None:
            tokens = tokenizer.encode_chat(body.messages)
        else:
            tokens = tokenizer.encode(body.prompt or "", special=body.add_special_tokens)
        ready = self._instance.core.ready
        return json_response(
            {
                "tokens": tokens,
                "count": len(tokens),
                "max_model_len": ready.max_model_len if ready else None,
            }
        )

    async def detokenize(self, http: web.Request) -> web.Response:
        with self._instance.under_way(self._gate.admit(http).request_id):
            return await understand(http, self._detokenize)

    def _detokenize(self, raw: bytes) -> web.Response:
        body = parse_body(raw, DetokenizeBody)
        self._instance.require_model(body.model)
        vocab, largest = self._vocab_size(), max(body.tokens, default=0)
        if largest >= vocab:
            raise RequestError(f"token id {largest} is not in 0..{vocab - 1}", param="tokens")
        text = self._instance.tokenizer.decode(body.tokens, skip_special=False)
        return json_response({"prompt": text})

    async def health(self, _: web.Request) -> web.Response:
        """200 while the process and its core live, loading included."""
        alive = self._instance.core.alive
        return json_response({"alive": alive}, status=200 if alive else 503)

    async def ready(self, _: web.Request) -> web.Response:
        instance, core = self._instance, self._instance.core
        waiting_for = instance.waiting_for()
        body = {
            "ready": waiting_for is None,
            "waiting_for": waiting_for,
            "name": instance.config.name,
            "role": instance.config.role,
            "pid": os.getpid(),
            "incarnation": core.ready.incarnation if core.ready else None,
            "peers": {n: {"path": p.path, "reason": p.reason} for n, p in core.peers.items()},
            "load_s": core.ready.load_s if core.ready else None,
            "self_test_s": core.ready.self_test_s if core.ready else None,
        }
        return json_response(body, status=200 if waiting_for is None else 503)

    async def ledger(self, _: web.Request) -> web.Response:
        """What the instance holds for requests; `idle` is the proof that nothing leaked."""
        stats = await self._instance.core.stats(STATS_TIMEOUT_S)
        ready = self._instance.core.ready
        active = len(self._instance.active)
        return json_response(
            {
                "name": self._instance.config.name,
                "role": self._instance.config.role,
                "tp_size": self._instance.config.tp_size,
                "incarnation": ready.incarnation if ready else None,
                "idle": stats.ledger.idle() and not active,
                "front_requests": active,
                "ledger": msgspec.to_builtins(stats.ledger),
                "totals": {
                    "device_blocks_total": stats.device_blocks_total,
                    "device_blocks_cached": stats.device_blocks_cached,
                    "buffer_blocks_total": stats.buffer_blocks_total,
                },
                "counters": stats.counters,
                "peers": {name: _peer(peer) for name, peer in stats.peers.items()},
            }
        )

    async def measure(self, http: web.Request) -> web.Response:
        """Moves blocks once from a prefill peer, or beside it by memcpy or a plain socket loop."""
        self._gate.vouch(http)
        try:
            ask = msgspec.json.decode(await http.read(), type=Measure)
        except msgspec.MsgspecError as e:
            raise RequestError(f"measure: {e}") from e
        found = await self._instance.core.measure(ask, MEASURE_TIMEOUT_S)
        if found.error:
            error = {"message": found.error, "type": "measure_error", "param": None}
            return json_response({"error": error}, status=found.status)
        return json_response({"path": found.path, "nbytes": found.nbytes, "seconds": found.seconds})

    async def metrics(self, _: web.Request) -> web.Response:
        instance = self._instance
        started = sum(instance.active.values())
        body = instance.metrics.render(
            await self._stats_or_none(), running=started, waiting=len(instance.active) - started
        )
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _stats_or_none(self) -> Stats | None:
        try:
            return await self._instance.core.stats(STATS_TIMEOUT_S)
        except LegError:
            return None  # the front's own metrics are still worth reading


def _peer(peer: PeerState) -> dict[str, object]:
    return {
        "path": peer.path,
        "incarnation": peer.incarnation,
        "reason": peer.reason,
        "requests": peer.requests,
    }
