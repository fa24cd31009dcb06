"""DAPO-Math-17k for conversations with the tool `code_interpreter`.

    python3 examples/data_preprocess/dapo_multiturn_w_tool.py --local_dataset_path DIR [--test_share 0.03]

DIR is the folder of BytedTsinghua-SIA/DAPO-Math-17k: rows {data_source, prompt, ability, reward_model, extra_info} in
data/dapo-math-17k.parquet. That file holds every problem about a hundred times; each is kept once. It has one split;
a share of the problems, chosen by the problem's text, becomes test.parquet.
"""

from conversion import DataSet, Dropped, Row, run_script, script_parser, share_of, with_tool


def main() -> None:
    name = "dapo_multiturn_w_tool"
    parser = script_parser(__doc__, name)
    parser.add_argument("--test_share", type=float, default=0.03, help="share of test rows (default: %(default)s)")
    options = parser.parse_args()
    if not 0 < options.test_share < 1:
        parser.error(f"--test_share {options.test_share} must be above 0 and below 1")
    data_set = DataSet(
        name,
        "the Hugging Face hub (BytedTsinghua-SIA/DAPO-Math-17k)",
        ("prompt", "reward_model"),
        Converter(),
        raw_splits={"dapo-math-17k|train": "train"},
        splits_of=lambda raw: ("test" if share_of(problem_of(raw)) < options.test_share else "train",),
    )
    run_script(data_set, options)


def problem_of(raw: Row) -> str:
    """The text of the prompt's messages; empty where it has none."""
    prompt = raw.get("prompt")
    messages = prompt if isinstance(prompt, list) else []
    return "\n".join(str(message.get("content") or "") for message in messages if isinstance(message, dict)).strip()


class Converter:
    """Converts each problem once."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, raw: Row, split: str, index: int) -> Row:
        problem, model = problem_of(raw), raw.get("reward_model")
        answer = str(model.get("ground_truth") or "").strip() if isinstance(model, dict) else ""
        if not problem:
            raise Dropped("the prompt is empty")
        if not answer:
            raise Dropped("no ground_truth")
        if problem in self.seen:
            raise Dropped("the problem is there already")
        self.seen.add(problem)
        about = {"split": split, "index": index, "id": (raw.get("extra_info") or {}).get("index")}
        return {
            "data_source": "math_dapo",
            "prompt": raw["prompt"],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": with_tool(about, "code_interpreter", ground_truth=answer),
            "agent_name": "tool_agent",
        }


if __name__ == "__main__":
    main()
