import datetime

from decoupled_diloco.v1 import fragment_pb2 as _fragment_pb2
from decoupled_diloco.v1 import syncer_pb2 as _syncer_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_PHASE_UNSPECIFIED: _ClassVar[RunPhase]
    RUN_PHASE_INITIALIZING: _ClassVar[RunPhase]
    RUN_PHASE_RUNNING: _ClassVar[RunPhase]
    RUN_PHASE_PAUSED: _ClassVar[RunPhase]
    RUN_PHASE_FINISHING: _ClassVar[RunPhase]
    RUN_PHASE_FINISHED: _ClassVar[RunPhase]
RUN_PHASE_UNSPECIFIED: RunPhase
RUN_PHASE_INITIALIZING: RunPhase
RUN_PHASE_RUNNING: RunPhase
RUN_PHASE_PAUSED: RunPhase
RUN_PHASE_FINISHING: RunPhase
RUN_PHASE_FINISHED: RunPhase

class GoodputFigures(_message.Message):
    __slots__ = ("goodput", "token_goodput", "participation", "uptime", "tokens_processed", "tokens_merged", "tokens_discarded", "activity_seconds", "steps_redone")
    class TokensDiscardedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ActivitySecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_GOODPUT_FIELD_NUMBER: _ClassVar[int]
    PARTICIPATION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PROCESSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MERGED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DISCARDED_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_REDONE_FIELD_NUMBER: _ClassVar[int]
    goodput: float
    token_goodput: float
    participation: float
    uptime: float
    tokens_processed: int
    tokens_merged: float
    tokens_discarded: _containers.ScalarMap[str, float]
    activity_seconds: _containers.ScalarMap[str, float]
    steps_redone: int
    def __init__(self, goodput: _Optional[float] = ..., token_goodput: _Optional[float] = ..., participation: _Optional[float] = ..., uptime: _Optional[float] = ..., tokens_processed: _Optional[int] = ..., tokens_merged: _Optional[float] = ..., tokens_discarded: _Optional[_Mapping[str, float]] = ..., activity_seconds: _Optional[_Mapping[str, float]] = ..., steps_redone: _Optional[int] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("run_id", "phase", "reason", "global_step", "total_steps", "rounds_committed_count", "rounds_abandoned_count", "learners_registered_count", "learners_live_count", "learners_participating_count", "goodput", "fragments", "effective_interval_steps", "warnings", "evaluation", "loss", "uptime_duration", "config_values", "evaluation_global_step")
    class EvaluationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ConfigValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_COMMITTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_ABANDONED_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_REGISTERED_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_LIVE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_PARTICIPATING_COUNT_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_INTERVAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_DURATION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_VALUES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    phase: RunPhase
    reason: str
    global_step: int
    total_steps: int
    rounds_committed_count: int
    rounds_abandoned_count: int
    learners_registered_count: int
    learners_live_count: int
    learners_participating_count: int
    goodput: GoodputFigures
    fragments: _containers.RepeatedCompositeFieldContainer[_fragment_pb2.FragmentVersion]
    effective_interval_steps: float
    warnings: _containers.RepeatedScalarFieldContainer[str]
    evaluation: _containers.ScalarMap[str, float]
    loss: float
    uptime_duration: _duration_pb2.Duration
    config_values: _containers.ScalarMap[str, str]
    evaluation_global_step: int
    def __init__(self, run_id: _Optional[str] = ..., phase: _Optional[_Union[RunPhase, str]] = ..., reason: _Optional[str] = ..., global_step: _Optional[int] = ..., total_steps: _Optional[int] = ..., rounds_committed_count: _Optional[int] = ..., rounds_abandoned_count: _Optional[int] = ..., learners_registered_count: _Optional[int] = ..., learners_live_count: _Optional[int] = ..., learners_participating_count: _Optional[int] = ..., goodput: _Optional[_Union[GoodputFigures, _Mapping]] = ..., fragments: _Optional[_Iterable[_Union[_fragment_pb2.FragmentVersion, _Mapping]]] = ..., effective_interval_steps: _Optional[float] = ..., warnings: _Optional[_Iterable[str]] = ..., evaluation: _Optional[_Mapping[str, float]] = ..., loss: _Optional[float] = ..., uptime_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., config_values: _Optional[_Mapping[str, str]] = ..., evaluation_global_step: _Optional[int] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class Learner(_message.Message):
    __slots__ = ("learner_id", "incarnation", "state", "local_step", "token_count", "step_duration", "last_seen_duration", "slot", "cursor", "loss", "rounds_behind_count", "rounds_merged_count", "uploaded_bytes", "downloaded_bytes", "reason", "role", "tokens_per_second", "schedule_step", "rounds_merged_by_fragment", "network_wait_duration")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_DURATION_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_DURATION_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_BEHIND_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_MERGED_COUNT_FIELD_NUMBER: _ClassVar[int]
    UPLOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWNLOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_STEP_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_MERGED_BY_FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    NETWORK_WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    state: str
    local_step: int
    token_count: int
    step_duration: _duration_pb2.Duration
    last_seen_duration: _duration_pb2.Duration
    slot: int
    cursor: int
    loss: float
    rounds_behind_count: int
    rounds_merged_count: int
    uploaded_bytes: int
    downloaded_bytes: int
    reason: str
    role: _syncer_pb2.Role
    tokens_per_second: float
    schedule_step: int
    rounds_merged_by_fragment: _containers.RepeatedScalarFieldContainer[int]
    network_wait_duration: _duration_pb2.Duration
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., state: _Optional[str] = ..., local_step: _Optional[int] = ..., token_count: _Optional[int] = ..., step_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., last_seen_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., slot: _Optional[int] = ..., cursor: _Optional[int] = ..., loss: _Optional[float] = ..., rounds_behind_count: _Optional[int] = ..., rounds_merged_count: _Optional[int] = ..., uploaded_bytes: _Optional[int] = ..., downloaded_bytes: _Optional[int] = ..., reason: _Optional[str] = ..., role: _Optional[_Union[_syncer_pb2.Role, str]] = ..., tokens_per_second: _Optional[float] = ..., schedule_step: _Optional[int] = ..., rounds_merged_by_fragment: _Optional[_Iterable[int]] = ..., network_wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListLearnersRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListLearnersResponse(_message.Message):
    __slots__ = ("learners", "next_page_token")
    LEARNERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    learners: _containers.RepeatedCompositeFieldContainer[Learner]
    next_page_token: str
    def __init__(self, learners: _Optional[_Iterable[_Union[Learner, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RoundMember(_message.Message):
    __slots__ = ("learner_id", "weight_share", "token_count", "step_count")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_SHARE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    weight_share: float
    token_count: int
    step_count: int
    def __init__(self, learner_id: _Optional[str] = ..., weight_share: _Optional[float] = ..., token_count: _Optional[int] = ..., step_count: _Optional[int] = ...) -> None: ...

class RoundAbsentee(_message.Message):
    __slots__ = ("learner_id", "reason")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    reason: str
    def __init__(self, learner_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("round", "fragment", "global_step", "state", "reason", "members", "absentees", "quorum_duration", "grace_duration", "last_call_duration", "merge_duration", "commit_duration", "rda_over_avg", "version")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ABSENTEES_FIELD_NUMBER: _ClassVar[int]
    QUORUM_DURATION_FIELD_NUMBER: _ClassVar[int]
    GRACE_DURATION_FIELD_NUMBER: _ClassVar[int]
    LAST_CALL_DURATION_FIELD_NUMBER: _ClassVar[int]
    MERGE_DURATION_FIELD_NUMBER: _ClassVar[int]
    COMMIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    RDA_OVER_AVG_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    round: int
    fragment: int
    global_step: int
    state: str
    reason: str
    members: _containers.RepeatedCompositeFieldContainer[RoundMember]
    absentees: _containers.RepeatedCompositeFieldContainer[RoundAbsentee]
    quorum_duration: _duration_pb2.Duration
    grace_duration: _duration_pb2.Duration
    last_call_duration: _duration_pb2.Duration
    merge_duration: _duration_pb2.Duration
    commit_duration: _duration_pb2.Duration
    rda_over_avg: float
    version: _fragment_pb2.Version
    def __init__(self, round: _Optional[int] = ..., fragment: _Optional[int] = ..., global_step: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., members: _Optional[_Iterable[_Union[RoundMember, _Mapping]]] = ..., absentees: _Optional[_Iterable[_Union[RoundAbsentee, _Mapping]]] = ..., quorum_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., grace_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., last_call_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., merge_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., commit_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., rda_over_avg: _Optional[float] = ..., version: _Optional[_Union[_fragment_pb2.Version, _Mapping]] = ...) -> None: ...

class ListRoundsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRoundsResponse(_message.Message):
    __slots__ = ("rounds", "next_page_token")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    rounds: _containers.RepeatedCompositeFieldContainer[Round]
    next_page_token: str
    def __init__(self, rounds: _Optional[_Iterable[_Union[Round, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class PauseRunRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class PauseRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class ResumeRunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class FinishRunRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class FinishRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class DrainLearnerRequest(_message.Message):
    __slots__ = ("learner_id", "reason")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    reason: str
    def __init__(self, learner_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainLearnerResponse(_message.Message):
    __slots__ = ("learner",)
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    learner: Learner
    def __init__(self, learner: _Optional[_Union[Learner, _Mapping]] = ...) -> None: ...

class EvictLearnerRequest(_message.Message):
    __slots__ = ("learner_id", "reason")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    reason: str
    def __init__(self, learner_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EvictLearnerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadmitLearnerRequest(_message.Message):
    __slots__ = ("learner_id",)
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    def __init__(self, learner_id: _Optional[str] = ...) -> None: ...

class ReadmitLearnerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("checkpoint_id", "run_id", "created_at", "reason", "automatic", "global_step", "timeline", "rounds_committed_count", "payload_bytes", "software_version", "versions")
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AUTOMATIC_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_COMMITTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    run_id: str
    created_at: str
    reason: str
    automatic: bool
    global_step: int
    timeline: int
    rounds_committed_count: int
    payload_bytes: int
    software_version: str
    versions: _containers.RepeatedCompositeFieldContainer[_fragment_pb2.Version]
    def __init__(self, checkpoint_id: _Optional[str] = ..., run_id: _Optional[str] = ..., created_at: _Optional[str] = ..., reason: _Optional[str] = ..., automatic: _Optional[bool] = ..., global_step: _Optional[int] = ..., timeline: _Optional[int] = ..., rounds_committed_count: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., software_version: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[_fragment_pb2.Version, _Mapping]]] = ...) -> None: ...

class CreateCheckpointRequest(_message.Message):
    __slots__ = ("checkpoint_id", "reason")
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    reason: str
    def __init__(self, checkpoint_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CreateCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class GetCheckpointRequest(_message.Message):
    __slots__ = ("checkpoint_id",)
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    def __init__(self, checkpoint_id: _Optional[str] = ...) -> None: ...

class GetCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints", "next_page_token", "unreadable")
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    next_page_token: str
    unreadable: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., unreadable: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteCheckpointRequest(_message.Message):
    __slots__ = ("checkpoint_id",)
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    def __init__(self, checkpoint_id: _Optional[str] = ...) -> None: ...

class DeleteCheckpointResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollBackRunRequest(_message.Message):
    __slots__ = ("checkpoint_id", "reason")
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    reason: str
    def __init__(self, checkpoint_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RollBackRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class ExportModelRequest(_message.Message):
    __slots__ = ("checkpoint_id",)
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    def __init__(self, checkpoint_id: _Optional[str] = ...) -> None: ...

class ExportModelResponse(_message.Message):
    __slots__ = ("path", "size_bytes", "global_step")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    global_step: int
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., global_step: _Optional[int] = ...) -> None: ...
