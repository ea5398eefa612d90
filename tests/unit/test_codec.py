import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.arrays.schema import Schema, TensorSpec
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.ids import Activity, Decline, Fate, Role, Version
from decoupled_diloco.core.policy import Deadlines, Policy
from decoupled_diloco.v1 import fragment_pb2 as fpb
from decoupled_diloco.v1 import syncer_pb2 as spb
from decoupled_diloco.wire import codec, control, enums

VERSION = Version(2, 7, "ab" * 16)
SCHEMA = Schema(
    [
        TensorSpec("embed/table", (10, 4), rule="avg"),
        TensorSpec("layers/kernel", (3, 4, 4), dtype="bfloat16", stack_axis=0),
        TensorSpec("scale", ()),
    ]
)
PROGRESS = ev.Progress(
    local_step=41,
    token_count=4100,
    activity=Activity.DATA_WAIT,
    step_seconds=0.25,
    running_step_seconds=0.125,
    spans=((Activity.COMPUTE, 1.5), (Activity.SYNC_STALL, 0.5)),
    loss=3.25,
    schedule_step=99,
    network_wait_seconds=0.5,
    uploaded_bytes=2**40,
    downloaded_bytes=2**41,
)


def sent(message):
    """What the other end parses."""
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.1, 1.0, 1.999999999, 86400.5])
def test_durations_keep_nanoseconds(seconds):
    assert codec.duration_from_wire(sent(codec.duration_to_wire(seconds))) == seconds


@given(st.floats(min_value=0, max_value=1e6))
def test_durations_are_right_to_a_nanosecond(seconds):
    assert abs(codec.duration_from_wire(codec.duration_to_wire(seconds)) - seconds) <= 1e-9


def test_versions_and_schema_come_back():
    assert codec.version_from_wire(sent(codec.version_to_wire(VERSION))) == VERSION
    assert codec.schema_from_wire(sent(codec.schema_to_wire(SCHEMA))) == SCHEMA
    published = codec.fragment_version_to_wire(3, VERSION, 17, 1000)
    assert codec.fragment_version_from_wire(sent(published)) == lev.Published(3, VERSION, 17)
    assert published.value_count == 1000


def test_a_schema_whose_digest_is_not_its_own_is_refused():
    message = codec.schema_to_wire(SCHEMA)
    message.tensors[0].shape[0] = 11
    with pytest.raises(codec.CodecError, match="run the same release on both"):
        codec.schema_from_wire(message)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rule": 9}, r"rule = 9: this release knows 1 \(avg\), 2 \(rda\)"),
        ({"shape": [0, 4]}, "extent below 1"),
        ({"dtype": "int8"}, "only float32, bfloat16, float16 can be exchanged"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(change, words):
    plain = {"name": "a", "shape": [2, 4], "rule": fpb.MERGE_RULE_AVG, "dtype": "float32"} | change
    with pytest.raises(codec.CodecError, match=words):
        codec.schema_from_wire(fpb.Schema(tensors=[fpb.TensorSpec(**plain)]))


def test_the_table_of_deadlines_reaches_the_learner():
    ours = Deadlines(*(float(index) for index in range(1, 1 + len(dataclasses.fields(Deadlines)))))
    theirs = codec.deadlines_from_wire(sent(codec.deadlines_to_wire(ours)))
    syncers_own = {"stall_seconds", "last_call_seconds_min", "last_call_seconds_max"}
    for field in dataclasses.fields(Deadlines):
        if field.name not in syncers_own:
            assert getattr(theirs, field.name) == getattr(ours, field.name), field.name


def test_the_policy_in_force_replaces_the_learners_own():
    ours = Policy(fragment_count=3, interval_steps=9, overlap_steps=1, total_steps=90, upload_encoding="float32")
    theirs = codec.policy_from_wire(sent(codec.policy_to_wire(ours)), Policy(apply_rule="carry"))
    assert theirs == ours.changed(apply_rule="carry")


def test_an_encoding_of_a_newer_release_is_named():
    with pytest.raises(enums.CodecError, match=r"encoding = 9: this release knows 1 \(float32\), 2 \(bf16\)"):
        enums.encoding_from_wire(9)
    assert enums.known_encodings([9, fpb.ENCODING_BF16]) == {"bf16"}


def test_enumerations_come_back():
    assert [enums.role_from_wire(enums.role_to_wire(role)) for role in Role] == list(Role)
    assert [enums.fate_from_wire(enums.fate_to_wire(fate)) for fate in Fate] == list(Fate)
    assert [enums.decline_from_wire(enums.decline_to_wire(reason)) for reason in Decline] == list(Decline)
    assert enums.fate_from_wire(99) is Fate.ABORTED
    assert enums.decline_from_wire(99) is Decline.NO_COPY
    for refuses in (enums.role_from_wire, enums.activity_from_wire):
        with pytest.raises(enums.CodecError, match="= 0: must be one of 1"):
            refuses(0)


def test_the_header_of_a_contribution_comes_back():
    header = ev.ContributionHeader("a", 3, 12, 4, VERSION, 100, 9000, 24, 2400, 101, 4096)
    message = sent(codec.contribution_header_to_wire(header, "bf16", SCHEMA.digest, resume=True))
    assert codec.contribution_header_from_wire(message, SCHEMA.digest) == header
    assert codec.contribution_header_from_wire(message, "other").schema_matches is False
    assert message.resume
    assert enums.encoding_from_wire(message.encoding) == "bf16"


def test_negative_counts_are_refused_by_name():
    with pytest.raises(codec.CodecError, match=r"ContributionHeader.cursor = -1: must be at least 0"):
        codec.contribution_header_from_wire(spb.ContributionHeader(cursor=-1), "")
    with pytest.raises(codec.CodecError, match=r"Progress.local_step = -2"):
        codec.progress_from_wire(spb.Progress(local_step=-2, activity=1))


REPORTS = [
    ev.ProgressReported("a", 3, PROGRESS),
    ev.ProgressReported("a", 3, ev.Progress(0, 0)),
    ev.FragmentApplied("a", 3, 5, VERSION, 40, 4000, 12, 0.75),
    ev.FragmentApplied("a", 3, 5, VERSION, 40, 4000),
    ev.ContributionDeclined("a", 3, 8, Decline.ZERO_STEPS),
    ev.EvaluationReported("a", 3, 120, (("bits_per_byte", 2.5), ("loss", 3.5))),
    ev.LeavingAnnounced("a", 3, "maintenance"),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_reports_reach_the_syncer(report):
    assert control.report_from_wire(sent(control.report_to_wire(report)), "a", 3) == report


def test_hello_opens_the_stream_and_only_that():
    event = ev.LearnerAttached("a", 3, ((0, VERSION), (1, VERSION)), PROGRESS)
    message = sent(control.hello_to_wire(event))
    assert control.hello_from_wire(message) == event
    with pytest.raises(codec.CodecError, match="only the first message"):
        control.report_from_wire(message, "a", 3)
    with pytest.raises(codec.CodecError, match="first message on Attach must be hello"):
        control.hello_from_wire(spb.AttachRequest(leaving=spb.Leaving()))


def test_figures_that_are_not_finite_are_left_out():
    figures = {"loss": float("nan"), "bits_per_byte": 2.0}
    message = spb.AttachRequest(evaluation=spb.Evaluation(global_step=1, figures=figures))
    assert control.report_from_wire(message, "a", 3).figures == (("bits_per_byte", 2.0),)
    message = spb.AttachRequest(progress=spb.Progress(activity=1, loss=float("inf")))
    assert control.report_from_wire(message, "a", 3).progress.loss is None


def test_too_many_figures_are_refused():
    figures = {f"figure {index}": 1.0 for index in range(control.EVALUATION_FIGURES_MAX + 1)}
    with pytest.raises(codec.CodecError, match="holds 17 figures: at most 16"):
        control.report_from_wire(spb.AttachRequest(evaluation=spb.Evaluation(figures=figures)), "a", 3)


INSTRUCTIONS = [
    (
        fx.AskContribution("a", 3, 9, 1, VERSION, 24, 25, 0.5, 4),
        lev.Asked(9, 1, VERSION, 24, 25, 0.5, 4),
    ),
    (fx.SendLastCall("a", 3, 9), lev.LastCalled(9)),
    (fx.CloseRound(9, 1, True, ("a", "b"), 24, "all"), lev.RoundEnded(9, 1, True, ("a", "b"), 24)),
    (fx.CloseRound(9, 1, False, (), 24, "none"), lev.RoundEnded(9, 1, False, (), 24)),
    (fx.PublishFragment(1, VERSION, 25), lev.Published(1, VERSION, 25)),
    (fx.AnnounceFragment("a", 3, 1, VERSION, 25), lev.Published(1, VERSION, 25)),
    (fx.AskInitialParameters("a", 3), lev.InitialAsked()),
    (fx.RecoverLearner("a", 3, "nan"), lev.RecoverAsked("nan")),
    (fx.DrainLearner("a", 3, "end", False), lev.DrainAsked("end", False)),
    (fx.PauseLearner("a", 3, "lunch"), lev.PauseAsked("lunch")),
    (fx.ResumeLearner("a", 3), lev.ResumeAsked()),
    (fx.FinishLearner("a", 3, "done", 96), lev.Ended("done", 96)),
]


@pytest.mark.parametrize(("effect", "event"), INSTRUCTIONS, ids=lambda value: type(value).__name__)
def test_instructions_reach_the_learner(effect, event):
    assert control.instruction_from_wire(sent(control.instruction_to_wire(effect, 10))) == event


def test_a_sign_of_life_says_which_start_of_the_syncer_it_is_of():
    assert control.instruction_from_wire(sent(control.alive_to_wire(5, 3))) == lev.SyncerSeen(3)


def test_what_a_learner_need_not_act_on_is_passed_over():
    changed = control.instruction_to_wire(fx.ChangePolicy(Policy(quorum_minimum=2)))
    assert control.instruction_from_wire(changed) is None
    assert changed.policy_changed.policy.fragment_count == 8
    assert control.instruction_from_wire(spb.AttachResponse()) is None
    assert control.report_from_wire(spb.AttachRequest(), "a", 3) is None
