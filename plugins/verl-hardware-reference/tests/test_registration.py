"""What a vendor checks without the chip: everything registers, is found by name, and calls the vendor's module."""

import types

import pytest
import torch

from verl.plugin.platform import PlatformBase, get_platform, platform_manager
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.engine.base import EngineRegistry

CHIPS = [("intel", "xpu", "XPU"), ("cambricon", "mlu", "MLU"), ("metax", "cuda", "MetaX")]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(platform_manager, "_current_platform", None)
    for name in ("VERL_PLATFORM", "VERL_ENGINE_DEVICE", "VERL_ENGINE_VENDOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("vendor", "device", "short"), CHIPS)
def test_platform_is_found_by_its_vendor_name(monkeypatch, vendor, device, short):
    monkeypatch.setenv("VERL_PLATFORM", vendor.upper())
    assert platform_manager._detect_platform_name() == vendor
    platform = get_platform()
    assert isinstance(platform, PlatformBase) and type(platform).__name__ == f"Platform{short}"
    assert (platform.device_name, platform.vendor_name) == (device, vendor)


@pytest.mark.parametrize(("vendor", "device", "short"), CHIPS)
@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
@pytest.mark.parametrize(("model_type", "head"), [("language_model", "LMHead"), ("value_model", "ValueHead")])
def test_engine_is_registered_and_looked_up(monkeypatch, vendor, device, short, backend, model_type, head):
    import verl_hardware_reference  # noqa: F401  (the entry point does this on the first lookup)

    registered = EngineRegistry._engines[model_type][backend][(device, vendor)]
    assert registered.__name__ == f"FSDP{short}EngineWith{head}"
    monkeypatch.setenv("VERL_PLATFORM", vendor)
    assert EngineRegistry.get_engine_cls(model_type, backend) is registered


def test_engine_device_and_vendor_can_be_chosen_apart_from_the_platform(monkeypatch):
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "metax")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__ == "FSDPMetaXEngineWithLMHead"


def test_nothing_of_ours_is_detected_without_the_chips():
    assert platform_manager._detect_platform_name() not in [vendor for vendor, *_ in CHIPS]


def test_metax_is_detected_by_its_program_and_not_by_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    metax = PlatformRegistry.get("metax")()
    assert not metax.is_platform_available(use_smi_check=True)
    program = tmp_path / "mx-smi"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert metax.is_platform_available(use_smi_check=True)


def test_xpu_names_devices_by_the_selector(monkeypatch):
    xpu = PlatformRegistry.get("intel")()
    monkeypatch.delenv("ONEAPI_DEVICE_SELECTOR", raising=False)
    assert xpu.get_device_uuid(1) == "GPU-1"
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "level_zero:4,6")
    assert [xpu.get_device_uuid(i) for i in (0, 1)] == ["GPU-4", "GPU-6"]


def test_mlu_calls_the_vendors_module(monkeypatch):
    calls = []
    module = types.SimpleNamespace(
        is_available=lambda: True, set_device=lambda i: calls.append(("set_device", i)), device_count=lambda: 16
    )
    monkeypatch.setitem(__import__("sys").modules, "torch_mlu", types.ModuleType("torch_mlu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch, "mlu", module, raising=False)
    mlu = PlatformRegistry.get("cambricon")()
    mlu.set_device(3)
    assert mlu.is_available() and mlu.device_count() == 16 and calls == [("set_device", 3)]
    assert mlu.communication_backend_name() == "cncl" and mlu.ray_resource_options(2) == {"resources": {"MLU": 2}}
