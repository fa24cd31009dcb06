"""Definitions that only other people's code imports; thin modules at the paths that it knows point here."""
