"""Which platform this process runs on: the registry, the detection, and the one cached instance.

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
from verl.utils.errors import ConfigError
from verl.utils.suggest import closest

logger = logging.getLogger(__name__)
PlatformClass = TypeVar("PlatformClass", bound=type[PlatformBase])

FALLBACK = "cpu"
VENDOR_ALIASES = {"cuda": "nvidia", "rocm": "amd", "npu": "huawei"}

_current_platform: PlatformBase | None = None


class UnknownPlatformError(ConfigError, ValueError):
    """A platform name that nothing registered."""


class PlatformRegistry:
    """Vendor names to platform classes, in the order in which they are probed. The CPU is known but never probed."""

    _platforms: ClassVar[dict[str, type[PlatformBase]]] = {}

    @classmethod
    def register(cls, platform: str) -> Callable[[PlatformClass], PlatformClass]:
        """Decorator that files a platform class under a vendor's name; a later class under the same name wins."""
        name = platform.strip().lower()

        def add(platform_class: PlatformClass) -> PlatformClass:
            if not (isinstance(platform_class, type) and issubclass(platform_class, PlatformBase)):
                raise TypeError(f"platform {name!r}: {platform_class!r} must be a class derived from PlatformBase")
            taken = cls._platforms.get(name)
            if taken is not None and taken is not platform_class:
                logger.info("platform %r: %r replaces %r", name, platform_class, taken)
            cls._platforms[name] = platform_class
            return platform_class

        return add

    @classmethod
    def get(cls, name: str) -> type[PlatformBase] | None:
        """The class filed under `name` or under what that spelling stands for; None when there is none."""
        load_plugins()
        name = name.strip().lower()
        return cls._platforms.get(name) or cls._platforms.get(VENDOR_ALIASES.get(name, name))

    @classmethod
    def registered_names(cls) -> tuple[str, ...]:
        """The probe order: every name but the fallback's."""
        load_plugins()
        return tuple(name for name in cls._platforms if name != FALLBACK)


@dataclass(frozen=True)
class PlatformProbe:
    """One platform's answer to "are you here?", kept so that `verl doctor` can say why."""

    name: str
    available: bool
    reason: str


def get_platform() -> PlatformBase:
    """The platform of this process: VERL_PLATFORM, else the first that is present, else the CPU. Found once."""
    global _current_platform
    if _current_platform is None:
        _current_platform = _create_platform(_detect_platform_name())
    return _current_platform


def set_platform(platform: PlatformBase) -> None:
    """Use `platform` from now on; whoever asked before keeps what they got, so call this first."""
    global _current_platform
    if not isinstance(platform, PlatformBase):
        raise TypeError(f"set_platform takes an instance of PlatformBase, not {platform!r}")
    if _current_platform is not None and _current_platform is not platform:
        logger.warning("platform %s replaces %s, which may be in use already", platform, _current_platform)
    _current_platform = platform


def choose_platform(device: str) -> PlatformBase:
    """The platform with torch device type `device`, from now on and in processes started from here.

    "auto" is `get_platform()`. ConfigError with the devices that are there when there is no such one.
    """
    global _current_platform
    platform = get_platform()
    if device in ("auto", platform.device_name):
        return platform
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


def probe_platforms() -> list[PlatformProbe]:
    """Ask every platform in order, with its monitoring program first and, if none answers, without; stops at a yes.

    The second round finds devices in containers that lack the program. It cannot come first: a CUDA-compatible chip
    of another vendor is told from NVIDIA's by the program alone.
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
    except Exception as error:  # a vendor's broken driver must not stop the next vendor from being asked
        logger.info("platform %r cannot be probed: %s: %s", name, type(error).__name__, error)
        return PlatformProbe(name, False, f"{type(error).__name__}: {error}")
    if not available:
        return PlatformProbe(name, False, "not present")
    return PlatformProbe(name, True, "present" if use_smi_check else "usable in torch, without its monitoring program")


def _detect_platform_name() -> str:
    """VERL_PLATFORM as given, in lower case; else the name of the first platform that is present; else "cpu"."""
    chosen = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if chosen:
        return chosen
    probes = probe_platforms()
    return probes[-1].name if probes and probes[-1].available else FALLBACK


def _create_platform(name: str) -> PlatformBase:
    """An instance of the platform called `name`; a warning, not an error, when its device is not usable here."""
    platform_class = PlatformRegistry.get(name)
    if platform_class is None:
        known = [*PlatformRegistry.registered_names(), FALLBACK]
        near = closest(name.strip().lower(), [*known, *VENDOR_ALIASES])
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        spelled = ", ".join(f"{short} = {full}" for short, full in VENDOR_ALIASES.items())
        raise UnknownPlatformError(
            f"unknown platform {name!r}{hint} Registered: {', '.join(known)} (also {spelled}). "
            f"A vendor's plug-in adds its own: install it, or name it in VERL_USE_EXTERNAL_MODULES"
        )
    platform = platform_class()
    if not platform.is_available():
        logger.warning("platform %r is chosen, but this process sees no usable %s device", name, platform.device_name)
    return platform
