from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_FLOAT32: _ClassVar[Encoding]
    ENCODING_BF16: _ClassVar[Encoding]
    ENCODING_INT8: _ClassVar[Encoding]
    ENCODING_INT4: _ClassVar[Encoding]

class MergeRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MERGE_RULE_UNSPECIFIED: _ClassVar[MergeRule]
    MERGE_RULE_AVG: _ClassVar[MergeRule]
    MERGE_RULE_RDA: _ClassVar[MergeRule]
ENCODING_UNSPECIFIED: Encoding
ENCODING_FLOAT32: Encoding
ENCODING_BF16: Encoding
ENCODING_INT8: Encoding
ENCODING_INT4: Encoding
MERGE_RULE_UNSPECIFIED: MergeRule
MERGE_RULE_AVG: MergeRule
MERGE_RULE_RDA: MergeRule

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "rule", "stack_axis", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    STACK_AXIS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    rule: MergeRule
    stack_axis: int
    dtype: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., rule: _Optional[_Union[MergeRule, str]] = ..., stack_axis: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class Schema(_message.Message):
    __slots__ = ("tensors", "digest")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    digest: str
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., digest: _Optional[str] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("timeline", "number", "digest")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    number: int
    digest: str
    def __init__(self, timeline: _Optional[int] = ..., number: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class FragmentVersion(_message.Message):
    __slots__ = ("fragment", "version", "global_step", "value_count")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    VALUE_COUNT_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: Version
    global_step: int
    value_count: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., global_step: _Optional[int] = ..., value_count: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "checksum", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    checksum: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., checksum: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Trailer(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...
