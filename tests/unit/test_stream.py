import random
import tracemalloc

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.v1 import fragment_pb2 as fpb
from decoupled_diloco.v1 import peer_pb2 as ppb
from decoupled_diloco.v1 import syncer_pb2 as spb
from decoupled_diloco.wire.stream import (
    CHUNK_BYTES_MAX,
    ChunkPart,
    CorruptPayloadError,
    CutPayload,
    PayloadSink,
    chunk_message,
    parse_chunk,
    part_parser,
    part_serializer,
    payload_digest,
    payload_messages,
    trailer_message,
)

PAYLOAD = random.Random(7).randbytes(10_000)
STREAMS = (
    spb.UploadContributionRequest,
    spb.UploadInitialFragmentRequest,
    spb.DownloadFragmentResponse,
    ppb.DownloadOptimizerStateResponse,
)


def parts(messages, message_class=spb.DownloadFragmentResponse):
    return [part_parser(message_class)(message) for message in messages]


def receive(sink, messages):
    """Feeds a whole stream to a sink."""
    for part in parts(messages):
        if isinstance(part, ChunkPart):
            sink.write(part)
        else:
            sink.finish(part.trailer.digest)


@given(offset=st.sampled_from([0, 1, 127, 128, 2**20, 2**31, 2**40]), data=st.binary(max_size=300))
def test_a_chunk_has_the_bytes_of_the_generated_classes_in_every_stream(offset, data):
    message = chunk_message(offset, memoryview(data))
    part = parse_chunk(message)
    for stream in STREAMS:
        generated = stream(chunk=fpb.Chunk(offset=offset, checksum=part.checksum, data=data))
        assert generated.SerializeToString() == message
    assert (part.offset, bytes(part.data)) == (offset, data)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_trailer_is_the_same_part_of_every_stream(stream):
    assert stream.FromString(trailer_message("abc")).trailer.digest == "abc"


def test_a_chunk_in_another_order_of_fields_is_understood():
    odd = fpb.Chunk(data=b"xyz").SerializeToString() + fpb.Chunk(offset=5).SerializeToString()
    message = b"\x12" + bytes([len(odd)]) + odd
    part = part_parser(spb.UploadContributionRequest)(message)
    assert (part.offset, bytes(part.data)) == (5, b"xyz")


def test_a_chunk_with_an_unknown_field_is_understood():
    odd = fpb.Chunk(offset=5, data=b"xyz").SerializeToString() + b"\x20\x01"
    part = part_parser(spb.UploadContributionRequest)(b"\x12" + bytes([len(odd)]) + odd)
    assert (part.offset, bytes(part.data)) == (5, b"xyz")


@pytest.mark.parametrize(
    "junk", [b"", b"\x12", b"\x12\xff", b"\x12\x05\x1a\x20ab", b"\x12\x02\x11\x00", b"\x12" + b"\xff" * 12]
)
def test_what_is_cut_off_is_no_chunk(junk):
    assert parse_chunk(junk) is None


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 4096, 10_000, 1000])
def test_a_payload_arrives_as_it_was_sent(chunk_bytes):
    buffer = bytearray(len(PAYLOAD))
    receive(PayloadSink(memoryview(buffer)), payload_messages(PAYLOAD, chunk_bytes=chunk_bytes))
    assert bytes(buffer) == PAYLOAD


def test_an_empty_payload_is_a_trailer():
    (trailer,) = parts(payload_messages(b""))
    PayloadSink(memoryview(bytearray())).finish(trailer.trailer.digest)


@pytest.mark.parametrize("chunk_bytes", [1000, 1001, 20_000])
@pytest.mark.parametrize("offset", [0, 1, 999, 1000, 1001, 9000, 9999, 10_000])
def test_a_cut_payload_serves_the_same_messages_from_any_offset(offset, chunk_bytes):
    cut = CutPayload(PAYLOAD, chunk_bytes=chunk_bytes)
    served = parts(cut.messages(offset))
    assert b"".join(part.data for part in served[:-1]) == PAYLOAD[offset:]
    assert [part.offset for part in served[:-1]][:1] in ([offset], [])
    assert served[-1].trailer.digest == cut.digest == payload_digest(PAYLOAD)
    assert all(part.checksum == xxhash.xxh3_64_intdigest(part.data) for part in served[:-1])
    assert cut.payload_bytes == len(PAYLOAD)


def test_a_cut_payload_makes_its_messages_as_they_are_asked_for():
    payload = bytes(8 << 20)
    tracemalloc.start()
    try:
        for message in CutPayload(payload).messages():
            del message
        assert tracemalloc.get_traced_memory()[1] < len(payload) / 2
    finally:
        tracemalloc.stop()


def test_a_digest_that_is_known_is_taken_for_granted():
    assert CutPayload(PAYLOAD, payload_digest(PAYLOAD)).digest == payload_digest(PAYLOAD)
    *_, trailer = parts(CutPayload(PAYLOAD, "known").messages())
    assert trailer.trailer.digest == "known"


def test_a_broken_stream_goes_on_where_it_stopped():
    buffer = bytearray(len(PAYLOAD))
    sink = PayloadSink(memoryview(buffer))
    for message in list(payload_messages(PAYLOAD, chunk_bytes=1000))[:3]:
        sink.write(parse_chunk(message))
    assert sink.received_bytes == 3000
    receive(sink, payload_messages(PAYLOAD, offset=3000, chunk_bytes=700))
    assert bytes(buffer) == PAYLOAD


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (ChunkPart(5, 0, memoryview(b"x")), "where 0 was next"),
        (ChunkPart(-1, 0, memoryview(b"x")), "where 0 was next"),
        (ChunkPart(0, 0, memoryview(b"")), "a chunk of 0 bytes"),
        (ChunkPart(0, 0, memoryview(bytes(CHUNK_BYTES_MAX + 1))), "allowed are 1 to"),
        (ChunkPart(0, 0, memoryview(b"123456789")), "beyond the payload's 8 bytes"),
        (ChunkPart(0, 1, memoryview(b"12345678")), "does not match its checksum"),
    ],
)
def test_a_wrong_chunk_is_refused_and_leaves_no_trace(part, words):
    buffer = bytearray(8)
    sink = PayloadSink(memoryview(buffer))
    with pytest.raises(CorruptPayloadError, match=words):
        sink.write(part)
    assert sink.received_bytes == 0
    assert buffer == bytes(8)


def test_a_payload_without_its_end_is_refused():
    sink = PayloadSink(memoryview(bytearray(10)))
    sink.write(parse_chunk(chunk_message(0, memoryview(b"12345"))))
    with pytest.raises(CorruptPayloadError, match="5 bytes before its 10"):
        sink.finish(payload_digest(b"12345"))


def test_a_payload_with_another_digest_is_refused_and_starts_over():
    sink = PayloadSink(memoryview(bytearray(5)))
    sink.write(parse_chunk(chunk_message(0, memoryview(b"12345"))))
    with pytest.raises(CorruptPayloadError, match="digest"):
        sink.finish(payload_digest(b"54321"))
    assert sink.received_bytes == 0
    receive(sink, payload_messages(b"12345"))


def test_an_offset_outside_of_the_payload_is_an_error():
    with pytest.raises(ValueError, match="offset 11 does not lie in a payload of 10 bytes"):
        next(payload_messages(bytes(10), offset=11))


def test_a_read_only_buffer_is_refused():
    with pytest.raises(ValueError, match="read-only"):
        PayloadSink(memoryview(b"12345"))


def test_headers_pass_through_parser_and_serializer():
    header = spb.DownloadFragmentResponse(header=spb.DownloadHeader(payload_bytes=3))
    assert part_parser(spb.DownloadFragmentResponse)(part_serializer(header)) == header
    assert part_serializer(b"ready") == b"ready"
