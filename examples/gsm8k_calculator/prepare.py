"""Write the inputs of the example: a new tokenizer, a small random Qwen3, and GSM8K rows for SFT and GRPO.

python3 examples/gsm8k_calculator/prepare.py --local_dataset_path DIR --out gsm8k_calculator_out
"""

import argparse
import json
from pathlib import Path

from verl.commands.quickstart.small_model import small_qwen3

VOCABULARY = 1024
END, PAD = "<|end|>", "<|pad|>"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}Q: {{ m['content'] }}\nA: "
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


def read(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def train_tokenizer(rows):
    """A byte-level BPE tokenizer in which every digit is a separate token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|<<|>>|####|[-+*/=()$.%\n]| ?[A-Za-z]+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for r in rows for text in (r["question"], r["answer"])), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast.chat_template = TEMPLATE
    return fast


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rl_row(row, split, index):
    return {
        "data_source": "gsm8k_calculator",
        "prompt": [{"role": "user", "content": row["question"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"].rpartition("####")[2].strip()},
        "extra_info": {"split": split, "index": index, "question": row["question"]},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", required=True, help="folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--out", default="gsm8k_calculator_out")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    source, out = Path(options.local_dataset_path).expanduser(), Path(options.out)
    train, test = read(source / "train.jsonl"), read(source / "test.jsonl")
    tokenizer = train_tokenizer(train)
    model = small_qwen3(tokenizer, options.seed, layers=4, positions=1024)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    chats = [
        {"messages": [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}]}
        for r in train
    ]
    write(out / "data" / "sft.jsonl", chats)
    write(out / "data" / "train.jsonl", [rl_row(r, "train", i) for i, r in enumerate(train)])
    write(out / "data" / "test.jsonl", [rl_row(r, "test", i) for i, r in enumerate(test)])
    tokens = [len(tokenizer(r["answer"])["input_ids"]) for r in train]
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens; answers have "
        f"{sum(tokens) / len(tokens):.0f} tokens on average, {max(tokens)} at most; {out} is ready"
    )


if __name__ == "__main__":
    main()
