"""What a run moves, against the bandwidth planner's formula: a real syncer, learners that speak the real protocol."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from chaos.proxy import Direction, Proxy
from decoupled_diloco.arrays.encoding import ENCODINGS
from decoupled_diloco.arrays.schema import Schema, TensorSpec
from decoupled_diloco.core.encoding_bits import ENCODING_BITS
from simulator.bandwidth import Plan, decoupled
from tests.integration.protocol_learner import ProtocolLearner, Script
from tests.integration.syncers import config_of, fetch, syncer

NAMES = ("alpha", "beta")
P = H = 4
INTERVALS = 5
"""Of H steps in a run; the first and the last one are not counted, since joins and goodbyes fall into them."""
COUNTED = INTERVALS - 2
FIRST_ROUND, LAST_ROUND = P + 1, P + COUNTED * P


@dataclass
class CountedLearner(ProtocolLearner):
    """Counts the payload that it moves, and what its sockets have moved whenever it begins to upload."""

    sockets: Mapping[Direction, int] = field(default_factory=dict)
    """Bytes of its connections so far, by direction."""
    sent: Counter = field(default_factory=Counter)
    """Payload bytes of contributions by round; under 0 those of initial parameters."""
    received: Counter = field(default_factory=Counter)
    """Payload bytes of downloads by version number."""
    sockets_at: dict[int, Mapping[Direction, int]] = field(default_factory=dict)
    """`sockets` before the contribution to each round."""

    def __post_init__(self):
        super().__post_init__()
        upload, download, upload_initial = self.link.upload, self.link.download, self.link.upload_initial

        async def counted_upload(message, payload):
            self.sockets_at[message.round] = dict(self.sockets)
            self.sent[message.round] += len(payload)
            return await upload(message, payload)

        async def counted_initial(fragment, theta):
            self.sent[0] += theta.nbytes
            await upload_initial(fragment, theta)

        async def counted_download(fragment, version, held):
            header, payload = await download(fragment, version, held)
            self.received[version.number] += len(payload)
            return header, payload

        self.link.upload, self.link.download = counted_upload, counted_download
        self.link.upload_initial = counted_initial


def schema_of(parameter_count):
    """A model of so many parameters, in tensors that the fragments share evenly."""
    rows = parameter_count // 1024
    return Schema([TensorSpec(f"layer{index}/kernel", (rows // 8, 1024)) for index in range(8)])


async def play(folder, schema, encoding, step_seconds, **sections):
    """Plays a run; its learners, and the syncer's counters of payload received and sent."""
    config = config_of(
        run={"total_steps": INTERVALS * H, "learners_expected": len(NAMES)},
        fragments={"count": P, "interval_steps": H, "overlap_steps": 2},
        quorum={"minimum": len(NAMES)},
        encoding={"upload": encoding, "download": "bf16"},
        **sections,
    )
    with Proxy() as proxy:
        async with syncer(folder, config) as running:
            host, port = str(running.addresses.data).rsplit(":", 1)
            links = [proxy.link((host, int(port))) for _ in NAMES]
            team = [
                CountedLearner(
                    link.address,
                    name,
                    config.to_policy(),
                    Script(step_seconds, seed=seed),
                    schema,
                    sockets=link.moved_bytes,
                )
                for seed, (name, link) in enumerate(zip(NAMES, links, strict=True))
            ]
            await asyncio.gather(*(learner.run() for learner in team))
            _, metrics = await fetch(running, "metrics")
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines())
    return team, [float(values[f"decoupled_diloco_syncer_{way}_bytes_total"]) for way in ("received", "sent")]


def need_of(schema, encoding):
    """What the planner says that one learner takes, for steps of a second."""
    count = sum(tensor.size for tensor in schema.tensors)
    return decoupled(Plan(count, len(NAMES), P, H, 2, 1.0, upload_bits=ENCODING_BITS[encoding], download_bits=16.0))


def check_payload(learner, need):
    """The payload of the counted rounds, and of the versions that they committed."""
    sent = sum(learner.sent[number] for number in range(FIRST_ROUND, LAST_ROUND + 1))
    received = sum(learner.received[number] for number in range(3, 3 + COUNTED))
    assert 8 * sent == pytest.approx(need.up * COUNTED * H, rel=0.01)
    assert 8 * received == pytest.approx(need.down * COUNTED * H, rel=0.01)


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_a_run_moves_the_payload_of_the_formula(tmp_path, encoding):
    schema = schema_of(1 << 18)
    need = need_of(schema, encoding)
    async with asyncio.timeout(60):
        team, (received, sent) = await play(tmp_path, schema, encoding, 0.02)
    for learner in team:
        check_payload(learner, need)
    # The syncer's own counters: all of that, the initial parameters, and what little the end of the run adds.
    contributions = 8 * (received - sum(learner.sent[0] for learner in team))
    both = need.times(len(team))
    assert 0.99 * both.up * INTERVALS * H < contributions < 1.01 * both.up * (INTERVALS + 1) * H
    assert sent > 0.99 * both.down * (INTERVALS - 1) * H / 8


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["bf16", "int4"])
async def test_the_sockets_of_ten_million_parameters_carry_the_bytes_of_the_formula(tmp_path, encoding):
    """With the barrier on nothing is under way when a learner begins to upload, so that every byte has its round."""
    schema = schema_of(10 << 20)
    need = need_of(schema, encoding)
    deadlines = {"lease_seconds": 60.0, "stall_seconds": 60.0, "upload_idle_seconds": 30.0, "attach_idle_seconds": 30.0}
    async with asyncio.timeout(110):
        team, _ = await play(tmp_path, schema, encoding, 0.02, inner={"barrier": True}, deadlines=deadlines)
    for learner in team:
        check_payload(learner, need)
        before, after = learner.sockets_at[FIRST_ROUND], learner.sockets_at[LAST_ROUND + 1]
        # Frames, checksums and the control stream included.
        for way, rate in ((Direction.UP, need.up), (Direction.DOWN, need.down)):
            assert 8 * (after[way] - before[way]) == pytest.approx(rate * COUNTED * H, rel=0.01)
