"""Post-training of language models with reinforcement learning; see README.md. Importing this costs almost nothing."""

from verl.utils import import_paths

__version__ = "0.11.0"

import_paths.install()


def __getattr__(name: str) -> object:
    if name == "DataProto":
        import_paths.refuse_import("verl.DataProto")
    raise AttributeError(f"module 'verl' has no attribute {name!r}")
