"""What a checkpoint holds."""

from dataclasses import dataclass

from verl.config.base import Section, key


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Contents and checks of a saved model."""

    save_contents: list[str] = key(
        ["model", "optimizer", "extra", "hf_model"], "Parts to save, out of model, optimizer, extra, hf_model."
    )
    load_contents: list[str] = key(None, "Parts to restore on resume.", sibling="save_contents")
    async_save: bool = key(False, "Write in the background while training goes on.")
    save_lora_only: bool = key(False, "Save the adapters instead of the whole model.")
    verify: str = key(
        "auto",
        "How a saved Hugging Face folder is checked: digests of all tensors, logits too, or logits when small (auto).",
        choices=("auto", "digest", "logits"),
    )
