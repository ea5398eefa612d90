from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_PROTOCOL_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_RUN_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_CONFIG_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_SCHEMA_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_FIELD: _ClassVar[ErrorReason]
    ERROR_REASON_TOO_MANY_LEARNERS: _ClassVar[ErrorReason]
    ERROR_REASON_OVERLOADED: _ClassVar[ErrorReason]
    ERROR_REASON_RUN_FINISHED: _ClassVar[ErrorReason]
    ERROR_REASON_NOT_READY: _ClassVar[ErrorReason]
    ERROR_REASON_STALE_INCARNATION: _ClassVar[ErrorReason]
    ERROR_REASON_NOT_JOINED: _ClassVar[ErrorReason]
    ERROR_REASON_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_SUPERSEDED: _ClassVar[ErrorReason]
    ERROR_REASON_CORRUPT: _ClassVar[ErrorReason]
    ERROR_REASON_TRANSFER_IDLE: _ClassVar[ErrorReason]
    ERROR_REASON_SHUTTING_DOWN: _ClassVar[ErrorReason]
    ERROR_REASON_WRONG_STATE: _ClassVar[ErrorReason]
    ERROR_REASON_UNIMPLEMENTED: _ClassVar[ErrorReason]
    ERROR_REASON_EVICTED: _ClassVar[ErrorReason]
    ERROR_REASON_INTERNAL: _ClassVar[ErrorReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_PROTOCOL_MISMATCH: ErrorReason
ERROR_REASON_RUN_MISMATCH: ErrorReason
ERROR_REASON_CONFIG_MISMATCH: ErrorReason
ERROR_REASON_SCHEMA_MISMATCH: ErrorReason
ERROR_REASON_INVALID_FIELD: ErrorReason
ERROR_REASON_TOO_MANY_LEARNERS: ErrorReason
ERROR_REASON_OVERLOADED: ErrorReason
ERROR_REASON_RUN_FINISHED: ErrorReason
ERROR_REASON_NOT_READY: ErrorReason
ERROR_REASON_STALE_INCARNATION: ErrorReason
ERROR_REASON_NOT_JOINED: ErrorReason
ERROR_REASON_NOT_FOUND: ErrorReason
ERROR_REASON_SUPERSEDED: ErrorReason
ERROR_REASON_CORRUPT: ErrorReason
ERROR_REASON_TRANSFER_IDLE: ErrorReason
ERROR_REASON_SHUTTING_DOWN: ErrorReason
ERROR_REASON_WRONG_STATE: ErrorReason
ERROR_REASON_UNIMPLEMENTED: ErrorReason
ERROR_REASON_EVICTED: ErrorReason
ERROR_REASON_INTERNAL: ErrorReason
