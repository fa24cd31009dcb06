"""`hf_tokenizer` and `hf_processor`, where published code imports them."""

import logging
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

from verl.models.model_place import existing_folder

logger = logging.getLogger(__name__)


def hf_tokenizer(
    name_or_path: str | Path, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, or of an id in the local cache. The end of sequence replaces a missing padding token
    (`correct_pad_token`); gemma-2-2b-it ends at `<end_of_turn>` (`correct_gemma2`)."""
    tokenizer = AutoTokenizer.from_pretrained(existing_folder(name_or_path, "path"), **_local(kwargs))
    if correct_gemma2 and "gemma-2-2b-it" in str(name_or_path):
        tokenizer.eos_token = "<end_of_turn>"
    if correct_pad_token and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def hf_processor(name_or_path: str | Path, **kwargs: Any) -> Any:
    """The processor of a folder, or None for a text model, which has none."""
    folder = existing_folder(name_or_path, "path")
    has_one = any((folder / f"{kind}_config.json").is_file() for kind in ("processor", "preprocessor"))
    return AutoProcessor.from_pretrained(folder, **_local(kwargs)) if has_one else None


def _local(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("trust_remote_code"):
        logger.warning("trust_remote_code=True has no effect: code from a model's folder is never run")
    return {**kwargs, "trust_remote_code": False, "local_files_only": True}
