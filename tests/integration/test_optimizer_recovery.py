"""A recovery from donors that die, stall, refuse and lie: the calls over real sockets, the device thread played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decoupled_diloco.arrays.fragments import fragment_schema
from decoupled_diloco.arrays.optimizer_fragments import OptimizerFragments
from decoupled_diloco.arrays.tree import ParameterTree
from decoupled_diloco.core.ids import Version
from decoupled_diloco.runtime.channel import open_channel
from decoupled_diloco.runtime.clock import ManualClock, MonotonicClock
from decoupled_diloco.runtime.ports import parse_address
from decoupled_diloco.runtime.rate_limit import RateLimit
from decoupled_diloco.wire.peer import CopyName
from decoupled_diloco.wire.stream import CHUNK_BYTES
from learner_service import peer, peer_client, peer_copies
from learner_service.optimizer_copies import Boundary, OptimizerCopies
from learner_service.optimizer_recovery import NoDonorError, OptimizerRecovery, Recovered, Wanted
from learner_service.peer import DonorIdentity, PeerServicer, start_peer_server
from learner_service.peer_client import PeerClient
from learner_service.peer_copies import KeptCopies
from learner_service.workload import default_merge_rule

PARAMS = {"a": jnp.ones((300, 1000)), "b": jnp.ones((1000, 300)), "c": jnp.ones(7)}
FRAGMENT_COUNT = 2


def cut(state: Any, params: Any = PARAMS) -> OptimizerFragments:
    return OptimizerFragments(
        params, fragment_schema(ParameterTree(params, default_merge_rule).schema, FRAGMENT_COUNT), state
    )


def state_of(seed: int) -> Any:
    """An Adam state with moments that nobody else has."""
    generator = np.random.default_rng(seed)
    slopes = {name: jnp.asarray(generator.standard_normal(leaf.shape), jnp.float32) for name, leaf in PARAMS.items()}
    optimizer = optax.adam(1.0)
    return optimizer.update(slopes, optimizer.init(PARAMS))[1]


@dataclass
class Fault:
    """What happens to a stream after some chunks, the first so many times.

    Attributes:
        kind: "cut" ends the call, "hang" sends no more, "flip" changes a byte, "die" takes the server down.
        part: only in streams of this one; None: in any.
    """

    kind: str
    chunk_count: int = 1
    times: int = 1
    part: int | None = None


class FaultyContext:
    """A servicer's context with a fault on its way."""

    def __init__(self, context: Any, fault: Fault, die: Callable[[], Any]) -> None:
        self._context, self._fault, self._die = context, fault, die
        self._chunk_count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        if isinstance(message, bytes):
            self._chunk_count += 1
            if self._chunk_count > self._fault.chunk_count and self._fault.times > 0:
                self._fault.times -= 1
                message = await self._strike(message)
        await self._context.write(message)

    async def _strike(self, message: bytes) -> bytes:
        match self._fault.kind:
            case "cut":
                await self._context.abort(grpc.StatusCode.UNAVAILABLE, "the network is in the way")
            case "hang":
                await asyncio.Event().wait()
            case "die":
                self._die()
                await asyncio.Event().wait()
        return message[:-1] + bytes([message[-1] ^ 1])


class FaultyServicer(PeerServicer):
    """Notes the offsets that are asked for."""

    fault: Fault | None = None
    die: Callable[[], Any]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.offsets: list[int] = []

    async def _download(self, request: Any, context: Any) -> None:
        self.offsets.append(request.offset)
        if self.fault is not None and self.fault.part in (None, request.part):
            context = FaultyContext(context, self.fault, self.die)
        await super()._download(request, context)


@dataclass
class Played:
    """A donor. `step` is that of its newest copy."""

    name: str
    state: Any
    copies: OptimizerCopies
    address: str = ""
    step: int = 0
    served: list[int] = field(default_factory=list)
    servicer: FaultyServicer | None = None
    server: Any = None

    def boundary(self) -> None:
        """The device thread comes along."""
        self.step += 1
        self.copies.serve(self.state, lambda: Boundary(CopyName(4, self.step), {0: Version(1, 9, "")}))


@asynccontextmanager
async def donor(
    name: str,
    seed: int,
    fault: Fault | None = None,
    *,
    state: Any = None,
    opened: bool = True,
    bytes_max: int = 1 << 30,
    limit: RateLimit | None = None,
) -> AsyncIterator[Played]:
    state = state_of(seed) if state is None else state
    copies = OptimizerCopies()
    copies.fragments = cut(state)
    played = Played(name, state, copies)
    copies.wake_device = played.boundary
    if opened:
        copies.open()
    with ThreadPoolExecutor(1) as executor:
        kept = KeptCopies(copies, executor, MonotonicClock(), bytes_max)
        identity = DonorIdentity(name, lambda: "run", "schema")
        servicer = FaultyServicer(identity, copies, kept, played.served.append, limit)
        server, address = await start_peer_server(parse_address("127.0.0.1:0"), None, "peer_listen", servicer)
        servicer.fault, servicer.die = fault, lambda: asyncio.ensure_future(server.stop(None))
        played.address, played.servicer, played.server = str(address), servicer, server
        try:
            yield played
        finally:
            await server.stop(None)
            kept.forget_all()


async def recover(
    *donors: Played,
    seconds: float = 20.0,
    fragments: OptimizerFragments | None = None,
    limit: RateLimit | None = None,
) -> Recovered:
    wanted = Wanted(
        learner="joiner",
        run_id="run",
        schema_digest="schema",
        fragments=fragments or cut(optax.adam(1.0).init(PARAMS)),
        versions={0: Version(1, 3, "")},
        peers=[(played.name, played.address) for played in donors],
    )
    channels: list[grpc.aio.Channel] = []

    def client_of(address: str) -> PeerClient:
        channels.append(open_channel(parse_address(address), None))
        return PeerClient(channels[-1], limit)

    with ThreadPoolExecutor(1) as executor:
        try:
            return await OptimizerRecovery(wanted, client_of, executor, lambda _: None).run(seconds, MonotonicClock())
        finally:
            for channel in channels:
                await channel.close(None)


def owners(recovered: Recovered, *donors: Played) -> list[str]:
    """Whose each part is, bit for bit."""
    found = []
    for part, payload in enumerate(recovered.payloads):
        own = [
            d.name for d in donors if d.copies.fragments.copy(d.state, part).to_host().tobytes() == payload.tobytes()
        ]
        found.append("/".join(own) or "nobody")
    return found


COUNT = "a/b"
"""The last part is the step count, the same with both donors."""


async def test_the_first_peer_gives_all():
    async with donor("a", 1) as a, donor("b", 2) as b:
        recovered = await recover(a, b)
        assert owners(recovered, a, b) == ["a", "a", COUNT]
        assert (recovered.source, recovered.origin) == ("peer", "a")
        assert recovered.payload_bytes == 2 * 4 * 600_007 + 4
        assert b.servicer.offsets == []


async def test_both_ends_keep_to_their_rate_limits():
    def limit_of(bytes_per_second: float) -> tuple[ManualClock, RateLimit]:
        clock = ManualClock()

        async def sleep(seconds: float) -> None:
            clock.advance(seconds)
            await asyncio.sleep(0)

        return clock, RateLimit(bytes_per_second, clock, sleep)

    (donors_time, upload), (joiners_time, download) = limit_of(4e6), limit_of(2e6)
    async with donor("a", 1, limit=upload) as a:
        recovered = await recover(a, limit=download)
        assert owners(recovered, a) == ["a"] * 3
        assert max(a.served) <= upload.piece_bytes(1 << 20) + 100
        assert donors_time.now() == pytest.approx(recovered.payload_bytes / 4e6, rel=0.1)
        # Two streams of 2.4 MB pay for each MiB before they read it; who pays last does not wait.
        assert 0.7 * recovered.payload_bytes / 2e6 <= joiners_time.now() <= recovered.payload_bytes / 2e6


async def test_a_broken_stream_goes_on_where_it_stopped():
    async with donor("a", 1, Fault("cut", chunk_count=2, part=1)) as a:
        recovered = await recover(a)
        assert owners(recovered, a) == ["a"] * 3
        assert sorted(a.servicer.offsets) == [0, 0, 0, 2 * CHUNK_BYTES]


async def test_a_donor_that_dies_in_the_middle_is_passed_over_for_the_next():
    async with donor("a", 1, Fault("die", times=2)) as a, donor("b", 2) as b:
        recovered = await recover(a, b)
        assert owners(recovered, a, b) == ["b", "b", COUNT]
        assert recovered.origin in ("b", "a, b")


async def test_a_donor_that_stands_still_is_passed_over_for_the_next(monkeypatch):
    monkeypatch.setattr(peer_client, "CHUNK_SECONDS_MAX", 0.3)
    async with donor("a", 1, Fault("hang", chunk_count=0, times=99)) as a, donor("b", 2) as b:
        recovered = await recover(a, b)
        assert owners(recovered, a, b) == ["b", "b", COUNT]


async def test_a_donor_that_takes_no_call_is_passed_over_for_the_next(monkeypatch):
    monkeypatch.setattr(peer_client, "CONTACT_SECONDS_MAX", 0.3)

    async def silent(*_: Any) -> None:
        await asyncio.Event().wait()

    async with donor("a", 1) as a, donor("b", 2) as b:
        monkeypatch.setattr(a.servicer, "_download", silent)
        recovered = await recover(a, b)
        assert owners(recovered, a, b) == ["b", "b", COUNT]


async def test_bytes_that_changed_on_the_way_are_asked_for_again():
    async with donor("a", 1, Fault("flip", part=0)) as a:
        recovered = await recover(a)
        assert owners(recovered, a) == ["a"] * 3
        assert sorted(a.servicer.offsets) == [0, 0, 0, CHUNK_BYTES]


async def test_moments_that_are_not_finite_are_nobodys():
    state = state_of(1)
    state[0].mu["a"] = state[0].mu["a"].at[5, 5].set(jnp.nan)
    async with donor("a", 1, state=state) as a, donor("b", 2) as b:
        recovered = await recover(a, b)
        assert owners(recovered, a, b).count("b") >= 1
        assert all(np.isfinite(payload.view("<f4")).all() for payload in recovered.payloads[:FRAGMENT_COUNT])


async def test_a_donor_that_recovers_itself_refuses():
    async with donor("a", 1, opened=False) as a, donor("b", 2) as b:
        recovered = await recover(a, b)
        assert owners(recovered, a, b) == ["b", "b", COUNT]
        a.copies.refuse("it recovers itself: test")
        with pytest.raises(NoDonorError, match="a: NOT_READY: .* has no state to give: it recovers itself: test"):
            await recover(a)


async def test_a_caller_that_waits_for_a_copy_hears_that_its_donor_begins_to_recover():
    async with donor("a", 1) as a:
        a.copies.wake_device = lambda: a.copies.refuse("its loss is not finite")
        with pytest.raises(NoDonorError, match="its loss is not finite"):
            await recover(a)


async def test_no_peer_and_only_oneself():
    with pytest.raises(NoDonorError, match="there is no peer to ask"):
        await recover()
    async with donor("joiner", 1) as itself:
        with pytest.raises(NoDonorError, match="there is no peer to ask"):
            await recover(itself)
    nobody = Played("gone", None, OptimizerCopies(), "127.0.0.1:1")
    with pytest.raises(NoDonorError, match=r"gone: UNAVAILABLE"):
        await recover(nobody)


async def test_another_optimizer_is_refused_at_once_and_in_words():
    other = cut(optax.sgd(0.1, momentum=0.9).init(PARAMS))
    async with donor("a", 1) as a:
        with pytest.raises(NoDonorError, match=r"a: SCHEMA_MISMATCH: .*only here: '0/mu' float32\[.*'0/trace' float32"):
            await recover(a, fragments=other)
        assert len(a.servicer.offsets) <= FRAGMENT_COUNT
        assert a.step == 0, "nothing was copied"


async def test_another_timeline_is_refused():
    async with donor("a", 1) as a:
        a.copies.wake_device = lambda: a.copies.serve(a.state, lambda: Boundary(CopyName(4, 1), {0: Version(2, 9, "")}))
        with pytest.raises(NoDonorError, match="this learner is on timeline 2, the caller on 1"):
            await recover(a)


async def test_it_takes_no_longer_than_it_may():
    async with donor("a", 1, Fault("hang", times=99)) as a:
        with pytest.raises(NoDonorError, match=r"it took longer than 0\.3 s"):
            await recover(a, seconds=0.3)


async def test_a_donor_without_a_boundary_says_so(monkeypatch):
    monkeypatch.setattr(peer_copies, "BOUNDARY_SECONDS_MAX", 0.1)
    async with donor("a", 1) as a, donor("b", 2) as b:
        a.copies.wake_device = lambda: None
        recovered = await recover(a, b)
        assert owners(recovered, a, b) == ["b", "b", COUNT]


async def test_two_joiners_share_one_copy():
    async with donor("a", 1) as a:
        one, other = await asyncio.gather(recover(a), recover(a))
        assert owners(one, a) == owners(other, a) == ["a"] * 3
        assert a.step == 3


async def test_more_callers_than_a_donor_serves_are_told_to_come_again(monkeypatch):
    monkeypatch.setattr(peer, "REQUESTS_MAX", 1)
    async with donor("a", 1) as a:
        recovered = await recover(a)
        assert owners(recovered, a) == ["a"] * 3
        assert len(a.servicer.offsets) > 3


async def test_copies_that_are_read_are_kept_and_others_make_room():
    async with donor("a", 1, bytes_max=3_000_000) as a:
        recovered = await recover(a)
        assert owners(recovered, a) == ["a"] * 3
        assert a.step >= 3
        assert sum(copy.payload.size for copy in a.servicer._kept._kept.values()) <= 3_000_000
