import datetime

from decoupled_diloco.v1 import fragment_pb2 as _fragment_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_LEARNER: _ClassVar[Role]
    ROLE_OBSERVER: _ClassVar[Role]

class Activity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTIVITY_UNSPECIFIED: _ClassVar[Activity]
    ACTIVITY_COMPUTE: _ClassVar[Activity]
    ACTIVITY_DATA_WAIT: _ClassVar[Activity]
    ACTIVITY_SYNC_STALL: _ClassVar[Activity]
    ACTIVITY_COMPILE: _ClassVar[Activity]
    ACTIVITY_STARTUP: _ClassVar[Activity]
    ACTIVITY_RECOVER: _ClassVar[Activity]
    ACTIVITY_PAUSED: _ClassVar[Activity]
    ACTIVITY_DRAINING: _ClassVar[Activity]

class DeclineReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECLINE_REASON_UNSPECIFIED: _ClassVar[DeclineReason]
    DECLINE_REASON_NO_COPY: _ClassVar[DeclineReason]
    DECLINE_REASON_ZERO_STEPS: _ClassVar[DeclineReason]
    DECLINE_REASON_NONFINITE: _ClassVar[DeclineReason]

class RoundOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUND_OUTCOME_UNSPECIFIED: _ClassVar[RoundOutcome]
    ROUND_OUTCOME_COMMITTED: _ClassVar[RoundOutcome]
    ROUND_OUTCOME_ABANDONED: _ClassVar[RoundOutcome]

class ContributionFate(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTRIBUTION_FATE_UNSPECIFIED: _ClassVar[ContributionFate]
    CONTRIBUTION_FATE_ACCEPTED: _ClassVar[ContributionFate]
    CONTRIBUTION_FATE_LATE: _ClassVar[ContributionFate]
    CONTRIBUTION_FATE_STALE_BASE: _ClassVar[ContributionFate]
    CONTRIBUTION_FATE_STALE_INCARNATION: _ClassVar[ContributionFate]
    CONTRIBUTION_FATE_ZERO_STEPS: _ClassVar[ContributionFate]
    CONTRIBUTION_FATE_SCHEMA: _ClassVar[ContributionFate]
    CONTRIBUTION_FATE_NONFINITE: _ClassVar[ContributionFate]
    CONTRIBUTION_FATE_NORM_OUTLIER: _ClassVar[ContributionFate]
    CONTRIBUTION_FATE_CORRUPT: _ClassVar[ContributionFate]
    CONTRIBUTION_FATE_ABORTED: _ClassVar[ContributionFate]
ROLE_UNSPECIFIED: Role
ROLE_LEARNER: Role
ROLE_OBSERVER: Role
ACTIVITY_UNSPECIFIED: Activity
ACTIVITY_COMPUTE: Activity
ACTIVITY_DATA_WAIT: Activity
ACTIVITY_SYNC_STALL: Activity
ACTIVITY_COMPILE: Activity
ACTIVITY_STARTUP: Activity
ACTIVITY_RECOVER: Activity
ACTIVITY_PAUSED: Activity
ACTIVITY_DRAINING: Activity
DECLINE_REASON_UNSPECIFIED: DeclineReason
DECLINE_REASON_NO_COPY: DeclineReason
DECLINE_REASON_ZERO_STEPS: DeclineReason
DECLINE_REASON_NONFINITE: DeclineReason
ROUND_OUTCOME_UNSPECIFIED: RoundOutcome
ROUND_OUTCOME_COMMITTED: RoundOutcome
ROUND_OUTCOME_ABANDONED: RoundOutcome
CONTRIBUTION_FATE_UNSPECIFIED: ContributionFate
CONTRIBUTION_FATE_ACCEPTED: ContributionFate
CONTRIBUTION_FATE_LATE: ContributionFate
CONTRIBUTION_FATE_STALE_BASE: ContributionFate
CONTRIBUTION_FATE_STALE_INCARNATION: ContributionFate
CONTRIBUTION_FATE_ZERO_STEPS: ContributionFate
CONTRIBUTION_FATE_SCHEMA: ContributionFate
CONTRIBUTION_FATE_NONFINITE: ContributionFate
CONTRIBUTION_FATE_NORM_OUTLIER: ContributionFate
CONTRIBUTION_FATE_CORRUPT: ContributionFate
CONTRIBUTION_FATE_ABORTED: ContributionFate

class ProtocolVersionRange(_message.Message):
    __slots__ = ("minimum", "maximum")
    MINIMUM_FIELD_NUMBER: _ClassVar[int]
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    minimum: int
    maximum: int
    def __init__(self, minimum: _Optional[int] = ..., maximum: _Optional[int] = ...) -> None: ...

class JoinRunRequest(_message.Message):
    __slots__ = ("protocol", "run_id", "learner_id", "role", "schema", "config_digest", "config_values", "encodings", "peer_address", "software_version")
    class ConfigValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONFIG_VALUES_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol: ProtocolVersionRange
    run_id: str
    learner_id: str
    role: Role
    schema: _fragment_pb2.Schema
    config_digest: str
    config_values: _containers.ScalarMap[str, str]
    encodings: _containers.RepeatedScalarFieldContainer[_fragment_pb2.Encoding]
    peer_address: str
    software_version: str
    def __init__(self, protocol: _Optional[_Union[ProtocolVersionRange, _Mapping]] = ..., run_id: _Optional[str] = ..., learner_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., schema: _Optional[_Union[_fragment_pb2.Schema, _Mapping]] = ..., config_digest: _Optional[str] = ..., config_values: _Optional[_Mapping[str, str]] = ..., encodings: _Optional[_Iterable[_Union[_fragment_pb2.Encoding, str]]] = ..., peer_address: _Optional[str] = ..., software_version: _Optional[str] = ...) -> None: ...

class DeadlineTable(_message.Message):
    __slots__ = ("heartbeat_duration", "lease_duration", "upload_idle_duration", "upload_minimum_duration", "initial_parameters_duration", "drain_duration", "rpc_duration", "attach_idle_duration")
    HEARTBEAT_DURATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_IDLE_DURATION_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_MINIMUM_DURATION_FIELD_NUMBER: _ClassVar[int]
    INITIAL_PARAMETERS_DURATION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_DURATION_FIELD_NUMBER: _ClassVar[int]
    RPC_DURATION_FIELD_NUMBER: _ClassVar[int]
    ATTACH_IDLE_DURATION_FIELD_NUMBER: _ClassVar[int]
    heartbeat_duration: _duration_pb2.Duration
    lease_duration: _duration_pb2.Duration
    upload_idle_duration: _duration_pb2.Duration
    upload_minimum_duration: _duration_pb2.Duration
    initial_parameters_duration: _duration_pb2.Duration
    drain_duration: _duration_pb2.Duration
    rpc_duration: _duration_pb2.Duration
    attach_idle_duration: _duration_pb2.Duration
    def __init__(self, heartbeat_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., upload_idle_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., upload_minimum_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., initial_parameters_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., drain_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., rpc_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., attach_idle_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LearnerPolicy(_message.Message):
    __slots__ = ("fragment_count", "interval_steps", "overlap_steps", "total_steps", "upload_encoding", "last_call", "barrier")
    FRAGMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_ENCODING_FIELD_NUMBER: _ClassVar[int]
    LAST_CALL_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    fragment_count: int
    interval_steps: int
    overlap_steps: int
    total_steps: int
    upload_encoding: _fragment_pb2.Encoding
    last_call: bool
    barrier: bool
    def __init__(self, fragment_count: _Optional[int] = ..., interval_steps: _Optional[int] = ..., overlap_steps: _Optional[int] = ..., total_steps: _Optional[int] = ..., upload_encoding: _Optional[_Union[_fragment_pb2.Encoding, str]] = ..., last_call: _Optional[bool] = ..., barrier: _Optional[bool] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("learner_id", "address")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    address: str
    def __init__(self, learner_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class JoinRunResponse(_message.Message):
    __slots__ = ("protocol_version", "run_id", "incarnation", "policy", "deadlines", "fragments", "slot", "cursor", "global_step", "paused", "initialized", "peers")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DEADLINES_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run_id: str
    incarnation: int
    policy: LearnerPolicy
    deadlines: DeadlineTable
    fragments: _containers.RepeatedCompositeFieldContainer[_fragment_pb2.FragmentVersion]
    slot: int
    cursor: int
    global_step: int
    paused: bool
    initialized: bool
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., policy: _Optional[_Union[LearnerPolicy, _Mapping]] = ..., deadlines: _Optional[_Union[DeadlineTable, _Mapping]] = ..., fragments: _Optional[_Iterable[_Union[_fragment_pb2.FragmentVersion, _Mapping]]] = ..., slot: _Optional[int] = ..., cursor: _Optional[int] = ..., global_step: _Optional[int] = ..., paused: _Optional[bool] = ..., initialized: _Optional[bool] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("learner_id", "incarnation", "applied", "progress")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    applied: _containers.RepeatedCompositeFieldContainer[_fragment_pb2.FragmentVersion]
    progress: Progress
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., applied: _Optional[_Iterable[_Union[_fragment_pb2.FragmentVersion, _Mapping]]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class ActivitySpan(_message.Message):
    __slots__ = ("activity", "duration")
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    activity: Activity
    duration: _duration_pb2.Duration
    def __init__(self, activity: _Optional[_Union[Activity, str]] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("local_step", "token_count", "step_duration", "running_step_duration", "activity", "spans", "loss", "schedule_step", "network_wait_duration", "uploaded_bytes", "downloaded_bytes")
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_DURATION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_STEP_DURATION_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_STEP_FIELD_NUMBER: _ClassVar[int]
    NETWORK_WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    UPLOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWNLOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    local_step: int
    token_count: int
    step_duration: _duration_pb2.Duration
    running_step_duration: _duration_pb2.Duration
    activity: Activity
    spans: _containers.RepeatedCompositeFieldContainer[ActivitySpan]
    loss: float
    schedule_step: int
    network_wait_duration: _duration_pb2.Duration
    uploaded_bytes: int
    downloaded_bytes: int
    def __init__(self, local_step: _Optional[int] = ..., token_count: _Optional[int] = ..., step_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., running_step_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., activity: _Optional[_Union[Activity, str]] = ..., spans: _Optional[_Iterable[_Union[ActivitySpan, _Mapping]]] = ..., loss: _Optional[float] = ..., schedule_step: _Optional[int] = ..., network_wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., uploaded_bytes: _Optional[int] = ..., downloaded_bytes: _Optional[int] = ...) -> None: ...

class FragmentApplied(_message.Message):
    __slots__ = ("fragment", "version", "local_step", "token_count", "kept_token_count", "download_duration")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_DURATION_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: _fragment_pb2.Version
    local_step: int
    token_count: int
    kept_token_count: int
    download_duration: _duration_pb2.Duration
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[_Union[_fragment_pb2.Version, _Mapping]] = ..., local_step: _Optional[int] = ..., token_count: _Optional[int] = ..., kept_token_count: _Optional[int] = ..., download_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ContributionDeclined(_message.Message):
    __slots__ = ("round", "reason")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    round: int
    reason: DeclineReason
    def __init__(self, round: _Optional[int] = ..., reason: _Optional[_Union[DeclineReason, str]] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("global_step", "figures")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    global_step: int
    figures: _containers.ScalarMap[str, float]
    def __init__(self, global_step: _Optional[int] = ..., figures: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("hello", "progress", "fragment_applied", "contribution_declined", "evaluation", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_APPLIED_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_DECLINED_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    progress: Progress
    fragment_applied: FragmentApplied
    contribution_declined: ContributionDeclined
    evaluation: Evaluation
    leaving: Leaving
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., fragment_applied: _Optional[_Union[FragmentApplied, _Mapping]] = ..., contribution_declined: _Optional[_Union[ContributionDeclined, _Mapping]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ...) -> None: ...

class AskContribution(_message.Message):
    __slots__ = ("round", "fragment", "base", "global_step", "due_local_step", "pace_ratio", "rounds_in_flight")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    DUE_LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    PACE_RATIO_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    round: int
    fragment: int
    base: _fragment_pb2.Version
    global_step: int
    due_local_step: int
    pace_ratio: float
    rounds_in_flight: int
    def __init__(self, round: _Optional[int] = ..., fragment: _Optional[int] = ..., base: _Optional[_Union[_fragment_pb2.Version, _Mapping]] = ..., global_step: _Optional[int] = ..., due_local_step: _Optional[int] = ..., pace_ratio: _Optional[float] = ..., rounds_in_flight: _Optional[int] = ...) -> None: ...

class LastCall(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class RoundClosed(_message.Message):
    __slots__ = ("round", "fragment", "outcome", "members", "global_step")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    round: int
    fragment: int
    outcome: RoundOutcome
    members: _containers.RepeatedScalarFieldContainer[str]
    global_step: int
    def __init__(self, round: _Optional[int] = ..., fragment: _Optional[int] = ..., outcome: _Optional[_Union[RoundOutcome, str]] = ..., members: _Optional[_Iterable[str]] = ..., global_step: _Optional[int] = ...) -> None: ...

class FragmentPublished(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _fragment_pb2.FragmentVersion
    def __init__(self, version: _Optional[_Union[_fragment_pb2.FragmentVersion, _Mapping]] = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason", "leave")
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    leave: bool
    def __init__(self, reason: _Optional[str] = ..., leave: _Optional[bool] = ...) -> None: ...

class Recover(_message.Message):
    __slots__ = ("reason", "peers")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, reason: _Optional[str] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class AskInitialParameters(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RunFinished(_message.Message):
    __slots__ = ("reason", "global_step")
    REASON_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    reason: str
    global_step: int
    def __init__(self, reason: _Optional[str] = ..., global_step: _Optional[int] = ...) -> None: ...

class PolicyChanged(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: LearnerPolicy
    def __init__(self, policy: _Optional[_Union[LearnerPolicy, _Mapping]] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ("global_step", "syncer_epoch")
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    SYNCER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    global_step: int
    syncer_epoch: int
    def __init__(self, global_step: _Optional[int] = ..., syncer_epoch: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("ask_contribution", "last_call", "round_closed", "fragment_published", "pause", "resume", "drain", "recover", "ask_initial_parameters", "run_finished", "policy_changed", "alive")
    ASK_CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    LAST_CALL_FIELD_NUMBER: _ClassVar[int]
    ROUND_CLOSED_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    RECOVER_FIELD_NUMBER: _ClassVar[int]
    ASK_INITIAL_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    RUN_FINISHED_FIELD_NUMBER: _ClassVar[int]
    POLICY_CHANGED_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    ask_contribution: AskContribution
    last_call: LastCall
    round_closed: RoundClosed
    fragment_published: FragmentPublished
    pause: Pause
    resume: Resume
    drain: Drain
    recover: Recover
    ask_initial_parameters: AskInitialParameters
    run_finished: RunFinished
    policy_changed: PolicyChanged
    alive: Alive
    def __init__(self, ask_contribution: _Optional[_Union[AskContribution, _Mapping]] = ..., last_call: _Optional[_Union[LastCall, _Mapping]] = ..., round_closed: _Optional[_Union[RoundClosed, _Mapping]] = ..., fragment_published: _Optional[_Union[FragmentPublished, _Mapping]] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., recover: _Optional[_Union[Recover, _Mapping]] = ..., ask_initial_parameters: _Optional[_Union[AskInitialParameters, _Mapping]] = ..., run_finished: _Optional[_Union[RunFinished, _Mapping]] = ..., policy_changed: _Optional[_Union[PolicyChanged, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ...) -> None: ...

class ContributionHeader(_message.Message):
    __slots__ = ("learner_id", "incarnation", "round", "fragment", "base", "local_step", "token_count", "step_count_since_base", "token_count_since_base", "cursor", "encoding", "payload_bytes", "schema_digest", "resume")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_SINCE_BASE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_SINCE_BASE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    round: int
    fragment: int
    base: _fragment_pb2.Version
    local_step: int
    token_count: int
    step_count_since_base: int
    token_count_since_base: int
    cursor: int
    encoding: _fragment_pb2.Encoding
    payload_bytes: int
    schema_digest: str
    resume: bool
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., round: _Optional[int] = ..., fragment: _Optional[int] = ..., base: _Optional[_Union[_fragment_pb2.Version, _Mapping]] = ..., local_step: _Optional[int] = ..., token_count: _Optional[int] = ..., step_count_since_base: _Optional[int] = ..., token_count_since_base: _Optional[int] = ..., cursor: _Optional[int] = ..., encoding: _Optional[_Union[_fragment_pb2.Encoding, str]] = ..., payload_bytes: _Optional[int] = ..., schema_digest: _Optional[str] = ..., resume: _Optional[bool] = ...) -> None: ...

class UploadContributionRequest(_message.Message):
    __slots__ = ("header", "chunk", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: ContributionHeader
    chunk: _fragment_pb2.Chunk
    trailer: _fragment_pb2.Trailer
    def __init__(self, header: _Optional[_Union[ContributionHeader, _Mapping]] = ..., chunk: _Optional[_Union[_fragment_pb2.Chunk, _Mapping]] = ..., trailer: _Optional[_Union[_fragment_pb2.Trailer, _Mapping]] = ...) -> None: ...

class UploadContributionResponse(_message.Message):
    __slots__ = ("wanted_offset", "fate")
    WANTED_OFFSET_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    wanted_offset: int
    fate: ContributionFate
    def __init__(self, wanted_offset: _Optional[int] = ..., fate: _Optional[_Union[ContributionFate, str]] = ...) -> None: ...

class DownloadFragmentRequest(_message.Message):
    __slots__ = ("learner_id", "incarnation", "fragment", "version", "held", "encodings", "offset", "next_version")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NEXT_VERSION_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    fragment: int
    version: _fragment_pb2.Version
    held: _fragment_pb2.Version
    encodings: _containers.RepeatedScalarFieldContainer[_fragment_pb2.Encoding]
    offset: int
    next_version: bool
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., fragment: _Optional[int] = ..., version: _Optional[_Union[_fragment_pb2.Version, _Mapping]] = ..., held: _Optional[_Union[_fragment_pb2.Version, _Mapping]] = ..., encodings: _Optional[_Iterable[_Union[_fragment_pb2.Encoding, str]]] = ..., offset: _Optional[int] = ..., next_version: _Optional[bool] = ...) -> None: ...

class DownloadHeader(_message.Message):
    __slots__ = ("version", "encoding", "delta_base", "payload_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    DELTA_BASE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: _fragment_pb2.FragmentVersion
    encoding: _fragment_pb2.Encoding
    delta_base: _fragment_pb2.Version
    payload_bytes: int
    def __init__(self, version: _Optional[_Union[_fragment_pb2.FragmentVersion, _Mapping]] = ..., encoding: _Optional[_Union[_fragment_pb2.Encoding, str]] = ..., delta_base: _Optional[_Union[_fragment_pb2.Version, _Mapping]] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class DownloadFragmentResponse(_message.Message):
    __slots__ = ("header", "chunk", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: DownloadHeader
    chunk: _fragment_pb2.Chunk
    trailer: _fragment_pb2.Trailer
    def __init__(self, header: _Optional[_Union[DownloadHeader, _Mapping]] = ..., chunk: _Optional[_Union[_fragment_pb2.Chunk, _Mapping]] = ..., trailer: _Optional[_Union[_fragment_pb2.Trailer, _Mapping]] = ...) -> None: ...

class InitialFragmentHeader(_message.Message):
    __slots__ = ("learner_id", "incarnation", "fragment", "value_count", "schema_digest")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VALUE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    fragment: int
    value_count: int
    schema_digest: str
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., fragment: _Optional[int] = ..., value_count: _Optional[int] = ..., schema_digest: _Optional[str] = ...) -> None: ...

class UploadInitialFragmentRequest(_message.Message):
    __slots__ = ("header", "chunk", "trailer")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    header: InitialFragmentHeader
    chunk: _fragment_pb2.Chunk
    trailer: _fragment_pb2.Trailer
    def __init__(self, header: _Optional[_Union[InitialFragmentHeader, _Mapping]] = ..., chunk: _Optional[_Union[_fragment_pb2.Chunk, _Mapping]] = ..., trailer: _Optional[_Union[_fragment_pb2.Trailer, _Mapping]] = ...) -> None: ...

class UploadInitialFragmentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRunRequest(_message.Message):
    __slots__ = ("learner_id", "incarnation", "reason")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    learner_id: str
    incarnation: int
    reason: str
    def __init__(self, learner_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class LeaveRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
