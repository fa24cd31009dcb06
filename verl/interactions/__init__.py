"""The door for interactions of your own; everything is defined in `verl.agent.interactions`."""
