"""The environment of a run: source tree, package versions, time and device."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone

from greenfast.device.gpu import device_count
from greenfast.device.worker import gpu_info
from greenfast.judge.emulator_session import EmulatorSession
from greenfast.judge.record_schema import GitState
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.arch import Target
from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.facts import DeviceInfo

#: Environment variable: the commit of a source tree without git history.
GIT_SHA_VARIABLE = "GREENFAST_GIT_SHA"

_PACKAGES = ("torch", "numpy", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")


def git_state() -> GitState:
    """Return the commit of the checkout that this package runs from; "unknown" if installed or without git.

    A source tree on a GPU machine may have no history. GREENFAST_GIT_SHA then gives its commit, with branch "copied".
    """

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], cwd=KERNEL_DIR, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    copied_from = os.environ.get(GIT_SHA_VARIABLE)
    if copied_from:
        return GitState(sha=copied_from, branch="copied", dirty=False)
    sha = git("rev-parse", "HEAD")
    if sha is None:
        return GitState(sha="unknown", branch="unknown", dirty=False)
    return GitState(
        sha=sha, branch=git("rev-parse", "--abbrev-ref", "HEAD") or "unknown", dirty=bool(git("status", "--porcelain"))
    )


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect a result."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(timezone.utc)


#: The name of the emulator as a device.
EMULATOR = "emulator"
_EMULATED = "emulated"  # The emulator's name in records.


def choose_device(text: str) -> int | str | None:
    """Parse ``--device``: auto (the first GPU, else the emulator), none, emulator, or the number of a GPU.

    Raises UsageError for any other text and MachineError for a missing GPU.
    """
    if text == "none":
        return None
    if text in (EMULATOR, _EMULATED):
        return EMULATOR
    count = device_count()
    if text == "auto":
        return 0 if count else EMULATOR
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"device {text!r}: allowed are auto, none, emulator and a GPU's number")
    if int(text) >= count:
        raise MachineError(f"device {text}: the driver shows {count} GPU(s); use --device none to run without one")
    return int(text)


def choose_devices(text: str) -> list[str]:
    """Parse ``--device`` of a search: the values of ``choose_device``, several numbers such as 0,1, or all.

    "all" selects every GPU, else the emulator. Raises as ``choose_device`` does.
    """
    if text == "all":
        return [str(n) for n in range(device_count())] or [EMULATOR]
    parts = text.split(",")
    words = ("auto", "none", EMULATOR, _EMULATED)
    if text not in words and not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"device {text!r}: allowed are auto, all, none, emulator, and GPUs' numbers such as 0 or 0,1")
    chosen = [choose_device(part) for part in parts]
    if len(set(chosen)) != len(chosen):
        raise UsageError(f"device {text!r}: a GPU is named twice, and its two races would slow each other")
    return ["none" if one is None else str(one) for one in chosen]


def device_info(ordinal: int | str | None, timeout_s: float) -> DeviceInfo | None:
    """Return the facts about the chosen device. A separate process queries a GPU, so this one has no CUDA context."""
    if ordinal is None:
        return None
    if isinstance(ordinal, str):
        return EmulatorSession().info()
    return gpu_info(ordinal, timeout_s)


def choose_target(text: str | None, device: DeviceInfo | None, default: str) -> Target:
    """Return the target: the value of ``--arch``, else the GPU's own target, else the task's default."""
    if text is not None:
        return Target.parse(text)
    if device is not None and device.kind == "gpu":
        return Target.of_device(device.capability)
    return Target.parse(default)
