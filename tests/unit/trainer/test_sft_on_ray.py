"""Fine-tuning on Ray: its keys reach the cluster and the watch over its ranks."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from verl.config import SFTConfig, load_config
from verl.runtime import ray_cluster
from verl.trainer.sft import ranks
from verl.utils.errors import ConfigError

PRESET = "sft_trainer_engine"


class Started(Exception):
    """All that a test needs is known."""


def test_nodes_are_waited_for_and_ranks_watched_for_the_configured_time(monkeypatch: pytest.MonkeyPatch):
    started: dict[str, Any] = {}

    def start(factory: Any, layout: Any, devices: Any, **settings: Any) -> None:
        started.update(devices=devices, **settings)
        raise Started

    cluster = SimpleNamespace(leave=lambda: None, describe=lambda *_: "joined")
    monkeypatch.setattr(ranks, "join_cluster", lambda *_: cluster)
    monkeypatch.setattr(ranks, "RayGroup", start)
    monkeypatch.setattr(ray_cluster, "check_installed", lambda: None)
    words = ["trainer.node_wait_s=9", "trainer.stall_timeout_s=7", "trainer.device=cpu", "trainer.runtime=ray"]
    config = load_config(words, config_name=PRESET, root=SFTConfig)
    with pytest.raises(Started), ExitStack() as ending:
        ranks.start_ranks(config, config.model, 1, ending)
    assert (started["devices"].wait_s, started["stall_timeout_s"]) == (9.0, 7.0)


def test_restarts_which_fine_tuning_has_not_are_no_key_of_it():
    with pytest.raises(ConfigError, match=r"trainer\.max_restarts"):
        load_config(["trainer.max_restarts=1"], config_name=PRESET, root=SFTConfig)
