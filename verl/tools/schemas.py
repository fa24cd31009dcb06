"""Schemas, calls and responses, where tools written for this library expect them."""

from verl.agent.tool_schemas import *
from verl.agent.tools import ToolResponse
from verl.doors.tool_calls import *
