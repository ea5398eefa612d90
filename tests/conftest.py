"""What holds for every test: the CPU backend, and no silent skip where skips are forbidden.

With DECOUPLED_DILOCO_FORBID_SKIPS=1 (continuous integration) a skipped test or module is a failure, so that a
tool that went missing cannot turn a check off unnoticed.
"""

import os
from collections.abc import Generator

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Taken out of the environment, because the services that tests start refuse variables that are no setting.
FORBID_SKIPS = os.environ.pop("DECOUPLED_DILOCO_FORBID_SKIPS", "") == "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="store what the scenarios print as what they should print")


def _forbid(report: pytest.TestReport | pytest.CollectReport) -> None:
    if FORBID_SKIPS and report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skips are forbidden here ({reason})"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _forbid(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _forbid(report)
    return report
