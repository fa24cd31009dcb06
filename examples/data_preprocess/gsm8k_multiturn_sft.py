"""GSM8K as conversations to fine-tune on: train.parquet and test.parquet with a column `messages`.

    python3 examples/data_preprocess/gsm8k_multiturn_sft.py --local_dataset_path DIR [--local_save_dir ~/data/gsm8k_sft]

DIR is what examples/data_preprocess/gsm8k.py takes. Each row is a question and its worked answer; with --steps every
line of the answer is a separate assistant turn, and the user asks for the next one.
"""

from conversion import DataSet, Row, run_script, script_parser, text_of
from gsm8k import COLUMNS, HOME, INSTRUCTION

NEXT = "Next step, please."


def main() -> None:
    parser = script_parser(__doc__, "gsm8k_sft")
    parser.add_argument("--steps", action="store_true", help="one turn per line of the answer")
    options = parser.parse_args()

    def convert(raw: Row, split: str, index: int) -> Row:
        return {"messages": messages(raw, options.steps)}

    run_script(DataSet("gsm8k_sft", HOME, COLUMNS, convert), options)


def messages(raw: Row, steps: bool) -> list[dict[str, str]]:
    """The conversation of a raw row."""
    question, answer = text_of(raw, "question"), text_of(raw, "answer")
    out = []
    request = f"{question} {INSTRUCTION}"
    for turn in answer.splitlines() if steps else [answer]:
        out += [{"role": "user", "content": request}, {"role": "assistant", "content": turn}]
        request = NEXT
    return out


if __name__ == "__main__":
    main()
