"""Parsers of tool calls, where published loops and parsers import them."""

from verl.agent.tool_parsers import (
    DeepSeekV4Parser,
    FunctionCall,
    Gemma4Parser,
    GLMParser,
    GPTOSSParser,
    HermesParser,
    KimiParser,
    MiniMaxParser,
    Qwen3CoderParser,
    SeedParser,
    ToolParser,
)

# names that published code uses for the same parsers
DeepSeekV4ToolParser, Gemma4ToolParser, GLMToolParser = DeepSeekV4Parser, Gemma4Parser, GLMParser
GptOssToolParser, HermesToolParser, KimiToolParser = GPTOSSParser, HermesParser, KimiParser
MiniMaxToolParser, Qwen3XMLToolParser, SeedToolParser = MiniMaxParser, Qwen3CoderParser, SeedParser

__all__ = ["FunctionCall", "ToolParser"]
