"""The platform of this process: registry, detection, and the one cached instance.

The module's path and `_current_platform`, `_detect_platform_name`, `_create_platform` are used by published plug-ins'
tests, so the implementation lives here.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from verl.plugin.loading import load_plugins
from verl.plugin.platform.platform_base import PlatformBase
from verl.utils.errors import ConfigError, PluginError
from verl.utils.suggest import closest

logger = logging.getLogger(__name__)
PlatformClass = TypeVar("PlatformClass", bound=type[PlatformBase])

FALLBACK = "cpu"
VENDOR_ALIASES = {"cuda": "nvidia", "rocm": "amd", "npu": "huawei"}

_current_platform: PlatformBase | None = None


class UnknownPlatformError(ConfigError, ValueError):
    """A platform name that is not registered."""


class PlatformRegistry:
    """Vendor names to platform classes, in probe order. The CPU is registered but never probed."""

    _platforms: ClassVar[dict[str, type[PlatformBase]]] = {}

    @classmethod
    def register(cls, platform: str) -> Callable[[PlatformClass], PlatformClass]:
        """Decorator that registers a platform class for a vendor's name; a later class replaces an earlier one."""
        name = platform.strip().lower()

        def add(platform_class: PlatformClass) -> PlatformClass:
            if not (isinstance(platform_class, type) and issubclass(platform_class, PlatformBase)):
                raise TypeError(f"platform {name!r}: {platform_class!r} must be a class derived from PlatformBase")
            old = cls._platforms.get(name)
            if old is not None and old is not platform_class:
                logger.info("platform %r: %r replaces %r", name, platform_class, old)
            cls._platforms[name] = platform_class
            return platform_class

        return add

    @classmethod
    def get(cls, name: str) -> type[PlatformBase] | None:
        """The class registered for `name`, or for the vendor that `name` is an alias of; None when there is none."""
        load_plugins()
        name = name.strip().lower()
        return cls._platforms.get(name) or cls._platforms.get(VENDOR_ALIASES.get(name, name))

    @classmethod
    def registered_names(cls) -> tuple[str, ...]:
        """All names except the fallback's, in probe order."""
        load_plugins()
        return tuple(name for name in cls._platforms if name != FALLBACK)


@dataclass(frozen=True)
class PlatformProbe:
    """Result of one platform's probe, with the reason, which `verl doctor` prints."""

    name: str
    available: bool
    reason: str


def get_platform() -> PlatformBase:
    """The platform of this process: VERL_PLATFORM, else the first that is present, else the CPU. Detected once."""
    global _current_platform
    if _current_platform is None:
        _current_platform = _create_platform(_detect_platform_name())
    return _current_platform


def set_platform(platform: PlatformBase) -> None:
    """Make `platform` the platform of this process. Earlier callers keep the old one, so call this first."""
    global _current_platform
    if not isinstance(platform, PlatformBase):
        raise TypeError(f"set_platform takes an instance of PlatformBase, not {platform!r}")
    if _current_platform is not None and _current_platform is not platform:
        logger.warning("platform %s replaces %s, which may be in use already", platform, _current_platform)
    _current_platform = platform


def check_device_name(device: str) -> None:
    """ConfigError where neither verl nor a platform that is registered so far knows this torch device type."""
    known = {"auto", "cuda", "npu", *(platform().device_name for platform in PlatformRegistry._platforms.values())}
    if device not in known:
        raise ConfigError(f"trainer.device={device} is no kind of device; known: {', '.join(sorted(known))}")


def choose_platform(device: str) -> PlatformBase:
    """The platform with torch device type `device`, which this process and its later children then use.

    "auto" is `get_platform()`. ConfigError, with the available devices, when no platform has that type.
    """
    global _current_platform
    platform = get_platform()
    if device in ("auto", platform.device_name):
        return platform
    check_device_name(device)
    probes = [
        _probe_platform(name, use_smi_check)
        for use_smi_check in (True, False)
        for name in PlatformRegistry.registered_names()
    ]
    names = [*(probe.name for probe in probes if probe.available), FALLBACK]
    vendor_of = {PlatformRegistry._platforms[name]().device_name: name for name in reversed(names)}
    if device not in vendor_of:
        raise ConfigError(
            f"trainer.device={device}, but this machine has {', '.join(sorted(vendor_of))}; name one, or leave it "
            "at auto"
        )
    os.environ["VERL_PLATFORM"] = vendor_of[device]
    _current_platform = _create_platform(vendor_of[device])
    return _current_platform


def probe_until_available() -> list[PlatformProbe]:
    """The probes made until a platform was available: first with monitoring programs, then without.

    The second round finds devices in containers that lack the program. It cannot come first: only the program
    distinguishes a CUDA-compatible chip of another vendor from NVIDIA's.
    """
    probes: list[PlatformProbe] = []
    for use_smi_check in (True, False):
        for name in PlatformRegistry.registered_names():
            probes.append(_probe_platform(name, use_smi_check))
            if probes[-1].available:
                return probes
    return probes


def _probe_platform(name: str, use_smi_check: bool) -> PlatformProbe:
    try:
        available = bool(PlatformRegistry._platforms[name]().is_platform_available(use_smi_check=use_smi_check))
    except Exception as error:  # a vendor's broken driver must not prevent the next probe
        logger.info("platform %r cannot be probed: %s: %s", name, type(error).__name__, error)
        return PlatformProbe(name, False, f"{type(error).__name__}: {error}")
    if not available:
        return PlatformProbe(name, False, "not present")
    return PlatformProbe(name, True, "present" if use_smi_check else "usable in torch, without its monitoring program")


def _detect_platform_name() -> str:
    """VERL_PLATFORM in lower case; else the name of the first platform that is present; else "cpu"."""
    chosen = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if chosen:
        return chosen
    probes = probe_until_available()
    return probes[-1].name if probes and probes[-1].available else FALLBACK


def _create_platform(name: str) -> PlatformBase:
    """An instance of the platform called `name`; a warning, not an error, when its device is not usable."""
    platform_class = PlatformRegistry.get(name)
    if platform_class is None:
        known = [*PlatformRegistry.registered_names(), FALLBACK]
        near = closest(name.strip().lower(), [*known, *VENDOR_ALIASES])
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        aliases = ", ".join(f"{short} = {full}" for short, full in VENDOR_ALIASES.items())
        raise UnknownPlatformError(
            f"unknown platform {name!r}{hint} Registered: {', '.join(known)} (also {aliases}). "
            f"A vendor's plug-in adds its own: install it, or name it in VERL_USE_EXTERNAL_MODULES"
        )
    try:
        platform = platform_class()
        is_available = platform.is_available()
    except Exception as error:  # whatever a vendor's code raises is reported under its name
        raise PluginError(
            f"platform {name!r} ({platform_class.__module__}.{platform_class.__qualname__}) cannot be used: "
            f"{type(error).__name__}: {error}. Install what its plug-in needs, or choose another platform: "
            "VERL_PLATFORM=cpu, or unset it"
        ) from error
    if not is_available:
        logger.warning("platform %r is chosen, but this process sees no usable %s device", name, platform.device_name)
    return platform
