"""GSM8K for conversations in which the policy checks its number with the tool `calc_gsm8k_reward`.

    python3 examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_dataset_path DIR

DIR is what examples/data_preprocess/gsm8k.py takes. The rows run `tool_agent` where
actor_rollout_ref.rollout.multi_turn.enable=True; gsm8k_tool_agent_loop.py writes rows that always do. The tool:
actor_rollout_ref.rollout.multi_turn.tool_config_path=examples/gsm8k_multiturn_w_tool/calc_gsm8k_reward.yaml
"""

import gsm8k
from conversion import DataSet, Row, run_script, script_parser, with_tool

TOOL = "calc_gsm8k_reward"
SYSTEM = (
    f"Solve the problem step by step. As soon as you have a number, call the tool {TOOL} with it, which says whether "
    "it is right. Correct your work if it is not, and call again. "
    'Then finish with a line that holds "####" followed by the final number.'
)


def convert(raw: Row, split: str, index: int) -> Row:
    row = gsm8k.convert(raw, split, index)
    extra_info, ground_truth = row["extra_info"], row["reward_model"]["ground_truth"]
    question = {"role": "user", "content": extra_info["question"]}
    return {
        **row,
        "prompt": [{"role": "system", "content": SYSTEM}, question],
        "extra_info": with_tool(extra_info, TOOL, ground_truth=ground_truth),
    }


if __name__ == "__main__":
    name = "gsm8k_multiturn_w_tool"
    run_script(DataSet(name, gsm8k.HOME, gsm8k.COLUMNS, convert), script_parser(__doc__, name).parse_args())
