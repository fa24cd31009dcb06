"""Contents of a checkpoint."""

from dataclasses import dataclass

from verl.config.base import Section, key


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Contents and checks of a saved model."""

    save_contents: list[str] = key(
        ["model", "optimizer", "extra", "hf_model"], "Parts to save, out of model, optimizer, extra, hf_model."
    )
    load_contents: list[str] = key(None, "Parts to restore on resume.", sibling="save_contents")
    async_save: bool = key(False, "Write in the background while training continues.")
    save_lora_only: bool = key(False, "Save the adapters instead of the whole model.")
    verify: str = key(
        "auto",
        "Check of a saved Hugging Face folder: tensor digests, logits as well, or logits for small models only (auto).",
        choices=("auto", "digest", "logits"),
    )
