"""Base class, results and settings of agent loops, where published loops import them."""

from verl.doors.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, ToolListWrap, register
from verl.doors.agent_loop import ConfigWrap as DictConfigWrap
from verl.doors.llm_server import LLMServerClient, TokenOutput
from verl.utils.import_paths import refuse_missing_names

__getattr__ = refuse_missing_names(__name__)
