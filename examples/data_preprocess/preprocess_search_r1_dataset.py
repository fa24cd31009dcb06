"""Natural Questions and HotpotQA for conversations with the tool `search`, as in Search-R1 (2025, arXiv:2503.09516).

    python3 examples/data_preprocess/preprocess_search_r1_dataset.py --local_dataset_path DIR

DIR is the folder of PeterJinGo/nq_hotpotqa_train: rows {id, question, golden_answers, data_source, reward_model,
metadata, ...} in train.parquet and test.parquet. The built-in scorer compares what stands in <answer> with every gold
answer.
"""

from conversion import DataSet, Dropped, Row, run_script, script_parser, text_of, with_tool

SOURCES = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
SYSTEM = (
    "Answer the question. First reason about it. When you lack knowledge, call the tool search with a query: it gives "
    "passages, and you may search as often as you want. Give the final answer, without explanation, between <answer> "
    "and </answer>, for example <answer> Beijing </answer>."
)


def convert(raw: Row, split: str, index: int) -> Row:
    question, source = text_of(raw, "question"), text_of(raw, "data_source")
    if source not in SOURCES:
        raise Dropped(f"data_source {source!r}, which has no scorer")
    target = gold_answers(raw)
    about = {"split": split, "index": index, "id": raw.get("id"), "question": question}
    name, truth = f"searchR1_{source}", {"target": target}
    return {
        "data_source": name,
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": with_tool(about, "search", ground_truth=truth, question=question, data_source=name),
        "agent_name": "tool_agent",
    }


def gold_answers(raw: Row) -> list[str]:
    """The gold answers of a raw row, without empty ones."""
    model = raw.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    found = raw.get("golden_answers") or (truth.get("target") if isinstance(truth, dict) else None) or []
    answers = [str(answer).strip() for answer in ([found] if isinstance(found, str) else found) if str(answer).strip()]
    if not answers:
        raise Dropped("no gold answer")
    return answers


if __name__ == "__main__":
    name = "searchR1_processed_direct"
    home = "the Hugging Face hub (PeterJinGo/nq_hotpotqa_train)"
    data_set = DataSet(name, home, ("question", "data_source", "golden_answers"), convert)
    run_script(data_set, script_parser(__doc__, name).parse_args())
