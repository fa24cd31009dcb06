"""The door for agent loops of your own; everything is defined in `verl.doors.agent_loop`."""

from verl.agent.tool_parsers import FunctionCall, ToolParser
from verl.doors.agent_loop import SingleTurnAgentLoop, ToolAgentLoop
from verl.experimental.agent_loop.agent_loop import *
from verl.utils.import_paths import refuse_missing_names

__getattr__ = refuse_missing_names(__name__)
