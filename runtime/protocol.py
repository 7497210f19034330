"""Every message between processes of a deployment, in one file; those between the ranks of one
instance are in engine/rank_protocol.py, those of registration in router_protocol.py.

Two kinds of connection carry them, both as frames of `runtime.link` (4-byte little-endian length,
msgpack):
  front <-> engine core   one inherited socket pair per instance; Command one way, Event the other
  decode -> prefill       one TCP connection per pair for control, dialled by decode; PeerRequest,
  PeerReply

Times in messages are durations in seconds, taken on the sender's clock. Clocks of two hosts are
never subtracted.

What another instance sends is checked while it is decoded: a number beyond what its type says ends
the session, before anything is indexed, sized or timed with it. What only the receiver can know,
such as the size of its vocabulary, it checks itself.
"""

from __future__ import annotations

from typing import Annotated, Literal, NewType

import msgspec

PROTOCOL_VERSION = 2

MOST_SECONDS = 1e9

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Nonce = _Positive
"""Of a reservation; unique in one incarnation of a decode instance, and rising."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
"""Neither infinite nor NaN."""
_U16 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_U24 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
_U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]

RequestId = NewType("RequestId", str)
"""Made by the router (or by the front without one): never a client's string."""

Stage = Literal[
    "admit", "route", "reserve", "prefill", "transfer", "swap_in", "decode", "stream", "release"
]
FinishReason = Literal["stop", "length", "abort"]

# Internal headers, router -> decode front. Honoured only with the right HEADER_TOKEN; the router
# drops them from clients.
HEADER_PREFIX = "x-pdctl-"
HEADER_TOKEN = "x-pdctl-token"
HEADER_REQUEST_ID = "x-pdctl-request-id"
HEADER_PREFILL = "x-pdctl-prefill"
"""Request: the prefill instance's name that the router chose. Response: the one that served."""
HEADER_DECODE = "x-pdctl-decode"
"""Response only: the decode (or mixed) instance that served."""
HEADER_DEADLINE = "x-pdctl-deadline-s"
"""Request: seconds this request may still take."""
HEADER_FAILED_LEG = "x-pdctl-failed-leg"
"""Response: on 502 and 504, `prefill`, `decode` or `transfer`, so that the router knows what to
avoid on a retry."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. Defaults are OpenAI's; temperature 0 is greedy.

    The draw for output position i depends on (seed, i) and the logits alone, never on the batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """None: none; n: the chosen token's log probability and the n most likely tokens'."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of one position, from the model's logits before temperature and
    penalties."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class OutputToken(msgspec.Struct, frozen=True, array_like=True):
    token: int
    logprob: TokenLogprob | None = None


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """How a request was served: the proof that a hand-over happened. Sent with the last tokens."""

    prefill: str
    """Instance that computed the prompt; equal to `decode` for a mixed instance."""
    decode: str
    path: str
    """`local` (mixed), `shm`, `tcp`, `rdma`, `cuda_ipc`."""
    kv_bytes: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefill instance's prefix cache: not computed again."""
    decode_cached_tokens: int = 0
    """Prompt tokens whose KV was in the decode instance's prefix cache: not moved again."""
    stages: dict[str, float] = {}
    """Seconds per Stage. Each is taken on one clock; prefill has its queueing in
    `prefill_queue`."""


# ---- front -> engine core ------------------------------------------------------------------------


class Generate(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    id: RequestId
    prompt: tuple[int, ...]
    params: SamplingParams
    prefill: str | None = None
    """Decode role: the peer to use; None: the core picks the peer with the fewest requests under
    way."""
    deadline_s: float


class PeerAddress(msgspec.Struct, frozen=True):
    """Where decode instances reach a prefill instance."""

    host: str
    port: int


class SetPeers(msgspec.Struct, frozen=True, tag=True):
    """Decode role: the prefill instances that the router knows, by name. Sessions are kept with
    these and the configured ones; a session with another goes on until it ends by itself.
    """

    peers: dict[str, PeerAddress]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop this request and give back all it holds, in whatever stage it is. Unknown ids are
    ignored."""

    id: RequestId


class GetStats(msgspec.Struct, frozen=True, tag=True):
    seq: int


class Measure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Decode: move `blocks` blocks once, `run` neighbours at a time, and say how long it took.

    path    from the peer's device pool into the CPU buffer, as KV moves
    socket  as many bytes from the peer by a plain socket loop
    memcpy  as many bytes within this host, by one thread, into the CPU buffer
    """

    what: Literal["path", "socket", "memcpy"]
    peer: str
    blocks: int
    run: int = 1
    seq: int = 0
    """Set by the front."""


Command = Generate | Abort | GetStats | SetPeers | Measure


# ---- engine core -> front ------------------------------------------------------------------------


class CoreReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The model is loaded and has generated a token. For decode, `peers` follow in PeerState
    messages."""

    incarnation: str
    fingerprint: dict[str, str | int]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_device_blocks: int
    num_buffer_blocks: int
    load_s: float
    self_test_s: float


class PeerState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Decode: the link to one prefill peer came up (path tested with real bytes) or went down."""

    name: str
    path: str | None
    """None: down."""
    incarnation: str = ""
    reason: str = ""
    """Why it is down, or why it is up over no better path."""
    requests: int = 0
    """Decode, in Stats only: requests that still need this peer."""


class PeerGone(msgspec.Struct, frozen=True, tag=True):
    """Decode: this prefill peer is no longer dialled; nobody names it any more."""

    name: str


class Tokens(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """New output tokens of one request, in order. With `finish` it is the last message for this
    id."""

    id: RequestId
    tokens: tuple[OutputToken, ...]
    finish: FinishReason | None = None
    served: Served | None = None
    """Set with `finish`, and with the first tokens (as far as known then)."""


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The request cannot go on; the last message for this id. `status` is the HTTP status it
    deserves."""

    id: RequestId
    message: str
    status: int
    leg: Literal["router", "prefill", "decode", "transfer"] | None = None
    instance: str = ""
    retry_after_s: float | None = None
    code: str | None = None
    """Of a status 400: OpenAI's code, where there is a better one than `invalid_value`."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an instance holds for requests. Idle means every number is zero (cached blocks are
    not held)."""

    requests: int = 0
    waiting: int = 0
    running: int = 0
    device_blocks: int = 0
    """Device blocks that a live request refers to."""
    buffer_blocks: int = 0
    reservations: int = 0
    quarantined_blocks: int = 0
    """Blocks, of the buffer or lent by the device pool, that nobody wants any more and whose writer
    is not yet proven gone; never reused until it is."""
    outgoing: int = 0
    """Prefill: requests computed or being computed for a decode peer and not yet released."""
    copies: int = 0
    """Puts and swaps queued or running."""

    def idle(self) -> bool:
        return not any(msgspec.structs.astuple(self))


class Measured(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to Measure. With `error` there are no numbers."""

    seq: int
    path: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    error: str = ""
    status: int = 200
    """The HTTP status that the error deserves."""


class Stats(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    seq: int
    ledger: Ledger
    device_blocks_total: int
    device_blocks_cached: int
    """Free blocks that hold a reusable prefix."""
    buffer_blocks_total: int
    peers: dict[str, PeerState]
    """Decode: prefill peers. Prefill: connected decode instances."""
    counters: dict[str, float]
    """Monotonic totals, Prometheus style without prefix: requests_finished, kv_bytes_<path>, ..."""


Event = CoreReady | PeerState | PeerGone | Tokens | Failed | Stats | Measured

# ---- decode -> prefill ---------------------------------------------------------------------------


class GpuPool(msgspec.Struct, frozen=True, kw_only=True):
    """Decode's device pool: `offset` bytes into the allocation that the CUDA IPC handle is of."""

    handle: bytes
    offset: Count
    nbytes: Count


class RdmaMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Where it starts, and the key to write there."""

    address: Count
    nbytes: Count
    key: _U32


class RdmaEnd(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a reliable connection, as the other end must know it to connect."""

    device: str
    """For messages."""
    fabric: str
    """What both ends must have in common."""
    gid: bytes
    lid: _U16
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]
    """ibv_mtu's number: 256 to 4096 bytes."""
    number: _U24
    """Of the queue pair."""
    psn: _U24
    address: Count
    """Decode's: where its buffer starts, and the key to write there."""
    key: _U32
    pool: RdmaMemory | None = None
    """Decode's device pool on a GPU, where it can be written."""


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message after authentication (see runtime.link). Opens a control session."""

    version: int
    deployment: str
    instance: str
    incarnation: str
    fingerprint: dict[str, str | int]
    transfer: Literal["auto", "cuda_ipc", "shm", "rdma", "tcp"]
    segment: str
    """Name of the CPU buffer's shared memory segment on the decode host."""
    segment_bytes: Count
    block_bytes: Count
    streams: Count = 1
    """tcp: the most data connections that this host would use."""
    rdma: RdmaEnd | None = None
    no_rdma: str = ""
    """Why `rdma` is None."""
    gpu: GpuPool | None = None
    no_gpu: str = ""
    """Why `gpu` is None, unless KV is not on a GPU at all."""


class HelloData(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message on each tcp data connection: joins it to a control session."""

    session: Count


class Prefill(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Compute this prompt and put its KV into these blocks of mine: of the CPU buffer, or, numbered
    with them, of the device pool."""

    id: RequestId
    nonce: Nonce
    """Every later message and every write carries it."""
    prompt: tuple[int, ...]
    params: SamplingParams
    blocks: tuple[int, ...]
    """Destination block per prompt block after the first `have_blocks`, in order."""
    have_blocks: Count = 0
    """Leading blocks of the prompt that I have already: compute with them, do not send them."""
    deadline_s: Seconds


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop. Answered by exactly one terminal message (KvReady, PrefillFailed or Released)."""

    nonce: Nonce


class Ping(msgspec.Struct, frozen=True, tag=True):
    seq: int


class HelloPlain(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message on a connection that measures the network alone: after Pong and one byte from
    decode, prefill sends `nbytes` with a plain socket loop, in pieces of `piece`, and hangs up."""

    nbytes: Count
    piece: Count


class PathTest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Put `pattern`, repeated to one block, into each of `blocks`; answered by KvReady or
    PrefillFailed for `nonce`."""

    nonce: Nonce
    blocks: tuple[int, ...]
    pattern: bytes
    """Empty: whatever is in the device pool, to measure the way that KV takes."""
    run: _Positive = 1
    """So many neighbouring blocks come from one place, and so move as one."""


PeerRequest = Hello | HelloData | HelloPlain | Prefill | Cancel | Ping | PathTest

# ---- prefill -> decode ---------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The session is open. Everything an older session of the same decode instance could write is
    fenced."""

    instance: str
    incarnation: str
    session: Count
    path: Literal["cuda_ipc", "shm", "rdma", "tcp"]
    path_reason: str = ""
    """Why it is not a better one."""
    streams: _Positive = 1
    """tcp: open so many data connections; no more than Hello has."""
    rdma: RdmaEnd | None = None
    """Set where the path is rdma."""
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    start_ticks: Count
    """Of the writing process, with `boot_id`: what proves it dead to a decode instance on the same
    host."""
    boot_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """No session: another model, layout, version or token. `field` names what differs."""

    field: str
    message: str


class FirstToken(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Sent the moment it is sampled, ahead of the KV. With `finish` the KV is not sent: nothing
    will decode it."""

    nonce: Nonce
    token: OutputToken
    finish: FinishReason | None
    cached_tokens: Count
    queue_s: Seconds
    prefill_s: Seconds


class KvProgress(msgspec.Struct, frozen=True, tag=True):
    """The first `blocks` destination blocks hold their final bytes."""

    nonce: Nonce
    blocks: Count


class KvReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Terminal: all blocks were put, prefill will write none of them again."""

    nonce: Nonce
    nbytes: Count
    transfer_s: Seconds
    """From the end of the prompt's computation to the end of the last put: what the hand-over
    costs."""


class PrefillFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Terminal: prefill will write none of the blocks again, unless it is not `fenced`."""

    nonce: Nonce
    message: str
    status: Annotated[int, msgspec.Meta(ge=400, le=599)]
    leg: Literal["prefill", "transfer"]
    fenced: bool = True
    """False: what was put may still be under way. The session ends behind this message, and its
    fence frees the blocks."""
    code: str | None = None
    """As in `Failed`."""


class Released(msgspec.Struct, frozen=True, tag=True):
    """Terminal answer to Cancel, and to a request that finished with its first token."""

    nonce: Nonce


class Pong(msgspec.Struct, frozen=True, tag=True):
    seq: int


PeerReply = Welcome | Refused | FirstToken | KvProgress | KvReady | PrefillFailed | Released | Pong
