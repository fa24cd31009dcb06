"""Schemas and responses, where tools written for this library expect them."""

from verl.agent.tools import FunctionSchema, OpenAIFunctionToolSchema, ToolResponse

__all__ = ["FunctionSchema", "OpenAIFunctionToolSchema", "ToolResponse"]
