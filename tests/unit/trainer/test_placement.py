"""Which ranks hold which roles, and the placements that are refused."""

import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from verl.config import ConfigError, RunConfig, load_config
from verl.placement import devices, plan
from verl.placement import pools as placement
from verl.placement.devices import chosen_runtime
from verl.placement.pools import announce_plan, devices_apart, plan_run, pools_of, start_pools
from verl.runtime import ray_cluster
from verl.runtime.pools import Pool
from verl.trainer.sft import ranks as sft_ranks
from verl.workers.rollout.engines import rollout_engine_of

PPO = ["data.train_batch_size=8", "actor_rollout_ref.rollout.n=1"]
ON_CPU = [*PPO, "trainer.device=cpu"]


def place(*words: str) -> tuple[Pool, ...]:
    return pools_of(plan_run(load_config(words)))


def announce(config: RunConfig, say: Callable[[str], None]) -> None:
    announce_plan(config, plan_run(config), say)


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as raised:
        place(*words)
    return str(raised.value)


def on_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    platform = SimpleNamespace(device_name="cuda", device_count=lambda: count)
    monkeypatch.setattr(placement, "get_platform", lambda: platform)


def start_on_the_drivers_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As engines do that somebody else has registered without `starts_on_nodes`."""

    def without_nodes(arr: Any) -> Any:
        engine = rollout_engine_of(arr)
        return replace(engine, traits=replace(engine.traits, starts_on_nodes=False))

    for module in (placement, plan):
        monkeypatch.setattr(module, "rollout_engine_of", without_nodes)


def test_one_pool_holds_every_role_unless_the_critic_has_ranks_of_its_own():
    assert place(*ON_CPU) == (Pool("actor", ("actor", "rollout", "critic")),)
    grpo = [*ON_CPU, "algorithm.adv_estimator=grpo", "critic.n_gpus_per_node=2"]
    assert place(*grpo) == (Pool("actor", ("actor", "rollout")),)
    assert place(
        *ON_CPU, "algorithm.use_kl_in_reward=True", "critic.n_gpus_per_node=4", "trainer.n_gpus_per_node=2"
    ) == (
        Pool("actor", ("actor", "reference", "rollout"), 2),
        Pool("critic", ("critic",), 4, first_device=2),
    )


def test_a_reference_may_have_ranks_of_its_own_beside_those_of_the_critic():
    own = ["actor_rollout_ref.ref.n_gpus_per_node=2", "trainer.n_gpus_per_node=4"]
    assert place(*ON_CPU, *own) == (Pool("actor", ("actor", "rollout", "critic"), 4),)  # nothing needs a reference
    shared = place(*ON_CPU, *own, "algorithm.use_kl_in_reward=True")
    assert shared == (
        Pool("actor", ("actor", "rollout", "critic"), 4),
        Pool("reference", ("reference",), 2, first_device=4),
    )
    apart = place(*ON_CPU, *own, "algorithm.use_kl_in_reward=True", "critic.n_gpus_per_node=1")
    assert [(pool.name, pool.num_devices, pool.first_device) for pool in apart] == [
        ("actor", 4, 0),
        ("reference", 2, 4),
        ("critic", 1, 6),
    ]
    assert apart[0].roles == ("actor", "rollout")


def test_the_actor_takes_the_devices_that_the_critic_leaves(monkeypatch: pytest.MonkeyPatch):
    on_gpus(monkeypatch, 8)
    assert [pool.num_devices for pool in place(*PPO)] == [8]
    assert [pool.num_devices for pool in place(*PPO, "critic.n_gpus_per_node=4")] == [4, 4]
    assert place(*PPO, "critic.n_gpus_per_node=4")[1].first_device == 4
    fewer = place(*PPO, "critic.n_gpus_per_node=2", "trainer.n_gpus_per_node=1")
    assert [(pool.num_devices, pool.first_device) for pool in fewer] == [(1, 0), (2, 1)]


def test_a_reference_of_its_own_counts_among_the_devices(monkeypatch: pytest.MonkeyPatch):
    on_gpus(monkeypatch, 8)
    both = [*PPO, "algorithm.use_kl_in_reward=True", "critic.n_gpus_per_node=1"]
    assert [p.num_devices for p in place(*both, "actor_rollout_ref.ref.n_gpus_per_node=3")] == [4, 3, 1]
    found = refusal(*both, "actor_rollout_ref.ref.n_gpus_per_node=7")
    assert "actor_rollout_ref.ref.n_gpus_per_node=7 and critic.n_gpus_per_node=1, but 8 cuda devices" in found
    assert "leave out actor_rollout_ref.ref.n_gpus_per_node or critic.n_gpus_per_node" in found


def test_placements_with_too_few_devices_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch):
    on_gpus(monkeypatch, 4)
    assert "critic.n_gpus_per_node=4, but 4 cuda devices are visible; lower" in refusal(
        *PPO, "critic.n_gpus_per_node=4"
    )
    both = refusal(*PPO, "critic.n_gpus_per_node=1", "trainer.n_gpus_per_node=4")
    assert "trainer.n_gpus_per_node=4 and critic.n_gpus_per_node=1, but 4 cuda devices" in both
    assert "leave out critic.n_gpus_per_node" in both
    alone = refusal(*PPO, "trainer.n_gpus_per_node=8")
    assert alone == "trainer.n_gpus_per_node=8, but 4 cuda devices are visible; lower it to at most 4"


def test_a_critic_beside_a_single_process_is_refused():
    found = refusal(*ON_CPU, "trainer.runtime=inline", "critic.n_gpus_per_node=1")
    assert found.startswith("trainer.runtime=inline is one process, but critic.n_gpus_per_node=1; use trainer.runtime=")


def test_the_critics_ranks_share_its_sequences():
    found = refusal(*ON_CPU, "critic.n_gpus_per_node=3")
    assert "data.train_batch_size=8" in found and "3 data-parallel ranks of the critic" in found
    found = refusal(*ON_CPU, "critic.n_gpus_per_node=4", "critic.ppo_mini_batch_size=2")
    assert "critic.ppo_mini_batch_size=2" in found and "set critic.ppo_mini_batch_size=4, or a multiple of 4" in found
    place(
        *ON_CPU,
        "critic.n_gpus_per_node=4",
        "critic.ppo_mini_batch_size=2",
        "critic.fsdp.ulysses_sequence_parallel_size=2",
    )


def test_a_total_of_the_reference_is_divided_by_its_own_ranks():
    words = [*ON_CPU, "actor_rollout_ref.ref.log_prob_micro_batch_size=8", "trainer.n_gpus_per_node=2"]
    with pytest.warns(match="old spelling"):
        config = load_config([*words, "actor_rollout_ref.ref.n_gpus_per_node=4"])
    assert config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu == 2


def test_a_total_of_the_critic_is_divided_by_its_own_ranks():
    words = [*ON_CPU, "critic.ppo_micro_batch_size=8", "actor_rollout_ref.actor.ppo_micro_batch_size=8"]
    with pytest.warns(match="old spelling"):
        config = load_config([*words, "trainer.n_gpus_per_node=2", "critic.n_gpus_per_node=4"])
    assert config.critic.ppo_micro_batch_size_per_gpu == 2
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4


def test_a_run_with_several_ranks_prints_a_line_for_each_pool_and_one_rank_none(tmp_path: Path):
    said: list[str] = []
    announce(load_config(ON_CPU), said.append)
    assert said == []
    two = [*ON_CPU, "trainer.n_gpus_per_node=2", "critic.n_gpus_per_node=1"]
    announce(load_config([*two, "actor_rollout_ref.model.path=nowhere"]), said.append)
    assert said == [
        "placement    actor: 2 devices (cpu 0-1): actor, rollout (2 replicas of 1)",
        "placement    critic: 1 device (cpu 2): critic",
    ]
    save_file({"w": torch.zeros(10**6)}, tmp_path / "model.safetensors")
    announce(load_config([*two, f"actor_rollout_ref.model.path={tmp_path}"]), said.append)
    # fp32: half of weights, gradients and Adam's two, the whole sum between micro-batches; on one rank 16 bytes
    assert "; about 1.1 GB of a device (collect)" in said[2]
    assert said[3].endswith("about 16.0 MB of a device (update critic)")


def test_a_run_starts_the_replicas_of_its_plan_beside_the_trainer_or_apart(monkeypatch: pytest.MonkeyPatch):
    on_gpus(monkeypatch, 8)
    rollout, said = "actor_rollout_ref.rollout", list[str]()
    vllm = [*PPO, f"{rollout}.name=vllm"]
    for tensor in (1, 2):
        config = load_config([*vllm, f"{rollout}.tensor_model_parallel_size={tensor}"])
        assert pools_of(plan_run(config)) == (Pool("actor", ("actor", "rollout", "critic"), 8),)
        assert plan_run(config).rollout.count == 8 // tensor and not plan_run(config).notes
    announce(config, said.append)
    assert said[0].endswith("actor, rollout (4 replicas of 2), critic")
    apart = [*vllm, "actor_rollout_ref.hybrid_engine=False", f"{rollout}.n_gpus_per_node=4"]
    assert place(*apart) == (Pool("actor", ("actor", "critic"), 4),)  # replicas are no ranks
    own = place(*vllm, f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=6")
    assert own == (Pool("actor", ("actor", "critic"), 2),)


def test_a_plan_that_cannot_be_started_yet_is_refused_by_the_run(monkeypatch: pytest.MonkeyPatch):
    on_gpus(monkeypatch, 8)
    rollout = "actor_rollout_ref.rollout"
    vllm, ray = [*PPO, f"{rollout}.name=vllm"], "trainer.runtime=ray"
    sglang = [*PPO, f"{rollout}.name=sglang"]
    for tensor in (2, 4):  # two replicas, and one
        sizes = [f"{rollout}.tensor_model_parallel_size={tensor}", f"{rollout}.data_parallel_size=2"]
        assert place(*vllm, *sizes)[0].num_devices == 8
        assert place(*vllm, *sizes, ray)[0].num_devices == 8
        two_machines = [*vllm, *sizes, ray, "trainer.nnodes=2", "trainer.n_gpus_per_node=4"]
        for words in ([*sglang, *sizes], two_machines if tensor == 4 else [*sglang, *sizes, ray]):
            assert f"set {rollout}.data_parallel_size=1, which makes {8 // tensor} replicas" in refusal(*words)
    one = refusal(*sglang, *sizes, f"{rollout}.num_replicas=1")
    assert one.endswith(f"set {rollout}.data_parallel_size=1")  # it is one replica still
    start_on_the_drivers_machine(monkeypatch)
    two = refusal(*vllm, f"{rollout}.num_replicas=2", ray)
    assert two.startswith(f"{rollout}.num_replicas with rollout.name=vllm on Ray")
    assert place(*vllm, f"{rollout}.num_replicas=1", ray)[0].num_devices == 8
    split = [*vllm, f"{rollout}.n_gpus_per_node=8", f"{rollout}.nnodes=1"]
    for far in ([ray], ["trainer.n_gpus_per_node=8", ray]):  # on the machines of a cluster, and on a second one
        assert refusal(*split, *far).startswith("actor_rollout_ref.hybrid_engine=False or rollout.nnodes with rollout")


def test_beside_ranks_on_ray_the_run_starts_the_replicas_of_the_plan_or_one_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
):
    on_gpus(monkeypatch, 8)
    with monkeypatch.context() as patch:
        start_on_the_drivers_machine(patch)
        alone = plan_run(load_config([*PPO, "actor_rollout_ref.rollout.name=vllm", "trainer.runtime=ray"]))
    assert alone.rollout.count == 1
    assert alone.notes[0].startswith("8 replicas of rollout.name=vllm are planned, and beside ranks on Ray a run")
    words = [*PPO, "trainer.runtime=ray", "trainer.nnodes=2", "trainer.n_gpus_per_node=6", "data.train_batch_size=12"]
    for name in ("vllm", "sglang"):
        words = [*words, f"actor_rollout_ref.rollout.name={name}"]
        config = load_config([*words, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"])
        assert (
            plan_run(config).rollout.count == 6
            and not plan_run(config).notes
            and devices_apart(plan_run(config)) == ([], "")
        )
    apart = ["actor_rollout_ref.hybrid_engine=False", "actor_rollout_ref.rollout.n_gpus_per_node=2"]
    assert devices_apart(plan_run(load_config([*words, *apart]))) == ([2, 2], " and 4 devices for the rollout")
    place(*words, *apart, "actor_rollout_ref.rollout.name=native")
    far = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=8"]
    assert devices_apart(plan_run(load_config([*words, *far]))) == ([0, 0, 8], " and 8 devices for the rollout")
    reward = [f"reward.reward_model.{key}" for key in ("enable=True", "model_path=m", "enable_resource_pool=True")]
    sized = [*reward, "reward.reward_model.nnodes=1", "reward.reward_model.n_gpus_per_node=2"]
    ranks = plan_run(load_config([*words, *sized]))
    assert devices_apart(ranks) == ([2, 0], " and 2 devices for the reward model")
    assert pools_of(ranks)[1] == Pool("reward_model", ("reward_model",), 2, first_device=6)
    served = plan_run(load_config([*words, *sized, "reward.reward_model.rollout.name=vllm"]))
    assert devices_apart(served) == devices_apart(ranks) and [pool.name for pool in pools_of(served)] == ["actor"]


@pytest.mark.parametrize("error", [ValueError, TypeError, ConfigError])
def test_the_line_of_the_placement_ends_no_run(error: type[Exception], monkeypatch: pytest.MonkeyPatch):
    def fail(*of_a_run: object) -> None:
        raise error("from a library")

    monkeypatch.setattr(placement, "count_roles", fail)
    said: list[str] = []
    announce(load_config([*ON_CPU, "trainer.n_gpus_per_node=2"]), said.append)
    assert said == ["placement    actor: 2 devices (cpu 0-1): actor, rollout (2 replicas of 1), critic"]


def test_auto_is_ray_where_several_machines_or_a_cluster_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    def chosen(*words: str) -> str:
        return chosen_runtime(load_config([*ON_CPU, *words]).trainer)

    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    assert chosen() == "auto" and chosen("trainer.nnodes=2") == "ray" and chosen("trainer.runtime=ray") == "ray"
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert chosen() == "ray" and chosen("trainer.runtime=processes") == "processes"
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert chosen() == "ray" and chosen("trainer.runtime=inline") == "inline"


def test_every_machine_holds_the_same_number_of_ranks(monkeypatch: pytest.MonkeyPatch):
    on_two = [*ON_CPU, "trainer.nnodes=2", "trainer.n_gpus_per_node=2", "critic.n_gpus_per_node=1"]
    assert [pool.num_devices for pool in place(*on_two)] == [4, 2]
    found = refusal(*on_two, "trainer.runtime=processes")
    assert found.startswith(
        "trainer.runtime=processes is on one machine, but trainer.nnodes=2; use trainer.runtime=ray"
    )
    on_gpus(monkeypatch, 2)  # of this machine: Ray says what the others have
    assert place(*PPO, "trainer.nnodes=2", "trainer.n_gpus_per_node=4")[0].num_devices == 8
    monkeypatch.setattr(ray_cluster.importlib.util, "find_spec", lambda name: None)
    assert refusal(*on_two) == "trainer.runtime=ray needs Ray, which is not installed: pip install -e '.[ray]'"


def test_a_ray_on_this_machine_is_reported_and_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(placement, "InlineGroup", lambda worker: "inline")
    monkeypatch.setattr(placement, "RankWorkers", lambda *of_a_run: None)
    said: list[str] = []

    def start() -> list[str]:
        said.clear()
        config = load_config(ON_CPU)
        assert list(start_pools(config, 1, plan_run(config), said.append).groups.values()) == ["inline"]
        return said

    assert start() == []
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert start() == [f"a Ray head runs on this machine at {address}; trainer.runtime=ray joins it"]
    assert start() == []  # it has ended


def test_fine_tuning_reports_a_ray_on_this_machine_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "local_head", lambda: "10.0.0.1:6379")
    monkeypatch.setattr(sft_ranks, "ProcessGroup", lambda *_, **__: ExitStack())
    line = "a Ray head runs on this machine at 10.0.0.1:6379; trainer.runtime=ray joins it\n"
    for runtime, said in (("auto", line), ("processes", "")):
        words = ["model.path=m", "trainer.device=cpu", "trainer.n_gpus_per_node=2", f"trainer.runtime={runtime}"]
        config = load_config([*words, f"trainer.default_local_dir={tmp_path}"], "sft_trainer")
        with ExitStack() as ending:
            sft_ranks.start_ranks(config, config.model, 1, ending)
        assert capsys.readouterr().out == said


def test_a_token_in_the_home_folder_or_the_environment_is_shown_to_a_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert not ray_cluster.has_token()
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("1" * 64)
    assert ray_cluster.has_token()
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 64)
    assert ray_cluster.has_token()


@pytest.mark.parametrize(("runtime", "group"), [("processes", "ProcessGroup"), ("ray", "RayGroup")])
def test_ranks_are_watched_for_the_configured_time(monkeypatch: pytest.MonkeyPatch, runtime: str, group: str):
    started: list[tuple] = []
    monkeypatch.setattr(placement, group, lambda *arguments: started.append(arguments))
    monkeypatch.setattr(ray_cluster, "check_installed", lambda: None)
    joined = SimpleNamespace(leave=lambda: None, describe=lambda *_: "joined")
    monkeypatch.setattr(placement, "join_cluster", lambda *_: joined)
    monkeypatch.setattr(placement, "reserve", lambda *_: "reserved")
    words = [f"trainer.runtime={runtime}", "trainer.n_gpus_per_node=2", "trainer.stall_timeout_s=7"]
    config = load_config([*ON_CPU, *words])
    start_pools(config, 1, plan_run(config), print)
    assert [arguments[5] for arguments in started] == [7.0]
