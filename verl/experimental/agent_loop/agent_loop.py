"""Base class, results and settings of agent loops, where published loops import them."""

from verl.agent.llm_server import LLMServerClient, TokenOutput
from verl.agent.loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    ToolListWrap,
    register,
)
from verl.agent.loop import ConfigWrap as DictConfigWrap
from verl.utils.import_paths import refuse_missing_names

__all__ = [
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "DictConfigWrap",
    "LLMServerClient",
    "TokenOutput",
    "ToolListWrap",
    "register",
]
__getattr__ = refuse_missing_names(__name__)
