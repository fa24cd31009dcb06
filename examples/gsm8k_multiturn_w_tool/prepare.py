"""Write the inputs of the example: word problems, a tokenizer with tool turns, and a small random Qwen3.

python3 examples/gsm8k_multiturn_w_tool/prepare.py --out gsm8k_tool_out
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

from verl.agent.tools import load_tools
from verl.commands.quickstart.small_model import small_qwen3

HERE = Path(__file__).resolve().parent
END, PAD, USER, ASSISTANT, TOOL = "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|tool|>"
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]  # not special: they stay in decoded text
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}({{ t.function.parameters.properties | join(', ') }})\n{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|assistant|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{{ eos_token }}"
    "{% elif m.role == 'tool' %}<|tool|><tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|user|>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

NAMES = ["Ann", "Ben", "Carla", "Dan", "Eva", "Finn", "Grace", "Hugo"]
THINGS = ["apples", "pens", "books", "cards", "stamps", "eggs", "shells", "coins"]
STORIES = [  # text, expression
    ("{name} buys {a} boxes of {b} {thing} and gives {c} away. How many {thing} are left?", "{a}*{b}-{c}"),
    ("{name} has {a} {thing}. Then {b} friends bring {c} {thing} each. How many {thing} are there?", "{a}+{b}*{c}"),
    ("{name} packs {a} red and {b} blue {thing} in each of {c} bags. How many {thing} is that?", "({a}+{b})*{c}"),
    ("{name} makes {a} {thing} a day for {b} days, and then {c} more. How many {thing} in all?", "{a}*{b}+{c}"),
]


@dataclass(frozen=True)
class Problem:
    """A word problem, the expression to calculate, and the result."""

    question: str
    expression: str
    result: str


def make_problems(count, seed):
    """Distinct problems with numbers from 12 to 98, in random order."""
    calculator = load_tools(None, str(HERE / "tools.py"))["calculator"].function
    rng, problems = random.Random(seed), {}
    while len(problems) < count:
        text, expression = rng.choice(STORIES)
        numbers = {letter: rng.randint(12, 98) for letter in "abc"}
        question = text.format(name=rng.choice(NAMES), thing=rng.choice(THINGS), **numbers)
        expression = expression.format(**numbers)
        problems[question] = Problem(question, expression, calculator(expression))
    return list(problems.values())


def conversation(problem, with_tool):
    """The problem and its answer: with a call of the calculator and its reply, or directly."""
    messages = [{"role": "user", "content": problem.question}]
    if with_tool:
        function = {"name": "calculator", "arguments": {"expression": problem.expression}}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "name": "calculator", "content": problem.result})
    return [*messages, {"role": "assistant", "content": f"#### {problem.result}"}]


def train_tokenizer(texts, size=400):
    """A byte-level BPE tokenizer in which every digit and every operator is a separate token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(r"\d|[-+*/()]| ?[A-Za-z]+|\s|[^\s\dA-Za-z+*/()-]+")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, END, USER, ASSISTANT, TOOL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    extra = [USER, ASSISTANT, TOOL]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, additional_special_tokens=extra
    )
    fast.add_tokens(TAGS)
    fast.chat_template = TEMPLATE
    return fast


def rl_row(problem, split, index):
    return {
        "data_source": "gsm8k_tool",
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.result},
        "extra_info": {"split": split, "index": index},
    }


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prepare(out, seed=1, worked=600, tool_share=0.5, train=4000, test=200):
    """Write model/ and data/ under `out`; `worked` problems have answers, `tool_share` of them with the calculator."""
    problems = make_problems(worked + train + test, seed)
    rng = random.Random(seed)
    chats = [conversation(p, rng.random() < tool_share) for p in problems[:worked]]
    schemas = [
        tool.tool_schema.model_dump(exclude_unset=True) for tool in load_tools(None, str(HERE / "tools.py")).values()
    ]
    texts = [p.question for p in problems[:worked]]
    texts += ['\n{"name": "calculator", "arguments": {"expression": "1"}}\n#### '] * worked
    tokenizer = train_tokenizer(texts)
    model = small_qwen3(tokenizer, seed, positions=256)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    write(out / "data" / "sft.jsonl", [{"messages": chat, "tools": json.dumps(schemas)} for chat in chats])
    write(out / "data" / "train.jsonl", [rl_row(p, "train", i) for i, p in enumerate(problems[worked:-test])])
    write(out / "data" / "test.jsonl", [rl_row(p, "test", i) for i, p in enumerate(problems[-test:])])
    lengths = [
        len(tokenizer.apply_chat_template(c, tools=schemas, tokenize=True)["input_ids"]) for c in chats if len(c) > 2
    ]
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens; {worked} worked "
        f"problems, {len(lengths)} of them with the calculator ({max(lengths)} tokens at most)"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gsm8k_tool_out")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    prepare(Path(options.out), options.seed)


if __name__ == "__main__":
    main()
