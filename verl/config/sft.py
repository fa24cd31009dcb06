"""The whole configuration of supervised fine-tuning."""

from dataclasses import dataclass

from verl.config.base import Section, section
from verl.config.checkpoint import CheckpointConfig
from verl.config.data import SFTDataConfig
from verl.config.engine import STRATEGIES, EngineConfig, FSDPEngineConfig, engine_section
from verl.config.model import HFModelConfig
from verl.config.optim import FSDPOptimizerConfig
from verl.config.profiler import ProfilerConfig
from verl.config.trainer import RayKwargsConfig, SFTTrainerConfig


@dataclass(frozen=True, kw_only=True)
class SFTConfig(Section):
    """Configuration of `python3 -m verl.trainer.sft_trainer`."""

    module = "verl.trainer.sft_trainer"  # what a rank runs
    run_name = "sft"  # of a run that was given none
    task = "supervised fine-tuning"

    trainer: SFTTrainerConfig = section(SFTTrainerConfig)
    data: SFTDataConfig = section(SFTDataConfig)
    model: HFModelConfig = section(HFModelConfig)
    engine: FSDPEngineConfig = section(FSDPEngineConfig)
    optim: FSDPOptimizerConfig = section(FSDPOptimizerConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    profiler: ProfilerConfig = section(ProfilerConfig, tool="torch")
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig)

    @property
    def training_engine(self) -> EngineConfig:
        """The section of `engine.strategy`: `engine` itself unless a plug-in has made a section for it."""
        own = self.engine.strategy in STRATEGIES
        return self.engine if own else engine_section(self, self.engine.strategy)


SFT_FOLLOWS: dict[str, str] = {"data.seed": "trainer.seed"}
"""Like FOLLOWS of run_config.py."""
