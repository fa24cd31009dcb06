"""Anthropic's helpful and harmless conversations: to fine-tune on, as pairs for DPO or a reward model, or as prompts.

    python3 examples/data_preprocess/full_hh_rlhf.py --local_dataset_path DIR --split rm [--local_save_dir DIR]

DIR is the folder of Dahoas/full-hh-rlhf (rows {prompt, response, chosen, rejected}) or of Anthropic/hh-rlhf (rows
{chosen, rejected} of whole conversations, in folders such as harmless-base/train.jsonl.gz). Below --local_save_dir
(default ~/data/full_hh_rlhf) a folder of that split is written:

    sft   `messages`: the conversation with the preferred answer
    rm    `prompt`, `chosen`, `rejected`
    rl    rows with `style: model`, which a reward model scores
"""

from collections.abc import Callable

from conversion import DataSet, Dropped, Row, run_script, script_parser, text_of

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


def main() -> None:
    parser = script_parser(__doc__, "full_hh_rlhf")
    parser.add_argument("--split", choices=tuple(ROWS), required=True, help="what the rows are for")
    options = parser.parse_args()
    options.local_save_dir = f"{options.local_dir or options.local_save_dir}/{options.split}"
    options.local_dir = options.local_dir and options.local_save_dir

    def convert(raw: Row, split: str, index: int) -> Row:
        return ROWS[options.split](*read_pair(raw), split, index)

    home = "the Hugging Face hub (Dahoas/full-hh-rlhf or Anthropic/hh-rlhf)"
    run_script(DataSet(f"full_hh_rlhf, {options.split}", home, ("chosen", "rejected"), convert), options)


def read_pair(raw: Row) -> tuple[list[dict[str, str]], str, str]:
    """(the messages of the prompt, the chosen answer, the rejected answer) of a raw row of either set."""
    if "prompt" in raw:
        prompt, *answers = (text_of(raw, column).strip() for column in ("prompt", "chosen", "rejected"))
    else:
        parts = [("\n\n" + text_of(raw, column)).rpartition(ASSISTANT) for column in ("chosen", "rejected")]
        if parts[0][0] != parts[1][0]:
            raise Dropped("the two conversations have different prompts")
        prompt, answers = parts[0][0] + ASSISTANT, [answer.strip() for _, _, answer in parts]
    if not all(answers):
        raise Dropped("an answer is empty")
    if any(mark in answer for mark in (HUMAN, ASSISTANT) for answer in answers):
        raise Dropped("an answer holds further turns")
    if answers[0] == answers[1]:
        raise Dropped("both answers are equal")
    return read_turns(prompt), answers[0], answers[1]


def read_turns(prompt: str) -> list[dict[str, str]]:
    """The messages of a text in which turns begin with Human: and Assistant:, the last one empty."""
    text = "\n\n" + prompt.strip()
    if not text.startswith(HUMAN) or not text.endswith(ASSISTANT):
        raise Dropped("the prompt does not go from Human: to Assistant:")
    messages = []
    for turn in text.removesuffix(ASSISTANT).removeprefix(HUMAN).split(HUMAN):
        question, *replies = turn.split(ASSISTANT)
        if (messages and messages[-1]["role"] == "user") or len(replies) > 1:
            raise Dropped("two turns of one side in a row")
        messages += [{"role": "user", "content": question.strip()}]
        messages += [{"role": "assistant", "content": reply.strip()} for reply in replies]
    if messages[-1]["role"] != "user" or not all(message["content"] for message in messages):
        raise Dropped("a turn is empty, or the last one is no question")
    return messages


def sft_row(prompt: list[dict[str, str]], chosen: str, rejected: str, split: str, index: int) -> Row:
    return {"messages": [*prompt, {"role": "assistant", "content": chosen}]}


def rm_row(prompt: list[dict[str, str]], chosen: str, rejected: str, split: str, index: int) -> Row:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def rl_row(prompt: list[dict[str, str]], chosen: str, rejected: str, split: str, index: int) -> Row:
    return {
        "data_source": "Dahoas/full-hh-rlhf",
        "prompt": prompt,
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": chosen},
        "extra_info": {"split": split, "index": index},
    }


ROWS: dict[str, Callable[..., Row]] = {"sft": sft_row, "rm": rm_row, "rl": rl_row}

if __name__ == "__main__":
    main()
