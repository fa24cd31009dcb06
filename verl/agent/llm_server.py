"""The policy as a published agent loop asks it, where earlier loops import it."""

from verl.doors.llm_server import LLMServerClient, TokenOutput
