"""Build the runtime library that CUDA programs load in place of NVIDIA's: cudart.c and stubs, with the host's compiler.

The library is C because programs call it as C. It forwards every call to server.py, so that it stays small. Functions
that it does not define are stubs generated from the toolkit's headers: a call of one is refused by its name.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from greenfast.device.cache import cache_dir
from greenfast.device.toolchain import cuda_include_dirs
from greenfast.emulator.machine.memory import GLOBAL_BASE
from greenfast.spec.errors import MachineError

SOURCE = Path(__file__).with_name("cudart.c")
#: Bytes of device memory that a program can allocate.
CAPACITY = 16 << 30
#: Registers per thread, as programs are told: PTX has no such count.
REGISTERS = 32
#: Properties of an H100 SXM, by the fields of cudaDeviceProp.
_PROPERTIES: dict[str, int | tuple[int, ...]] = {
    "totalGlobalMem": CAPACITY, "sharedMemPerBlock": 49152, "regsPerBlock": 65536, "warpSize": 32,
    "memPitch": 2**31 - 1, "maxThreadsPerBlock": 1024, "maxThreadsDim": (1024, 1024, 64),
    "maxGridSize": (2**31 - 1, 65535, 65535),
    "totalConstMem": 65536, "major": 9, "minor": 0, "textureAlignment": 512, "texturePitchAlignment": 32,
    "multiProcessorCount": 132, "canMapHostMemory": 1, "concurrentKernels": 1, "ECCEnabled": 1, "pciBusID": 1,
    "asyncEngineCount": 3, "unifiedAddressing": 1, "memoryBusWidth": 5120, "l2CacheSize": 50 << 20,
    "maxThreadsPerMultiProcessor": 2048, "streamPrioritiesSupported": 1, "globalL1CacheSupported": 1,
    "localL1CacheSupported": 1, "sharedMemPerMultiprocessor": 233472, "regsPerMultiprocessor": 65536,
    "managedMemory": 1, "concurrentManagedAccess": 1, "computePreemptionSupported": 1, "cooperativeLaunch": 1,
    "sharedMemPerBlockOptin": 232448, "maxBlocksPerMultiProcessor": 32, "reservedSharedMemPerBlock": 1024,
    "memoryPoolsSupported": 1, "clusterLaunch": 1, "surfaceAlignment": 512,
}  # fmt: skip
#: Texts of cudaGetErrorString that are not the error's name in words.
_TEXTS = {
    "cudaSuccess": "no error",
    "cudaErrorInvalidValue": "invalid argument",
    "cudaErrorMemoryAllocation": "out of memory",
    "cudaErrorInvalidConfiguration": "invalid configuration argument",
    "cudaErrorInvalidSymbol": "invalid device symbol",
    "cudaErrorInvalidDeviceFunction": "invalid device function",
    "cudaErrorInvalidDevice": "invalid device ordinal",
    "cudaErrorIllegalAddress": "an illegal memory access was encountered",
    "cudaErrorMisalignedAddress": "misaligned address",
    "cudaErrorLaunchFailure": "unspecified launch failure",
    "cudaErrorLaunchTimeout": "the launch timed out and was terminated",
    "cudaErrorLaunchOutOfResources": "too many resources requested for launch",
    "cudaErrorAssert": "device-side assert triggered",
    "cudaErrorNotSupported": "operation not supported",
    "cudaErrorCooperativeLaunchTooLarge": "too many blocks in cooperative launch",
}
_DECLARATION = re.compile(r"\bCUDARTAPI(?:_CDECL)?\s+(_*cuda\w+)\s*\(")
_DRIVER = re.compile(r"\bCUDAAPI\s+(cu[A-Z]\w+)\s*\(")


def build_library() -> Path:
    """Return the folder of the runtime library, libcudart.so of the toolkit's version. Build it if it is not cached.

    Raises MachineError if there is no C compiler, or if a header is missing.
    """
    folders = cuda_include_dirs()
    header = (folders[0] / "cuda_runtime_api.h").read_text(errors="replace")
    driver = (folders[0] / "cuda.h").read_text(errors="replace")
    generated = _generate(folders[0])
    source = SOURCE.read_text()
    digest = hashlib.sha256("\0".join((source, generated, header, driver)).encode()).hexdigest()[:24]
    folder = cache_dir() / f"cudart-{digest}"
    if (folder / "libcudart.so").exists():
        return folder
    version = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header)
    if version is None:
        raise MachineError(f"{folders[0] / 'cuda_runtime_api.h'} has no CUDART_VERSION; install nvidia-cuda-runtime")
    major = int(version[1]) // 1000
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name) / "lib"
        work.mkdir()
        (work / "generated.h").write_text(generated)
        (work / "stubs.c").write_text(_stubs(source, _DECLARATION.findall(header)))
        (work / "driver.c").write_text(_stubs(source, _DRIVER.findall(driver)))
        soname = f"libcudart.so.{major}"
        (work / "versions").write_text(f"{soname} {{ global: *; }};\n")
        includes = [f"-I{path}" for path in (work, *folders)]
        library = [*includes, str(SOURCE), str(work / "stubs.c"), f"-Wl,--version-script={work / 'versions'}"]
        _compile([*library, f"-Wl,-soname,{soname}", "-o", str(work / soname), "-ldl", "-lpthread"])
        link = [str(work / "driver.c"), "-L", str(work), f"-l:{soname}", "-Wl,-soname,libcuda.so.1"]
        _compile([*link, "-o", str(work / "libcuda.so.1")])
        (work / "libcudart.so").symlink_to(soname)
        (work / "libcuda.so").symlink_to("libcuda.so.1")
        try:
            work.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "libcudart.so").exists():
                raise
    return folder


def _compile(arguments: list[str]) -> None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        raise MachineError(
            "no C compiler was found, to build the runtime library; install gcc, or set CC to a compiler"
        )
    command = [compiler, "-O1", "-g1", "-fPIC", "-shared", "-w", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MachineError(f"the runtime library for CUDA programs cannot be built: {done.stderr.strip()[:2000]}")


def _generate(include: Path) -> str:
    """Return the C header with constants, the names of errors and the properties of the device."""
    enum = re.search(r"enum[^{]*\bcudaError\b\s*\{(.*?)\n\}", (include / "driver_types.h").read_text(), re.DOTALL)
    if enum is None:
        raise MachineError(f"{include / 'driver_types.h'} does not list cudaError; install nvidia-cuda-runtime")
    rows = []
    for name, number in re.findall(r"^\s*(cuda\w+)\s*=\s*(\d+)", enum[1], re.MULTILINE):
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.removeprefix("cudaError")).lower()
        rows.append(f'    {{{number}, "{name}", "{_TEXTS.get(name, words)}"}},')
    properties = []
    for field, value in _PROPERTIES.items():
        each = value if isinstance(value, tuple) else None
        properties += [f"p->{field}[{n}] = {v};" for n, v in enumerate(each)] if each else [f"p->{field} = {value};"]
    return "\n".join(
        [
            f"#define GF_BASE {GLOBAL_BASE:#x}ull",
            f"#define GF_CAPACITY {CAPACITY:#x}ull",
            f"#define GF_REGISTERS {REGISTERS}",
            "typedef struct { int number; const char *name, *text; } Named;",
            "static const Named error_names[] = {",
            *rows,
            "    {0, 0, 0}};",
            "static void set_properties(struct cudaDeviceProp *p) {",
            '    strcpy(p->name, "NVIDIA H100 (greenfast emulator)");',
            *(f"    {line}" for line in properties),
            "}",
        ]
    )


def _stubs(source: str, names: list[str]) -> str:
    """Return C with a function for each name that the library does not define; it refuses by the name."""
    defined = set(re.findall(r"^(?:EXPORT[^\n(]*?|NOTHING\()\b(_*cu\w+)\s*[(,]", source, re.MULTILINE))
    lines = ["int gf_refuse(const char *, void *);"]
    for name in sorted(set(names) - defined):
        lines.append(f'int {name}(void) {{ return gf_refuse("{name}", __builtin_return_address(0)); }}')
    return "\n".join(lines) + "\n"
