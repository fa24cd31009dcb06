"""Engines are looked up the way hardware plug-ins register them, and nothing they override is silently ignored."""

from dataclasses import dataclass, replace

import pytest

from verl.config import ActorConfig, CriticConfig, FSDPEngineConfig, RefConfig, SFTConfig
from verl.config import engine as engine_config
from verl.config.base import key, section
from verl.plugin.platform import get_platform, platform_manager
from verl.utils.errors import ConfigError, PluginError
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead
from verl.workers.engine.fsdp_engine import FSDPNPUEngineWithLMHead
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Our own entries, and whatever a test adds is gone afterwards."""
    copy = {
        model_type: {backend: dict(engines) for backend, engines in backends.items()}
        for model_type, backends in EngineRegistry._engines.items()
    }
    monkeypatch.setattr(EngineRegistry, "_engines", copy)


def on(monkeypatch, device: str, vendor: str) -> None:
    monkeypatch.setenv("VERL_ENGINE_DEVICE", device)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_our_engines_serve_every_device_of_the_surface(monkeypatch, backend):
    for device, policy in [
        ("cpu", FSDPEngineWithLMHead),
        ("cuda", FSDPEngineWithLMHead),
        ("npu", FSDPNPUEngineWithLMHead),
    ]:
        on(monkeypatch, device, "anyone")
        assert EngineRegistry.get_engine_cls("language_model", backend) is policy
        assert EngineRegistry.get_engine_cls("value_model", backend) is FSDPEngineWithValueHead


def test_without_overrides_the_platform_decides(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.delenv("VERL_ENGINE_DEVICE", raising=False)
    monkeypatch.delenv("VERL_ENGINE_VENDOR", raising=False)
    monkeypatch.setattr(platform_manager, "_current_platform", None)
    assert get_platform().device_name == "cpu"
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is FSDPEngineWithLMHead


def test_a_vendors_engine_wins_on_its_own_chip_only(monkeypatch):
    @EngineRegistry.register(
        model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor=["metax", "iluvatar"]
    )
    class Vendor(FSDPEngineWithLMHead):
        def initialize(self):
            super().initialize()

    assert EngineRegistry._engines["language_model"]["fsdp2"][("cuda", "iluvatar")] is Vendor
    on(monkeypatch, "cuda", "metax")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp") is Vendor
    on(monkeypatch, "cuda", "nvidia")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp") is FSDPEngineWithLMHead


def test_other_cuda_chips_fall_back_to_nvidias_engine(monkeypatch):
    @EngineRegistry.register(model_type="language_model", backend="special", device="cuda", vendor="nvidia")
    class Nvidia(FSDPEngineWithLMHead):
        pass

    on(monkeypatch, "cuda", "metax")
    assert EngineRegistry.get_engine_cls("language_model", "special") is Nvidia
    on(monkeypatch, "npu", "huawei")
    with pytest.raises(ConfigError, match=r"runs on: cuda of nvidia"):
        EngineRegistry.get_engine_cls("language_model", "special")


def test_unknown_model_types_and_backends_get_suggestions(monkeypatch):
    on(monkeypatch, "cpu", "cpu")
    with pytest.raises(ConfigError, match="did you mean 'value_model'"):
        EngineRegistry.get_engine_cls("value_modle", "fsdp")
    with pytest.raises(ConfigError, match="fsdp2"):
        EngineRegistry.get_engine_cls("language_model", "fsdp3")


def test_registering_twice_is_fine_and_taking_anothers_place_is_not():
    def register(engine):
        return EngineRegistry.register(model_type="language_model", backend="mine", device="xpu")(engine)

    class First(FSDPEngineWithLMHead):
        pass

    class Second(FSDPEngineWithLMHead):
        pass

    assert register(register(First)) is First
    with pytest.raises(PluginError, match=r"taken by .*First"):
        register(Second)


@pytest.mark.parametrize("hook", ["train_batch", "get_per_tensor_param", "_build_fsdp_module"])
def test_overriding_a_hook_nobody_calls_is_refused_by_name(hook):
    derived = type("Derived", (FSDPEngineWithLMHead,), {hook: lambda self: None})
    further = type("Further", (derived,), {})
    for engine in (derived, further):
        with pytest.raises(PluginError, match=rf"Derived overrides {hook}"):
            EngineRegistry.register(model_type="language_model", backend="fsdp", device="xpu")(engine)


def test_our_own_engines_define_none_of_those_hooks_and_what_is_no_engine_is_refused():
    assert issubclass(FSDPNPUEngineWithLMHead, BaseEngine)
    with pytest.raises(PluginError, match="not a subclass"):
        EngineRegistry.register(model_type="language_model", backend="fsdp", device="xpu")(dict)


def test_megatrons_class_can_be_derived_from_but_not_used():
    class Vendor(MegatronEngineWithLMHead):
        pass

    EngineRegistry.register(model_type="language_model", backend="megatron", device="xpu", vendor="someone")(Vendor)
    with pytest.raises(ConfigError, match="still to come"):
        Vendor(None, None, None, None)


@engine_config.configures("parted")
@dataclass(frozen=True, kw_only=True)
class PartedEngineConfig(engine_config.EngineConfig):
    """The section of a strategy that splits matrices."""

    parts: int = key(2, "Ranks that hold one copy.")
    seed: int = key(7, "Seed.")
    forward_only: bool = key(False, "Read by the engine that the test derives from.")

    @property
    def ranks_per_data_group(self) -> int:
        return self.parts


@dataclass(frozen=True, kw_only=True)
class PartedActorConfig(ActorConfig):
    parted: PartedEngineConfig = section(PartedEngineConfig)


@dataclass(frozen=True, kw_only=True)
class PartedSFTConfig(SFTConfig):
    parted: PartedEngineConfig = section(PartedEngineConfig)


def test_the_strategy_says_which_section_configures_the_engine():
    mine = PartedActorConfig(strategy="parted", parted=PartedEngineConfig(parts=4))
    assert mine.engine is mine.parted and (mine.engine.ranks_per_data_group, mine.engine.ranks_per_sequence) == (4, 1)
    sharded = FSDPEngineConfig(ulysses_sequence_parallel_size=2, seed=3)
    plain = PartedActorConfig(strategy="fsdp", fsdp_config=sharded)
    assert plain.engine is sharded and (plain.engine.ranks_per_data_group, plain.engine.seed) == (2, 3)
    for role in (ActorConfig(), RefConfig(strategy="fsdp"), ActorConfig(strategy="one without a section")):
        assert role.engine is role.fsdp_config
    assert CriticConfig().engine.parameter_dtype == CriticConfig().fsdp.model_dtype
    tuned = SFTConfig(engine=FSDPEngineConfig(strategy="fsdp"))
    assert tuned.training_engine is tuned.engine
    with pytest.raises(ConfigError, match="strategy=parted is configured by PartedEngineConfig, which CriticConfig l"):
        CriticConfig(strategy="parted").engine  # noqa: B018


def test_the_engine_gets_the_section_of_its_strategy(monkeypatch):
    on(monkeypatch, "cpu", "cpu")

    @EngineRegistry.register(model_type="language_model", backend="parted", device="cpu")
    class Parted(FSDPEngineWithLMHead):
        def initialize(self):
            self.model = None

    from verl.config import RunConfig
    from verl.trainer.sft.ranks import SFTRank
    from verl.workers.actor import build_actor_worker

    arr = RunConfig().actor_rollout_ref
    config = replace(RunConfig(), actor_rollout_ref=replace(arr, actor=PartedActorConfig(strategy="parted")))
    assert build_actor_worker(config, 1).engine.engine_config == PartedEngineConfig()
    tuned = PartedSFTConfig(engine=FSDPEngineConfig(strategy="parted"), parted=PartedEngineConfig(parts=4))
    assert SFTRank(tuned, tuned.model, 1).trained.engine.engine_config is tuned.training_engine is tuned.parted
