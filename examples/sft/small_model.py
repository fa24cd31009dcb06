"""Write a random Qwen3 of two small layers with the tokenizer of a real model, to try fine-tuning on a CPU.

python3 examples/sft/small_model.py --tokenizer DIR --out out/small_model
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder with tokenizer.json and tokenizer_config.json")
    parser.add_argument("--out", default="out/small_model")
    parser.add_argument("--hidden", type=int, default=32, help="width, a multiple of 32")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    torch.manual_seed(options.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=options.hidden // 4,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"{Path(options.out)}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
