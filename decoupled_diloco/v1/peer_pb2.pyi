from decoupled_diloco.v1 import fragment_pb2 as _fragment_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DownloadOptimizerStateRequest(_message.Message):
    __slots__ = ("learner_id", "run_id", "fragment", "version", "offset")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    run_id: str
    fragment: int
    version: _fragment_pb2.Version
    offset: int
    def __init__(self, learner_id: _Optional[str] = ..., run_id: _Optional[str] = ..., fragment: _Optional[int] = ..., version: _Optional[_Union[_fragment_pb2.Version, _Mapping]] = ..., offset: _Optional[int] = ...) -> None: ...

class OptimizerStateHeader(_message.Message):
    __slots__ = ("version", "optimizer_step", "payload_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEP_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: _fragment_pb2.FragmentVersion
    optimizer_step: int
    payload_bytes: int
    def __init__(self, version: _Optional[_Union[_fragment_pb2.FragmentVersion, _Mapping]] = ..., optimizer_step: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class DownloadOptimizerStateResponse(_message.Message):
    __slots__ = ("header", "chunk", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: OptimizerStateHeader
    chunk: _fragment_pb2.Chunk
    trailer: _fragment_pb2.Trailer
    def __init__(self, header: _Optional[_Union[OptimizerStateHeader, _Mapping]] = ..., chunk: _Optional[_Union[_fragment_pb2.Chunk, _Mapping]] = ..., trailer: _Optional[_Union[_fragment_pb2.Trailer, _Mapping]] = ...) -> None: ...
