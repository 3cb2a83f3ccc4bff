"""Writes deploy/grafana/turnout.json, or checks that it is what this module gives.

Invariants: every query uses metrics of docs/metrics.md alone, and answers once a run has lent; the module gives the
same bytes.

    python3 -m tools.dashboard            write the dashboard
    python3 -m tools.dashboard --check    exit 1 if it differs
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

DASHBOARD: Final = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "turnout.json"

_RATE: Final = "[$__rate_interval]"
_RUN: Final = 'run_id=~"$run"'
_WIDTH: Final = 8
"""Three panels side by side on Grafana's 24 columns."""

_HEIGHT: Final = 7


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. `queries` maps each query to its legend."""

    title: str
    meaning: str
    queries: dict[str, str]
    unit: str = "short"
    stacked: bool = False


def _quantile(share: float, metric: str, by: str, where: str = "") -> str:
    return f"histogram_quantile({share}, sum by ({by}, le) (rate({metric}_bucket{{{where}}}{_RATE})))"


def _mean(metric: str, by: str, where: str = "") -> str:
    """Over the last hour: steps are rare."""
    seconds, count = (f"sum by ({by}) (increase({metric}_{part}{{{where}}}[1h]))" for part in ("sum", "count"))
    return f"{seconds} / {count}"


def _per_lend(metric: str, where: str = _RUN) -> str:
    accounts = f"sum by (run_id) (increase(turnout_lend_accounts_total{{{_RUN}}}[1h]))"
    return f"sum by (run_id) (increase({metric}{{{where}}}[1h])) / {accounts}"


ROWS: Final[dict[str, list[Panel]]] = {
    "Runs": [
        Panel(
            "Mode",
            "Who has the hybrid GPUs: 1 for the present mode.",
            {f"turnout_run_mode{{{_RUN}}} == 1": "{{run_id}} {{mode}}"},
        ),
        Panel("Step", "The trainer's step.", {f"turnout_run_step{{{_RUN}}}": "{{run_id}}"}),
        Panel(
            "Wait for a mini-batch",
            "What lending is there to shorten, by the trainer's own measure. Domain seconds.",
            {
                _quantile(0.5, "turnout_sample_wait_seconds", "run_id", _RUN): "{{run_id}} p50",
                _quantile(0.95, "turnout_sample_wait_seconds", "run_id", _RUN): "{{run_id}} p95",
            },
            "s",
        ),
        Panel(
            "Predicted and realised wait of a step",
            "Means over an hour, of the steps for which the policy predicted. Domain seconds.",
            {
                _mean("turnout_predicted_wait_seconds", "run_id", _RUN): "{{run_id}} predicted",
                _mean("turnout_realised_wait_seconds", "run_id", _RUN): "{{run_id}} realised",
                _mean("turnout_wait_error_seconds", "run_id", _RUN): "{{run_id}} error",
            },
            "s",
        ),
        Panel(
            "Decisions",
            "What the policy answered, per hour.",
            {f"sum by (point, action) (increase(turnout_decisions_total{{{_RUN}}}[1h]))": "{{point}} {{action}}"},
        ),
        Panel(
            "Cost of switching",
            "Means over an hour. Domain seconds.",
            {
                _mean("turnout_lend_seconds", "run_id", _RUN): "{{run_id}} lend",
                _mean("turnout_reclaim_seconds", "run_id", _RUN): "{{run_id}} reclaim",
            },
            "s",
        ),
        Panel(
            "Tokens per lend",
            "Decoded on lent GPUs, and those of trajectories that ended there.",
            {
                _per_lend("turnout_lent_tokens_total", f'{_RUN}, what="decoded"'): "{{run_id}} decoded",
                _per_lend("turnout_lent_tokens_total", f'{_RUN}, what="delivered"'): "{{run_id}} delivered",
            },
        ),
        Panel(
            "Seconds per lend",
            "Spent on switching, and lost to waiting and switching. Domain seconds.",
            {
                _per_lend("turnout_lend_switch_seconds_total"): "{{run_id}} switching",
                _per_lend("turnout_lend_lost_seconds_total"): "{{run_id}} lost",
            },
            "s",
        ),
        Panel(
            "Gained by lending",
            "Since the scheduler started, where the policy predicts the wait without. A line that falls is a loss.",
            {f"turnout_lends_gained_seconds{{{_RUN}}}": "{{run_id}}"},
            "s",
        ),
        Panel(
            "Lends, and transitions that failed",
            "Per hour.",
            {
                f"sum by (run_id, kind) (increase(turnout_lends_total{{{_RUN}}}[1h]))": "{{run_id}} {{kind}}",
                f"sum by (run_id, transition) (increase(turnout_transition_failures_total{{{_RUN}}}[1h]))": (
                    "{{run_id}} failed {{transition}}"
                ),
            },
        ),
        Panel(
            "Trainer's lease",
            "0 when it gives no sign of life. Domain seconds.",
            {f"turnout_run_lease_seconds{{{_RUN}}} and turnout_run_open == 1": "{{run_id}}"},
            "s",
        ),
    ],
    "Replay buffer": [
        Panel(
            "Groups",
            "Present, by state.",
            {f"sum by (state) (turnout_buffer_groups{{{_RUN}}})": "{{state}}"},
            stacked=True,
        ),
        Panel(
            "Sampleable",
            "What a wait of the trainer is measured against.",
            {f"turnout_buffer_sampleable{{{_RUN}}}": "{{run_id}} {{partition}}"},
        ),
        Panel("Parked waits", "Calls that wait for groups.", {f"turnout_buffer_parked{{{_RUN}}}": "{{run_id}}"}),
        Panel(
            "Evicted, and refills owed",
            "Groups per hour by reason, and credits that no prompts paid yet.",
            {
                f"sum by (run_id, kind) (increase(turnout_buffer_refill_credits_total{{{_RUN}}}[1h]))": (
                    "{{run_id}} credits {{kind}}"
                ),
                f"sum by (run_id, reason) (increase(turnout_buffer_evictions_total{{{_RUN}}}[1h]))": (
                    "{{run_id}} evicted {{reason}}"
                ),
                f"turnout_buffer_unpaid_credits{{{_RUN}}}": "{{run_id}} unpaid",
            },
        ),
        Panel(
            "Payloads held",
            "By declared size.",
            {f"turnout_buffer_held_bytes{{{_RUN}}}": "{{run_id}}"},
            "bytes",
        ),
    ],
    "Engines": [
        Panel(
            "Routes",
            "Replicas that serve, hold requests, or are out.",
            {'sum by (role, route) (turnout_engine_route{service="engine"})': "{{role}} {{route}}"},
            stacked=True,
        ),
        Panel(
            "Health",
            "Replicas by health.",
            {'sum by (role, health) (turnout_engine_health{service="engine"})': "{{role}} {{health}}"},
            stacked=True,
        ),
        Panel(
            "Requests",
            "Running in engines, and parked in the controller.",
            {'sum by (role, state) (turnout_engine_requests{service="engine"})': "{{role}} {{state}}"},
            stacked=True,
        ),
        Panel(
            "Commands",
            "Means over an hour: sleep and wake_up are what a lend costs.",
            {_mean("turnout_engine_command_seconds", "role, command", 'service="engine"'): "{{role}} {{command}}"},
            "s",
        ),
        Panel(
            "Deaths, and commands that failed",
            "Per hour.",
            {
                'sum by (replica_id) (increase(turnout_engine_deaths_total{service="engine"}[1h]))': (
                    "{{replica_id}} died"
                ),
                'sum by (command) (increase(turnout_engine_command_failures_total{service="engine"}[1h]))': (
                    "{{command}} failed"
                ),
            },
        ),
        Panel(
            "Device memory",
            "As engines tell: what sleep frees.",
            {'turnout_engine_memory_bytes{service="engine"}': "{{replica_id}}"},
            "bytes",
        ),
        Panel(
            "Weight version",
            "Replicas that lag behind answer with old weights.",
            {'turnout_engine_weight_version{service="engine"}': "{{replica_id}}"},
        ),
    ],
    "Services": [
        Panel(
            "Up and serving",
            "1 if it can be scraped, and if it can be used.",
            {
                'up{service=~"scheduler|buffer|engine|agent"}': "{{service}} up",
                "turnout_serving": "{{service}} serving",
            },
        ),
        Panel(
            "Calls",
            "Per second, by status.",
            {f"sum by (service, code) (rate(turnout_calls_total{_RATE}))": "{{service}} {{code}}"},
        ),
        Panel(
            "Latency, p99",
            "Of calls that do not wait for anything.",
            {
                _quantile(
                    0.99,
                    "turnout_call_seconds",
                    "service, method",
                    'method=~".*/(GetSampleableCount|FinishTrajectories|AddGroups|ListReplicas|EndSample|CommitSample)"',
                ): "{{method}}"
            },
            "s",
        ),
        Panel(
            "Calls at work",
            "The parked ones too.",
            {"sum by (service) (turnout_calls_in_flight)": "{{service}}"},
        ),
        Panel(
            "Event loop lag, p99",
            "A service that is late here is late with everything.",
            {_quantile(0.99, "turnout_event_loop_lag_seconds", "service, instance"): "{{service}} {{instance}}"},
            "s",
        ),
        Panel(
            "Journal commits, p99",
            "With durability fsync this is the disk.",
            {_quantile(0.99, "turnout_journal_commit_seconds", "service, instance"): "{{service}} {{instance}}"},
            "s",
        ),
        Panel(
            "Journal, written",
            "Bytes per second.",
            {f"rate(turnout_journal_committed_bytes_total{_RATE})": "{{service}} {{instance}}"},
            "Bps",
        ),
        Panel(
            "Journal, to be replayed",
            "Log since the last snapshot.",
            {"turnout_journal_log_bytes": "{{service}} {{instance}}"},
            "bytes",
        ),
        Panel(
            "Memory",
            "Resident.",
            {'process_resident_memory_bytes{service=~"scheduler|buffer|engine|agent"}': "{{service}} {{instance}}"},
            "bytes",
        ),
        Panel(
            "CPU",
            "Cores in use.",
            {
                f'rate(process_cpu_seconds_total{{service=~"scheduler|buffer|engine|agent"}}{_RATE})': (
                    "{{service}} {{instance}}"
                )
            },
        ),
        Panel(
            "Versions",
            "What runs. After an upgrade all services should show the same.",
            {"sum by (service, version, grpc, protobuf) (turnout_build_info)": "{{service}} {{version}} grpc {{grpc}}"},
        ),
    ],
}

_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    queries = [
        {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
        for place, (query, legend) in enumerate(panel.queries.items())
    ]
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if panel.stacked else {}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": queries,
    }


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place})
        y += 1
        for number, panel in enumerate(row):
            line, column = divmod(number, 24 // _WIDTH)
            panels.append(_panel(len(panels) + 1, panel, column * _WIDTH, y + line * _HEIGHT))
        y += -(-len(row) * _WIDTH // 24) * _HEIGHT
    return {
        "uid": "turnout",
        "title": "Turnout",
        "tags": ["turnout"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                {
                    "name": "run",
                    "label": "Run",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": {"query": "label_values(turnout_run_mode, run_id)", "refId": "run"},
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }


def text() -> str:
    """The content of the file."""
    return json.dumps(dashboard(), indent=2) + "\n"


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        DASHBOARD.write_text(text())
        return 0
    if DASHBOARD.read_text() != text():
        print("deploy/grafana/turnout.json is not what tools/dashboard.py gives: python3 -m tools.dashboard")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
