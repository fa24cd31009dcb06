"""`@function_tool`, where tool files expect it."""

from verl.agent.tools import FunctionTool, function_tool
