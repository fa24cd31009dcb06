"""Post-training of language models with reinforcement learning; see README.md. Importing this costs almost nothing."""

__version__ = "0.11.0"
