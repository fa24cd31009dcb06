"""The built-in single turn as a class, where published loops derive from it."""

from verl.agent.single_turn import SingleTurnAgentLoop

__all__ = ["SingleTurnAgentLoop"]
