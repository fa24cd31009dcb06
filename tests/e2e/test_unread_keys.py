"""A key that nothing reads is named before the first step; one that only steps read, or that agrees, is not."""

from pathlib import Path

import pytest

from tests.e2e import jobs

ARR = "actor_rollout_ref"
READ_IN_STEPS = [
    *(f"{ARR}.actor.{name}" for name in ("clip_ratio_high=0.3", "clip_ratio_low=0.1", "optim.clip_grad=0.5")),
    *(f"algorithm.{name}" for name in ("use_kl_in_reward=True", "kl_penalty=abs", "kl_ctrl.kl_coef=0.01", "gamma=0.9")),
    *("algorithm.adv_estimator=reinforce_plus_plus", f"{ARR}.actor.fsdp_config.optimizer_offload=True"),
]
AGREES = [
    "data.val_files=null",
    "trainer.val_before_train=False",
    "critic.ppo_epochs=1",
    "+data.mine=3",
    "+data.other=4",
]
NOT_READ = ["algorithm.lam=0.9", f"{ARR}.actor.kl_loss_coef=0.3", "algorithm.pf_ppo.weight_pow=1"]
ROWS = """
from verl.utils.dataset import RLHFDataset


class Rows(RLHFDataset):
    def __init__(self, data_files, tokenizer, config, processor=None, **kwargs):
        super().__init__(data_files, tokenizer, config, processor, **kwargs)
        print("rows got", config.get("mine", 0), config.get("absent", 7))
"""


@pytest.mark.filterwarnings("ignore")
def test_what_nothing_reads_is_named_before_the_first_step(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    (tmp_path / "rows.py").write_text(ROWS)
    rows = [f"data.custom_cls.path={tmp_path / 'rows.py'}", "data.custom_cls.name=Rows"]
    jobs.train(tmp_path, "run", *READ_IN_STEPS, *AGREES, *NOT_READ, *rows, "trainer.total_training_steps=1")
    said = capsys.readouterr().out.splitlines()
    assert "rows got 3 7" in said
    named = {line.split()[1]: at for at, line in enumerate(said) if "nothing reads it in this run" in line}
    first_step = next(at for at, line in enumerate(said) if line.startswith("ledger: "))
    early = {key for key, at in named.items() if at < first_step}
    assert early == {key.partition("=")[0] for key in NOT_READ}
    assert set(named) - early == {"data.extra.other"}  # the user's code may read its own keys to the end
