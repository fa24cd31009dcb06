"""Whether the trackers of a run can start, without starting them."""

import netrc
import os
import sys
from collections.abc import Iterable

from verl.observe.tracking import INSTALL, check_backend_names
from verl.plugin.installed import has_module
from verl.utils.errors import ConfigError

_WANDB_SIGNED_IN = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_WANDB_WITHOUT_ACCOUNT = ("offline", "disabled", "dryrun")
_WITHOUT_A_MODULE = ("console", "file")


def check_trackers(names: Iterable[str], errors: str = "raise") -> None:
    """ConfigError for an unknown tracker; unless `errors` is warn, also for one that is not installed or would ask for
    an account."""
    check_backend_names(names)
    for name in names if errors == "raise" else ():
        if name not in _WITHOUT_A_MODULE and not has_module(name):
            raise ConfigError(
                f"trainer.logger={name!r}: {name} is not installed; {INSTALL.get(name, 'install it')}, or take it out "
                "of trainer.logger"
            )
        if name == "wandb" and not _wandb_can_start():
            raise ConfigError(
                "trainer.logger='wandb' has no account here: set WANDB_API_KEY, or run `wandb login` once, or set "
                "WANDB_MODE=offline, or take it out of trainer.logger"
            )


def _wandb_can_start() -> bool:
    """Whether an account is known, none is needed, or somebody is there to be asked."""
    needs_none = os.environ.get("WANDB_MODE", "").lower() in _WANDB_WITHOUT_ACCOUNT
    return needs_none or sys.stdin.isatty() or wandb_has_account()


def wandb_has_account() -> bool:
    """Whether the environment or `wandb login` has named an account."""
    if any(os.environ.get(name) for name in _WANDB_SIGNED_IN):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0].split(":")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
