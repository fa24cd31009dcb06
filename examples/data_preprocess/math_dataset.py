r"""MATH (12,500 problems of competitions) as train.parquet and test.parquet in the row format of verl.

    python3 examples/data_preprocess/math_dataset.py --local_dataset_path DIR [--local_save_dir ~/data/math]

DIR is the folder of lighteval/MATH or DigitalLearningGmbH/MATH-lighteval as the hub lays it out: rows {problem, level,
type, solution}. The ground truth is what the last \boxed{} of the solution holds.
"""

from conversion import DataSet, Row, last_boxed, run_script, script_parser, text_of

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = r"Work it out step by step, and put the final answer into \boxed{}."


def convert(raw: Row, split: str, index: int) -> Row:
    problem, solution = text_of(raw, "problem"), text_of(raw, "solution")
    about = {"level": raw.get("level"), "type": raw.get("type")}
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{problem}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": last_boxed(solution)},
        "extra_info": {"split": split, "index": index, "solution": solution, **about},
    }


if __name__ == "__main__":
    home = "the Hugging Face hub (DigitalLearningGmbH/MATH-lighteval)"
    run_script(DataSet("math", home, ("problem", "solution"), convert), script_parser(__doc__, "math").parse_args())
