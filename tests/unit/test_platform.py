"""Which platform is found, and what each says; vendors whose hardware is absent are fake modules that record calls."""

import logging
import os
import subprocess
import sys
import types

import pytest
import torch

from verl.plugin import loading
from verl.plugin.platform import (
    PlatformBase,
    PlatformRegistry,
    TorchAccelerator,
    choose_platform,
    get_platform,
    platform_manager,
    set_platform,
)
from verl.plugin.platform.cpu import PlatformCPU
from verl.plugin.platform.cuda import PlatformCUDA
from verl.plugin.platform.npu import PlatformNPU
from verl.plugin.platform.rocm import PlatformROCm
from verl.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No platform chosen yet, no plug-in from the environment, and registrations undone afterwards."""
    monkeypatch.setattr(platform_manager, "_current_platform", None)
    monkeypatch.setattr(PlatformRegistry, "_platforms", dict(PlatformRegistry._platforms))
    monkeypatch.setattr(loading, "_loaded", [])
    monkeypatch.delenv("VERL_PLATFORM", raising=False)


class Recorder(types.ModuleType):
    """A torch device module that notes what is called."""

    def __init__(self, name="fake", **values):
        super().__init__(name)
        self.calls = []
        self.values = values

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("memory", "nvtx", "profiler"):
            return self

        def call(*args):
            self.calls.append((name, *args))
            return self.values.get(name)

        return call


class Chip(TorchAccelerator):
    """A vendor's platform as small as it gets."""

    device_name, vendor_name = "chip", "acme"
    present = True
    device_module = Recorder(is_available=True)

    def is_platform_available(self, use_smi_check=False):
        return self.present

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CHIP_VISIBLE_DEVICES"

    def ray_resource_name(self):
        return "CHIP"


def test_members_of_the_published_interface_are_abstract_or_not_as_published():
    abstract = [
        "device_name",
        "vendor_name",
        "device_module",
        "is_available",
        "current_device",
        "device_count",
        "set_device",
        "synchronize",
        "manual_seed",
        "manual_seed_all",
        "set_allocator_settings",
        "empty_cache",
        "get_device_capability",
        "communication_backend_name",
        "visible_devices_envvar",
        "nvtx_range",
        "profiler_start",
        "profiler_stop",
        "ray_resource_name",
        "ray_noset_envvars",
        "is_ipc_supported",
        "cudart",
    ]
    concrete = [
        "is_platform_available",
        "ray_resource_options",
        "rollout_env_vars",
        "get_collective_module",
        "get_device_uuid",
        "apply_model_patches",
        "check_smi_command",
    ]
    assert set(abstract) == PlatformBase.__abstractmethods__
    assert all(callable(getattr(PlatformBase, name)) for name in concrete)


def test_without_an_accelerator_the_platform_is_the_cpu_and_is_found_once():
    assert isinstance(get_platform(), PlatformCPU)
    assert get_platform() is get_platform()


def test_the_cpu_is_known_but_never_probed():
    assert PlatformRegistry.registered_names() == ("nvidia", "amd", "huawei")
    assert PlatformRegistry.get("cpu") is PlatformCPU
    PlatformRegistry.register("acme")(Chip)
    assert platform_manager._detect_platform_name() == "acme"


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("nvidia", PlatformCUDA),
        ("cuda", PlatformCUDA),
        ("AMD", PlatformROCm),
        ("rocm", PlatformROCm),
        ("huawei", PlatformNPU),
        (" NPU ", PlatformNPU),
        ("cpu", PlatformCPU),
    ],
)
def test_verl_platform_accepts_vendor_and_device_spellings(monkeypatch, spelling, expected):
    monkeypatch.setattr(PlatformNPU, "is_available", lambda self: False)
    monkeypatch.setenv("VERL_PLATFORM", spelling)
    assert type(get_platform()) is expected


def test_an_unknown_name_lists_the_known_ones_and_is_a_value_error():
    with pytest.raises(ValueError, match=r"did you mean 'cuda'.*nvidia, amd, huawei, cpu.*npu = huawei") as caught:
        platform_manager._create_platform("cudaa")
    assert isinstance(caught.value, ConfigError)


def test_a_chosen_platform_that_is_not_usable_only_warns(monkeypatch, caplog):
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    monkeypatch.setattr(PlatformCUDA, "is_available", lambda self: False)
    assert get_platform().vendor_name == "nvidia"
    assert "no usable cuda device" in caplog.text


def test_probing_follows_registration_order_and_survives_a_vendor_that_raises():
    class Broken(Chip):
        def is_platform_available(self, use_smi_check=False):
            raise OSError("driver mismatch")

    PlatformRegistry.register("broken")(Broken)
    PlatformRegistry.register("first")(Chip)
    PlatformRegistry.register("second")(Chip)
    probes = platform_manager.probe_platforms()
    assert [probe.name for probe in probes] == ["nvidia", "amd", "huawei", "broken", "first"]
    assert "OSError: driver mismatch" in probes[3].reason and probes[-1].available


def test_monitoring_programs_are_asked_before_torch_so_a_compatible_chip_is_not_taken_for_nvidia(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("verl.plugin.platform.platform_base._SMI_FOLDERS", ())
    assert platform_manager._detect_platform_name() == "nvidia"  # a container without nvidia-smi
    PlatformRegistry.register("acme")(Chip)
    assert platform_manager._detect_platform_name() == "acme"


def test_register_refuses_what_is_no_platform_and_logs_a_replacement(caplog):
    with pytest.raises(TypeError, match="derived from PlatformBase"):
        PlatformRegistry.register("acme")(dict)
    caplog.set_level(logging.INFO)
    PlatformRegistry.register(" Acme ")(Chip)
    replacement = type("Other", (Chip,), {})
    PlatformRegistry.register("acme")(replacement)
    assert PlatformRegistry.get("ACME") is replacement
    assert "replaces" in caplog.text


def test_set_platform_replaces_with_a_warning_and_refuses_other_things(caplog):
    chip = Chip()
    set_platform(chip)
    assert get_platform() is chip and not caplog.records
    set_platform(PlatformCPU())
    assert "may be in use" in caplog.text
    with pytest.raises(TypeError):
        set_platform("cpu")


def test_accelerator_members_reach_the_device_module():
    module = Recorder(is_available=True, current_device=3, device_count=8, mem_get_info=(5, 7))
    chip = type("Recorded", (Chip,), {"device_module": module})()
    assert chip.is_available() and chip.current_device() == 3 and chip.device_count() == 8
    chip.set_device(2)
    chip.synchronize()
    chip.synchronize(1)
    chip.manual_seed(11)
    chip.manual_seed_all(12)
    chip.set_allocator_settings("expandable_segments:True")
    chip.empty_cache()
    assert chip.memory_info() == (5, 7)
    assert module.calls[3:] == [
        ("set_device", 2),
        ("synchronize",),
        ("synchronize", 1),
        ("manual_seed", 11),
        ("manual_seed_all", 12),
        ("_set_allocator_settings", "expandable_segments:True"),
        ("empty_cache",),
        ("mem_get_info",),
    ]


def test_ray_resources_and_device_names(monkeypatch):
    assert Chip().ray_resource_options(2) == {"resources": {"CHIP": 2}}
    assert PlatformCUDA().ray_resource_options(1) == {"num_gpus": 1}
    assert PlatformCPU().ray_resource_options(1) == {"num_cpus": 1}
    monkeypatch.delenv("CHIP_VISIBLE_DEVICES", raising=False)
    assert Chip().get_device_uuid(1) == "CHIP-1"
    monkeypatch.setenv("CHIP_VISIBLE_DEVICES", "4,6")
    assert [Chip().get_device_uuid(i) for i in (0, 1, 2)] == ["CHIP-4", "CHIP-6", "CHIP-2"]


def test_cuda_names_and_calls(monkeypatch):
    cuda = PlatformCUDA()
    module = Recorder(get_device_capability=(9, 0), cudart="runtime")
    monkeypatch.setattr(PlatformCUDA, "device_module", module)
    monkeypatch.delenv("USE_FLAGCX", raising=False)
    assert (cuda.device_name, cuda.vendor_name, cuda.communication_backend_name()) == ("cuda", "nvidia", "nccl")
    assert cuda.visible_devices_envvar() == "CUDA_VISIBLE_DEVICES" and cuda.ray_resource_name() == "GPU"
    assert cuda.ray_noset_envvars() == ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]
    assert cuda.get_device_capability(1) == (9, 0) and cuda.cudart() == "runtime" and cuda.is_ipc_supported()
    assert cuda.rollout_env_vars() == {"NCCL_CUMEM_ENABLE": "0"}
    cuda.nvtx_range("step")
    cuda.profiler_start()
    cuda.profiler_stop()
    assert module.calls == [("get_device_capability", 1), ("cudart",), ("range", "step"), ("start",), ("stop",)]
    monkeypatch.setenv("USE_FLAGCX", "true")
    assert cuda.communication_backend_name() == "flagcx"


def test_cupy_is_the_collective_module_where_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert PlatformCUDA().get_collective_module() is None
    nccl = types.ModuleType("cupy.cuda.nccl")
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)
    assert PlatformCUDA().get_collective_module() is nccl


def test_rocm_is_told_from_cuda_by_how_torch_was_built(monkeypatch, tmp_path):
    smi = tmp_path / "rocm-smi"
    smi.write_text("#!/bin/sh\nexit 0\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not PlatformROCm().is_platform_available(use_smi_check=True)
    monkeypatch.setattr(torch.version, "hip", "7.0.51831-abc")
    assert PlatformROCm().is_platform_available(use_smi_check=True)
    assert not PlatformCUDA().is_platform_available(use_smi_check=True)
    smi.write_text("#!/bin/sh\nexit 3\n")
    assert not PlatformROCm().is_platform_available(use_smi_check=True)


def test_rocm_names(monkeypatch):
    rocm = PlatformROCm()
    assert (rocm.device_name, rocm.vendor_name, rocm.ray_resource_name()) == ("cuda", "amd", "GPU")
    assert rocm.ray_noset_envvars() == [
        f"RAY_EXPERIMENTAL_NOSET_{name}_VISIBLE_DEVICES" for name in ("CUDA", "HIP", "ROCR")
    ]
    monkeypatch.delenv("SGLANG_USE_AITER", raising=False)
    assert rocm.rollout_env_vars() == {"NCCL_CUMEM_ENABLE": "0", "SGLANG_USE_AITER": "1"}
    monkeypatch.setenv("SGLANG_USE_AITER", "0")
    assert rocm.rollout_env_vars()["SGLANG_USE_AITER"] == "0"


@pytest.mark.parametrize(
    ("vllm", "hip", "blocked"),
    [
        ("0.11.0", "7.0.5", "newer than 0.11.0"),
        ("0.11.0rc2", "7.0.5", "newer than 0.11.0"),
        ("0.11.1.dev5+g123.rocm700", "7.0.51831-a3e", None),
        ("0.20.0", "6.4.2", "needs 7.0"),
        (None, "7.0.2", "not installed"),
        ("0.12.0", "7.0.0", None),
    ],
)
def test_sleep_mode_on_rocm_needs_a_newer_vllm_and_rocm_7(monkeypatch, vllm, hip, blocked):
    monkeypatch.setattr(torch.version, "hip", hip)
    reason = PlatformROCm().sleep_mode_blocker(vllm)
    assert (reason is None) if blocked is None else (blocked in reason)


@pytest.fixture
def ascend(monkeypatch, tmp_path):
    """torch_npu, a driver and CANN, all fake; returns (torch.npu, function that writes the versions)."""
    npu = Recorder("torch.npu", is_available=True, device_count=16)
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    driver = tmp_path / "version.info"
    monkeypatch.setattr("verl.plugin.platform.npu._DRIVER_INFO", driver)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    info = tmp_path / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir()

    def versions(driver_text, cann_text):
        driver.write_text(f"Version={driver_text}\nascendhal_version=7\n")
        info.write_text(f"package_name=Ascend-cann-toolkit\nversion={cann_text}\n")

    return npu, versions


def test_npu_is_found_and_named(ascend, monkeypatch):
    monkeypatch.delenv("USE_FLAGCX", raising=False)
    monkeypatch.delenv("VLLM_ASCEND_TASK_QUEUE_ENABLE", raising=False)
    npu = get_platform()
    assert type(npu) is PlatformNPU and npu.device_count() == 16 and npu.device_module is ascend[0]
    assert (npu.device_name, npu.vendor_name, npu.communication_backend_name()) == ("npu", "huawei", "hccl")
    assert npu.ray_noset_envvars() == ["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"]
    assert npu.ray_resource_options(1) == {"resources": {"NPU": 1}} and npu.cudart() is None
    with npu.nvtx_range("step"):
        npu.profiler_start()
    assert npu.get_device_capability() == (None, None)
    env = {"NCCL_CUMEM_ENABLE": "0", "VLLM_ASCEND_AUTO_DETECT_QUANTIZATION": "0"}
    assert npu.rollout_env_vars() == env
    monkeypatch.setenv("VLLM_ASCEND_TASK_QUEUE_ENABLE", "2")
    assert npu.rollout_env_vars() == {**env, "TASK_QUEUE_ENABLE": "2"}


@pytest.mark.parametrize(
    ("driver", "cann", "supported"),
    [
        ("25.3.rc1", "8.3.RC1", True),
        ("25.3", "8.3.0", True),
        ("25.2.1", "8.3.RC1", False),
        ("25.3.rc1", "8.2.RC2", False),
        ("25.3.rc1", "8.2.1", False),
        ("26.0.rc1", "9.1.0", True),
    ],
)
def test_npu_shares_tensors_only_with_a_new_enough_driver_and_cann(ascend, driver, cann, supported):
    ascend[1](driver, cann)
    assert PlatformNPU().is_ipc_supported() is supported


def test_npu_allocator_settings_warn_on_an_old_torch_npu(ascend, monkeypatch):
    monkeypatch.setattr("verl.plugin.platform.npu.version_of", lambda *names: "2.8.0.post2")
    with pytest.warns(UserWarning, match=r"2\.8\.0\.post2 cannot apply.*PYTORCH_NPU_ALLOC_CONF"):
        PlatformNPU().set_allocator_settings("expandable_segments:True")
    assert ascend[0].calls == []
    monkeypatch.setattr("verl.plugin.platform.npu.version_of", lambda *names: "2.10.0.post4")
    PlatformNPU().set_allocator_settings("expandable_segments:True")
    assert ascend[0].calls == [("_set_allocator_settings", "expandable_segments:True")]


def test_cpu_memory_and_seeds():
    cpu = PlatformCPU()
    free, total = cpu.memory_info()
    assert 0 < free <= total
    assert cpu.peak_memory()[0] > 10 * 2**20
    cpu.manual_seed(5)
    first = torch.rand(3)
    cpu.manual_seed_all(5)
    assert torch.equal(first, torch.rand(3))
    with cpu.nvtx_range("x"):
        assert cpu.communication_backend_name() == "gloo" and not cpu.is_ipc_supported()


def test_smi_commands_that_are_missing_failing_or_hanging_say_no(tmp_path, monkeypatch):
    hang = tmp_path / "hang"
    hang.write_text("#!/bin/sh\nexec sleep 30\n")
    hang.chmod(0o755)
    monkeypatch.setattr("verl.plugin.platform.platform_base._SMI_TIMEOUT_S", 0.2)
    check = PlatformBase.check_smi_command
    assert check("true") and check(["test", "a", "=", "a"])
    assert not check("false") and not check("no-such-program-at-all") and not check(str(hang))


def test_importing_the_platform_layer_leaves_torch_alone():
    code = "import sys, verl.plugin.platform, verl.utils.device; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_device_shim_asks_the_platform():
    from verl.utils import device

    set_platform(Chip())
    assert device.get_device_name() == "chip" and device.get_vendor() == "acme"
    assert device.get_visible_devices_keyword() == "CHIP_VISIBLE_DEVICES" and device.get_resource_name() == "CHIP"
    assert device.is_device_available() and not device.is_cuda_available and not device.is_npu_available
    config = types.SimpleNamespace(trainer=types.SimpleNamespace(device="cuda"))
    device.auto_set_device(config)
    assert config.trainer.device == "chip"


def test_a_run_is_on_the_device_it_asks_for_and_so_are_its_processes(monkeypatch):
    from verl.config import load_config
    from verl.trainer.launch import missing_ranks
    from verl.trainer.ppo.build import build_run
    from verl.trainer.sft_trainer import run_sft

    class Present(Chip):
        def is_platform_available(self, use_smi_check=True):
            return True

        def device_count(self):
            return 4

    monkeypatch.setenv("VERL_PLATFORM", "")
    for name in ("nvidia", "amd", "huawei"):
        PlatformRegistry._platforms.pop(name)
    PlatformRegistry.register("acme")(Present)
    sft = ["--config-name=sft_trainer"]
    assert choose_platform("auto").device_name == "chip"
    assert missing_ranks(load_config([*sft, "trainer.device=chip"])) == 4
    wrong = load_config(["actor_rollout_ref.model.path=.", "trainer.device=cuda"])
    with pytest.raises(ConfigError, match=r"trainer.device=cuda, but this machine has chip, cpu; name one"):
        build_run(wrong)
    with pytest.raises(ConfigError, match=r"trainer.device=npu, but this machine has chip, cpu"):
        run_sft(load_config([*sft, "trainer.device=npu"]))
    assert missing_ranks(load_config([*sft, "trainer.device=cpu"])) == 0
    assert get_platform().device_name == "cpu" and os.environ["VERL_PLATFORM"] == "cpu"
    assert choose_platform("chip") is get_platform() and os.environ["VERL_PLATFORM"] == "acme"
