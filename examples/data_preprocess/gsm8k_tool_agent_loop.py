"""GSM8K for the agent loop `tool_agent`, which every row names: rows of gsm8k_multiturn_w_tool.py with `agent_name`.

    python3 examples/data_preprocess/gsm8k_tool_agent_loop.py --local_dataset_path DIR

DIR is what examples/data_preprocess/gsm8k.py takes.
"""

import gsm8k
import gsm8k_multiturn_w_tool
from conversion import DataSet, Row, run_script, script_parser


def convert(raw: Row, split: str, index: int) -> Row:
    return {**gsm8k_multiturn_w_tool.convert(raw, split, index), "agent_name": "tool_agent"}


if __name__ == "__main__":
    name = "gsm8k_tool_agent_loop"
    run_script(DataSet(name, gsm8k.HOME, gsm8k.COLUMNS, convert), script_parser(__doc__, name).parse_args())
