"""The verbs of the `verl` command."""

VERBS: dict[str, tuple[str, str]] = {
    "quickstart": ("verl.commands.quickstart:main", "make a small model and task, train it, show before and after"),
    "train": ("verl.trainer.main_ppo:main", "reinforcement learning: PPO, GRPO and relatives"),
    "sft": ("verl.trainer.sft_trainer:main", "supervised fine-tuning"),
    "dpo": ("verl.trainer.dpo_trainer:main", "preference optimization on pairs of answers: DPO, IPO, hinge, SimPO"),
    "reward-model": ("verl.trainer.reward_trainer:main", "a reward model from pairs of answers"),
    "merge": ("verl.commands.mains:merge_main", "turn the shards of a checkpoint into a Hugging Face folder"),
    "generate": ("verl.commands.generate_answers:main", "answer the prompts of a data file"),
    "eval": ("verl.commands.score_answers:main", "score a file of answers: accuracy, pass@k, maj@k with intervals"),
    "serve": ("verl.commands.serve:main", "an OpenAI-compatible server over a rollout engine"),
    "report": ("verl.commands.report:main", "one page about a run, or several over each other, also while they train"),
    "show": ("verl.commands.show:main", "trajectories of a step as text, tokens coloured by advantage or log-prob"),
    "config": ("verl.config.explain:main", "explain a key, print the resolved configuration"),
    "plan": ("verl.commands.plan.command:main", "which role sits on which devices, and what it holds in memory"),
    "doctor": ("verl.commands.doctor:main", "what this machine can and cannot do"),
    "check-template": ("verl.commands.mains:template_main", "check that a chat template works for multi-turn runs"),
    "check-data": (
        "verl.commands.mains:data_main",
        "check the rows of a run: duplicates, leaks, lengths, gold answers",
    ),
    "check-reward": (
        "verl.commands.mains:reward_main",
        "check the reward of a run: gold and bad answers, threads, processes, time",
    ),
    "completion": ("verl.commands.completion:main", "a script by which bash or zsh completes verbs, keys and options"),
    "certify": ("verl.commands.certify:main", "check that gradients do not depend on how a batch is split"),
}
"""Verb -> (module:function, what it does)."""
