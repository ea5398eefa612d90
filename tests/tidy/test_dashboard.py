"""The dashboard is what its table says, and every metric that it asks for is exported."""

import json
import re
from typing import Any

import promql_parser
import pytest

from syncer_service.metrics import NAMES
from tests.tidy.source_tree import ROOT
from tools import build_dashboard

PATH = build_dashboard.OUT
PROCESS_METRICS = {"process_resident_memory_bytes"}


def panels() -> list[dict[str, Any]]:
    """The panels that ask for something."""
    found: list[dict[str, Any]] = json.loads(PATH.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def queries() -> list[str]:
    """All PromQL of the dashboard, with Grafana's variables filled in."""
    texts = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [text.replace("$__rate_interval", "20s").replace("$learner", ".*") for text in texts]


def metrics(query: str) -> set[str]:
    """Names of the metrics in a query."""
    return set(re.findall(r"\b(?:decoupled_diloco|process)_[a-z_]+\b", query))


def test_the_committed_dashboard_is_the_one_of_the_table() -> None:
    assert PATH.read_text(encoding="utf-8") == build_dashboard.text(), "run `make dashboard`"


@pytest.mark.parametrize("query", queries())
def test_every_query_parses_and_asks_for_metrics_that_exist(query: str) -> None:
    promql_parser.parse(query)
    asked = metrics(query)
    assert asked
    assert asked - NAMES - PROCESS_METRICS == set()


def test_the_variable_reads_a_metric_that_exists() -> None:
    (variable,) = json.loads(PATH.read_text(encoding="utf-8"))["templating"]["list"]
    assert metrics(variable["definition"]) <= NAMES


def test_the_four_figures_of_goodput_stand_side_by_side() -> None:
    tops = {panel["title"]: panel["gridPos"]["y"] for panel in panels()}
    assert len({tops[name] for name in ("Goodput", "Token goodput", "Participation", "Uptime")}) == 1


def test_panels_explain_themselves_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        assert panel["description"], panel["title"]
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= build_dashboard.GRID_WIDTH
        taken |= cells


def test_grafana_finds_the_dashboard_where_compose_mounts_it() -> None:
    compose = (ROOT / "deploy/compose/compose.yaml").read_text()
    provider = (ROOT / "deploy/monitoring/grafana/provisioning/dashboards/dashboards.yaml").read_text()
    folder = re.search(r"path: (\S+)", provider)
    assert folder is not None
    assert f"../monitoring/grafana/dashboards:{folder[1]}:ro" in compose
    assert f"{folder[1]}/{PATH.name}" in compose
