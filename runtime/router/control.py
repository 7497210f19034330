"""The router's own endpoints: registration, state for `pdctl status`, health, models, metrics.

Everything below /internal asks for the deployment's token.
"""

from __future__ import annotations

import logging
import os
import time

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from yarl import URL

from runtime.answers import error_object, error_response, json_response
from runtime.errors import NoPairError, RequestError, RuntimeFailure
from runtime.router.admit import KeyRing, check_key, unknown_model
from runtime.router.instances import Instance
from runtime.router.metrics import RouterMetrics
from runtime.router.probe import Prober
from runtime.router.registry import RegistrationRefused, Registry, check_version
from runtime.router_protocol import Drain, Registration, RegistrationReply

log = logging.getLogger(__name__)

HEARTBEATS_PER_TIMEOUT = 3
STARTING_HEARTBEAT_S = 0.25
"""Of an instance that is not ready: a decode instance waits for the peers that the reply names."""


class _Head(msgspec.Struct):
    """What every version of Registration has."""

    name: str
    version: int


_head_decoder = msgspec.json.Decoder(_Head)
_decoder = msgspec.json.Decoder(Registration)
_drain_decoder = msgspec.json.Decoder(Drain)


class Control:
    """Handlers of everything but the OpenAI endpoints that reach an instance."""

    def __init__(
        self,
        keys: KeyRing,
        registry: Registry,
        prober: Prober,
        metrics: RouterMetrics,
        heartbeat_timeout_s: float,
    ) -> None:
        self._keys = keys
        self._registry = registry
        self._prober = prober
        self._metrics = metrics
        self._heartbeat_s = heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
        self._created = int(time.time())

    async def register(self, request: web.Request) -> web.Response:
        try:
            self._check_token(request)
            instance = self._registry.register(_read_registration(await request.read()))
        except RegistrationRefused as e:
            error = error_object(e) | {"code": "registration_refused", "hint": e.hint}
            return json_response({"error": error}, status=409)
        except RuntimeFailure as e:
            return error_response(e)
        self._prober.watch(instance)
        info = instance.info
        return json_response(
            RegistrationReply(
                heartbeat_s=self._heartbeat_s if info.ready else STARTING_HEARTBEAT_S,
                draining=instance.draining,
                peers=self._registry.peers(info.model) if info.role == "decode" else {},
            )
        )

    async def drain(self, request: web.Request) -> web.Response:
        """Give an instance nothing new; answers with what it still has under way."""
        try:
            self._check_token(request)
            wanted = _read_drain(await request.read())
            instance = self._registry.drain(wanted.name, wanted.draining)
        except RuntimeFailure as e:
            return error_response(e)
        except KeyError as e:
            message = f"no instance {e.args[0]} is registered"
            return error_response(RequestError(message, status=404, code="unknown_instance"))
        log.info("%s %s", instance.name, "drains" if wanted.draining else "serves again")
        return json_response(self._describe(instance))

    async def instances(self, request: web.Request) -> web.Response:
        try:
            self._check_token(request)
        except RequestError as e:
            return error_response(e)
        pairs, mixed = self._capacity()
        return json_response(
            {
                "schema": 1,
                "instances": [self._describe(i) for i in self._registry.instances()],
                "conflicts": self._registry.conflicts(),
                "pairs": pairs,
                "mixed": mixed,
                "in_flight": self._metrics.in_flight,
            }
        )

    def _check_token(self, request: web.Request) -> None:
        if not self._keys.admits_instance(request):
            raise RequestError(
                "this needs the deployment's token as `Authorization: Bearer TOKEN`",
                status=401,
                code="invalid_token",
            )

    def _describe(self, instance: Instance) -> dict[str, object]:
        info, now = instance.info, self._registry.now()
        return {
            "name": info.name,
            "role": info.role,
            "url": info.url,
            "incarnation": info.incarnation,
            "model": info.model,
            "max_model_len": info.max_model_len,
            "fingerprint": info.fingerprint,
            "ready": info.ready,
            "leaving": info.leaving,
            "draining": instance.draining,
            "state": self._registry.state(instance, now),
            "reason": self._registry.trouble(instance),
            "heartbeat_age_s": round(now - instance.last_seen, 3),
            "registered_s": round(now - instance.first_seen, 3),
            "running": info.running,
            "waiting": info.waiting,
            "in_flight": instance.in_flight,
            "ok": instance.ok,
            "failed": instance.failed,
            "peers": info.peers,
            "links": sorted(instance.links),
        }

    def _capacity(self) -> tuple[int, int]:
        """Eligible pairs and mixed instances, of all models."""
        targets = [t for m in self._registry.models() for t in self._registry.eligible(m).all]
        return sum(len(t.prefills) for t in targets), sum(not t.prefills for t in targets)

    async def health(self, _: web.Request) -> web.Response:
        """The process lives. Whether it can serve is /ready's business."""
        return json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        pairs, mixed = self._capacity()
        models = sorted(self._registry.models())
        ready = pairs + mixed > 0
        reasons = [] if ready else [r for m in models for r in self._registry.missing(m)]
        if not ready and not models:
            reasons = ["no instance is registered"]
        return json_response(
            {
                "ready": ready,
                "pid": os.getpid(),
                "pairs": pairs,
                "mixed": mixed,
                "reasons": reasons,
            },
            status=200 if ready else 503,
            headers={} if ready else {"Retry-After": "1"},
        )

    async def models(self, request: web.Request) -> web.Response:
        try:
            check_key(request, self._keys)
        except RequestError as e:
            return error_response(e)
        return json_response({"object": "list", "data": self._model_cards()})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        known = self._registry.models()
        try:
            check_key(request, self._keys)
            for card in self._model_cards():
                if card["id"] == name:
                    return json_response(card)
            if known and name not in known:
                raise unknown_model(name, known)
            raise NoPairError("; ".join(self._registry.missing(name)))
        except RuntimeFailure as e:
            return error_response(e)

    def _model_cards(self) -> list[dict[str, object]]:
        now = self._registry.now()
        lengths: dict[str, int] = {}
        for instance in self._registry.instances():
            if self._registry.state(instance, now) != "dead":
                info = instance.info
                lengths[info.model] = min(
                    lengths.get(info.model, info.max_model_len), info.max_model_len
                )
        return [
            {
                "id": model,
                "object": "model",
                "created": self._created,
                "owned_by": "pdctl",
                "max_model_len": length,
            }
            for model, length in sorted(lengths.items())
        ]

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


def _read_drain(body: bytes) -> Drain:
    try:
        return _drain_decoder.decode(body)
    except msgspec.MsgspecError as e:
        raise RequestError(f"not a drain request: {e}") from e


def _read_registration(body: bytes) -> Registration:
    try:
        head = _head_decoder.decode(body)
        check_version(head.name, head.version)
        info = _decoder.decode(body)
        url = URL(info.url)
    except (msgspec.MsgspecError, ValueError) as e:
        raise RequestError(f"not a registration: {e}") from e
    if url.scheme != "http" or not url.host or url.path not in ("", "/") or info.url.endswith("/"):
        raise RequestError(
            f"not a registration: url {info.url!r} should look like http://HOST:PORT", param="url"
        )
    return info
