"""Verbs through PyPI's `ibverbs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ibverbs as ib

from runtime.errors import TransferError
from runtime.kv.region import Region
from runtime.transfer import verbs
from runtime.transfer.verbs import Completion, PortFacts, Route, Write

_RECEIVE = int(ib.AccessFlags.LOCAL_WRITE | ib.AccessFlags.REMOTE_WRITE)
_LOCAL = int(ib.AccessFlags.LOCAL_WRITE)
_WRITE, _SEND = int(ib.WROpcode.RDMA_WRITE), int(ib.WROpcode.SEND)
_SIGNALED = int(ib.SendFlags.SIGNALED)
_STATE = int(ib.QPAttrMask.STATE)
_ERROR = int(ib.QPState.ERR)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ib.VerbsError as e:
        raise TransferError(f"{e.operation}: {e.strerror or e}") from e


class _Memory(verbs.Memory):
    def __init__(self, region: Any) -> None:
        self._region = region
        self.lkey, self.rkey = region.lkey, region.rkey

    def close(self) -> None:
        with _translated():
            self._region.close()


class _Queue(verbs.Queue):
    def __init__(self, domain: Any, sends: int, receives: int) -> None:
        context = domain.context
        self._channel = context.create_comp_channel()
        self._completions = context.create_cq(sends + receives + 1, self._channel)
        self._pair = domain.create_qp(
            ib.QPInitAttr(
                send_cq=self._completions,
                recv_cq=self._completions,
                qp_type=ib.QPType.RC,
                max_send_wr=max(sends, 1),
                max_recv_wr=max(receives, 1),
                max_send_sge=verbs.MAX_PIECES,
            )
        )
        self.number = self._pair.qp_num
        self.fd = self._channel.fd

    def connect(self, route: Route) -> None:
        peer = ib.QPInfo(
            qp_num=route.peer_number,
            psn=route.peer_psn,
            lid=route.peer_lid,
            gid=route.peer_gid,
            port=route.port,
            mtu=route.mtu,
        )
        with _translated():
            self._pair.to_init(route.port, _RECEIVE)
            self._pair.to_rtr(
                peer,
                sgid_index=route.gid_index,
                mtu=route.mtu,
                hop_limit=verbs.HOP_LIMIT,
                min_rnr_timer=verbs.RNR_TIMER,
            )
            self._pair.to_rts(
                route.psn,
                timeout=verbs.ACK_TIMEOUT,
                retry_cnt=verbs.RETRIES,
                rnr_retry=verbs.RNR_RETRIES,
            )

    def write(self, writes: Sequence[Write], keys: tuple[int, int], tag: int) -> None:
        lkey, rkey = keys
        requests = [
            ib.SendWR(
                wr_id=tag,
                sg_list=[ib.SGE(address, length, lkey) for address, length in pieces],
                opcode=_WRITE,
                remote_addr=target,
                rkey=rkey,
            )
            for target, pieces in writes
        ]
        requests[-1].send_flags = _SIGNALED
        with _translated():
            self._pair.post_send(requests)

    def send(self, source: tuple[int, int, int], tag: int) -> None:
        request = ib.SendWR(
            wr_id=tag, sg_list=[ib.SGE(*source)], opcode=_SEND, send_flags=_SIGNALED
        )
        with _translated():
            self._pair.post_send(request)

    def receive(self, room: tuple[int, int, int], tag: int) -> None:
        with _translated():
            self._pair.post_recv(ib.RecvWR(wr_id=tag, sg_list=[ib.SGE(*room)]))

    def poll(self, most: int) -> list[Completion]:
        with _translated():
            found = self._completions.poll(most)
        return [Completion(c.wr_id, int(c.status), c.byte_len) for c in found]

    def arm(self) -> None:
        with _translated():
            self._completions.req_notify()

    def disarm(self) -> None:
        with _translated():
            self._channel.get_cq_event()
            self._completions.ack_events(1)

    def fail(self) -> None:
        with _translated():
            self._pair.modify(_STATE, qp_state=_ERROR)

    def close(self) -> None:
        with _translated():
            self._pair.close()

    def close_events(self) -> None:
        with _translated():
            self._completions.close()
            self._channel.close()


class _Device(verbs.Device):
    def __init__(self, context: Any) -> None:
        self._context = context
        self._domain = context.alloc_pd()

    def port(self, number: int) -> PortFacts:
        with _translated():
            facts = self._context.query_port(number)
        return PortFacts(int(facts.active_mtu), facts.lid, facts.max_msg_sz)

    def register(self, region: Region, *, remote_write: bool) -> verbs.Memory:
        access = _RECEIVE if remote_write else _LOCAL
        with _translated():
            return _Memory(self._domain.reg_mr(region.address, region.nbytes, access))

    def register_dmabuf(
        self, region: Region, fd: int, offset: int, *, remote_write: bool
    ) -> verbs.Memory:
        access = _RECEIVE if remote_write else _LOCAL
        place = offset, region.nbytes, region.address
        try:
            with _translated():
                return _Memory(self._domain.reg_dmabuf_mr(*place, fd, access))
        except RuntimeError as e:  # libibverbs is older than the call
            raise TransferError(str(e)) from e

    def queue(self, *, sends: int, receives: int) -> verbs.Queue:
        with _translated():
            return _Queue(self._domain, sends, receives)

    def close(self) -> None:
        with _translated():
            self._domain.close()
            self._context.close()


class _Verbs(verbs.Verbs):
    name = "ibverbs"

    def open(self, device: str) -> verbs.Device:
        with _translated():
            found = [d for d in ib.get_device_list() if d.name in (device, device.encode())]
            if not found:
                raise TransferError(f"libibverbs does not know {device}")
            return _Device(found[0].open())


VERBS = _Verbs()
