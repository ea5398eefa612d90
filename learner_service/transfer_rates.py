"""Rate limits and the deadlines of a run: how slow transfers may be made before the other end takes them for dead.

Streams take turns. What this process uploads is cut into small pieces, which the syncer hears of one by one; what it
downloads comes in chunks of the syncer's size, and the syncer hears of a chunk when all of it was taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from decoupled_diloco.arrays.encoding import encoding_named
from decoupled_diloco.config import RunConfig
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.runtime.config import Finding
from decoupled_diloco.runtime.rate_limit import BYTES_PER_SECOND_MAX, PIECE_BYTES_MIN, bytes_per_second_min
from decoupled_diloco.wire.stream import CHUNK_BYTES
from learner_service.config import EvaluatorSettings, LearnerSettings
from learner_service.downloader import DOWNLOADS_MAX
from learner_service.optimizer_recovery import PARTS_AT_A_TIME
from learner_service.peer import REQUESTS_MAX, WRITE_SECONDS_MAX
from learner_service.peer_client import CHUNK_SECONDS_MAX


def learner_findings(run: RunConfig, settings: LearnerSettings) -> Iterator[Finding]:
    """Limits of a learner that are too low for the deadlines of its run."""
    idle_seconds = run.deadlines.upload_idle_seconds
    if rate := settings.upload_bytes_per_second_max:
        streams = run.fragments.count + (REQUESTS_MAX if settings.peer_listen else 0)
        idle = min(idle_seconds, CHUNK_SECONDS_MAX) if settings.peer_listen else idle_seconds
        yield from _too_low("learner.upload", rate, PIECE_BYTES_MIN, streams, idle)
    if rate := settings.download_bytes_per_second_max:
        asks_peers = settings.peer_recovery_seconds > 0
        streams = DOWNLOADS_MAX + (PARTS_AT_A_TIME if asks_peers else 0)
        idle = min(idle_seconds, WRITE_SECONDS_MAX) if asks_peers else idle_seconds
        yield from _too_low("learner.download", rate, CHUNK_BYTES, streams, idle)


def evaluator_findings(run: RunConfig, settings: EvaluatorSettings) -> Iterator[Finding]:
    """A limit of an evaluator that is too low for the deadlines of its run."""
    if rate := settings.download_bytes_per_second_max:
        idle = run.deadlines.upload_idle_seconds
        yield from _too_low("evaluator.download", rate, CHUNK_BYTES, DOWNLOADS_MAX, idle)


def _too_low(what: str, rate: int, piece_bytes: int, streams: int, idle_seconds: float) -> Iterator[Finding]:
    lowest = bytes_per_second_min(piece_bytes, streams, idle_seconds)
    if rate < lowest:
        higher = f"Make the limit {lowest} or more, or 0 for none" if lowest <= BYTES_PER_SECOND_MAX else "Make it 0"
        yield Finding(
            (f"{what}_bytes_per_second_max", "deadlines.upload_idle_seconds"),
            f"too slow: up to {streams} streams take turns in pieces of {piece_bytes} bytes; one that moves "
            f"nothing for {idle_seconds:g} s is given up by the other end. {higher}, or give streams longer "
            "(deadlines.upload_idle_seconds, in the run file)",
        )


def upload_doubt(settings: LearnerSettings, policy: Policy, sizes: Sequence[int]) -> str:
    """Why uploads may never be whole in time although bytes always move; empty: they will be.

    Args:
        settings: with the limit.
        policy: the run's.
        sizes: float32 values of each fragment.
    """
    rate, seconds_min = settings.upload_bytes_per_second_max, policy.deadlines.upload_seconds_min
    payload_bytes = encoding_named(policy.upload_encoding).payload_bytes(max(sizes))
    if not rate or payload_bytes <= rate * seconds_min:
        return ""
    return (
        f"learner.upload_bytes_per_second_max = {rate}: a contribution of {payload_bytes} bytes takes "
        f"{payload_bytes / rate:.0f} s, and the syncer may give it up after deadlines.upload_seconds_min = "
        f"{seconds_min:g} s; make that longer, cut the model into more fragments, or choose a smaller encoding"
    )
