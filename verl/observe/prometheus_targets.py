"""Targets of a Prometheus server: its file gets those of a run, and the server reads it again."""

import contextlib
import os
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

import yaml

from verl.utils.errors import ConfigError
from verl.utils.paths import atomic_write_bytes

DRIVER_JOB, ROLLOUT_JOB = "verl", "verl-rollout"
RELOAD_S = 10.0  # the server may take
_OPENER = build_opener(ProxyHandler({}))  # the server is on this machine
Jobs = dict[str, tuple[list[str], dict[str, str]]]  # by name of a job: addresses, and their labels


def write_targets(file: Path, jobs: Jobs) -> None:
    """Put `jobs` into a prometheus.yml in place of those of an earlier run; everything else in it stays.

    ConfigError where the file is none, or cannot be written.
    """
    try:
        read = yaml.safe_load(file.read_text()) if file.exists() else {}
        content: dict[str, Any] = read or {"global": {"scrape_interval": "10s"}}
        if not isinstance(content, dict) or not isinstance(content.get("scrape_configs") or [], list):
            raise ConfigError(f"{file} is no configuration of Prometheus: it has no list scrape_configs; move it away")
        others = [
            job for job in content.get("scrape_configs") or [] if job.get("job_name") not in (DRIVER_JOB, ROLLOUT_JOB)
        ]
        content["scrape_configs"] = others + [
            {"job_name": name, "static_configs": [{"targets": targets, "labels": labels}]}
            for name, (targets, labels) in jobs.items()
            if targets
        ]
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(Path(os.path.realpath(file)), yaml.safe_dump(content, sort_keys=False).encode())
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise ConfigError(
            f"actor_rollout_ref.rollout.prometheus.file={file} cannot be rewritten: {error}; name the file that "
            "Prometheus was started with (--config.file)"
        ) from error


def reload_server(port: int) -> str | None:
    """Let the Prometheus of this machine read its configuration again; what was wrong, or None."""
    url = f"http://127.0.0.1:{port}/-/reload"
    try:
        with contextlib.closing(_OPENER.open(Request(url, method="POST"), timeout=RELOAD_S)):
            return None
    except (URLError, OSError) as error:
        return (
            f"no Prometheus has read its targets again at {url} ({error}); start it with --web.enable-lifecycle, and "
            "set actor_rollout_ref.rollout.prometheus.port to its port"
        )
