"""Devices that are not there: a module that records calls, and the smallest platform of a vendor."""

import types

import pytest

from verl.plugin import loading
from verl.plugin.platform import PlatformRegistry, TorchAccelerator, platform_manager


@pytest.fixture(autouse=True)
def clean_platform_state(monkeypatch):
    """No platform chosen yet, no plug-in from the environment, and registrations undone afterwards."""
    monkeypatch.setattr(platform_manager, "_current_platform", None)
    monkeypatch.setattr(PlatformRegistry, "_platforms", dict(PlatformRegistry._platforms))
    monkeypatch.setattr(loading, "_loaded", [])
    monkeypatch.delenv("VERL_PLATFORM", raising=False)


class RecordingDeviceModule(types.ModuleType):
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


class FakePlatform(TorchAccelerator):
    """A vendor's platform as small as it gets."""

    device_name, vendor_name = "chip", "acme"
    present = True
    device_module = RecordingDeviceModule(is_available=True)

    def is_platform_available(self, use_smi_check=False):
        return self.present

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CHIP_VISIBLE_DEVICES"

    def ray_resource_name(self):
        return "CHIP"
