"""`BaseInteraction`, where published interactions import it."""

from verl.agent.interactions import BaseInteraction
