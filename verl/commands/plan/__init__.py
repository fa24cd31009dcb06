"""`verl plan`."""
