"""GSM8K as preference pairs: train.parquet and test.parquet with columns `prompt`, `chosen` and `rejected`.

    python3 examples/data_preprocess/gsm8k_preferences.py --local_dataset_path DIR [--local_save_dir ~/data/gsm8k_pairs]

DIR is what examples/data_preprocess/gsm8k.py takes. The chosen answer is the worked one; in the rejected one the last
two numbers before the end are wrong: each is larger by one.
"""

import re

from conversion import DataSet, Row, run_script, script_parser, text_of
from gsm8k import COLUMNS, HOME, INSTRUCTION

LAST_TWO_NUMBERS = re.compile(r"(\d+)(\D+)(\d+)(\D*)$")


def convert(raw: Row, split: str, index: int) -> Row:
    """The preference row of a raw row."""
    question, answer = text_of(raw, "question"), text_of(raw, "answer")
    wrong = LAST_TWO_NUMBERS.sub(lambda m: f"{int(m[1]) + 1}{m[2]}{int(m[3]) + 1}{m[4]}", answer)
    return {
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "chosen": answer,
        "rejected": wrong if wrong != answer else f"{answer}0",
    }


if __name__ == "__main__":
    run_script(DataSet("gsm8k_pairs", HOME, COLUMNS, convert), script_parser(__doc__, "gsm8k_pairs").parse_args())
