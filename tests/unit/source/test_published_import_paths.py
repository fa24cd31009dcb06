"""Import paths of published user code: the provided ones have the names it uses, all others name a replacement."""

import importlib
import importlib.util
import re
import subprocess
import sys

import pytest

# (statement that published files have, how many of 60 published files can import whole with it and those above it)
PUBLISHED = (
    ("from verl.utils.hdfs_io import copy, exists, makedirs", 24),
    ("from verl.utils.reward_score import default_compute_score, gsm8k", 24),
    (
        "from verl.utils.reward_score.math_reward import compute_score, is_equiv, last_boxed_only_string, "
        "remove_boxed, strip_string",
        29,
    ),
    ("from verl.utils.reward_score.math_dapo import compute_score", 30),
    ("from verl.utils.profiler import DistProfiler, ProfilerConfig, GPUMemoryLogger, marked_timer", 50),
    ("from verl.utils.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op", 30),
    ("from verl.utils.fs import copy_to_local, is_non_local, local_mkdir_safe", 30),
    ("from verl.utils import tensordict_utils as tu; tu.get_non_tensor_data, tu.assign_non_tensor", 35),
    ("from verl.utils.tensordict_utils import get_tensordict, pad_to_divisor", 35),
    (
        "from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, "
        "DictConfigWrap, ToolListWrap, register",
        37,
    ),
    (
        "from verl.experimental.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, DictConfigWrap, "
        "ToolListWrap, register, SingleTurnAgentLoop, ToolAgentLoop",
        37,
    ),
    ("from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop", 37),
    ("from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser, HermesToolParser", 37),
    ("from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop", 37),
    ("from verl.experimental.reward_loop.reward_manager import RewardManagerBase, register", 37),
    ("from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase", 37),
    ("from verl.workers.config.actor import ActorConfig, FSDPActorConfig, PolicyLossConfig", 41),
    ("from verl.workers.config.optimizer import FSDPOptimizerConfig", 41),
    ("from verl.workers.config.engine import FSDPEngineConfig", 41),
    ("from verl.workers.config.model import HFModelConfig", 41),
    ("from verl.workers.config.rollout import AgentLoopConfig, MultiTurnConfig, RolloutConfig, SamplingConfig", 41),
    ("from verl.workers.config.critic import CriticConfig, FSDPCriticConfig", 41),
    ("from verl.utils.dataset import RLHFDataset, collate_fn", 47),
    ("from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn", 47),
    ("from verl.trainer.config.algorithm import AlgoConfig, RolloutCorrectionConfig", 47),
    (
        "from verl.tools.schemas import OpenAIFunctionCallSchema, OpenAIFunctionParametersSchema, "
        "OpenAIFunctionParsedSchema, OpenAIFunctionPropertySchema, OpenAIFunctionSchema, OpenAIFunctionToolCall, "
        "OpenAIFunctionToolSchema, ToolResponse",
        47,
    ),
    ("from verl import DataProto", 47),
    ("from verl.protocol import DataProto, DataProtoItem", 47),
    ("from verl.utils import hf_processor, hf_tokenizer", 47),
    ("from verl.utils.tokenizer import hf_processor, hf_tokenizer", 47),
    (
        "from verl.utils.torch_functional import clip_by_value, entropy_from_logits, get_response_mask, "
        "logprobs_from_logits, masked_mean, masked_sum, masked_var, masked_whiten, pad_sequence_to_length",
        47,
    ),
    ("from verl.utils.ray_utils import get_event_loop", 47),
    (
        "from verl.utils.py_functional import append_to_dict, list_of_dict_to_dict_of_list, temp_env_var, "
        "timeout_limit, union_two_dict",
        47,
    ),
    ("from verl.utils.metric import reduce_metrics", 47),
    ("from verl.trainer.main_ppo import run_ppo", 47),
    ("from verl.interactions.base import BaseInteraction", 47),
)


@pytest.mark.parametrize("statement", [statement for statement, _ in PUBLISHED])
def test_a_published_import_works(statement):
    exec(compile(statement, "published", "exec"), {})


def test_each_published_import_works_in_a_process_of_its_own_first():
    order = "\n".join(f"import {s.split()[1]}" for s, _ in reversed(PUBLISHED))
    subprocess.run([sys.executable, "-c", order], check=True)


@pytest.mark.parametrize(
    ("module", "instead"),
    [
        ("verl.single_controller", r"verl\.runtime\.group\.WorkerGroup"),
        ("verl.single_controller.base.decorator", r"verl\.runtime\.group\.WorkerGroup"),
        ("verl.trainer.ppo.ray_trainer", r"verl\.trainer\.ppo\.trainer\.PPOTrainer"),
        ("verl.workers.fsdp_workers", r"verl\.workers\.actor\.Actor"),
        ("verl.workers.reward_manager.registry", r"verl\.experimental\.reward_loop\.reward_manager\.RewardManagerBase"),
        ("verl.workers.reward_manager", r"async run_single\(data\)"),
        ("verl.experimental.reward_loop.reward_manager.naive", "RewardManagerBase"),
        ("verl.experimental.reward_loop.reward_loop", r"reward\.custom_reward_function\.path"),
        ("verl.utils.reward_score.rlla", r"reward\.custom_reward_function\.path"),
        ("verl.utils.dataset.multiturn_sft_dataset", r"verl\.trainer\.sft_trainer"),
        ("verl.experimental.agent_loop.agent_loops", "AgentLoopBase"),
        ("verl.interactions.gsm8k_interaction", r"verl\.interactions\.base\.BaseInteraction"),
        ("verl.utils.reward_scores", "verl.utils.reward_score"),
        ("verl.nothing_like_it", "docs/why/architecture.md"),
    ],
)
def test_a_path_that_is_not_provided_names_the_replacement(module, instead):
    with pytest.raises(ImportError, match=instead) as caught:
        importlib.import_module(module)
    assert type(caught.value) is ImportError and f"{module.split('.')[1]}" in str(caught.value)


@pytest.mark.parametrize(
    ("statement", "instead"),
    [
        ("from verl.protocol import pad_dataproto_to_divisor", r"verl\.data\.batch\.Batch"),
        ("from verl.trainer.main_ppo import TaskRunner", "data.custom_cls"),
        ("from verl.trainer.main_ppo import create_rl_dataset", r"verl\.utils\.dataset\.RLHFDataset"),
        ("from verl.utils.torch_functional import get_cosine_schedule", r"verl\.models\.head"),
        ("from verl.utils import nothing", r"near it are verl\.utils\."),
        ("from verl.experimental.agent_loop.agent_loop import AgentLoopManager", "AgentRunner runs loops"),
        ("from verl.workers.config.engine import McoreEngineConfig", "other engines are still to come"),
        ("from verl.workers.config import McoreActorConfig", "other engines are still to come"),
        ("from verl.utils.dataset import rm_dataset", r"verl\.trainer\.sft_trainer"),
        ("from verl.utils.fs import nothing", "docs/why/architecture.md"),
        ("from verl.experimental.reward_loop import RewardLoopManager", "RewardManagerBase"),
    ],
)
def test_a_name_that_is_not_provided_names_the_replacement(statement, instead):
    with pytest.raises(ImportError, match=instead):
        exec(compile(statement, "published", "exec"), {})


def test_every_replacement_that_names_a_module_of_ours_names_one_that_exists():
    from verl.utils.import_paths import REPLACEMENTS

    missing = []
    for advice in REPLACEMENTS.values():
        for path in re.findall(r"verl(?:\.\w+)+", advice):
            parts = path.split(".")
            for cut in range(len(parts), 0, -1):
                try:
                    found = importlib.import_module(".".join(parts[:cut]))
                except ImportError:
                    continue
                for name in parts[cut:]:
                    if not hasattr(found, name):
                        missing.append(path)
                        break
                    found = getattr(found, name)
                break
    assert missing == []


def test_a_helper_on_tensordict_says_what_to_use_when_it_is_called():
    from verl.utils import tensordict_utils

    with pytest.raises(ImportError, match=r"get_tensordict is not provided.*verl\.data\.batch\.Batch\.pack"):
        tensordict_utils.get_tensordict({})


def doors() -> list[str]:
    """The modules that other people's code imports, apart from programs."""
    names = {module for statement, _ in PUBLISHED for module in re.findall(r"from (verl[.\w]*) import", statement)}
    return sorted(names)


@pytest.mark.parametrize("module", doors())
def test_a_door_is_asked_by_hasattr_and_getattr_as_every_module(module):
    door = importlib.import_module(module)
    assert not hasattr(door, "nonsense") and getattr(door, "nonsense", 7) == 7
    assert importlib.util.find_spec(f"{module}.nonsense" if hasattr(door, "__path__") else "verl.nonsense") is None
    with pytest.raises(AttributeError, match="nonsense"):
        door.nonsense  # noqa: B018


def test_the_advice_of_an_import_survives_many_names_and_a_debugger():
    many = "from verl.utils.fs import " + ", ".join(f"__name__ as n{i}" for i in range(600)) + ", nothing"
    for statement in ("from verl.utils.fs import nothing", many, "from verl.utils.fs import (copy_to_local, nothing)"):
        before = sys.gettrace()
        for trace in (before, lambda *_: None):
            sys.settrace(trace)
            try:
                with pytest.raises(ImportError, match=r"nothing does not exist here: look into verl\.utils\.fs"):
                    exec(compile(statement, "published", "exec"), {})
            finally:
                sys.settrace(before)


def test_other_names_are_ordinary_attribute_errors():
    import verl

    with pytest.raises(AttributeError, match="nonsense"):
        verl.nonsense  # noqa: B018
    assert not hasattr(importlib.import_module("verl.utils.tensordict_utils"), "nonsense")


def test_other_packages_are_still_searched_for_as_before():
    with pytest.raises(ModuleNotFoundError, match="No module named 'verlx'"):
        importlib.import_module("verlx")
