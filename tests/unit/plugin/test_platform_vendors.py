"""What each vendor's platform says and calls; absent hardware is a fake module that records calls."""

import os
import sys
import types

import pytest
import torch

from tests.unit.plugin.fake_devices import FakePlatform, RecordingDeviceModule, clean_platform_state  # noqa: F401
from verl.plugin.platform import (
    get_platform,
)
from verl.plugin.platform.cpu import PlatformCPU
from verl.plugin.platform.cuda import PlatformCUDA
from verl.plugin.platform.npu import PlatformNPU
from verl.plugin.platform.rocm import PlatformROCm


def test_accelerator_members_reach_the_device_module():
    module = RecordingDeviceModule(is_available=True, current_device=3, device_count=8, mem_get_info=(5, 7))
    chip = type("Recorded", (FakePlatform,), {"device_module": module})()
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
    assert FakePlatform().ray_resource_options(2) == {"resources": {"CHIP": 2}}
    assert PlatformCUDA().ray_resource_options(1) == {"num_gpus": 1}
    assert PlatformCPU().ray_resource_options(1) == {"num_cpus": 1}
    monkeypatch.delenv("CHIP_VISIBLE_DEVICES", raising=False)
    assert FakePlatform().get_device_uuid(1) == "CHIP-1"
    monkeypatch.setenv("CHIP_VISIBLE_DEVICES", "4,6")
    assert [FakePlatform().get_device_uuid(i) for i in (0, 1, 2)] == ["CHIP-4", "CHIP-6", "CHIP-2"]


def test_a_rollout_process_sees_some_of_the_devices_that_this_one_sees(monkeypatch):
    name = "CUDA_VISIBLE_DEVICES"
    for visible, devices, shown in [("", [2, 3], "2,3"), ("4, 5,6", [2, 0], "6,4"), ("GPU-a,GPU-b", [1], "GPU-b")]:
        monkeypatch.setenv(name, visible)
        assert PlatformCUDA().rollout_environment(devices)[name] == shown
        assert PlatformCUDA().rollout_environment()[name] == visible
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    assert PlatformCUDA().rollout_environment([0])["NCCL_CUMEM_ENABLE"] == "0"
    assert PlatformCPU().rollout_environment([0, 1]) == os.environ  # its devices are only counted


def test_the_memory_of_a_device_is_read_without_opening_it_where_its_properties_say_it(monkeypatch):
    module = RecordingDeviceModule(get_device_properties=types.SimpleNamespace(total_memory=80), mem_get_info=(5, 7))
    monkeypatch.setattr(PlatformCUDA, "device_module", module)
    assert PlatformCUDA().total_memory() == 80
    assert module.calls == [("get_device_properties", 0)]  # mem_get_info would open it
    monkeypatch.setattr(PlatformCUDA, "device_module", types.SimpleNamespace(mem_get_info=lambda: (5, 7)))
    assert PlatformCUDA().total_memory() == 7
    assert PlatformCPU().total_memory() == PlatformCPU().memory_info()[1]


def test_cuda_names_and_calls(monkeypatch):
    cuda = PlatformCUDA()
    module = RecordingDeviceModule(get_device_capability=(9, 0), cudart="runtime")
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
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,3")  # which HIP obeys where both are set
    shown = rocm.rollout_environment([1])
    assert {shown[name] for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")} == {"3"}
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
    npu = RecordingDeviceModule("torch.npu", is_available=True, device_count=16)
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


def test_all_processes_count_in_the_used_memory_of_a_device_and_a_cpu_has_none(monkeypatch):
    monkeypatch.setattr(FakePlatform, "device_module", RecordingDeviceModule(mem_get_info=(3, 10)))
    assert FakePlatform().device_memory_used() == 7
    assert PlatformCPU().device_memory_used() == 0  # a machine's memory is not the run's


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
