"""The built-in tool agent, where published loops derive from it."""

from verl.agent.tool_agent import AgentData, AgentState
from verl.doors.agent_loop import ToolAgentLoop
