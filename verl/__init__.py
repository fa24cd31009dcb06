"""Post-training of language models with reinforcement learning; see README.md. Importing this costs almost nothing."""

from verl.utils import cores, import_paths

__version__ = "0.11.0"

cores.let_threads_sleep()  # before torch is loaded, which reads it once
import_paths.install()
__getattr__ = import_paths.names_from(__name__, DataProto="verl.protocol")
