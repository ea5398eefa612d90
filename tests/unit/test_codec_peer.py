import pytest

from decoupled_diloco.arrays.state_entry import StateEntry
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core.ids import Version
from decoupled_diloco.v1 import peer_pb2 as ppb
from decoupled_diloco.v1 import syncer_pb2 as spb
from decoupled_diloco.wire import codec, control, peer
from decoupled_diloco.wire.enums import CodecError

REQUEST = peer.PartRequest(
    learner="b",
    run_id="run",
    part=2,
    schema_digest="ab" * 32,
    entries=(StateEntry("0/mu", "float32", (7,)), StateEntry("0/count", "int32", ())),
    version=Version(2, 7, "cd" * 16),
    offset=2**40,
    copy=peer.CopyName(3, 41),
)


def sent(message):
    return type(message).FromString(message.SerializeToString())


def test_a_request_comes_back():
    assert peer.part_request_from_wire(sent(peer.part_request_to_wire(REQUEST))) == REQUEST
    first = peer.PartRequest("b", "run", 0, "", ())
    assert peer.part_request_from_wire(sent(peer.part_request_to_wire(first))) == first


@pytest.mark.parametrize("version", [None, Version(1, 3, "ef" * 16)])
def test_a_header_comes_back(version):
    header = peer.PartHeader(peer.CopyName(3, 41), 2**40, version)
    message = sent(peer.part_header_to_wire(2, header))
    assert message.WhichOneof("part") == "header"
    assert peer.part_header_from_wire(message.header) == header


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (ppb.DownloadOptimizerStateRequest(fragment=-1), r"fragment = -1"),
        (ppb.DownloadOptimizerStateRequest(offset=-5), r"offset = -5"),
        (ppb.DownloadOptimizerStateRequest(entries=[ppb.OptimizerEntry()] * (peer.ENTRIES_MAX + 1)), r"at most 20000"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(message, match):
    with pytest.raises(CodecError, match=match):
        peer.part_request_from_wire(message)


def test_peers_come_back_in_their_order():
    peers = (("b", "10.0.0.2:50061"), ("a", "10.0.0.1:50061"))
    answer = sent(spb.JoinRunResponse(peers=codec.peers_to_wire(peers)))
    assert codec.peers_from_wire(answer.peers) == peers
    recover = sent(control.instruction_to_wire(fx.RecoverLearner("c", 1, "a bad norm", peers)))
    assert recover.recover.reason == "a bad norm"
    assert codec.peers_from_wire(recover.recover.peers) == peers
