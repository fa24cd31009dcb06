"""`verl check-reward`: whether the reward of a run can be trusted, before a policy learns from it."""
