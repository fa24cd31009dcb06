"""The ledger gives back exactly what was recorded; dumps are readable JSON lines."""

import json
import os
import shutil

import pyarrow.parquet as pq
import pytest
import torch

from verl.data.batch import Batch
from verl.data.trajectory import Trajectory
from verl.observe.ledger import Ledger, ledger_path, ledger_steps, read_ledger, size_line
from verl.observe.rollout_dumps import dump_rollouts, remove_dumps_after
from verl.utils.errors import ConfigError, DataError


def make_batch(seed=0, count=7):
    generator = torch.Generator().manual_seed(seed)
    trajectories = []
    for i in range(count):
        response = torch.randint(0, 150_000, (3 + 5 * i,), generator=generator).tolist()
        logprobs = (-torch.rand(len(response), generator=generator)).tolist()
        reward = None if i == 0 else i / 4
        trajectories.append(
            Trajectory.from_completion(
                [1, 2, 3 + i], response, logprobs, group_id=i // 2, row=40 + i, reward=reward, policy_version=(i, i + 1)
            )
        )
    batch = Batch.pack(trajectories)
    extra = torch.randn(batch.num_tokens, generator=generator)
    return batch.with_columns(old_logprobs=extra, advantages=extra * batch["loss_mask"])


def assert_same(left: Batch, right: Batch):
    torch.testing.assert_close(left.cu_seqlens, right.cu_seqlens, rtol=0, atol=0)
    for ours, theirs in ((left.token_columns, right.token_columns), (left.sequence_columns, right.sequence_columns)):
        assert ours.keys() == theirs.keys()
        for name, column in ours.items():
            torch.testing.assert_close(column, theirs[name], rtol=0, atol=0, equal_nan=True)


def test_a_step_reads_back_bit_for_bit(tmp_path):
    batch = make_batch()
    reasons = ["stop", "length", "aborted", "stop", "stop", "length", "stop"]
    Ledger(tmp_path).append(12, batch, reasons)
    assert ledger_path(tmp_path, 12).name == "step_000012.parquet"
    back = read_ledger(tmp_path, 12)
    assert_same(back.batch, batch)
    assert (back.step, back.stop_reasons) == (12, reasons)


def test_any_parquet_reader_sees_a_row_per_trajectory(tmp_path):
    batch = make_batch()
    rows = pq.read_table(Ledger(tmp_path).append(1, batch, ["stop"] * 7)).to_pylist()
    start, end = batch.cu_seqlens[3:5].tolist()
    assert len(rows) == 7
    assert rows[3]["tokens"] == batch["tokens"][start:end].tolist()
    assert rows[3]["loss_mask"] == batch["loss_mask"][start:end].tolist()
    assert (rows[3]["row"], rows[3]["group"], rows[3]["reward"]) == (43, 1, 0.75)
    assert (rows[3]["policy_version_min"], rows[3]["policy_version_max"]) == (3, 4)


def test_a_column_the_step_did_not_compute_is_left_out(tmp_path):
    batch = make_batch().select_columns(["rollout_logprobs", "rewards", "group_ids", "rows", "policy_versions"])
    Ledger(tmp_path).append(1, batch)
    assert_same(read_ledger(tmp_path, 1).batch, batch)


def test_a_resumed_run_replaces_later_steps(tmp_path):
    ledger = Ledger(tmp_path)
    for step in (1, 2, 3, 4):
        ledger.append(step, make_batch(step))
    resumed = Ledger(tmp_path)
    resumed.rewind(2)
    assert ledger_steps(tmp_path) == [1, 2]
    resumed.append(3, make_batch(99))
    resumed.append(2, make_batch(98))
    resumed.sync()
    assert_same(read_ledger(tmp_path, 3).batch, make_batch(99))
    assert_same(read_ledger(tmp_path, 2).batch, make_batch(98))


def test_a_bounded_ledger_keeps_the_last_steps_also_after_a_kill_and_a_resume(tmp_path):
    ledger = Ledger(tmp_path, keep_steps=2)
    for step in (1, 2, 3, 4):
        ledger.append(step, make_batch(step))
    assert ledger_steps(tmp_path) == [3, 4]
    ledger.sync()  # asks for no deleted file
    Ledger(tmp_path).append(1, make_batch())  # what a kill between write and deletion leaves behind
    resumed = Ledger(tmp_path, keep_steps=2)
    resumed.rewind(3)
    resumed.append(4, make_batch(98))
    assert ledger_steps(tmp_path) == [3, 4]
    assert_same(read_ledger(tmp_path, 4).batch, make_batch(98))


def test_the_size_of_a_ledger_is_said_for_all_steps_or_those_that_are_kept():
    assert "3.1 MB per step, 3.1 GB for all 1000 steps" in size_line(3_100_000, 1000, None)
    assert "3.1 MB per step, 0.062 GB for the last 20 of 1000 steps" in size_line(3_100_000, 1000, 20)


def test_a_write_that_fails_leaves_no_file(tmp_path, monkeypatch):
    def full_disk(table, path, **options):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(pq, "write_table", full_disk)
    with pytest.raises(DataError):
        Ledger(tmp_path).append(1, make_batch())
    assert list(tmp_path.iterdir()) == []


def test_a_missing_step_names_what_is_there(tmp_path):
    with pytest.raises(DataError, match="nothing is recorded"):
        read_ledger(tmp_path, 1)
    Ledger(tmp_path).append(3, make_batch())
    with pytest.raises(DataError, match=r"no ledger of step 1.*3\.\.3"):
        read_ledger(tmp_path, 1)


def test_columns_of_the_wrong_length_are_refused(tmp_path):
    with pytest.raises(DataError, match="'stop_reason' has 1 values for 7"):
        Ledger(tmp_path).append(1, make_batch(), ["stop"])
    with pytest.raises(DataError, match="'output' has 1 values for 2"):
        dump_rollouts(tmp_path, 1, ["a", "b"], ["c"], ["", ""], [0, 0])


def test_a_record_is_compact(tmp_path):
    batch = make_batch(count=20)
    size = Ledger(tmp_path).append(1, batch).stat().st_size
    raw = sum(column.nbytes for column in batch.token_columns.values())
    assert size < raw  # two float32 log-probs and advantages of noise do not compress; ids and masks do


def test_dumps_hold_the_named_fields_and_the_extras(tmp_path):
    path = dump_rollouts(
        tmp_path,
        5,
        inputs=["1+1=\n", "日本"],
        outputs=["2", "3"],
        ground_truths=["2", torch.tensor([4])],
        scores=[1.0, None],
        extras={"acc": [True, False]},
    )
    assert path == tmp_path / "5.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"input": "1+1=\n", "output": "2", "gts": "2", "score": 1.0, "step": 5, "acc": True},
        {"input": "日本", "output": "3", "gts": [4], "score": None, "step": 5, "acc": False},
    ]


def test_dumps_of_steps_after_a_resume_are_removed(tmp_path):
    for step in (1, 2, 10):
        dump_rollouts(tmp_path, step, ["a"], ["b"], [""], [0.0])
    remove_dumps_after(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.jsonl", "2.jsonl"]


def test_a_ledger_whose_folder_was_deleted_says_what_to_do(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    ledger.append(1, make_batch())
    shutil.rmtree(tmp_path / "ledger")
    for task in (lambda: ledger.append(2, make_batch()), ledger.sync):
        with pytest.raises(
            DataError, match=r"ledger in .*ledger could not .*deleted.*same command.*trainer\.ledger=False"
        ):
            task()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"ledger.*cannot be written to"):
        Ledger(tmp_path / "file" / "ledger")
    with pytest.raises(DataError, match=r"answers of step 3 could not be written to .*3\.jsonl"):
        dump_rollouts(tmp_path / "file", 3, ["a"], ["b"], ["c"], [1.0])


def test_stray_files_in_the_ledger_are_passed_over(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.append(1, make_batch())
    for name in ("step_old.parquet", "step_000001 (copy).parquet", "step_2.parquet"):
        (tmp_path / name).write_text("stray")
    ledger.rewind(0)
    assert ledger_steps(tmp_path) == [] and len(list(tmp_path.iterdir())) == 3
    (tmp_path / "².jsonl").write_text("")
    remove_dumps_after(tmp_path, 0)


def test_a_resume_says_once_which_records_are_missing_cut_or_pipes(tmp_path, caplog):
    ledger = Ledger(tmp_path)
    for step in range(1, 8):
        ledger.append(step, make_batch(step))
    ledger.rewind(6)
    assert not caplog.records
    ledger_path(tmp_path, 2).unlink()
    ledger_path(tmp_path, 3).write_bytes(ledger_path(tmp_path, 3).read_bytes()[:-40])
    ledger_path(tmp_path, 4).unlink()
    os.mkfifo(ledger_path(tmp_path, 4))
    ledger.rewind(6)
    [said] = [record.getMessage() for record in caplog.records]
    assert "the records of 3 steps before this start are missing or damaged, first step 2" in said
    Ledger(tmp_path, keep_steps=2).rewind(6)
    assert len(caplog.records) == 1  # nobody keeps steps 2 to 4


def test_damage_inside_a_record_is_said_by_whoever_reads_it(tmp_path):
    path = Ledger(tmp_path).append(1, make_batch())
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"step_000001.parquet is damaged"):
        read_ledger(tmp_path, 1)
