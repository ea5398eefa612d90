from decoupled_diloco.v1 import fragment_pb2 as _fragment_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OptimizerEntry(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class DownloadOptimizerStateRequest(_message.Message):
    __slots__ = ("learner_id", "run_id", "fragment", "version", "offset", "schema_digest", "entries", "copy_incarnation", "copy_step")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    COPY_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COPY_STEP_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    run_id: str
    fragment: int
    version: _fragment_pb2.Version
    offset: int
    schema_digest: str
    entries: _containers.RepeatedCompositeFieldContainer[OptimizerEntry]
    copy_incarnation: int
    copy_step: int
    def __init__(self, learner_id: _Optional[str] = ..., run_id: _Optional[str] = ..., fragment: _Optional[int] = ..., version: _Optional[_Union[_fragment_pb2.Version, _Mapping]] = ..., offset: _Optional[int] = ..., schema_digest: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[OptimizerEntry, _Mapping]]] = ..., copy_incarnation: _Optional[int] = ..., copy_step: _Optional[int] = ...) -> None: ...

class OptimizerStateHeader(_message.Message):
    __slots__ = ("version", "optimizer_step", "payload_bytes", "incarnation")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEP_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    version: _fragment_pb2.FragmentVersion
    optimizer_step: int
    payload_bytes: int
    incarnation: int
    def __init__(self, version: _Optional[_Union[_fragment_pb2.FragmentVersion, _Mapping]] = ..., optimizer_step: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class DownloadOptimizerStateResponse(_message.Message):
    __slots__ = ("header", "chunk", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: OptimizerStateHeader
    chunk: _fragment_pb2.Chunk
    trailer: _fragment_pb2.Trailer
    def __init__(self, header: _Optional[_Union[OptimizerStateHeader, _Mapping]] = ..., chunk: _Optional[_Union[_fragment_pb2.Chunk, _Mapping]] = ..., trailer: _Optional[_Union[_fragment_pb2.Trailer, _Mapping]] = ...) -> None: ...
