"""The lowest layer, and where published code imports `hf_tokenizer` and `hf_processor`."""

from verl.utils.import_paths import names_from

__getattr__ = names_from(__name__, hf_tokenizer="verl.utils.tokenizer", hf_processor="verl.utils.tokenizer")
