import json

from decoupled_diloco.core.ids import LearnerState, Role, RoundState, Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.status import LearnerStatus, MemberStatus, RoundStatus
from decoupled_diloco.core.syncer import SyncerMachine
from decoupled_diloco.v1 import admin_pb2
from decoupled_diloco.wire.admin import learner_to_wire, plain, round_to_wire, run_to_wire

VERSION = Version(1, 4, "ab" * 16)


def run_of(machine, **values):
    status = machine.status(0.0)
    defaults = {"run_id": "r", "uptime_seconds": 1.5, "config_values": {"run.id": "r"}, "value_counts": ()}
    return run_to_wire(status, **(defaults | values))


def test_a_run_in_plain_values_is_json_with_every_field():
    machine = SyncerMachine(Policy(fragment_count=2))
    machine.versions = [VERSION, VERSION]
    shown = plain(run_of(machine, value_counts=(10, 12)))
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown
    assert shown["run_id"] == "r"
    assert shown["phase"] == "initializing"
    assert shown["uptime_seconds"] == 1.5
    assert shown["loss"] is None
    assert shown["config_values"] == {"run.id": "r"}
    assert [fragment["value_count"] for fragment in shown["fragments"]] == [10, 12]
    assert shown["fragments"][0]["version"] == {"timeline": 1, "number": 4, "digest": "ab" * 16}
    assert set(shown) == {field.name.replace("_duration", "_seconds") for field in admin_pb2.Run.DESCRIPTOR.fields}


def test_what_json_has_no_form_for_is_null():
    machine = SyncerMachine(Policy())
    machine.evaluation = {"loss": 2.0}
    machine.evaluation_global_step = 24
    message = run_of(machine)
    message.goodput.goodput = float("nan")
    message.loss = float("inf")
    shown = plain(message)
    assert shown["goodput"]["goodput"] is None
    assert shown["loss"] is None
    assert shown["evaluation"] == {"loss": 2.0}
    assert shown["evaluation_global_step"] == 24


def test_a_learner_without_a_step_time_has_none():
    status = LearnerStatus(
        "a",
        3,
        Role.OBSERVER,
        LearnerState.STALLED,
        "silent",
        True,
        7,
        70,
        None,
        1.0,
        0.25,
        -1,
        5,
        None,
        7,
        2,
        9,
        (4, 5),
        0.5,
        10,
        20,
    )
    shown = plain(learner_to_wire(status))
    assert shown["step_seconds"] is None
    assert shown["last_seen_seconds"] == 0.25
    assert (shown["role"], shown["state"], shown["loss"]) == ("observer", "stalled", None)
    assert shown["rounds_merged_by_fragment"] == [4, 5]


def test_a_round_names_members_and_absentees():
    status = RoundStatus(
        9,
        1,
        24,
        RoundState.COMMITTED,
        "all",
        (MemberStatus("a", 1.0, 100, 4),),
        (("b", "lost"),),
        version=VERSION,
        merge_seconds=0.125,
    )
    shown = plain(round_to_wire(status))
    assert shown["members"] == [{"learner_id": "a", "weight_share": 1.0, "token_count": 100, "step_count": 4}]
    assert shown["absentees"] == [{"learner_id": "b", "reason": "lost"}]
    assert shown["merge_seconds"] == 0.125
    assert shown["version"]["number"] == 4
    assert plain(round_to_wire(RoundStatus(9, 1, 24, RoundState.OPEN, "")))["version"] is None
