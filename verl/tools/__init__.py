"""Import paths for tools of your own; everything is defined in `verl.agent.tools`."""
