"""Write examples/monitoring: Grafana's dashboards of a run, its rollout engines, and the cluster, and alert rules.

Run as `python -m scripts.dashboards`; a test compares the files with it and runs every query on a Prometheus.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from verl.observe.signs import ALERTS

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "monitoring"
RUN = 'experiment=~"$experiment"'
Panel = tuple[str, str, str, str]  # title, query, legend, unit


def metric(name: str) -> str:
    return f'verl_metric{{{RUN}, name="{name}"}}'


DASHBOARDS: dict[str, tuple[str, list[Panel]]] = {
    "run": (
        "verl: run",
        [
            ("Reward", metric("critic/score/mean"), "{{experiment}}", "short"),
            ("Validation", f'verl_metric{{{RUN}, name=~"val-core/.*/mean@.*"}}', "{{name}}", "short"),
            ("Entropy (nats)", metric("actor/entropy"), "{{experiment}}", "short"),
            ("KL of the update (nats)", metric("actor/ppo_kl"), "{{experiment}}", "short"),
            ("Gradient norm", metric("actor/grad_norm"), "{{experiment}}", "short"),
            ("Mismatch of rollout and trainer (nats)", metric("rollout_corr/k3_kl"), "{{experiment}}", "short"),
            ("Staleness (versions)", metric("training/off_policy/trajectory_staleness/max"), "{{experiment}}", "short"),
            ("Length of answers (tokens)", metric("response_length/mean"), "{{experiment}}", "short"),
            ("Tokens per second and device", metric("perf/throughput"), "{{experiment}}", "short"),
            ("Seconds of each stage", f'verl_stage_seconds{{{RUN}, stage!="step"}}', "{{stage}}", "s"),
            ("Answers of this batch", f"verl_answers{{{RUN}}}", "{{state}}", "short"),
            (
                "Rewards that failed, an hour",
                f"increase(verl_reward_errors_total{{{RUN}}}[1h])",
                "{{experiment}}",
                "short",
            ),
            ("Step", f"verl_step{{{RUN}}}", "{{experiment}}", "short"),
            ("Restarts", f"verl_restarts_total{{{RUN}}}", "{{experiment}}", "short"),
        ],
    ),
    "rollout": (
        "verl: rollout engines",
        [
            (
                "Sampled tokens per second",
                f'rate(verl_replica_count_total{{{RUN}, count="generated_tokens"}}[5m])',
                "replica {{replica}}",
                "short",
            ),
            (
                "Requests per second",
                f'rate(verl_replica_count_total{{{RUN}, count="requests"}}[5m])',
                "replica {{replica}}",
                "short",
            ),
            ("Requests that run", metric("rollout/running"), "{{experiment}}", "short"),
            ("Requests that wait", metric("rollout/waiting"), "{{experiment}}", "short"),
            ("Use of the KV cache", metric("rollout/cache_use"), "{{experiment}}", "percentunit"),
            ("Preemptions", metric("rollout/preemptions"), "{{experiment}}", "short"),
            ("Lost replicas", f"verl_replicas_lost{{{RUN}}}", "{{experiment}}", "short"),
            ("Seconds of a publish", f'verl_stage_seconds{{{RUN}, stage="update_weights"}}', "{{experiment}}", "s"),
            ("SGLang: running requests", "sglang:num_running_reqs", "{{instance}}", "short"),
            ("SGLang: tokens per second", "sglang:gen_throughput", "{{instance}}", "short"),
        ],
    ),
    "cluster": (
        "verl: cluster",
        [
            ("Targets that answer", "up", "{{job}} {{instance}}", "short"),
            ("CPU of nodes (Ray, %)", "ray_node_cpu_utilization", "{{instance}}", "percent"),
            ("Memory of nodes (Ray)", "ray_node_mem_used", "{{instance}}", "bytes"),
            ("GPU of nodes (Ray, %)", "ray_node_gpus_utilization", "{{instance}} {{GpuIndex}}", "percent"),
            ("Object store (Ray)", "ray_object_store_memory", "{{instance}}", "bytes"),
            ("Memory of the driver (GiB)", metric("perf/cpu_memory_used_gb"), "{{experiment}}", "short"),
            ("Memory of devices (GiB)", f'verl_metric{{{RUN}, name=~".*/device_memory_used_gb"}}', "{{name}}", "short"),
        ],
    ),
}


def panel(number: int, parts: Panel) -> dict[str, Any]:
    """Two panels a row."""
    title, query, legend, unit = parts
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        # of a validation there is a value in some steps only
        "fieldConfig": {"defaults": {"unit": unit, "custom": {"spanNulls": "val-core" in query}}, "overrides": []},
        "targets": [{"refId": "A", "datasource": source, "expr": query, "legendFormat": legend}],
    }


def dashboard(name: str) -> dict[str, Any]:
    """The whole file of one dashboard."""
    title, panels = DASHBOARDS[name]
    choose = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    runs: dict[str, Any] = {"name": "experiment", "type": "query", "label": "Run", "includeAll": True, "multi": True}
    runs |= {"datasource": {"type": "prometheus", "uid": "${source}"}, "query": "label_values(verl_step, experiment)"}
    runs |= {"refresh": 2, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return {
        "uid": f"verl-{name}",
        "title": title,
        "tags": ["verl"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [choose, runs]},
        "annotations": {"list": []},
        "panels": [panel(number, parts) for number, parts in enumerate(panels)],
    }


def text(name: str) -> str:
    return json.dumps(dashboard(name), indent=1) + "\n"


def rules_for_prometheus() -> dict[str, Any]:
    """The rules as Prometheus reads them."""
    rules = []
    for sign in ALERTS:
        expr = sign.promql or f'verl_metric{{name="{sign.metric}"}} > {sign.limit:g}'
        rule: dict[str, Any] = {"alert": sign.name, "expr": expr}
        if sign.for_s:
            rule["for"] = f"{sign.for_s // 60}m"
        rule["labels"] = {"severity": "critical" if sign.name == "VerlGone" else "warning"}
        summary = f"{{{{ $labels.experiment }}}}: {sign.summary}"
        rule["annotations"] = {"summary": summary, "description": sign.sentence}
        rules.append(rule)
    return {"groups": [{"name": "verl", "rules": rules}]}


def alerts_text() -> str:
    """The file of the alert rules."""
    head = "# Alerts of a run. Prometheus reads it by `rule_files: [alerts.yml]`; "
    head += "`promtool check rules alerts.yml` checks a change.\n"
    return head + yaml.safe_dump(rules_for_prometheus(), sort_keys=False, width=1000)


if __name__ == "__main__":
    (FOLDER / "alerts.yml").write_text(alerts_text())
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(text(each))
