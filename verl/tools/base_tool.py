"""`BaseTool`, where tools written for this library expect it."""

from verl.agent.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse

__all__ = ["BaseTool", "OpenAIFunctionToolSchema", "ToolResponse"]
