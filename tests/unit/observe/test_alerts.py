"""The alerts that a report shows are those that Prometheus would raise: `promtool test rules` is the oracle."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.dashboards import rules_for_prometheus
from tests.conftest import skip_or_fail
from verl.observe.alerts import FIRING, INACTIVE, PENDING, UNKNOWN, Past, alert_states, past_steps
from verl.observe.signs import ALERTS

GRID_S = 30  # between two samples; every step ends at one
STALE, MISMATCH = "training/off_policy/trajectory_staleness/max", "rollout_corr/k3_kl"
LABELS = {"instance": "here:1", "experiment": "r"}
Step = tuple[int, dict[str, float]]  # seconds, metrics


def step(seconds: int, **metrics: float) -> Step:
    names = {"stale": STALE, "mismatch": MISMATCH, "errors": "reward/errors"}
    return seconds, {names.get(name, name): value for name, value in metrics.items()}


RUNS: dict[str, tuple[list[Step], int]] = {  # steps, seconds since the last
    "quiet": ([step(60, mismatch=0.01, stale=1)] * 20, 0),
    "mismatch that lasts": ([step(60, mismatch=0.01)] * 2 + [step(60, mismatch=0.2)] * 14, 0),
    "mismatch that passes": ([step(60, mismatch=0.2)] * 5 + [step(60, mismatch=0.01)] * 5, 0),
    "mismatch that begins": ([step(60, mismatch=0.01)] * 2 + [step(60, mismatch=0.2)] * 5, 0),
    "stale, then not": ([step(60, stale=9)] * 14 + [step(60, stale=8)] * 3, 0),
    "errors a while ago": ([step(60)] * 2 + [step(60, errors=2)] + [step(60)] * 20, 0),
    "errors now": ([step(60)] * 6 + [step(60, errors=2)] + [step(60)], 0),
    "a step that takes long": ([step(60)] * 3 + [step(1500)], 0),
    "a run that hangs": ([step(60)] * 3, 1200),
    "a run that is slow": ([step(60)] * 3, 840),
    "lost replica": ([step(60, lost=0)] * 3 + [step(60, lost=1)] * 3, 0),
}


def timeline(name: str) -> list[Past]:
    steps, idle_s = RUNS[name]
    records = [{"step": i, "data": {"timing_s/step": s, **m}} for i, (s, m) in enumerate(steps, start=1)]
    replicas = [{"step": i, "lost": m.get("lost", 0)} for i, (_, m) in enumerate(steps, start=1)]
    return [*past_steps(records, replicas, idle_s)]


def series(line: list[Past]) -> list[dict[str, str]]:
    """What Prometheus reads every GRID_S from a driver with the steps of `line`."""
    names = {name for past in line for name in past.step.metrics}
    errors, samples = 0.0, {}
    for at in range(0, int(line[-1].next_end) + 1, GRID_S):
        done = [past for past in line if past.end <= at]
        values: dict[str, float] = {"verl_reward_errors_total{}": 0.0}
        if done:
            last = done[-1].step
            errors = sum(past.step.get("reward/errors") for past in done)
            values |= {f'verl_metric{{name="{n}"}}': last.metrics[n] for n in names if n in last.metrics}
            values['verl_stage_seconds{stage="step"}'] = last.metrics["timing_s/step"]
            values["verl_last_step_timestamp_seconds{}"] = done[-1].end
            values["verl_reward_errors_total{}"] = errors
            values["verl_replicas_lost{}"] = last.lost
        samples[at] = values
    found = []
    for name in sorted({name for values in samples.values() for name in values}):
        text = " ".join(str(values.get(name, "_")) for values in samples.values())
        labels = ", ".join(f'{key}="{value}"' for key, value in LABELS.items())
        family, _, own = name.partition("{")
        own = own.removesuffix("}")
        found.append({"series": f"{family}{{{labels}{', ' if own else ''}{own}}}", "values": text})
    return found


def labels_of(alert: Any) -> dict[str, str]:
    own = {"VerlStaleness": {"name": STALE}, "VerlMismatch": {"name": MISMATCH}}
    return {**LABELS, **own.get(alert.name, {}), "severity": "warning"}


@pytest.mark.parametrize("name", list(RUNS))
def test_a_report_raises_what_prometheus_raises(name: str, tmp_path: Path):
    if shutil.which("promtool") is None:
        skip_or_fail("promtool is not installed: bash .ci/install_system_packages.sh")
    line = timeline(name)
    rules = rules_for_prometheus()
    for rule in rules["groups"][0]["rules"]:
        del rule["annotations"]  # promtool would compare them as well
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    states = {found.sign.name: found for found in alert_states(line)}
    cases = []
    for alert in ALERTS:
        if alert.metric or alert.value:
            firing = states[alert.name].state == FIRING
            expected = [{"exp_labels": labels_of(alert)}] if firing else []
            cases.append({"eval_time": f"{int(line[-1].next_end)}s", "alertname": alert.name, "exp_alerts": expected})
    test = {"interval": f"{GRID_S}s", "input_series": series(line), "alert_rule_test": cases}
    whole = {"rule_files": ["rules.yml"], "evaluation_interval": f"{GRID_S}s", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(whole))
    done = subprocess.run(["promtool", "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "alert", "state", "fired"),
    [
        ("quiet", "VerlMismatch", INACTIVE, []),
        ("mismatch that lasts", "VerlMismatch", FIRING, [3]),
        ("mismatch that passes", "VerlMismatch", INACTIVE, []),
        ("mismatch that begins", "VerlMismatch", PENDING, []),
        ("stale, then not", "VerlStaleness", INACTIVE, [1]),
        ("errors a while ago", "VerlRewardErrors", INACTIVE, [3]),
        ("errors now", "VerlRewardErrors", FIRING, [7]),
        ("a step that takes long", "VerlNoStep", INACTIVE, [3]),
        ("a run that hangs", "VerlNoStep", FIRING, [3]),
        ("a run that is slow", "VerlNoStep", INACTIVE, []),
        ("lost replica", "VerlReplicaLost", FIRING, [4]),
        ("quiet", "VerlGone", UNKNOWN, []),
    ],
)
def test_the_state_says_whether_and_after_which_step_an_alert_fired(name, alert, state, fired):
    [found] = [found for found in alert_states(timeline(name)) if found.sign.name == alert]
    assert (found.state, found.fired_at) == (state, fired)
