"""Verbs through `pyverbs`, as Debian and Ubuntu package it (python3-pyverbs)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from runtime.errors import TransferError
from runtime.kv.region import Region
from runtime.transfer import verbs
from runtime.transfer.verbs import Completion, PortFacts, Route, Write

_LOCAL = e.IBV_ACCESS_LOCAL_WRITE
_RECEIVE = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
_CHANNEL = "anon_inode:[infinibandevent]"
_descriptors = threading.Lock()
"""Held where this module opens or closes any, so that a new one can be told."""


@contextmanager
def _translated(call: str) -> Iterator[None]:
    try:
        yield
    except PyverbsError as error:
        raise TransferError(f"{call}: {error}") from error


def _channel(context: Any) -> tuple[Any, int]:
    """A completion channel and its descriptor, which this binding does not tell.

    The kernel names such descriptors, and none but this module opens any: the new one is ours.
    """
    with _descriptors:
        before = _event_descriptors()
        channel = CompChannel(context)
        (fd,) = _event_descriptors() - before
    return channel, fd


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _CHANNEL:
                found.add(int(name))
        except OSError:  # closed since, as the listing's own descriptor is
            continue
    return found


class _Memory(verbs.Memory):
    def __init__(self, region: Any) -> None:
        self._region = region
        self.lkey, self.rkey = region.lkey, region.rkey

    def close(self) -> None:
        with _translated("ibv_dereg_mr"):
            self._region.close()


class _Queue(verbs.Queue):
    def __init__(self, context: Any, domain: Any, sends: int, receives: int) -> None:
        self._channel, self.fd = _channel(context)
        self._completions = CQ(context, sends + receives + 1, None, self._channel)
        cap = QPCap(
            max_send_wr=max(sends, 1),
            max_recv_wr=max(receives, 1),
            max_send_sge=verbs.MAX_PIECES,
            max_recv_sge=1,
        )
        attributes = QPInitAttr(
            qp_type=e.IBV_QPT_RC,
            scq=self._completions,
            rcq=self._completions,
            cap=cap,
            sq_sig_all=0,
        )
        self._pair = QP(domain, attributes)
        self.number = self._pair.qp_num

    def connect(self, route: Route) -> None:
        init = QPAttr(qp_state=e.IBV_QPS_INIT, port_num=route.port)
        init.qp_access_flags = _RECEIVE
        hops = GlobalRoute(
            dgid=GID(_colons(route.peer_gid)),
            sgid_index=route.gid_index,
            hop_limit=verbs.HOP_LIMIT,
        )
        receive = QPAttr(qp_state=e.IBV_QPS_RTR, path_mtu=route.mtu)
        receive.dest_qp_num, receive.rq_psn = route.peer_number, route.peer_psn
        receive.max_dest_rd_atomic, receive.min_rnr_timer = 1, verbs.RNR_TIMER
        receive.ah_attr = AHAttr(port_num=route.port, is_global=1, gr=hops, dlid=route.peer_lid)
        send = QPAttr(qp_state=e.IBV_QPS_RTS)
        send.sq_psn, send.max_rd_atomic = route.psn, 1
        send.timeout, send.retry_cnt = verbs.ACK_TIMEOUT, verbs.RETRIES
        send.rnr_retry = verbs.RNR_RETRIES
        with _translated("ibv_modify_qp"):
            self._pair.to_init(init)
            self._pair.to_rtr(receive)
            self._pair.to_rts(send)

    def write(self, writes: Sequence[Write], keys: tuple[int, int], tag: int) -> None:
        lkey, rkey = keys
        requests = [
            SendWR(
                wr_id=tag,
                opcode=e.IBV_WR_RDMA_WRITE,
                num_sge=len(pieces),
                sg=[SGE(address, length, lkey) for address, length in pieces],
                send_flags=0,
            )
            for _, pieces in writes
        ]
        for request, (target, _) in zip(requests, writes, strict=True):
            request.set_wr_rdma(rkey, target)
        # A request does not keep the next one alive: the list does.
        for request, following in pairwise(requests):
            request.next_wr = following
        requests[-1].send_flags = e.IBV_SEND_SIGNALED
        with _translated("ibv_post_send"):
            self._pair.post_send(requests[0])

    def send(self, source: tuple[int, int, int], tag: int) -> None:
        request = SendWR(
            wr_id=tag,
            opcode=e.IBV_WR_SEND,
            num_sge=1,
            sg=[SGE(*source)],
            send_flags=e.IBV_SEND_SIGNALED,
        )
        with _translated("ibv_post_send"):
            self._pair.post_send(request)

    def receive(self, room: tuple[int, int, int], tag: int) -> None:
        with _translated("ibv_post_recv"):
            self._pair.post_recv(RecvWR(wr_id=tag, num_sge=1, sg=[SGE(*room)]))

    def poll(self, most: int) -> list[Completion]:
        with _translated("ibv_poll_cq"):
            _, found = self._completions.poll(most)
        return [Completion(c.wr_id, c.status, c.byte_len) for c in found]

    def arm(self) -> None:
        with _translated("ibv_req_notify_cq"):
            self._completions.req_notify()

    def disarm(self) -> None:
        with _translated("ibv_get_cq_event"):
            self._channel.get_cq_event(self._completions)
            self._completions.ack_events(1)

    def fail(self) -> None:
        with _translated("ibv_modify_qp"):
            self._pair.modify(QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)

    def close(self) -> None:
        with _translated("ibv_destroy_qp"):
            self._pair.close()

    def close_events(self) -> None:
        with _descriptors, _translated("ibv_destroy_cq"):
            self._completions.close()
            self._channel.close()


def _colons(gid: bytes) -> str:
    return ":".join(gid[at : at + 2].hex() for at in range(0, 16, 2))


class _Device(verbs.Device):
    def __init__(self, name: str) -> None:
        self._context = Context(name=name)
        self._domain = PD(self._context)

    def port(self, number: int) -> PortFacts:
        with _translated("ibv_query_port"):
            facts = self._context.query_port(number)
        return PortFacts(facts.active_mtu, facts.lid, facts.max_msg_sz)

    def register(self, region: Region, *, remote_write: bool) -> verbs.Memory:
        access = _RECEIVE if remote_write else _LOCAL
        with _translated("ibv_reg_mr"):
            return _Memory(MR(self._domain, region.nbytes, access, region.address))

    def register_dmabuf(
        self, region: Region, fd: int, offset: int, *, remote_write: bool
    ) -> verbs.Memory:
        raise TransferError("pyverbs cannot give a dmabuf the address it has in this process")

    def queue(self, *, sends: int, receives: int) -> verbs.Queue:
        with _translated("ibv_create_qp"):
            return _Queue(self._context, self._domain, sends, receives)

    def close(self) -> None:
        with _descriptors, _translated("ibv_close_device"):
            self._domain.close()
            self._context.close()


class _Verbs(verbs.Verbs):
    name = "pyverbs"

    def open(self, device: str) -> verbs.Device:
        with _descriptors, _translated("ibv_open_device"):
            return _Device(device)


VERBS = _Verbs()
