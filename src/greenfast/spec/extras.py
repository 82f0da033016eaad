"""pip extras: the optional packages, and the error of a command that lacks one."""

from __future__ import annotations

import importlib.util

from greenfast.spec.errors import MachineError

_EMULATOR = ("ml_dtypes", "msgspec", "rich")

#: Extra -> the modules that it installs, as in pyproject.toml.
EXTRAS = {
    "emulator": _EMULATOR,
    "judge": (*_EMULATOR, "jinja2", "markdown_it", "matplotlib", "nvtx", "scipy"),
    "evolve": ("httpx2", "optuna"),
    "triton": ("triton",),
    "cute": ("cutlass",),
}


def require(feature: str, extra: str) -> None:
    """Raise MachineError, naming the extra, if one of its modules is not installed. Imports none of them."""
    missing = [module for module in EXTRAS[extra] if not _installed(module)]
    if missing:
        raise MachineError(
            f"{feature} needs greenfast[{extra}]: {install_command(extra)} (no module {', '.join(missing)})"
        )


def install_command(extra: str) -> str:
    """Return the command that installs an extra, from a clone: greenfast is on no package index yet."""
    return f"pip install '.[{extra}]' in a clone of greenfast"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a finder refuses it; a module without a spec
        return False
