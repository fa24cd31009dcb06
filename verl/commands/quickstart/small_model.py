"""A small Qwen3 with random weights and a tokenizer of single characters, saved in the Hugging Face format."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from verl.models.load import no_progress_bars

PAD, EOS = "<pad>", "<eos>"
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def make_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token per character, plus padding and end of sequence; its chat template adds only end of sequence."""
    vocabulary = {token: i for i, token in enumerate([*characters, PAD, EOS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=PAD)
    fast.chat_template = TEMPLATE
    return fast


@no_progress_bars()
def make_model(folder: Path, characters: str, seed: int, hidden: int = 128, layers: int = 2) -> int:
    """Write model and tokenizer to `folder`; returns the number of parameters."""
    tokenizer = make_tokenizer(characters)
    model = small_qwen3(tokenizer, seed, hidden, layers)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def small_qwen3(
    tokenizer: PreTrainedTokenizerFast, seed: int, hidden: int = 128, layers: int = 2, positions: int = 128
) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights, four query heads and a tied head, for the tokens of `tokenizer`."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)
