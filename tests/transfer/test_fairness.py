"""The queue for room in the CPU buffer: whoever came first is served first, whatever its size."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.kv.buffer import CpuBuffer, Reservation
from runtime.transfer.reservations import Reservations, Waiter

BLOCKS = 12
BLOCK = 4096


@dataclass(eq=False)
class Client:
    number: int
    count: int
    granted: list[Reservation] = field(default_factory=list)
    left: bool = False


class Queue(RuleBasedStateMachine):
    """Requests of any size come, leave and give back; copies take what is to spare."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.buffer = CpuBuffer.create(f"pdctl-test-{secrets.token_hex(6)}", BLOCKS * BLOCK, BLOCK)
        self.queue = Reservations(self.buffer, self.loop)
        self.clients: list[Client] = []
        self.waiters: dict[int, Waiter] = {}
        self.order: list[int] = []
        self.holding: list[Reservation] = []

    def teardown(self) -> None:
        # As holders finish, everybody who still waits is served, in order.
        while self.holding or any(not c.granted and not c.left for c in self.clients):
            assert self.holding, "somebody waits, and nobody holds anything"
            self.give(self.holding[0])
        assert self.order == sorted(self.order)
        assert self.buffer.used_blocks == 0
        self.queue.close()
        self.buffer.close()
        self.loop.close()

    def waiting(self) -> list[Client]:
        return [c for c in self.clients if not c.granted and not c.left]

    @rule(count=st.integers(0, BLOCKS))
    def join(self, count: int) -> None:
        client = Client(len(self.clients), count)
        self.clients.append(client)

        def granted(reservation: Reservation) -> None:
            client.granted.append(reservation)
            self.order.append(client.number)
            self.holding.append(reservation)

        waiter = self.waiters[client.number] = Waiter(lambda _: count, granted)
        self.queue.join(waiter)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.waiting()))
        client.left = True
        self.queue.leave(self.waiters[client.number])

    @precondition(lambda self: self.holding)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.give(data.draw(st.sampled_from(self.holding)))

    def give(self, reservation: Reservation) -> None:
        self.holding.remove(reservation)
        self.buffer.close_writer(reservation)
        self.buffer.abandon(reservation)

    @rule(count=st.integers(1, BLOCKS))
    def swap_out(self, count: int) -> None:
        free, waiting = self.buffer.free_blocks, self.waiting()
        taken = self.queue.take_spare(count)
        assert (taken is not None) == (not waiting and count <= free)
        if taken:
            self.holding.append(taken)

    @invariant()
    def only_the_first_decides_who_waits(self) -> None:
        waiting = self.waiting()
        assert self.queue.waiting == len(waiting)
        if waiting:
            assert waiting[0].count > self.buffer.free_blocks, "there is room, and it waits"
        assert self.order == sorted(self.order), "nobody was overtaken"


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
