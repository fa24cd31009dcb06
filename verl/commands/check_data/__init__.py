"""`verl check-data`: what is wrong with the rows of a run, before it trains on them."""
