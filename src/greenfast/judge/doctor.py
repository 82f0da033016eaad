"""Diagnosis of this machine: available and missing dependencies with remedies. It does not load torch.

It also runs if packages that the rest of greenfast imports are missing, because it reports them.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from greenfast import __version__
from greenfast.kernels import KERNEL_DIR
from greenfast.spec.errors import GreenfastError, UsageError
from greenfast.spec.extras import install_command

#: The reason why a part of greenfast cannot be imported; empty if it can.
_NO_LIBRARY, _NO_JUDGE = "", ""
try:
    from cuda.bindings import driver, nvrtc

    from greenfast.device import cache, toolchain
    from greenfast.device.compiler import compile_kernel
    from greenfast.device.gpu import Gpu, device_count
    from greenfast.device.machine_code import count_instructions, disassemble
    from greenfast.device.worker import gpu_info
    from greenfast.spec.arch import Target
    from greenfast.spec.facts import DeviceInfo
    from greenfast.spec.kernel import KernelSource
except ImportError as e:
    _NO_LIBRARY = str(e)
try:
    from greenfast.judge.profiling import ncu
    from greenfast.judge.request import GIT_SHA_VARIABLE, git_state
    from greenfast.judge.task import TASKS_VARIABLE, Task, TaskConfig, load_known_tasks
except ImportError as e:
    _NO_JUDGE = str(e)

Status = Literal["OK", "MISSING", "EXTRA", "OPTIONAL"]

#: Packages of every installation and of the extra ``judge``, with minimum versions as in pyproject.toml.
_CORE = {"torch": "2.11", "numpy": "2.0", "cuda-core": "1.2", "cuda-bindings": "13"}
_JUDGE = {"msgspec": "0.19", "ml-dtypes": "0.5", "rich": "13", "scipy": "1.13", "matplotlib": "3.9", "nvtx": "0.2.11"}
PACKAGES = _CORE | _JUDGE
_PYTHON = ((3, 10), (3, 13))
_GPU_TIMEOUT_S = 30.0
_DEFAULT_TARGET = "sm_89"
# Variables of other programs that this depends on.
_OTHERS_VARIABLES = ("XDG_CACHE_HOME", "CUDA_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES")
_PROBE = """#include <cuda_fp8.h>
#include <mma.h>
#include <cuda/std/type_traits>
extern "C" __global__ void probe(const __nv_fp8_e4m3* x, float* y) { y[threadIdx.x] = float(x[threadIdx.x]); }
"""


@dataclass(frozen=True)
class Diagnosis:
    """The status of one dependency.

    OK: available. MISSING: required for attention. EXTRA: required for judge and the other commands, and part
    of an extra. OPTIONAL: missing or unusable, and required only for the purpose in the remedy.
    """

    what: str
    status: Status
    found: str
    remedy: str = ""


def library(findings: Sequence[Diagnosis]) -> bool:
    """Check whether attention can be computed: on a Hopper GPU, or slowly on CPU tensors."""
    return all(f.status != "MISSING" for f in findings)


def static_gates(findings: Sequence[Diagnosis]) -> bool:
    """Check whether judge can decide BUILD, RESOURCES and EVIDENCE."""
    return all(f.status not in ("MISSING", "EXTRA") for f in findings)


def gpu_gates(findings: Sequence[Diagnosis]) -> bool:
    """Check whether judge can decide PERFORMANCE too."""
    return static_gates(findings) and any(f.what.startswith("GPU") and f.status == "OK" for f in findings)


def examine(environment: Mapping[str, str] | None = None) -> list[Diagnosis]:
    """Check all dependencies. environment: the environment variables; None for this process's own."""
    variables = os.environ if environment is None else environment
    has_judge = not _NO_JUDGE or any(finding.status == "OK" for finding in packages(_JUDGE))
    findings = [python(), *packages(PACKAGES if has_judge else _CORE)]
    if _NO_LIBRARY:
        return [
            *findings,
            Diagnosis("everything else", "MISSING", f"not looked at: {_NO_LIBRARY}", "reinstall greenfast"),
        ]
    devices = gpus()
    target = next((target for target, _ in devices if target), None)
    return [
        *findings,
        *([] if _NO_JUDGE else [installation()]),
        *(finding for finding in _toolchain() if has_judge or finding.status != "EXTRA"),
        compile_check(target or Target(_DEFAULT_TARGET)),
        compile_cache(),
        *(finding for _, finding in devices),
        clocks([target for target, _ in devices]),
        *_diagnose_judge(variables),
    ]


def _diagnose_judge(variables: Mapping[str, str]) -> list[Diagnosis]:
    if _NO_JUDGE:
        missing = [finding.what for finding in packages(_JUDGE) if finding.status != "OK"]
        lacks = f"not installed: {', '.join(missing)}" if missing else f"cannot be imported: {_NO_JUDGE}"
        return [Diagnosis("extra judge", "EXTRA", lacks, install_command("judge"))]
    return [
        _tool("ncu", ncu(), "the profile of EVIDENCE and of `greenfast profile`", "NVIDIA Nsight Compute"),
        _tool("compute-sanitizer", shutil.which("compute-sanitizer"), "looking for races by hand", "a CUDA toolkit"),
        *tasks_and_variables(variables),
    ]


def python() -> Diagnosis:
    """Check the interpreter."""
    least, most = _PYTHON
    fits = least <= sys.version_info[:2] <= most
    remedy = "" if fits else f"use Python {least[0]}.{least[1]} to {most[0]}.{most[1]}"
    return Diagnosis("Python", "OK" if fits else "MISSING", platform.python_version(), remedy)


def packages(required: Mapping[str, str] = PACKAGES) -> list[Diagnosis]:
    """Check packages, by name with their least version, by their installed metadata, without importing them."""
    findings = []
    for name, least in required.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        fits = bool(version) and _numbers(version) >= _numbers(least)
        extra = name in _JUDGE
        remedy = "" if fits else install_command("judge") if extra else f'pip install "{name}>={least}"'
        status: Status = "OK" if fits else "EXTRA" if extra else "MISSING"
        findings.append(Diagnosis(name, status, version or "not installed", remedy))
    return findings


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release part of a version: (2, 13, 0) for 2.13.0+cu130."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def installation() -> Diagnosis:
    """Check this package: its version and location."""
    if not (KERNEL_DIR.parents[2] / "pyproject.toml").is_file():
        return Diagnosis("greenfast", "OK", f"{__version__}, an installed package")
    git = git_state()
    commit = "without git" if git.sha == "unknown" else f"at {git.sha[:10]}{' with changes' if git.dirty else ''}"
    return Diagnosis("greenfast", "OK", f"{__version__}, a checkout {commit}")


def _toolchain() -> Iterator[Diagnosis]:
    try:
        library = toolchain.nvrtc_library()
        _, major, minor = nvrtc.nvrtcVersion()
        yield Diagnosis("NVRTC", "OK", f"{major}.{minor}, {library}")
    except (GreenfastError, RuntimeError) as e:
        yield _missing("NVRTC", e)
    try:
        yield Diagnosis("CUDA headers", "OK", ", ".join(map(str, toolchain.cuda_include_dirs())))
    except GreenfastError as e:
        yield _missing("CUDA headers", e)
    try:
        yield Diagnosis("nvdisasm", "OK", str(toolchain.nvdisasm()))
    except GreenfastError as e:
        yield _missing("nvdisasm", e, "EXTRA")


def _missing(name: str, error: Exception, status: Status = "MISSING") -> Diagnosis:
    """Return a finding for an error. Its message has the form "fault; remedy"."""
    fault, _, remedy = str(error).partition("; ")
    return Diagnosis(name, status, " ".join(fault.split()), " ".join(remedy.split()) or "see the rows above")


def compile_check(target: Target) -> Diagnosis:
    """Compile a tiny kernel without the cache, and disassemble it if there is a disassembler."""
    source = KernelSource("probe", _PROBE, "probe.cu", (), (32, 1, 1))
    try:
        kernel = compile_kernel(source, target, use_cache=False)
        summary = f"{kernel.compiler}, {target.name}: {kernel.compile_ms:.0f} ms"
        if _has_disassembler():
            summary += f", {count_instructions(disassemble(kernel.cubin, source.entry))['total']} instructions"
    except (GreenfastError, RuntimeError, OSError) as e:
        return _missing("compile check", e)
    return Diagnosis("compile check", "OK", summary)


def _has_disassembler() -> bool:
    try:
        toolchain.nvdisasm()
    except GreenfastError:
        return False
    return True


def compile_cache() -> Diagnosis:
    """Check the folder of compiled kernels. Without it, every run compiles everything again."""
    remedy = "without it every run compiles anew: set GREENFAST_CACHE_DIR to a folder that can be written"
    try:
        folder = cache.cache_dir()
    except RuntimeError as e:
        return Diagnosis("compile cache", "OPTIONAL", str(e), remedy)
    if not folder.exists():
        nearest = next(parent for parent in folder.absolute().parents if parent.exists())
        if os.access(nearest, os.W_OK | os.X_OK) and nearest.is_dir():
            return Diagnosis("compile cache", "OK", f"{folder}, not made yet")
        return Diagnosis("compile cache", "OPTIONAL", f"{folder} cannot be made in {nearest}", remedy)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
        entries, size = cache.usage()
    except OSError as e:
        return Diagnosis("compile cache", "OPTIONAL", f"{folder} cannot be written ({e.strerror})", remedy)
    return Diagnosis("compile cache", "OK", f"{folder}, {entries} entries, {size / 2**20:.1f} MiB")


def gpus() -> list[tuple[Target | None, Diagnosis]]:
    """Check each GPU and its target (None if it cannot be used); one finding if there is no GPU."""
    reason = _why_no_gpu()
    if reason:
        remedy = "PERFORMANCE needs one: install the NVIDIA driver, and give a container its GPU"
        return [(None, Diagnosis("GPU", "OPTIONAL", reason, remedy))]
    findings: list[tuple[Target | None, Diagnosis]] = []
    for ordinal in range(device_count()):
        try:
            info = gpu_info(ordinal, _GPU_TIMEOUT_S)
        except GreenfastError as e:
            remedy = "PERFORMANCE needs it; run nvidia-smi"
            findings.append((None, Diagnosis(f"GPU {ordinal}", "OPTIONAL", " ".join(str(e).split()), remedy)))
            continue
        findings.append(_gpu(ordinal, info))
    return findings


def _gpu(ordinal: int, info: DeviceInfo) -> tuple[Target | None, Diagnosis]:
    summary = (
        f"{info.name}, compute capability {info.compute_capability}, driver {info.driver} (CUDA {info.cuda_version})"
    )
    try:
        target = Target.of_device(info.capability)
    except UsageError as e:
        return None, Diagnosis(f"GPU {ordinal}", "OPTIONAL", f"{summary}: {e}", "PERFORMANCE needs another")
    return target, Diagnosis(f"GPU {ordinal}", "OK", f"{summary}, target {target.name}")


def _why_no_gpu() -> str | None:
    try:
        (error,) = driver.cuInit(0)
    except RuntimeError:  # cuda.bindings cannot find the driver's library
        return "no NVIDIA driver"
    if error != driver.CUresult.CUDA_SUCCESS:
        return f"the driver shows none (cuInit: {error.name})"
    return None if device_count() else "the driver shows none"


def clocks(targets: Sequence[Target | None]) -> Diagnosis:
    """Check that NVML reports the clock of the first usable GPU."""
    ordinal = next((i for i, target in enumerate(targets) if target), None)
    if ordinal is None:
        return Diagnosis("NVML clocks", "OPTIONAL", "no GPU to read them from", "see GPU")
    try:
        now = Gpu(ordinal).clocks()
    except (GreenfastError, RuntimeError) as e:
        now, why = {}, str(e)
    else:
        why = "NVML does not tell them"
    if not now:
        remedy = "timings are taken without them: samples at a fallen clock are then not noticed"
        return Diagnosis("NVML clocks", "OPTIONAL", why, remedy)
    return Diagnosis("NVML clocks", "OK", f"SM {now['sm_mhz']:.0f} MHz, {now['temperature_c']:.0f} °C")


def _tool(name: str, path: str | None, use: str, package: str) -> Diagnosis:
    if path:
        return Diagnosis(name, "OK", path)
    return Diagnosis(name, "OPTIONAL", "not on the PATH", f"for {use}: install {package}, or add its folder to PATH")


def tasks_and_variables(environment: Mapping[str, str]) -> list[Diagnosis]:
    """Report the known tasks and the environment variables that affect greenfast."""
    tasks = [*load_known_tasks()]
    configs = [task.config for _, task in tasks if isinstance(task, Task)]
    broken = [
        Diagnosis(f"task {folder.name}", "OPTIONAL", "its config does not hold", str(error))
        for folder, error in tasks
        if isinstance(error, UsageError)
    ]
    names = ", ".join(config.name for config in configs)
    remedy = "" if names else "reinstall greenfast with its tasks, or repair the tasks named below"
    known = Diagnosis("tasks", "OK" if names else "MISSING", names or "none", remedy)
    return [known, *broken, *_variables(environment, configs)]


def _variables(environment: Mapping[str, str], configs: Sequence[TaskConfig]) -> list[Diagnosis]:
    own = ("GREENFAST_CACHE_DIR", "GREENFAST_BATCH_INVARIANT", TASKS_VARIABLE, GIT_SHA_VARIABLE, "TORCH_CUDA_ARCH_LIST")
    toggles = {name: config for config in configs for name in config.toggles}
    findings = []
    for name in dict.fromkeys([*own, *_OTHERS_VARIABLES, *toggles]):
        value = environment.get(name)
        if not value:
            continue
        fault = _fault(name, value, toggles.get(name))
        findings.append(Diagnosis(name, "OPTIONAL" if fault else "OK", value, fault or ""))
    return findings or [Diagnosis("environment", "OK", "no variable that greenfast reads is set")]


def _fault(name: str, value: str, config: TaskConfig | None) -> str | None:
    """Return the fault of a variable's value, or None. Only a task's runner uses toggles and the target."""
    try:
        if name == "TORCH_CUDA_ARCH_LIST":
            Target.parse(value)
        if name == TASKS_VARIABLE:
            lost = [entry for entry in value.split(os.pathsep) if entry and not Path(entry).is_dir()]
            return f"no such folder: {', '.join(lost)}" if lost else None
        if config is not None:
            allowed = config.toggles[name].values
            if value not in map(str, allowed):
                return f"allowed values are {allowed}"
    except UsageError as e:
        return str(e)
    return None
