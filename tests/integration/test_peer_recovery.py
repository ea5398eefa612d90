"""Recovery of the inner optimizer's state from peers, over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import optax

from decoupled_diloco.core.ids import LearnerState
from tests.integration.adept import Adept, training
from tests.integration.learner_threads import Trainee, eventually, figure, start_values, train
from tests.integration.syncers import config_of, machine_of, syncer, until
from tests.integration.test_learner_session import state_of

TLS = Path(__file__).parents[1] / "data" / "tls"
PEER = {"peer_listen": "127.0.0.1:0"}


def sources(adept: Adept) -> dict[str, float]:
    """How often its optimizer's state came from where."""
    registry = adept.session._parts.metrics.telemetry.registry
    found = {
        source: registry.get_sample_value("decoupled_diloco_learner_optimizer_recoveries_total", {"source": source})
        for source in ("peer", "snapshot", "fresh")
    }
    return {source: count for source, count in found.items() if count}


def count_of(state):
    return int(state[1][0].count)


async def begun(running, donor: Adept) -> None:
    """Waits until the run has parameters, some rounds, and a donor that has moments."""
    await until(running, lambda: machine_of(running).rounds.committed_count >= 8)
    await donor.has_steps(10)


def assert_is_of(joiner: Adept, *donors: Adept) -> None:
    """Every part of what the joiner began with is, bit for bit, what a donor had at some boundary."""
    for part, payload in enumerate(joiner.payloads(joiner.begun)):
        wanted = {donor.parts.copy(s, part).to_host().tobytes() for donor in donors for s in donor.states}
        assert payload.tobytes() in wanted, f"part {part}"


async def test_a_joiner_gets_the_moments_of_a_peer_bit_for_bit(tmp_path):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        a, b = Adept("a"), Adept("b", seed=2)
        async with training(address, config, a, **PEER):
            await begun(running, a)
            async with training(address, config, b, **PEER):
                await b.has_steps(5)
                assert b.recovered
                assert_is_of(b, a)
                assert count_of(b.begun) >= 10
                assert count_of(b.states[0]) == count_of(b.begun) + 1
                assert not np.array_equal(b.begun[1][0].mu["head"], np.zeros(4))
                assert sources(b) == {"peer": 1}
                size = sum(b.parts.payload_bytes(part) for part in range(b.parts.part_count))
                assert figure(b.session, "optimizer_received_bytes_total") == size
                assert figure(a.session, "optimizer_served_bytes_total") >= size
                assert figure(b.session, "optimizer_recovery_megabytes_per_second") > 0
            assert a.recovered is False, "it was there from the beginning"
            assert figure(a.session, "network_wait_seconds") == 0


async def test_a_run_that_has_just_begun_has_nothing_to_recover(tmp_path):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        a = Adept("a")
        async with training(str(running.addresses.data), config, a, **PEER):
            await a.has_steps(3)
            assert a.recovered is False
            assert sources(a) == {}
            assert count_of(a.begun) == 0


async def test_two_joiners_at_once_get_it_both(tmp_path):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        a, b, c = Adept("a"), Adept("b", seed=2), Adept("c", seed=3)
        async with training(address, config, a, **PEER):
            await begun(running, a)
            async with training(address, config, b, c, **PEER):
                await b.has_steps(3)
                await c.has_steps(3)
                assert b.recovered
                assert c.recovered
                assert_is_of(b, a, c)
                assert_is_of(c, a, b)


async def test_without_a_peer_a_joiner_starts_fresh_and_says_why(tmp_path, capsys):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        a, b = Adept("a"), Adept("b", seed=2)
        async with training(address, config, a):
            await begun(running, a)
            async with training(address, config, b, snapshot_dir=tmp_path / "none"):
                await b.has_steps(3)
                assert b.recovered is False
                assert sources(b) == {"fresh": 1}
                assert count_of(b.begun) == 0
    told = capsys.readouterr().err
    assert "optimizer_fresh" in told
    assert "there is no peer to ask" in told
    assert "there is no snapshot" in told


async def test_another_optimizer_is_refused_in_words(tmp_path, capsys):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        a, b = Adept("a"), Adept("b", seed=2, optimizer=optax.sgd(0.01, momentum=0.9))
        async with training(address, config, a, **PEER):
            await begun(running, a)
            async with training(address, config, b):
                await b.has_steps(3)
                assert sources(b) == {"fresh": 1}
    assert "only here: '1/0/mu' float32" in capsys.readouterr().err


async def test_an_optimizer_without_state_recovers_nothing(tmp_path):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        a, b = Adept("a", optimizer=optax.sgd(0.01)), Adept("b", seed=2, optimizer=optax.sgd(0.01))
        async with training(address, config, a, **PEER):
            await begun_stateless(running, a)
            async with training(address, config, b, **PEER):
                await b.has_steps(3)
                assert b.recovered is False
                assert sources(b) == {}


async def begun_stateless(running, adept: Adept) -> None:
    await until(running, lambda: machine_of(running).rounds.committed_count >= 8)
    await adept.has_steps(1)


async def test_a_learner_whose_loss_is_not_finite_goes_on_with_the_moments_of_a_peer(tmp_path):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        a, b = Adept("a"), Adept("b", seed=2)
        b.loss_of = lambda number, loss: loss * np.nan if number == 12 else loss
        async with training(address, config, a, **PEER):
            await begun(running, a)
            async with training(address, config, b, **PEER):
                await eventually(lambda: bool(b.renewed))
                await b.has_steps(3)
                (number,) = b.renewed
                assert b.renewed[number] is True
                assert sources(b) == {"peer": 2}


async def test_a_snapshot_of_ones_own_helps_where_no_peer_does(tmp_path, capsys):
    config = config_of()
    folder = {"snapshot_dir": tmp_path / "kept", "snapshot_seconds": 0.1}
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        a, b, again = Adept("a"), Adept("b", seed=2), Adept("b", seed=2)
        async with training(address, config, a):
            await begun(running, a)
            async with training(address, config, b, **folder):
                await eventually(lambda: b.session is not None and figure(b.session, "snapshots_total") >= 2)
            async with training(address, config, again, **folder):
                await again.has_steps(3)
                assert again.recovered
                assert sources(again) == {"snapshot": 1}
                assert_is_of(again, b)
            path = tmp_path / "kept" / "b.optimizer"
            assert [entry.name for entry in path.parent.iterdir()] == ["b.optimizer"], "nothing unfinished is left"
            content = bytearray(path.read_bytes())
            content[3] ^= 1
            path.write_bytes(content)
            rotten = Adept("b", seed=2)
            async with training(address, config, rotten, snapshot_dir=tmp_path / "kept"):
                await rotten.has_steps(3)
                assert sources(rotten) == {"fresh": 1}
    assert "part 0 is not what was written" in capsys.readouterr().err


async def test_a_loop_that_keeps_its_optimizer_to_itself_serves_nobody(tmp_path, capsys, monkeypatch):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        a, b = Trainee("a", start_values(1), step_seconds=0.01), Adept("b", seed=2)
        alone = asyncio.create_task(train(running, config, a, **PEER))
        await until(running, lambda: machine_of(running).rounds.committed_count >= 8)
        async with training(address, config, b, peer_recovery_seconds=10.0):
            await b.has_steps(3)
            assert sources(b) == {"fresh": 1}
        a.session.drain("enough")
        await alone
    assert "does not hand over the optimizer's state" in capsys.readouterr().err


async def test_a_joiner_that_is_overtaken_while_it_recovers_begins_with_the_newest_versions(tmp_path):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        a, b = Adept("a"), Adept("b", seed=2)
        async with training(address, config, a, **PEER):
            await begun(running, a)
            copies = a.session._optimizer._copies
            serve, copies.serve = copies.serve, lambda *_: None
            async with training(address, config, b, **PEER):
                await eventually(lambda: copies.has_waiting)
                joined_at = machine_of(running).global_step
                await until(running, lambda: machine_of(running).global_step >= joined_at + 24)
                assert b.begun is None
                assert state_of(running, "b") is LearnerState.RECOVERING, "nobody waits for it"
                published = list(machine_of(running).versions)
                copies.serve = serve
                await b.has_steps(3)
                assert b.recovered
                assert_is_of(b, a)
                applied = b.session._handover.snapshot().applied
                assert all(applied[p].number >= version.number for p, version in enumerate(published))
                assert b.session.schedule_step >= joined_at + 24


async def test_a_learner_that_drains_while_it_recovers_leaves(tmp_path):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        a, b = Adept("a"), Adept("b", seed=2)
        async with training(address, config, a, **PEER):
            await begun(running, a)
            a.session._optimizer._copies.serve = lambda *_: None
            async with training(address, config, b, **PEER) as tasks:
                await eventually(lambda: a.session._optimizer._copies.has_waiting)
                b.session.drain("told to")
                async with asyncio.timeout(10):
                    await asyncio.gather(*tasks)
                assert b.states == []
                assert b.session.end_reason == "told to"


async def test_peers_speak_tls_like_everybody_else(tmp_path, capsys):
    config = config_of()
    served = {"tls_certificate": TLS / "server.pem", "tls_key": TLS / "server.key"}
    dialled = {"tls_ca": TLS / "authority.pem"}
    own = {"tls_certificate": TLS / "caller.pem", "tls_key": TLS / "caller.key"}
    async with syncer(tmp_path, config, **served) as running:
        address = str(running.addresses.data)
        a, b = Adept("a"), Adept("b", seed=2)
        async with training(address, config, a, **PEER, **dialled, **own):
            await begun(running, a)
            async with training(address, config, b, **dialled):
                await b.has_steps(3)
                assert b.recovered
                assert_is_of(b, a)
    assert "optimizer_recovered" in capsys.readouterr().err


async def test_a_peer_elsewhere_is_not_dialled_in_plaintext(tmp_path, capsys):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        a, b = Adept("a"), Adept("b", seed=2)
        async with training(address, config, a, **PEER, peer_advertise="203.0.113.5:50061"):
            await begun(running, a)
            async with training(address, config, b):
                await b.has_steps(3)
                assert sources(b) == {"fresh": 1}
    assert "a at 203.0.113.5:50061: it is not on this machine, and there is no TLS here" in capsys.readouterr().err
