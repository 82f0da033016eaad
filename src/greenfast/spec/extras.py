"""pip extras: the optional packages, and the error of a command that lacks one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

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

#: Module -> the first release that works, for modules that PyTorch may have installed in another version.
OLDEST = {"triton": (3, 5)}


def require(feature: str, extra: str) -> None:
    """Raise MachineError, naming the extra, if one of its modules is missing or too old. Imports none of them."""
    missing = [module for module in EXTRAS[extra] if not _installed(module)]
    lacks = [f"no module {', '.join(missing)}"] if missing else [*filter(None, map(_describe_old, EXTRAS[extra]))]
    if lacks:
        raise MachineError(f"{feature} needs greenfast[{extra}]: {install_command(extra)} ({'; '.join(lacks)})")


def install_command(extra: str) -> str:
    """Return the command that installs an extra, from a clone: greenfast is on no package index yet."""
    return f"pip install '.[{extra}]' in a clone of greenfast"


def _describe_old(module: str) -> str:
    """Return the installed and the needed release if the module is too old, else an empty string."""
    oldest = OLDEST.get(module)
    if oldest is None:
        return ""
    try:
        release = importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:  # of a package with another name
        return ""
    if tuple(int(n) for n in re.findall(r"\d+", release)[:2]) >= oldest:
        return ""
    return f"{module} {release} is too old, {'.'.join(map(str, oldest))} is needed"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a finder refuses it; a module without a spec
        return False
