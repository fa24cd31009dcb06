"""HellaSwag (which of four endings follows?) as train.parquet and test.parquet in the row format of verl.

    python3 examples/data_preprocess/hellaswag.py --local_dataset_path DIR [--local_save_dir ~/data/hellaswag]

DIR is the folder of Rowan/hellaswag: rows {ctx, endings, label, activity_label, ...}. The rows of its own test split
have no label, so test.parquet holds its validation split. The ground truth is a letter from A to D; the reward:
reward.custom_reward_function.path=examples/data_preprocess/hellaswag_reward.py
"""

import re

from conversion import DataSet, Dropped, Row, run_script, script_parser, text_of

LETTERS = "ABCD"
INSTRUCTION = 'Which ending follows? Think about it, and finish with a line that holds "####" followed by its letter.'


def convert(raw: Row, split: str, index: int) -> Row:
    endings = raw.get("endings")
    if not isinstance(endings, list) or len(endings) != len(LETTERS):
        raise Dropped("not four endings")
    endings = [clean(ending) for ending in endings]
    if len(set(endings)) != len(LETTERS) or not all(endings):
        raise Dropped("an ending is empty or there twice")
    context = f"{text_of(raw, 'activity_label')}: {clean(text_of(raw, 'ctx'))}"
    choices = "\n".join(f"{letter}. {ending}" for letter, ending in zip(LETTERS, endings, strict=True))
    return {
        "data_source": "Rowan/hellaswag",
        "prompt": [{"role": "user", "content": f"{context}\n\n{choices}\n\n{INSTRUCTION}"}],
        "ability": "nlp",
        "reward_model": {"style": "rule", "ground_truth": LETTERS[label_of(raw)]},
        "extra_info": {"split": split, "index": index, "ind": raw.get("ind"), "source_id": raw.get("source_id")},
    }


def label_of(raw: Row) -> int:
    """The number of the right ending, which the hub writes as text."""
    if (label := str(raw.get("label", "")).strip()) not in ("0", "1", "2", "3"):
        raise Dropped("no label from 0 to 3")
    return int(label)


def clean(text: str) -> str:
    """The text without the marks of WikiHow pages: [title], [header], [step], [substeps]."""
    text = re.sub(r"\[(?:title|header|step|substeps)\]", "", text.replace(" [title]", ". "))
    return re.sub(r"\s+", " ", text).strip()


if __name__ == "__main__":
    home = "the Hugging Face hub (Rowan/hellaswag)"
    raw_splits = {"train": "train", "validation|val": "test"}
    notes = ("No built-in scorer reads these rows: take examples/data_preprocess/hellaswag_reward.py.",)
    data_set = DataSet("hellaswag", home, ("ctx", "endings", "label"), convert, raw_splits, notes=notes)
    run_script(data_set, script_parser(__doc__, "hellaswag").parse_args())
