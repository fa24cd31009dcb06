"""Parsers of tool calls, where published loops and parsers import them by other names, too."""

from verl.agent.tool_parsers import *

DeepSeekV4ToolParser, Gemma4ToolParser, GLMToolParser = DeepSeekV4Parser, Gemma4Parser, GLMParser
GptOssToolParser, HermesToolParser, KimiToolParser = GPTOSSParser, HermesParser, KimiParser
MiniMaxToolParser, Qwen3XMLToolParser, SeedToolParser = MiniMaxParser, Qwen3CoderParser, SeedParser
