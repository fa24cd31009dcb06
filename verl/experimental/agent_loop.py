"""The door for agent loops of your own; everything is defined in `verl.agent`."""

from verl.agent.loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    LLMServerClient,
    TokenOutput,
    register,
)
from verl.agent.tool_parsers import FunctionCall, ToolParser

__all__ = [
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "FunctionCall",
    "LLMServerClient",
    "TokenOutput",
    "ToolParser",
    "register",
]
