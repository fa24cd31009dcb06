"""The tool that rows of examples/data_preprocess/gsm8k_multiturn_w_tool.py name: it says whether a number is right."""

from verl.rewards.scorers.gsm8k import compute_score
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class CalcGsm8kReward(BaseTool):
    """Compares with the ground truth of its row; every call is an instance of its own."""

    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema)
        self._ground_truths = {}

    async def create(self, instance_id=None, create_kwargs=None, **kwargs):
        """`create_kwargs` are `extra_info.tools_kwargs.calc_gsm8k_reward.create_kwargs` of the row."""
        instance_id, response = await super().create(instance_id)
        self._ground_truths[instance_id] = (create_kwargs or {})["ground_truth"]
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        """Reply, reward of the call, metrics."""
        right = compute_score(f"#### {parameters['answer']}", self._ground_truths[instance_id])
        return ToolResponse(text="This is right." if right else "This is not right."), right, {"right": right}

    async def release(self, instance_id, **kwargs):
        """Forget the row."""
        self._ground_truths.pop(instance_id, None)
