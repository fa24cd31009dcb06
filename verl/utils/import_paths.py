"""Replacements for import paths that published code names and that do not exist here.

`import verl` puts a finder behind Python's own ones. It is asked only for modules of this package that nobody found,
and raises an ImportError that names the replacement.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from opcode import opmap
from types import ModuleType
from typing import Any, NoReturn

_REWARD = "write a function compute_score(data_source, solution_str, ground_truth, extra_info) and name its file in "
_REWARD += "reward.custom_reward_function.path"
_MANAGER = (
    "a manager of your own derives from verl.experimental.reward_loop.reward_manager.RewardManagerBase and scores "
)
_MANAGER += "one answer in `async run_single(data)` (reward.reward_manager.source=importlib); or " + _REWARD
_DATA_PROTO = "batches are packed (verl.data.batch.Batch), and DataProto is the type of the one answer that a reward "
_DATA_PROTO += "manager gets, to be read (docs/rewards/own_reward_manager.md); or " + _REWARD
_WORKERS = "worker groups have two verbs, broadcast and scatter (verl.runtime.group.WorkerGroup), and the training "
_WORKERS += "loop reaches models through verl.workers.actor.Actor"
_SFT = "verl.trainer.sft_trainer trains conversations; data.messages_key and data.tools_key name their columns"
_MEGATRON = "the Megatron-LM engine is still to come; use FSDP (actor.strategy=fsdp2)"
_ASYNC = (
    "trainer.v1.trainer_mode=separate_async of verl.trainer.main_ppo runs it (docs/train/asynchronous.md); a step "
    "takes what verl.trainer.ppo.sources.async_source.AsyncSource gives it, by the two rules of "
    "verl.trainer.ppo.sources.admission"
)
_TRAINER = (
    "there is one trainer for all modes, verl.trainer.ppo.trainer.PPOTrainer, and nothing to register: "
    "trainer.v1.trainer_mode chooses where its trajectories come from, and a program of your own gives it a "
    "verl.trainer.ppo.sources.trajectory_source.TrajectorySource"
)
_POLICY = (
    "there are no policies of a dynamic schedule: how many prompts are under way follows from "
    "async_training.staleness_threshold, and devices are divided by trainer.n_gpus_per_node and rollout.n_gpus_per_node"
)
_SCORER = "verl.utils.reward_score.default_compute_score has the built-in scorers; else " + _REWARD
_LOOPS = (
    "a loop derives from verl.experimental.agent_loop.AgentLoopBase; verl.agent.agent_runner.AgentRunner runs loops"
)

# A module or name and everything below it: what to use instead. The longest match counts.
REPLACEMENTS = {
    "verl.protocol": _DATA_PROTO,
    "verl.base_config": "derive from verl.config.base.Section, or write a plain dataclass",
    "verl.experimental": "python3 -m verl.trainer.main_ppo runs training; verl.experimental.agent_loop has agent loops",
    "verl.experimental.agent_loop": _LOOPS,
    "verl.experimental.dataset": "derive from verl.utils.dataset.RLHFDataset and name it in data.custom_cls",
    "verl.experimental.dynamic_dataset": "derive from verl.utils.dataset.RLHFDataset and name it in data.custom_cls",
    "verl.experimental.fully_async_policy": _ASYNC,
    "verl.experimental.fully_async_policy.register_policy": _POLICY,
    "verl.experimental.one_step_off_policy": _ASYNC,
    "verl.experimental.reward_loop": _MANAGER,
    "verl.interactions": "derive an interaction of your own from verl.interactions.base.BaseInteraction",
    "verl.models.mcore": _MEGATRON,
    "verl.models.transformers": "verl.models.registry.register_family adds a model family",
    "verl.single_controller": _WORKERS,
    "verl.third_party": "rollout engines are adapters in verl.workers.rollout (rollout.name=vllm, sglang, native)",
    "verl.trainer.distillation": "losses are in verl.algorithms.distillation; yours: verl.trainer.distillation.losses",
    "verl.trainer.fsdp_sft_trainer": _SFT,
    "verl.trainer.main_ppo.TaskRunner": "run_ppo(verl.config.load_config(overrides)) trains; what a task runner does "
    "has settings: data.custom_cls, reward.*, actor_rollout_ref.rollout.agent.*, model.external_lib",
    "verl.trainer.main_ppo.create_rl_dataset": "write verl.utils.dataset.RLHFDataset(files, tokenizer, config.data), "
    "or name a class of your own in data.custom_cls",
    "verl.trainer.main_ppo.create_rl_sampler": "data.shuffle and data.seed decide the order of rows",
    "verl.trainer.main_ppo_v0": "python3 -m verl.trainer.main_ppo runs training",
    "verl.trainer.ppo.ray_trainer": "verl.trainer.ppo.trainer.PPOTrainer takes the step; verl.trainer.main_ppo runs it",
    "verl.trainer.ppo.core_algos": "built-in losses are in verl.algorithms.losses, for packed batches; yours: "
    "register_adv_est and register_policy_loss",
    "verl.trainer.ppo.metric_utils": "verl.trainer.ppo.batch_metrics and .validation_metrics have the metrics",
    "verl.trainer.ppo.reward": _REWARD,
    "verl.trainer.ppo.rollout_corr_helper": "set algorithm.rollout_correction.*; verl.algorithms.rollout_correction "
    "computes it for packed batches",
    "verl.trainer.ppo.v1": "verl.trainer.ppo.trainer.PPOTrainer takes the step; verl.trainer.main_ppo runs it",
    "verl.trainer.ppo.v1.get_trainer_cls": _TRAINER,
    "verl.trainer.ppo.v1.register_trainer": _TRAINER,
    "verl.trainer.ppo.v1.replay_buffer": "which groups a step takes is decided by "
    "verl.trainer.ppo.sources.admission and algorithm.filter_groups (trainer.v1.sampler.*)",
    "verl.utils.checkpoint": "checkpoints are written by verl.workers.engine.checkpoint; `verl merge` merges shards",
    "verl.utils.config": "verl.config.load_config loads a configuration and names every mistake",
    "verl.utils.dataset.multiturn_sft_dataset": _SFT,
    "verl.utils.dataset.sft_dataset": _SFT,
    "verl.utils.dataset.rm_dataset": _SFT,
    "verl.utils.dataset.vision_utils": "multimodal data is still to come; rows hold text",
    "verl.utils.debug": "verl.observe.timers measures stages, verl.observe.memory_metrics memory",
    "verl.utils.fsdp_utils": "engines shard models: derive from verl.workers.engine.fsdp.FSDPEngineWithLMHead",
    "verl.utils.import_utils": "verl.utils.external_code.load_object loads an object of a file or module",
    "verl.utils.megatron": _MEGATRON,
    "verl.utils.megatron_utils": _MEGATRON,
    "verl.utils.model": "verl.models.load loads models and tokenizers of a folder",
    "verl.utils.reward_score": _SCORER,
    "verl.utils.reward_score.rlla": "no scorer of RLLA's tool calls is built in; " + _REWARD,
    "verl.utils.seqlen_balancing": "verl.data.balance shares sequences among ranks and micro-batches",
    "verl.utils.tokenizer": "verl.models.load.load_tokenizer loads a tokenizer; transformers.AutoTokenizer does, too",
    "verl.utils.torch_functional": "verl.models.head has log-probs and entropy, torch the rest",
    "verl.utils.tracking": "verl.observe.tracking.Tracking logs metrics, and answers of a validation (log_samples)",
    "verl.utils.ulysses": "verl.models.attention.ulysses exchanges tokens for heads",
    "verl.workers.config": "it has the configuration classes of FSDP; other engines are still to come",
    "verl.workers.engine_workers": _WORKERS,
    "verl.workers.fsdp_workers": _WORKERS,
    "verl.workers.megatron_workers": _MEGATRON,
    "verl.workers.reward_manager": _MANAGER,
    "verl.workers.rollout.llm_server": "an agent loop asks its server_manager (verl.experimental.agent_loop)",
    "verl.workers.sharding_manager": "verl.weight_sync brings new weights to the rollout engine",
}


def replacement(name: str) -> str:
    """The replacement of the module or name `name`; '' when none is known."""
    head = name
    while "." in head:
        if head in REPLACEMENTS:
            return REPLACEMENTS[head]
        head = head.rpartition(".")[0]
    return ""


def what_instead(name: str) -> str:
    """A sentence that says what to use instead of `name`, or which modules are near it."""
    import pkgutil

    from verl.utils.suggest import closest

    advice = replacement(name)
    if not advice:
        parent = name.rpartition(".")[0]
        folders = getattr(sys.modules.get(parent), "__path__", [])
        near = closest(name, [f"{parent}.{module.name}" for module in pkgutil.iter_modules(folders)])
        advice = f"near it are {', '.join(near)}" if near else f"look into {parent}, and into docs/why/architecture.md"
    return f"{name} does not exist here: {advice}"


def refuse_import(name: str) -> NoReturn:
    """ImportError that says what to use instead of `name`."""
    raise ImportError(what_instead(name), name=name)


def refuse_missing_names(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__`: `from module import name` is an ImportError with the replacement, since Python would
    drop the text of another error; hasattr and getattr get the AttributeError that they know."""

    def missing(name: str) -> Any:
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        with contextlib.suppress(ImportError, ValueError):  # a module in a package, which nobody has imported yet
            return import_module(f"{module}.{name}")
        asking = sys._getframe(1)
        if asking.f_lasti >= 0 and asking.f_code.co_code[asking.f_lasti] == opmap["IMPORT_FROM"]:
            refuse_import(f"{module}.{name}")
        raise AttributeError(what_instead(f"{module}.{name}"))

    return missing


def names_from(module: str, **homes: str) -> Callable[[str], Any]:
    """The `__getattr__` of a light module: the names of `homes`, each from the module it gives, loaded on first use."""

    def found(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return found


class MissingPathFinder(MetaPathFinder):
    """The last finder: refuses modules of this package that nobody found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        only_asked = sys._getframe(2).f_globals.get("__name__") == "importlib.util"  # its find_spec: None is its "no"
        if fullname.startswith("verl.") and not only_asked:
            refuse_import(fullname)
        return None


def install() -> None:
    """Put the finder behind all others, once per process."""
    if not any(isinstance(finder, MissingPathFinder) for finder in sys.meta_path):
        sys.meta_path.append(MissingPathFinder())
