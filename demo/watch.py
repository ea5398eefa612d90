"""What the demo sees of the run: the admin service's answers over time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import grpc
from google.protobuf.duration_pb2 import Duration

from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc, syncer_pb2

RPC_SECONDS = 5.0


@dataclass(slots=True)
class Sample:
    """One look at the run; `seconds` since the demo's start."""

    seconds: float
    run: admin_pb2.Run
    learners: list[admin_pb2.Learner]

    @property
    def tokens(self) -> int:
        """Tokens of all inner steps."""
        return self.run.goodput.tokens_processed

    @property
    def bits_per_byte(self) -> float | None:
        """Newest evaluation of the published parameters."""
        return self.run.evaluation.get("bits_per_byte")

    def learner(self, name: str) -> admin_pb2.Learner | None:
        """One learner."""
        return next((item for item in self.learners if item.learner_id == name), None)


@dataclass(slots=True)
class Mark:
    """A fault, or its end, as it happened."""

    seconds: float
    tokens: int
    action: str
    process: str


@dataclass(slots=True)
class Watch:
    """Polls the admin service and keeps what it saw."""

    address: str
    started: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    rounds: dict[int, admin_pb2.Round] = field(default_factory=dict)
    round_seconds: dict[int, float] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    syncer_back_seconds: list[float] = field(default_factory=list)
    """From each start of a killed syncer to its first commit."""
    bytes_before: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes up and down of learners' earlier incarnations."""
    _channel: grpc.Channel | None = None

    def seconds(self) -> float:
        """Since the demo's start."""
        return time.monotonic() - self.started

    def _stub(self) -> admin_pb2_grpc.AdminServiceStub:
        if self._channel is None:
            options = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 500))
            self._channel = grpc.insecure_channel(self.address, options=options)
        return admin_pb2_grpc.AdminServiceStub(self._channel)

    def look(self) -> Sample | None:
        """One look; None while the syncer does not answer."""
        stub = self._stub()
        try:
            run = stub.GetRun(admin_pb2.GetRunRequest(), timeout=RPC_SECONDS).run
            learners = stub.ListLearners(admin_pb2.ListLearnersRequest(page_size=1000), timeout=RPC_SECONDS).learners
            rounds = stub.ListRounds(admin_pb2.ListRoundsRequest(page_size=200), timeout=RPC_SECONDS).rounds
        except grpc.RpcError:
            return None
        sample = Sample(self.seconds(), run, list(learners))
        self._note_restarts(sample)
        self.samples.append(sample)
        for item in rounds:
            if item.state in ("committed", "abandoned") and item.round not in self.rounds:
                self.rounds[item.round] = item
                self.round_seconds[item.round] = sample.seconds
        return sample

    def _note_restarts(self, sample: Sample) -> None:
        for now in sample.learners:
            before = self.samples[-1].learner(now.learner_id) if self.samples else None
            if before is not None and before.incarnation != now.incarnation:
                up, down = self.bytes_before.get(now.learner_id, (0, 0))
                self.bytes_before[now.learner_id] = (up + before.uploaded_bytes, down + before.downloaded_bytes)

    def mark(self, action: str, learner: str) -> None:
        """Notes a fault."""
        tokens = self.samples[-1].tokens if self.samples else 0
        self.marks.append(Mark(self.seconds(), tokens, action, learner))

    def committed(self) -> list[admin_pb2.Round]:
        """Committed rounds in order."""
        return [item for _, item in sorted(self.rounds.items()) if item.state == "committed"]

    def share_done(self) -> float:
        """Share of the run's steps that are made."""
        if not self.samples or not self.samples[-1].run.total_steps:
            return 0.0
        run = self.samples[-1].run
        return run.global_step / run.total_steps

    def evaluations(self) -> list[tuple[int, float]]:
        """(tokens, bits per byte) whenever the figure changed."""
        points: list[tuple[int, float]] = []
        for sample in self.samples:
            value = sample.bits_per_byte
            if value is not None and (not points or points[-1][1] != value):
                points.append((sample.tokens, value))
        return points

    def transferred(self) -> tuple[int, int]:
        """Bytes up and down of all learners and incarnations."""
        up = sum(pair[0] for pair in self.bytes_before.values())
        down = sum(pair[1] for pair in self.bytes_before.values())
        for item in self.samples[-1].learners if self.samples else []:
            if item.role == syncer_pb2.ROLE_LEARNER:
                up, down = up + item.uploaded_bytes, down + item.downloaded_bytes
        return up, down

    def close(self) -> None:
        """Ends the channel."""
        if self._channel is not None:
            self._channel.close()


def duration_seconds(duration: Duration) -> float:
    """A proto duration in seconds."""
    return float(duration.ToTimedelta().total_seconds())
