"""Which platform is found and chosen; vendors whose hardware is absent are fake modules that record calls."""

import logging
import os
import subprocess
import sys
import types

import pytest
import torch

from tests.unit.plugin.fake_devices import FakePlatform, RecordingDeviceModule, clean_platform_state  # noqa: F401
from verl.plugin.platform import (
    PlatformBase,
    PlatformRegistry,
    choose_platform,
    get_platform,
    platform_manager,
    set_platform,
)
from verl.plugin.platform.cpu import PlatformCPU
from verl.plugin.platform.cuda import PlatformCUDA
from verl.plugin.platform.npu import PlatformNPU
from verl.plugin.platform.rocm import PlatformROCm
from verl.utils.errors import ConfigError, PluginError


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
    PlatformRegistry.register("acme")(FakePlatform)
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


def test_a_chosen_platform_whose_extension_is_missing_is_an_error_that_names_it(monkeypatch):
    class WithoutExtension(FakePlatform):
        def is_available(self):
            raise ImportError("no module named torch_chip")

    PlatformRegistry.register("chip")(WithoutExtension)
    monkeypatch.setenv("VERL_PLATFORM", "chip")
    with pytest.raises(
        PluginError, match=r"platform 'chip' \(.*WithoutExtension\) .*ImportError: no module named torch_chip"
    ):
        get_platform()


def test_probing_follows_registration_order_and_survives_a_vendor_that_raises():
    class Broken(FakePlatform):
        def is_platform_available(self, use_smi_check=False):
            raise OSError("driver mismatch")

    PlatformRegistry.register("broken")(Broken)
    PlatformRegistry.register("first")(FakePlatform)
    PlatformRegistry.register("second")(FakePlatform)
    probes = platform_manager.probe_until_available()
    assert [probe.name for probe in probes] == ["nvidia", "amd", "huawei", "broken", "first"]
    assert "OSError: driver mismatch" in probes[3].reason and probes[-1].available


def test_monitoring_programs_are_asked_before_torch_so_a_compatible_chip_is_not_taken_for_nvidia(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("verl.plugin.platform.platform_base._SMI_FOLDERS", ())
    assert platform_manager._detect_platform_name() == "nvidia"  # a container without nvidia-smi
    PlatformRegistry.register("acme")(FakePlatform)
    assert platform_manager._detect_platform_name() == "acme"


def test_register_refuses_what_is_no_platform_and_logs_a_replacement(caplog):
    with pytest.raises(TypeError, match="derived from PlatformBase"):
        PlatformRegistry.register("acme")(dict)
    caplog.set_level(logging.INFO)
    PlatformRegistry.register(" Acme ")(FakePlatform)
    replacement = type("Other", (FakePlatform,), {})
    PlatformRegistry.register("acme")(replacement)
    assert PlatformRegistry.get("ACME") is replacement
    assert "replaces" in caplog.text


def test_set_platform_replaces_with_a_warning_and_refuses_other_things(caplog):
    chip = FakePlatform()
    set_platform(chip)
    assert get_platform() is chip and not caplog.records
    set_platform(PlatformCPU())
    assert "may be in use" in caplog.text
    with pytest.raises(TypeError):
        set_platform("cpu")


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

    set_platform(FakePlatform())
    assert device.get_device_name() == "chip" and device.get_vendor() == "acme"
    assert device.get_visible_devices_keyword() == "CHIP_VISIBLE_DEVICES" and device.get_resource_name() == "CHIP"
    assert device.is_device_available() and not device.is_cuda_available and not device.is_npu_available
    config = types.SimpleNamespace(trainer=types.SimpleNamespace(device="cuda"))
    device.auto_set_device(config)
    assert config.trainer.device == "chip"


def test_a_run_is_on_the_device_it_asks_for_and_so_are_its_processes(monkeypatch):
    from verl.config import load_config
    from verl.trainer.ppo.run_setup import build_run
    from verl.trainer.sft.ranks import num_ranks_to_start
    from verl.trainer.sft_trainer import run_sft

    class Present(FakePlatform):
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
    assert num_ranks_to_start(load_config([*sft, "trainer.device=chip"])) == 4
    wrong = load_config(["actor_rollout_ref.model.path=.", "trainer.device=cuda"])
    with pytest.raises(ConfigError, match=r"trainer.device=cuda, but this machine has chip, cpu; name one"):
        build_run(wrong)
    with pytest.raises(ConfigError, match=r"trainer.device=npu, but this machine has chip, cpu"):
        run_sft(load_config([*sft, "trainer.device=npu"]))
    assert num_ranks_to_start(load_config([*sft, "trainer.device=cpu"])) == 0
    assert get_platform().device_name == "cpu" and os.environ["VERL_PLATFORM"] == "cpu"
    assert choose_platform("chip") is get_platform() and os.environ["VERL_PLATFORM"] == "acme"
