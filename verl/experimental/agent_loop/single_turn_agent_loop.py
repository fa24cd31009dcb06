"""The built-in single turn as a class, where published loops derive from it."""

from verl.doors.agent_loop import SingleTurnAgentLoop
