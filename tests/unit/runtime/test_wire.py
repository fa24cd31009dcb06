"""What travels between driver and ranks arrives as it was sent, and reading it runs nothing."""

import math
from pathlib import Path

import pytest
import torch

from verl.config.extra import Extra
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.data.micro_batches import MicroBatching
from verl.data.trajectory import Trajectory
from verl.runtime.wire import NotSerializableError, deserialize, pack, serialize, unpack
from verl.workers.rollout.base import Completion, GenerationRequest, SamplingParams


@pytest.mark.parametrize(
    "item",
    [
        None,
        True,
        -3,
        0.1,
        "ä\n",
        Path("/a/b"),
        [],
        (),
        {},
        [1, 2.5, True, None, "x", [1, (2,)]],
        (1, (2, [3])),
        {"a": [1], 3: {"b": (None,)}},
        MicroBatching(max_tokens=5, plan=((0, 2), (), (1,))),
        GenerationRequest(1 << 40, [1, 2], SamplingParams(stop=("a", "b"), seed=7)),
        [Completion([1], [-0.25], "stop", (0, 3))],
    ],
)
def test_plain_values_arrive_equal_and_of_the_same_type(item):
    got = deserialize(serialize(item))
    assert got == item and type(got) is type(item) and repr(got) == repr(item)


def test_keys_of_the_users_own_arrive_with_their_section():
    sent = Extra({"beta": 0.5, "path": {"deep": [1, "x"]}}, "algorithm.extra")
    arrived = deserialize(serialize(sent))
    assert type(arrived) is Extra and arrived == sent and arrived.path.deep == [1, "x"]
    with pytest.raises(AttributeError, match=r"algorithm\.extra\.gamma is not set"):
        _ = arrived.gamma


@pytest.mark.parametrize(
    "numbers",
    [
        [0, -1, 2**63 - 1, -(2**63)] * 40,
        [0.1, -1e-300, 1.0, -0.0, float("inf")] * 40,
        [2**63, 1] * 40,
        [2**63, -1] * 40,
        [2**70] * 100,
        [1, 1.0] * 50,
        [True] * 100,
        (3,) * 100,
        [],
    ],
)
def test_long_lists_of_numbers_arrive_equal_and_of_the_same_type(numbers):
    arrived, tensor = deserialize(serialize([numbers, torch.ones(3)]))
    assert repr(arrived) == repr(numbers) and type(arrived) is type(numbers)
    assert tensor.tolist() == [1, 1, 1]
    assert repr(unpack(pack({"a": numbers}))["a"]) == repr(numbers)


def test_numbers_that_are_not_numbers_arrive():
    nan, inf = deserialize(serialize([float("nan"), -math.inf]))
    assert math.isnan(nan) and inf == -math.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_tensors_arrive_bit_for_bit(dtype):
    tensors = [torch.randn(3, 5).to(dtype), torch.tensor(1).to(dtype), torch.empty(0, 4, dtype=dtype)]
    tensors.append(torch.randn(6, 4).to(dtype).t()[1:])  # not contiguous
    for got, sent in zip(deserialize(serialize({"t": tensors}))["t"], tensors, strict=True):
        assert got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent)
        got.flatten()[:1] = 0  # ours to write to


def test_a_scored_trajectory_arrives_with_all_its_fields():
    sent = Trajectory(torch.tensor([1, 2]), torch.tensor([False, True]), torch.zeros(2), group_id=3, tool_rewards=[0.5])
    sent = sent.with_reward(1.0, {"acc": True, "why": "right"}, "toy", "4")
    got = deserialize(serialize(sent))
    tensors = ("tokens", "loss_mask", "rollout_logprobs")
    assert all(torch.equal(got.__dict__.pop(name), sent.__dict__.pop(name)) for name in tensors)
    assert got.__dict__ == sent.__dict__ and got.score_parts == {"acc": True, "why": "right"}


def test_batches_and_metrics_arrive():
    columns = {"tokens": torch.tensor([1, 2, 3]), "loss_mask": torch.tensor([False, True, True])}
    batch = Batch(torch.tensor([0, 1, 3]), columns, {"rewards": torch.tensor([0.5, float("nan")])})
    metrics = Metrics()
    metrics.mean("a", 1.5, 3)
    metrics.max("b", 2.0)
    got, (learnt, out) = deserialize(serialize((batch, (metrics, {"x": torch.ones(2)}))))
    assert got.cu_seqlens.tolist() == [0, 1, 3] and got["tokens"].tolist() == [1, 2, 3]
    assert torch.equal(got["rewards"], batch["rewards"]) or got["rewards"].isnan().tolist() == [False, True]
    assert learnt.state() == metrics.state() and out["x"].tolist() == [1.0, 1.0]


class Local:
    pass


@pytest.mark.parametrize("item", [Local(), Local, print, {"a": [Local()]}, b"bytes", {1, 2}])
def test_anything_else_is_refused_by_name_before_it_is_sent(item):
    with pytest.raises(NotSerializableError, match="cannot travel"):
        serialize(item)


@pytest.mark.parametrize(
    ("module", "name"), [("subprocess", "Popen"), ("verl.runtime.wire", "importlib"), ("verl.data.batch", "Batch")]
)
def test_a_message_cannot_name_what_is_not_a_dataclass_of_this_package(module, name):
    good = serialize(MicroBatching(max_tokens=5))
    text = (
        good[8:]
        .rstrip(b"\0")
        .replace(b"verl.data.micro_batches", module.encode())
        .replace(b"MicroBatching", name.encode())
    )
    bad = len(text).to_bytes(8, "little") + text
    with pytest.raises(NotSerializableError, match=name):
        deserialize(bad)
