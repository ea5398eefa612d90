"""Writes the Grafana dashboard from the table of panels below: `python tools/build_dashboard.py`.

The JSON is committed, because that is what Grafana provisions; a tidy test builds it anew and compares, and holds
every metric that a panel asks for against those that the syncer exports.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "deploy/monitoring/grafana/dashboards/run.json"

S = "decoupled_diloco_syncer"
L = f"{S}_learner"
PICKED = '{learner=~"$learner"}'
GRID_WIDTH = 24
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}


@dataclass(frozen=True)
class Panel:
    """One panel. `queries` maps a legend (Grafana's `{{label}}` allowed) to a PromQL expression."""

    title: str
    text: str
    queries: dict[str, str]
    unit: str = "short"
    width: int = 8
    height: int = 8
    kind: str = "timeseries"
    stacked: bool = False
    maximum: float | None = None
    thresholds: tuple[tuple[str, float | None], ...] = field(default=(("green", None),))


def rate(metric: str, by: str = "") -> str:
    """Per-second increase over Grafana's interval, summed by a label."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({S}_{metric}[$__rate_interval]))"


def mean(metric: str) -> str:
    """Mean of a histogram over Grafana's interval."""
    return f"rate({S}_{metric}_sum[$__rate_interval]) / rate({S}_{metric}_count[$__rate_interval])"


def quantile(metric: str, share: float) -> str:
    """A quantile of a histogram over Grafana's interval."""
    return f"histogram_quantile({share:g}, rate({S}_{metric}_bucket[$__rate_interval]))"


def share(title: str, metric: str, text: str) -> Panel:
    """A figure between 0 and 1 as a large number."""
    limits: tuple[tuple[str, float | None], ...] = (("red", None), ("orange", 0.6), ("green", 0.8))
    return Panel(title, text, {"": f"{S}_{metric}"}, "percentunit", 3, 4, "stat", maximum=1, thresholds=limits)


def number(title: str, query: str, text: str, unit: str = "short", width: int = 3) -> Panel:
    """A large number."""
    return Panel(title, text, {"": query}, unit, width, 4, "stat")


ROWS: dict[str, list[Panel]] = {
    "The run": [
        share("Goodput", "goodput_ratio", "Compute seconds over allocated learner-seconds. Says nothing alone."),
        share("Token goodput", "token_goodput_ratio", "Merged tokens over those of a cluster without failures."),
        share("Participation", "participation_ratio", "Members over live learners, mean of committed rounds."),
        share("Uptime", "uptime_ratio", "Share of time in which at least one learner advanced."),
        number("Global step", f"{S}_global_steps", "Steps that the run has made."),
        number("Steps in all", f"{S}_total_steps", "The run finishes after this step; 0: open end."),
        number(
            "Bits per byte",
            f'{S}_evaluation{{figure="bits_per_byte"}}',
            "Newest evaluation of published parameters.",
        ),
        number("Warnings", f"{S}_warnings", "Warnings in force; the syncer's status page has their words."),
        Panel(
            "Learners",
            "Three numbers, because live learners that do not participate are easily overlooked.",
            {
                "registered": f"{S}_learners_registered",
                "live": f"{S}_learners_live",
                "in the newest round": f"{S}_learners_participating",
            },
        ),
        Panel(
            "Loss",
            "Training loss by learner, and evaluated loss of the published parameters.",
            {"{{learner}}": f"{L}_loss{PICKED}", "evaluated": f'{S}_evaluation{{figure="loss"}}'},
        ),
        Panel("Phase", "1 for the phase that the run is in.", {"{{phase}}": f"{S}_run_phase"}, maximum=1),
    ],
    "Rounds": [
        Panel("Rounds closed", "Per second, by outcome.", {"{{outcome}}": rate("rounds_total", "outcome")}, "ops"),
        Panel(
            "Contributors of a round",
            "Mean of committed rounds, beside the live learners.",
            {"contributors": mean("round_contributors"), "live": f"{S}_learners_live"},
        ),
        Panel(
            "Where a round's time goes",
            "Mean seconds from the first start to the commit.",
            {
                part.replace("_", " "): mean(f"round_{part}_seconds")
                for part in ("quorum_wait", "grace", "last_call", "merge", "commit")
            },
            "s",
            stacked=True,
        ),
        Panel("Contributions", "Per second, by fate.", {"{{fate}}": rate("contributions_total", "fate")}, "ops"),
        Panel(
            "Effective sync interval",
            "Inner steps per sync of a fragment as measured; above H: raise the overlap.",
            {"steps": f"{S}_effective_interval_steps"},
        ),
        Panel(
            "RDA over Avg",
            "Norm of the merged delta over that of the plain average; above 1 where learners disagree.",
            {"ratio": f"{S}_rda_over_avg_ratio"},
        ),
        Panel("Rounds under way", "By state.", {"{{state}}": f"{S}_rounds_under_way"}, stacked=True),
        Panel(
            "Step and sync",
            "Fastest live learner's step beside upload, merge, commit and download together.",
            {"step": f"{S}_fastest_step_seconds", "sync": f"{S}_sync_seconds", "quorum": f"{S}_quorum_seconds"},
            "s",
        ),
        Panel("Learners by state", "Every registered learner.", {"{{state}}": f"{S}_learners"}, stacked=True),
    ],
    "Learners": [
        Panel("Tokens per second", "By learner.", {"{{learner}}": f"{L}_tokens_per_second{PICKED}"}),
        Panel("Step time", "By learner.", {"{{learner}}": f"{L}_step_seconds{PICKED}"}, "s"),
        Panel(
            "Staleness",
            "Rounds since the learner's newest merged contribution.",
            {"{{learner}}": f"{L}_rounds_behind{PICKED}"},
        ),
        Panel(
            "Silence",
            "Seconds since the syncer last heard from a learner; the lease ends it.",
            {"{{learner}}": f"{L}_last_seen_seconds{PICKED}"},
            "s",
        ),
        Panel(
            "Device thread waits for the network",
            "Seconds per second; must be zero.",
            {"{{learner}}": f"deriv({L}_network_wait_seconds{PICKED}[$__rate_interval])"},
            "s",
        ),
        Panel("Rounds merged", "By learner.", {"{{learner}}": f"{L}_rounds_merged{PICKED}"}),
    ],
    "Tokens and time": [
        Panel(
            "Tokens",
            "Processed by learners, and merged (by the share of parameters whose merge contained them).",
            {"processed": rate("tokens_processed_total"), "merged": rate("tokens_merged_total")},
        ),
        Panel(
            "Tokens discarded",
            "Per second, by cause.",
            {"{{cause}}": rate("tokens_discarded_total", "cause")},
            stacked=True,
        ),
        Panel(
            "Steps redone",
            "Inner steps per second that repeat data, because no committed round held their effect.",
            {"redone": rate("steps_redone_total")},
        ),
        Panel(
            "What learners spend their time on",
            "Learner-seconds per second, by activity.",
            {"{{activity}}": rate("activity_seconds_total", "activity")},
            stacked=True,
        ),
    ],
    "The syncer": [
        Panel(
            "Payload",
            "Bytes per second of contributions and downloads.",
            {"received": rate("received_bytes_total"), "sent": rate("sent_bytes_total")},
            "Bps",
        ),
        Panel(
            "Speed of one transfer",
            "Mean over whole uploads and downloads.",
            {"upload": mean("upload_bytes_per_second"), "download": mean("download_bytes_per_second")},
            "Bps",
        ),
        Panel(
            "Memory",
            "Of the process, of uploads and of payloads that are served.",
            {
                "resident": 'process_resident_memory_bytes{job="syncer"}',
                "uploads, in use": f"{S}_upload_buffer_used_bytes",
                "uploads, allocated": f"{S}_upload_buffer_allocated_bytes",
                "uploads, limit": f"{S}_upload_buffer_max_bytes",
                "downloads": f"{S}_download_payload_bytes",
            },
            "bytes",
        ),
        Panel(
            "Event loop lag",
            "How late the loop's timers are.",
            {f"{share:.0%}": quantile("event_loop_lag_seconds", share) for share in (0.5, 0.99)},
            "s",
        ),
        Panel(
            "Events that wait for a decision",
            "At the limit further calls are asked to retry.",
            {"waiting": f"{S}_queue_events", "limit": f"{S}_queue_events_max"},
        ),
        Panel(
            "Streams",
            "Control streams, observers and downloads that are up.",
            {
                "control": f"{S}_control_streams_active",
                "observers": f"{S}_observers_attached",
                "downloads": f"{S}_downloads_active",
            },
        ),
    ],
    "Restore points": [
        Panel(
            "Mirror: rounds behind",
            "Committed rounds that would be lost with the syncer's disk; nothing is drawn without a mirror.",
            {"rounds": f"{S}_mirror_lag_rounds"},
        ),
        Panel(
            "Mirror: seconds behind",
            "Age of the mirrored position while the run is ahead of it.",
            {"seconds": f"{S}_mirror_lag_seconds"},
            "s",
        ),
        Panel(
            "Mirror: copies",
            "Positions copied, and attempts that failed, per second.",
            {"copied": rate("mirror_copies_total"), "failed": rate("mirror_failures_total")},
            "ops",
        ),
        Panel(
            "Checkpoints",
            "Attempts since the start of the syncer, by outcome.",
            {"{{outcome}}": f"{S}_checkpoints_total"},
        ),
        Panel(
            "Steps since the newest checkpoint",
            "What a roll-back to it would undo; only of checkpoints that this process has written.",
            {"steps": f"{S}_global_steps - {S}_checkpoint_global_steps"},
        ),
        Panel(
            "Mirror: payload",
            "Bytes per second written to the mirror.",
            {"written": rate("mirror_bytes_total")},
            "Bps",
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return {
        "uid": "decoupled-diloco-run",
        "title": "Decoupled DiLoCo: a run",
        "tags": ["decoupled-diloco"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_learner_variable()]},
        "panels": list(_panels()),
    }


def _learner_variable() -> dict[str, Any]:
    query = f"label_values({L}_live, learner)"
    return {
        "name": "learner",
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "learners"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        at = {"h": 1, "w": GRID_WIDTH, "x": 0, "y": top}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": at, "panels": []})
        top, left, line_height = top + 1, 0, 0
        for panel in row:
            if left + panel.width > GRID_WIDTH:
                top, left, line_height = top + line_height, 0, 0
            at = {"h": panel.height, "w": panel.width, "x": left, "y": top}
            panels.append({"id": len(panels) + 1, "gridPos": at, **_body(panel)})
            left, line_height = left + panel.width, max(line_height, panel.height)
        top += line_height
    return panels


def _body(panel: Panel) -> dict[str, Any]:
    custom = {
        "drawStyle": "line",
        "lineWidth": 2,
        "fillOpacity": 30 if panel.stacked else 0,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {
            "mode": "absolute",
            "steps": [{"color": color, "value": value} for color, value in panel.thresholds],
        },
    }
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.kind == "timeseries":
        defaults["custom"] = custom
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        options = {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": query,
                "legendFormat": legend or "__auto",
                "datasource": DATASOURCE,
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUT.write_text(text(), encoding="utf-8")
    print(OUT)
