"""`python -m demo`: the main job on this machine, with faults (make demo)."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from decoupled_diloco.v1 import admin_pb2
from demo.plan import (
    REHEARSAL_STEPS,
    RESTART_SHARE,
    SUSPEND_SECONDS,
    SYNCER,
    SYNCER_DOWN_SECONDS,
    Fault,
    Plan,
    learner_names,
    steps_that_fit,
)
from demo.processes import Addresses, DemoError, Processes
from demo.report import NOTE, draw, summarise, write_summary
from demo.screen import Screen
from demo.watch import Watch

POLL_SECONDS = 0.5
START_SECONDS_MAX = 120.0
REHEARSAL_SECONDS = 8.0
REHEARSAL_WARM_STEPS = 20
FINAL_EVALUATION_SECONDS_MAX = 30.0


def main(arguments: list[str]) -> int:
    """Runs the demo; returns the exit code."""
    options = _parse(arguments)
    console = Console()
    folder = options.output
    _clear(folder)
    names = learner_names(options.learners)
    plan = Plan(folder, names, options.quorum, options.seconds, total_steps=options.steps or REHEARSAL_STEPS)
    processes = Processes(plan, Addresses.free())
    try:
        if not options.steps:
            plan = processes.plan = _measured(plan, processes, console)
        plan.write_run_file()
        return _run(plan, processes, console)
    except DemoError as error:
        console.print(f"[red]The demo failed:[/red] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("\nstopped")
        return 130
    finally:
        processes.stop_all()


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--learners", type=int, default=3, help="learner processes (default 3)")
    parser.add_argument("--seconds", type=float, default=100.0, help="how long training shall take (default 100)")
    parser.add_argument("--quorum", type=int, default=1, help="contributions a round needs, K (default 1)")
    parser.add_argument("--steps", type=int, default=0, help="global steps, instead of measuring how many fit")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder (default runs/demo)")
    options = parser.parse_args(arguments)
    if not 1 <= options.learners <= 32:
        parser.error(f"--learners {options.learners}: from 1 to 32")
    if not 1 <= options.quorum <= options.learners:
        parser.error(f"--quorum {options.quorum}: from 1 to the number of learners, {options.learners}")
    if options.seconds < 10:
        parser.error(f"--seconds {options.seconds:g}: at least 10")
    return options


def _clear(folder: Path) -> None:
    """Removes what an earlier demo wrote, but keeps its caches."""
    for path in folder.glob("*"):
        if path.name != "cache":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "logs").mkdir(parents=True, exist_ok=True)


def _measured(plan: Plan, processes: Processes, console: Console) -> Plan:
    """Fixes the number of steps by a rehearsal: all processes, without faults, for a moment."""
    plan.write_run_file()
    with console.status("preparing: tokenising the text and compiling (once), measuring the speed of this machine"):
        processes.warm()
        steps_per_second = _rehearse(plan, processes)
    processes.stop_all()
    processes.addresses = Addresses.free()
    _clear(plan.folder)
    steps = steps_that_fit(plan.seconds, steps_per_second)
    console.print(
        f"{len(plan.learners)} learners make {steps_per_second:.1f} global steps a second here: "
        f"{steps} of them in about {plan.seconds:.0f} s",
        highlight=False,
    )
    return replace(plan, total_steps=steps)


def _rehearse(plan: Plan, processes: Processes) -> float:
    """Global steps a second with everything running."""
    watch = Watch(processes.addresses.admin)
    _start_all(plan, processes, watch)
    first: tuple[float, int] | None = None
    while True:
        time.sleep(POLL_SECONDS)
        _check(processes)
        sample = watch.look()
        if sample is None:
            continue
        if watch.seconds() > START_SECONDS_MAX:
            raise DemoError(f"the learners make no steps; see {plan.folder / 'logs'}")
        learners = [sample.learner(name) for name in plan.learners]
        stepping = all(learner is not None and learner.local_step >= REHEARSAL_WARM_STEPS for learner in learners)
        if first is None and stepping and sample.bits_per_byte is not None:
            first = sample.seconds, sample.run.global_step
        elif first is not None and sample.seconds - first[0] >= REHEARSAL_SECONDS:
            watch.close()
            return (sample.run.global_step - first[1]) / (sample.seconds - first[0])


def _start_all(plan: Plan, processes: Processes, watch: Watch) -> None:
    processes.start_syncer()
    _await_first_look(watch, processes)
    for name in plan.learners:
        processes.start_learner(name)
    processes.start_evaluator()


def _run(plan: Plan, processes: Processes, console: Console) -> int:
    watch = Watch(processes.addresses.admin)
    _start_all(plan, processes, watch)
    page = f"http://{processes.addresses.http}/"
    console.print(f"the run's page: {page}   logs: {plan.folder / 'logs'}", highlight=False)
    rejoins: list[float] = []
    with Screen(plan, console, page) as screen:
        _watch_until_finished(plan, processes, watch, screen, rejoins)
        screen.show(watch)
    summary = summarise(plan, watch, rejoins)
    path, picture = write_summary(plan.folder, summary), draw(plan, watch)
    watch.close()
    _print_summary(plan, summary, path, picture, console)
    return 0


def _await_first_look(watch: Watch, processes: Processes) -> None:
    while watch.look() is None:
        _check(processes)
        if watch.seconds() > START_SECONDS_MAX:
            raise DemoError(f"the syncer does not answer; see {processes.log('syncer')}")
        time.sleep(POLL_SECONDS)


def _check(processes: Processes) -> None:
    failure = processes.failed()
    if failure is not None:
        raise DemoError(failure)


def _watch_until_finished(plan: Plan, processes: Processes, watch: Watch, screen: Screen, rejoins: list[float]) -> None:
    faults = list(plan.faults)
    rejoining: dict[str, tuple[float, int]] = {}
    undo_at: dict[str, float] = {}
    finished_at: float | None = None
    limit = START_SECONDS_MAX + 5 * plan.seconds
    while True:
        time.sleep(POLL_SECONDS)
        _check(processes)
        is_seen = watch.look() is not None
        _undo(processes, watch, screen, rejoining, undo_at)
        if not is_seen:
            continue
        screen.show(watch)
        while faults and watch.share_done() >= faults[0].at_share:
            _inject(faults.pop(0), processes, watch, screen, undo_at)
        _note_rejoins(watch, processes, rejoining, rejoins, screen)
        if watch.samples[-1].run.phase == admin_pb2.RUN_PHASE_FINISHED:
            finished_at = finished_at or watch.seconds()
            if processes.running["evaluator"].poll() is not None:
                watch.look()
                return
            if watch.seconds() - finished_at > FINAL_EVALUATION_SECONDS_MAX:
                return
        if watch.seconds() > limit:
            raise DemoError(f"the run did not finish within {limit:.0f} s; see {plan.folder / 'logs'}")


def _inject(
    fault: Fault,
    processes: Processes,
    watch: Watch,
    screen: Screen,
    undo_at: dict[str, float],
) -> None:
    name = fault.process
    match fault.action:
        case "kill" if name == SYNCER:
            processes.signal(name, signal.SIGKILL)
            screen.say("** kill -9 of the syncer itself; the learners train on")
            undo_at[name] = watch.seconds() + SYNCER_DOWN_SECONDS
        case "kill":
            processes.signal(name, signal.SIGKILL)
            screen.say(f"** kill -9 {name}; the others train on")
            undo_at[name] = watch.seconds() + RESTART_SHARE * processes.plan.seconds
        case "suspend":
            processes.signal(name, signal.SIGSTOP)
            undo_at[name] = watch.seconds() + SUSPEND_SECONDS
            screen.say(f"** {name} is suspended (SIGSTOP) for {SUSPEND_SECONDS:.0f} s")
    watch.mark(fault.action, name)


def _undo(
    processes: Processes,
    watch: Watch,
    screen: Screen,
    rejoining: dict[str, tuple[float, int]],
    undo_at: dict[str, float],
) -> None:
    """Starts what was killed, lets go on what was suspended."""
    for name, when in list(undo_at.items()):
        if watch.seconds() < when:
            continue
        del undo_at[name]
        if processes.running[name].poll() is None:
            processes.signal(name, signal.SIGCONT)
            watch.mark("resume", name)
            screen.say(f"** {name} goes on (SIGCONT)")
        elif name == SYNCER:
            processes.start_syncer()
            rejoining[name] = (watch.seconds(), watch.samples[-1].run.rounds_committed_count)
            watch.mark("start", name)
            screen.say("** the syncer is started again on what it had committed")
        else:
            known = watch.samples[-1].learner(name)
            processes.start_learner(name)
            rejoining[name] = (watch.seconds(), known.rounds_merged_count if known else 0)
            watch.mark("start", name)
            screen.say(f"** {name} is started again, with nothing but its id")


def _note_rejoins(
    watch: Watch,
    processes: Processes,
    rejoining: dict[str, tuple[float, int]],
    rejoins: list[float],
    screen: Screen,
) -> None:
    """A learner is back when a round merged a contribution of its new incarnation, the syncer when a round commits."""
    for name, (started, merged) in list(rejoining.items()):
        if name == SYNCER:
            if watch.samples[-1].run.rounds_committed_count > merged:
                del rejoining[name]
                watch.syncer_back_seconds.append(watch.seconds() - started)
                screen.say(f"** rounds commit again {watch.syncer_back_seconds[-1]:.1f} s after the syncer's start")
            continue
        learner = watch.samples[-1].learner(name)
        if learner is not None and learner.rounds_merged_count > merged:
            del rejoining[name]
            rejoins.append(watch.seconds() - started)
            screen.say(f"** {name} is back in the rounds {rejoins[-1]:.1f} s after its start")


def _print_summary(plan: Plan, summary: dict[str, object], path: Path, picture: Path, console: Console) -> None:
    model = plan.folder / "model.safetensors"
    lines = (
        (
            f"\n{summary['rounds_committed']} rounds merged ({summary['rounds_abandoned']} abandoned) in "
            f"{summary['wall_seconds']} s; bits per byte {summary['eval_bits_per_byte_first']} -> "
            f"{summary['eval_bits_per_byte_last']}"
        ),
        (
            f"goodput {summary['goodput']:.1%}, token goodput {summary['token_goodput']:.1%}, "
            f"participation {summary['participation']:.1%}, uptime {summary['uptime']:.1%} ({NOTE})"
        ),
        f"summary  {path}",
        f"picture  {picture}",
        f"model    {model}",
        "sample text from it:",
        (
            f"  {sys.executable if not sys.prefix.endswith('.venv') else '.venv/bin/python'} -m "
            f'learner_service.workloads.language_model.sample --model {model} --prompt "The state of the union"'
        ),
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
