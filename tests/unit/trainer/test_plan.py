"""Which devices every role gets, by hand-counted cases, and the plans that are refused."""

import pytest

from tests.unit.trainer.test_placement import start_on_the_drivers_machine
from verl.config import ConfigError, load_config
from verl.placement.plan import Machine, Plan, Replicas, plan_placement
from verl.placement.tables import devices_table, log_lines
from verl.runtime.pools import Pool

ROLLOUT = "actor_rollout_ref.rollout"
REWARD = "reward.reward_model"
GRPO = ["algorithm.adv_estimator=grpo", "data.train_batch_size=128", f"{ROLLOUT}.n=1"]
VLLM = [*GRPO, f"{ROLLOUT}.name=vllm"]
SPLIT = "actor_rollout_ref.hybrid_engine=False"
EIGHT = Machine("cuda", 8)


def plan(*words: str, machine: Machine = EIGHT, runtime: str = "auto") -> Plan:
    return plan_placement(load_config(words), machine, runtime)


def refusal(*words: str, machine: Machine = EIGHT, runtime: str = "auto") -> str:
    with pytest.raises(ConfigError) as raised:
        plan(*words, machine=machine, runtime=runtime)
    return str(raised.value)


@pytest.mark.parametrize(
    ("tensor", "data", "expected"), [(1, 1, 8), (2, 1, 4), (2, 2, 2), (4, 2, 1), (8, 1, 1), (1, 4, 2)]
)
def test_replicas_are_the_devices_over_tensor_times_data_parallel_size(tensor: int, data: int, expected: int):
    made = plan(*VLLM, f"{ROLLOUT}.tensor_model_parallel_size={tensor}", f"{ROLLOUT}.data_parallel_size={data}")
    assert made.pools == (Pool("actor", ("actor", "rollout"), 8),)
    assert made.rollout == Replicas("rollout", "actor", expected, tensor, data)


def test_replicas_beside_ranks_on_ray_are_planned_and_where_one_starts_alone_it_is_noted(
    monkeypatch: pytest.MonkeyPatch,
):
    two = f"{ROLLOUT}.tensor_model_parallel_size=2"
    for name in ("vllm", "sglang"):
        assert plan(*GRPO, f"{ROLLOUT}.name={name}", two, runtime="ray").notes == ()
    start_on_the_drivers_machine(monkeypatch)
    [note] = plan(*VLLM, two, runtime="ray").notes
    assert note.startswith("4 replicas of rollout.name=vllm are planned, and beside ranks on Ray a run of this version")
    assert f"{ROLLOUT}.num_replicas=1 plans that one" in note and plan(*VLLM, two).notes == ()
    for quiet in (f"{ROLLOUT}.num_replicas=1", f"{ROLLOUT}.num_replicas=4", f"{ROLLOUT}.tensor_model_parallel_size=8"):
        assert plan(*VLLM, quiet, runtime="ray").notes == ()


def test_each_replica_has_a_machine_and_devices_there():
    nodes, tensor = ["trainer.nnodes=2", "trainer.n_gpus_per_node=4"], f"{ROLLOUT}.tensor_model_parallel_size"
    made = plan(*VLLM, *nodes, f"{tensor}=2", runtime="ray")
    assert made.rollout_places == ((0, (0, 1)), (0, (2, 3)), (1, (0, 1)), (1, (2, 3)))
    apart = plan(*VLLM, *nodes, SPLIT, f"{ROLLOUT}.n_gpus_per_node=3", f"{ROLLOUT}.num_replicas=4", runtime="ray")
    assert apart.rollout_places == ((0, (4,)), (0, (5,)), (0, (6,)), (1, (4,)))
    far = plan(*VLLM, *nodes, f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=8", f"{tensor}=4", runtime="ray")
    assert far.rollout_places == ((2, (0, 1, 2, 3)), (2, (4, 5, 6, 7)))
    on_cpus = plan(*VLLM, *nodes, f"{ROLLOUT}.num_replicas=3", machine=Machine("cpu", 1), runtime="ray")
    assert on_cpus.rollout_places == ((0, ()), (0, ()), (1, ()))


def test_replicas_take_the_devices_of_their_pool_in_order():
    assert plan(*VLLM, f"{ROLLOUT}.tensor_model_parallel_size=4").rollout_devices == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert plan(*VLLM, f"{ROLLOUT}.num_replicas=2").rollout_devices == ((0,), (1,))
    apart = [*VLLM, SPLIT, f"{ROLLOUT}.n_gpus_per_node=2", "actor_rollout_ref.ref.n_gpus_per_node=1"]
    made = plan(*apart, "trainer.n_gpus_per_node=4", "algorithm.use_kl_in_reward=True")
    assert made.rollout_devices == ((5,), (6,))  # after the actor's and the reference's
    assert plan(*VLLM, f"{ROLLOUT}.num_replicas=2", machine=Machine("cpu", 1)).rollout_devices == ()


def test_collectives_to_replicas_on_the_trainers_devices_are_refused_with_what_works(monkeypatch: pytest.MonkeyPatch):
    words = [*VLLM, f"{ROLLOUT}.tensor_model_parallel_size=2"]
    nccl = f"{ROLLOUT}.checkpoint_engine.backend=nccl"
    found = refusal(*words, nccl)
    assert "rank 0 of the trainer and the 8 workers of the rollout, and NCCL joins one rank a device" in found
    ways = found.partition(" Set ")[2]
    assert ways.startswith(f"{ROLLOUT}.checkpoint_engine.backend=naive (device memory) or gloo (host memory), or")
    apart = ways.partition("devices of its own: ")[2].split()
    assert plan(*words, nccl, *apart).rollout_devices == ((4, 5), (6, 7))
    for backend in ("naive", "gloo"):
        assert plan(*words, f"{ROLLOUT}.checkpoint_engine.backend={backend}").rollout.count == 4
    assert "device 0 would have two" in refusal(*VLLM, nccl, machine=Machine("cuda", 1))
    assert plan(*words, nccl, machine=Machine("cpu", 1)).rollout.count == 1  # gloo there
    for name in ("vllm", "sglang"):  # replicas are on the ranks' devices
        assert "NCCL joins one rank a device" in refusal(*words, f"{ROLLOUT}.name={name}", nccl, runtime="ray")
    start_on_the_drivers_machine(monkeypatch)
    assert plan(*words, nccl, runtime="ray").rollout.count == 4  # Ray knows which devices the ranks have


def test_ranks_on_parts_of_devices_are_counted_as_such():
    words = [*GRPO, "algorithm.use_kl_in_reward=True", "trainer.n_gpus_per_node=1", "ray_kwargs.devices_per_rank=0.5"]
    words += ["actor_rollout_ref.ref.n_gpus_per_node=1"]
    made = plan(*words, runtime="ray")
    assert devices_table(made).splitlines()[1:] == [
        "0     1 x 0.5 cuda  rank 0  replica 0",
        "0     1 x 0.5 cuda                     rank 0",
    ]
    assert log_lines(made)[0] == "placement    actor: 1 rank (1 x 0.5 cuda): actor, rollout (1 replica of 1)"
    assert plan(*words, runtime="processes").devices_per_rank == 1  # Ray alone reads it


def test_experts_use_the_devices_of_the_replica():
    sizes = [f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.data_parallel_size=2"]
    assert plan(*VLLM, *sizes, f"{ROLLOUT}.expert_parallel_size=4").rollout == plan(*VLLM, *sizes).rollout


def test_how_ranks_divide_experts_is_noted_and_refused_before_anything_starts():
    experts = "actor_rollout_ref.actor.fsdp_config.expert_parallel_size"
    assert plan(*VLLM, f"{experts}=4").notes == ("the ranks of the actor are 8 data, 4 for experts",)
    assert "expert_parallel_size=3 does not divide the 8 ranks that hold one copy" in refusal(*VLLM, f"{experts}=3")


def test_a_replica_may_take_whole_machines():
    two = [*VLLM, "trainer.nnodes=2", "trainer.n_gpus_per_node=4"]
    made = plan(*two, f"{ROLLOUT}.tensor_model_parallel_size=4", f"{ROLLOUT}.data_parallel_size=2", runtime="ray")
    assert made.rollout.count == 1
    assert "part of replica 0" in devices_table(made)


def test_num_replicas_takes_the_place_of_the_computed_number():
    assert plan(*VLLM, f"{ROLLOUT}.num_replicas=3").rollout.count == 3
    three = [*VLLM, f"{ROLLOUT}.tensor_model_parallel_size=3"]
    assert plan(*three, f"{ROLLOUT}.num_replicas=2").rollout.count == 2  # two devices sample nothing
    found = refusal(*three, f"{ROLLOUT}.num_replicas=3")
    assert "= 3 devices, and pool actor has 1 x 8, room for 2; lower actor_rollout_ref.rollout.num_replicas=3" in found


@pytest.mark.parametrize(
    ("tensor", "data", "nearest"),
    [
        (3, 1, "tensor_model_parallel_size=2, for 4 replicas"),
        (5, 1, "tensor_model_parallel_size=4, for 2 replicas"),
        (16, 1, "tensor_model_parallel_size=8, for 1 replica"),
        (4, 4, "tensor_model_parallel_size=2, for 1 replica"),
        (1, 3, "tensor_model_parallel_size=1 and data_parallel_size=1, for 8 replicas"),
    ],
)
def test_replicas_that_do_not_divide_the_devices_are_refused_with_the_nearest(tensor: int, data: int, nearest: str):
    words = [f"{ROLLOUT}.tensor_model_parallel_size={tensor}", f"{ROLLOUT}.data_parallel_size={data}"]
    found = refusal(*VLLM, *words)
    assert f"tensor_model_parallel_size={tensor} x data_parallel_size={data} = {tensor * data} devices" in found
    assert "pool actor has 1 x 8" in found and found.endswith(nearest)
    change = dict(part.split("=") for part in nearest.partition(",")[0].split(" and "))
    assert plan(*VLLM, *words, *(f"{ROLLOUT}.{name}={value}" for name, value in change.items()))  # it does work


def test_the_native_engine_samples_on_every_rank_and_says_what_it_does_not_read():
    made = plan(*GRPO, f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.data_parallel_size=2")
    assert made.rollout == Replicas("rollout", "actor", 8)
    assert [note.partition(" has no effect")[0] for note in made.notes] == [
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.data_parallel_size=2",
    ]


def test_the_native_engine_apart_has_a_replica_on_each_device():
    apart = [*GRPO, SPLIT, f"{ROLLOUT}.n_gpus_per_node=4"]
    assert plan(*apart).rollout == Replicas("rollout", "rollout", 4)
    assert "a replica of which has one device" in refusal(*apart, f"{ROLLOUT}.tensor_model_parallel_size=2")


def test_where_no_devices_are_counted_data_parallel_size_means_replicas_and_says_so():
    cpu = Machine("cpu", 1)
    made = plan(*VLLM, f"{ROLLOUT}.data_parallel_size=2", machine=cpu)
    assert made.rollout == Replicas("rollout", "actor", 2, on_devices=False)
    [note] = made.notes
    assert f"{ROLLOUT}.data_parallel_size=2 means 2 replicas" in note and f"write {ROLLOUT}.num_replicas=2" in note
    named = plan(*VLLM, f"{ROLLOUT}.num_replicas=2", machine=cpu)
    assert (named.rollout, named.notes) == (made.rollout, ())
    both = refusal(*VLLM, f"{ROLLOUT}.num_replicas=2", f"{ROLLOUT}.data_parallel_size=2", machine=cpu)
    assert "leave it at 1, num_replicas=2 alone says how many" in both
    joined = plan(*GRPO, f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.server.url=http://h:1")
    assert joined.rollout == Replicas("rollout", "actor", 1, on_devices=False)


def test_a_rollout_apart_takes_devices_of_the_same_machines_or_machines_of_its_own():
    beside = plan(*VLLM, SPLIT, f"{ROLLOUT}.n_gpus_per_node=4")
    assert beside.pools == (Pool("actor", ("actor",), 4), Pool("rollout", ("rollout",), 4, 1, 4))
    assert beside.rollout == Replicas("rollout", "rollout", 4) and beside.num_devices == 8
    both = [*VLLM, "trainer.n_gpus_per_node=8", f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=8"]
    apart = plan(*both, runtime="ray")
    assert apart.pools[1] == Pool("rollout", ("rollout",), 8, 2, 0, 1) and apart.num_nodes == 3
    assert apart.num_devices == 24
    found = refusal(*both, runtime="processes")
    assert "(actor 1 x 8, rollout 2 x 8) take 3 machines of 8 devices, and trainer.runtime=processes" in found


def test_pools_with_machines_of_their_own_fill_room_that_is_left():
    reward = [f"{REWARD}.enable=True", f"{REWARD}.enable_resource_pool=True", f"{REWARD}.model_path=m"]
    reward.append(f"{REWARD}.rollout.name=vllm")
    words = [*VLLM, "trainer.n_gpus_per_node=4", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2", *reward]
    sized = [f"{REWARD}.nnodes=1", f"{REWARD}.n_gpus_per_node=2", f"{REWARD}.rollout.tensor_model_parallel_size=2"]
    made = plan(*words, *sized)
    assert made.num_nodes == 1 and [(p.name, p.first_device) for p in made.pools] == [
        ("actor", 0),
        ("rollout", 4),
        ("reward_model", 6),
    ]
    assert made.replicas[1] == Replicas("reward_model", "reward_model", 1, 2)
    assert plan(*words, f"{REWARD}.nnodes=1", f"{REWARD}.n_gpus_per_node=4").pools[2].first_node == 1
    assert f"needs {REWARD}.nnodes of 1 or more" in refusal(*words)
    shared = plan(*VLLM, f"{REWARD}.enable=True", f"{REWARD}.model_path=m")
    assert shared.pools[0].roles == ("actor", "rollout", "reward_model") and shared.reward_servers is None
    served = plan(*VLLM, f"{REWARD}.enable=True", f"{REWARD}.model_path=m", f"{REWARD}.rollout.name=vllm")
    assert served.pools == shared.pools and served.reward_servers.count == 8


def test_a_server_of_a_reward_model_and_all_of_a_judge_are_on_one_machine():
    served = [f"{REWARD}.enable=True", f"{REWARD}.model_path=m", f"{REWARD}.rollout.name=vllm"]
    two = [*VLLM, *served, "trainer.nnodes=2", "trainer.n_gpus_per_node=4"]
    wide = [*two, f"{REWARD}.rollout.tensor_model_parallel_size=4", f"{REWARD}.rollout.data_parallel_size=2"]
    text = refusal(*wide, runtime="ray")
    assert "a server takes tensor_model_parallel_size=4 x data_parallel_size=2 = 8 devices of one machine" in text
    judge = [*two, "reward.custom_reward_function.path=judge.py"]
    text = refusal(*judge, runtime="ray")
    assert text.startswith("a judge is one server on one machine, and its 8 replicas of 1 devices take 2 machines of 4")
    assert text.endswith(f"the nearest that fits is {REWARD}.rollout.num_replicas=4")
    made = plan(*judge, f"{REWARD}.rollout.num_replicas=4", runtime="ray")
    assert made.places(made.reward_servers) == tuple((0, (device,)) for device in range(4))
    own = [*served, f"{REWARD}.enable_resource_pool=True", f"{REWARD}.nnodes=1", f"{REWARD}.n_gpus_per_node=2"]
    words = [*VLLM, "trainer.nnodes=2", "trainer.n_gpus_per_node=8", *own]
    assert devices_table(plan(*words, runtime="ray")).splitlines() == [
        "node  devices   actor       rollout        reward_model",
        "0     cuda 0-7  ranks 0-7   replicas 0-7",
        "1     cuda 0-7  ranks 8-15  replicas 8-15",
        "2     cuda 0-1                             replicas 0-1",
    ]


def test_a_rollout_apart_needs_numbers_and_gets_the_nearest_that_fit():
    assert "say how many of a machine's with actor_rollout_ref.rollout.n_gpus_per_node=N" in refusal(*VLLM, SPLIT)
    found = refusal(*VLLM, SPLIT, "trainer.n_gpus_per_node=8")  # the rollout's number follows it
    assert found.endswith(
        "the nearest that fits is trainer.n_gpus_per_node=4 actor_rollout_ref.rollout.n_gpus_per_node=4"
    )
    assert "leave out actor_rollout_ref.hybrid_engine=False to share the actor's" in found
    note = plan(*VLLM, f"{ROLLOUT}.n_gpus_per_node=4").notes[0]
    assert f"{ROLLOUT}.n_gpus_per_node=4 has no effect" in note and SPLIT in note


def test_devices_that_nobody_can_count_are_asked_for():
    unknown = Machine("GPU")
    assert "trainer.n_gpus_per_node is not set" in refusal(*GRPO, machine=unknown)
    made = plan(*VLLM, "trainer.n_gpus_per_node=8", "trainer.nnodes=16", machine=unknown, runtime="ray")
    assert made.rollout.count == 128 and made.num_nodes == 16
    split = [*VLLM, "trainer.n_gpus_per_node=8", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=8"]
    found = refusal(*split, machine=unknown, runtime="processes")
    assert "take 2 machines, and trainer.runtime=processes is on one" in found


def test_the_devices_are_shown_by_role():
    words = [*VLLM, "algorithm.use_kl_in_reward=True", "actor_rollout_ref.ref.n_gpus_per_node=2", "trainer.nnodes=2"]
    words += ["trainer.n_gpus_per_node=4", f"{ROLLOUT}.tensor_model_parallel_size=2"]
    made = plan(*words, runtime="ray")
    assert devices_table(made).splitlines() == [
        "node  devices   actor      rollout            reference",
        "0     cuda 0-3  ranks 0-3  replicas 0-1 of 2",
        "0     cuda 4-5                                ranks 0-1",
        "1     cuda 0-3  ranks 4-7  replicas 2-3 of 2",
        "1     cuda 4-5                                ranks 2-3",
    ]
    assert log_lines(made) == [
        "placement    actor: 8 devices (cuda 0-3 of nodes 0-1): actor, rollout (4 replicas of 2)",
        "placement    reference: 4 devices (cuda 4-5 of nodes 0-1): reference",
    ]
    assert log_lines(plan(*GRPO, machine=Machine("cpu", 1))) == []  # one rank says nothing new
