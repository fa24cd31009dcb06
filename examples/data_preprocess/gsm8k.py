"""GSM8K as train.parquet and test.parquet in the row format of verl.

    python3 examples/data_preprocess/gsm8k.py --local_dataset_path DIR [--local_save_dir ~/data/gsm8k]

DIR holds the original train.jsonl and test.jsonl, or parquet files as the Hugging Face hub lays them out
(main/train-*.parquet, train-*.parquet or train.parquet, and the same for test).
"""

import re

from conversion import DataSet, Dropped, Row, run_script, script_parser, text_of

HOME = "github.com/openai/grade-school-math (grade_school_math/data) or the Hugging Face hub (openai/gsm8k)"
COLUMNS = ("question", "answer")
DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Work it out step by step, and finish with a line that holds "####" followed by the final number.'


def convert(raw: Row, split: str, index: int) -> Row:
    question, answer = text_of(raw, "question"), text_of(raw, "answer")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_number(answer)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def final_number(answer: str) -> str:
    """The number after the last ####, without thousands separators."""
    found = re.search(r"####\s*(-?[\d,]*\.?\d+)\s*$", answer)
    if found is None:
        raise Dropped("the answer does not end in '#### number'")
    return found.group(1).replace(",", "")


if __name__ == "__main__":
    run_script(DataSet("gsm8k", HOME, COLUMNS, convert), script_parser(__doc__, "gsm8k").parse_args())
