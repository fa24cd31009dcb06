"""AIME 2024 (30 problems) for conversations with the tool `code_interpreter`.

    python3 examples/data_preprocess/aime2024_multiturn_w_tool.py --local_dataset_path DIR

DIR is the folder of Maxwell-Jia/AIME_2024: rows {ID, Problem, Solution, Answer} in aime_2024_problems.parquet. It is a
benchmark: both files hold all its rows, because published scripts name either; use one as data.val_files.
"""

from conversion import DataSet, Dropped, Row, run_script, script_parser, text_of, with_tool

INSTRUCTION = 'You may run Python code with the tool code_interpreter. Finish with a line "Answer: " and the number.'


def convert(raw: Row, split: str, index: int) -> Row:
    problem, answer = text_of(raw, "Problem"), str(raw.get("Answer", "")).strip()
    if not answer.isdecimal() or not 0 <= int(answer) <= 999:
        raise Dropped("the answer is no whole number from 0 to 999")
    about = {"split": split, "index": index, "id": raw.get("ID"), "solution": raw.get("Solution")}
    return {
        "data_source": "aime2024",
        "prompt": [{"role": "user", "content": f"{problem}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(int(answer))},
        "extra_info": with_tool(about, "code_interpreter", ground_truth=str(int(answer))),
        "agent_name": "tool_agent",
    }


if __name__ == "__main__":
    name = "aime2024_multiturn_w_tool"
    notes = ("Both files hold the same rows, those of a benchmark: for data.val_files, never for data.train_files.",)
    data_set = DataSet(
        name,
        "the Hugging Face hub (Maxwell-Jia/AIME_2024)",
        ("Problem", "Answer"),
        convert,
        raw_splits={"aime_2024_problems|train": "train"},
        splits_of=lambda raw: ("train", "test"),
        notes=notes,
    )
    run_script(data_set, script_parser(__doc__, name).parse_args())
