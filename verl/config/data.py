"""Training and validation data: files, columns, lengths, order."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import LARGEST_SEED, Section, key, section

TRUNCATION = ("error", "left", "right", "middle")


@dataclass(frozen=True, kw_only=True)
class CustomClassConfig(Section):
    """A dataset class of your own."""

    path: str | None = key(None, "Python file of the class.")
    name: str | None = key(None, "Name of the class.")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Where prompts come from and how many are used per step."""

    train_files: str | list[str] = key(
        "~/data/rlhf/gsm8k/train.parquet",
        "Training rows: parquet, json(l) or csv files, patterns, folders of shards, "
        "or org/name:split of the local Hub cache.",
    )
    val_files: str | list[str] | None = key(None, "Validation rows, likewise; null is no validation.")
    train_max_samples: int = key(-1, "Rows used for training; -1 is all.")
    val_max_samples: int = key(-1, "Rows used for validation; -1 is all.")
    tokenizer: str | None = key(None, "Folder of another tokenizer; null is the model's.")
    prompt_key: str = key("prompt", "Column with the chat messages, or with a text, which is one user message.")
    answer_key: str | None = key(None, "Column with the ground truth; null is reward_model.ground_truth.")
    system_prompt: str | None = key(None, "System message of the prompts that have none.")
    data_source: str | None = key(
        None, "Data source of rows that name none; null is the file's name where the file has no such column."
    )
    reward_fn_key: str = key("data_source", "Column that selects the scorer and groups validation metrics.")
    image_key: str = key("images", "Column with images (not supported yet: rows with images are refused).")
    video_key: str = key("videos", "Column with videos (not supported yet: rows with videos are refused).")
    audio_key: str = key("audios", "Column with audio (not supported yet: rows with audio are refused).")
    max_prompt_length: int = key(512, "Longest prompt in tokens.", minimum=1)
    max_response_length: int = key(512, "Longest answer in tokens.", minimum=1)
    truncation: str = key("error", "What happens to longer prompts.", choices=TRUNCATION)
    filter_overlong_prompts: bool = key(False, "Leave out rows with longer prompts, and count them.")
    train_batch_size: int = key(
        1024,
        "Prompts per step, over all devices; 0 with async_training.trigger_parameter_sync_step.",
        minimum=0,
    )
    gen_batch_size: int | None = key(
        None, "Prompts read from the data and sent to be answered together; null is train_batch_size.", minimum=1
    )
    shuffle: bool = key(True, "Shuffle training rows each epoch.")
    validation_shuffle: bool = key(False, "Shuffle validation rows.")
    seed: int | None = key(None, "Seed of the shuffle; null is 1.", minimum=0, maximum=LARGEST_SEED)
    output_path: str | None = key(None, "main_generation_server: file for the answers (.parquet or .jsonl).")
    apply_chat_template_kwargs: dict[str, Any] = key({}, "Extra arguments of the chat template.")
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    tool_config_path: str | None = key(None, "Tools that count towards prompt length.")
    function_tool_path: str | None = key(None, "Function tools that count towards prompt length.")
    need_tools_kwargs: bool = key(
        False,
        "Rows need extra_info.tools_kwargs, unless their extra_info.need_tools_kwargs is false: a run counts those "
        "without, `verl check-data` refuses them.",
    )


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig(Section):
    """Conversations for supervised fine-tuning."""

    train_files: str | list[str] = key(
        "~/data/gsm8k/train.parquet", "Training rows: files, patterns, folders of shards, or org/name:split."
    )
    val_files: str | list[str] | None = key(None, "Validation rows, likewise.")
    train_max_samples: int = key(-1, "Rows used for training; -1 is all.")
    val_max_samples: int = key(-1, "Rows used for validation; -1 is all.")
    train_batch_size: int = key(256, "Sequences per optimiser step, over all devices.", minimum=1)
    micro_batch_size_per_gpu: int = key(4, "Sequences per forward and backward pass on one device.", minimum=1)
    use_dynamic_bsz: bool = key(True, "Fill micro-batches up to a token budget.")
    max_token_len_per_gpu: int = key(8192, "Tokens per forward and backward pass on one device.", minimum=1)
    messages_key: str = key("messages", "Column with the conversation.")
    prompt_key: str = key("prompt", "Column with the prompt, of rows without a conversation.")
    answer_key: str | None = key(None, "Column with the answer to prompt_key; null is messages_key, else response.")
    system_prompt: str | None = key(None, "System message of the conversations that have none.")
    tools_key: str = key("tools", "Column with tool schemas.")
    enable_thinking_key: str = key("enable_thinking", "Column with the chat template's thinking switch.")
    enable_thinking_default: bool | None = key(None, "Its value in rows without that column; null passes none.")
    pad_mode: str = key("no_padding", "no_padding packs sequences, right pads them.", choices=("no_padding", "right"))
    max_length: int = key(1024, "Longest sequence in tokens.", minimum=1)
    truncation: str = key("error", "What happens to longer sequences.", choices=TRUNCATION)
    shuffle: bool = key(True, "Shuffle training rows each epoch.")
    seed: int | None = key(None, "Seed of the shuffle; null is trainer.seed.", minimum=0, maximum=LARGEST_SEED)
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    apply_chat_template_kwargs: dict[str, Any] = key({}, "Extra arguments of the chat template.")
    ignore_input_ids_mismatch: bool = key(False, "Accept rows whose turns tokenise differently on their own.")
