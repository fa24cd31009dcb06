"""`BaseTool`, where tools written for this library expect it."""

from verl.agent.tool_schemas import OpenAIFunctionToolSchema
from verl.agent.tools import BaseTool, ToolResponse
