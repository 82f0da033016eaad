"""``python -m benchmarks NAME``: run one benchmark."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from greenfast.spec.errors import GreenfastError, unknown
from greenfast.spec.extras import require
from greenfast.spec.printable import printable

#: Benchmark -> the module and the function that runs it with its arguments, and one line of help.
BENCHMARKS = {
    "kernel": ("kernel:main", "check one variant of a task and time it over shapes"),
    "peers": ("commands:peers", "compare the Hopper kernel with libraries that compute the same: times, errors"),
    "sdpa": ("commands:sdpa", "compare greenfast.sdpa with PyTorch's attention and others: times, host times, errors"),
    "routing": ("commands:routing", "time greenfast.sdpa and PyTorch's attention on many shapes, for greenfast.use"),
    "serving": ("commands:serving", "compare attention over a paged FP8 cache, and appending to it, with others"),
    "parallel": ("parallel:main", "compare attention of one sequence on several GPUs, under torchrun"),
    "report": ("commands:report", "print the report of a saved comparison"),
    "models": ("models:main", "time transformer layers with PyTorch's attention and under greenfast.use"),
    "continuous_batching": ("continuous_batching:main", "measure tokens per second of continuous batching"),
    "varlen": ("varlen:main", "time packed sequences beside equal ones and FlashAttention"),
    "block": ("block:main", "time norm, RoPE and attention, fused with quantization and by torch.compile"),
    "masks": ("masks:main", "time attention that skips tiles beside dense attention, cuDNN and FlexAttention"),
    "token_scales": ("token_scales:main", "measure times and errors of precision fp8_token"),
    "backward": ("backward:main", "measure the errors of 8-bit backward passes, and train small models with them"),
    "backward_speed": ("backward_speed:main", "time the 8-bit backward pass beside bfloat16"),
    "quality": ("quality:main", "measure the errors and losses of small trained models with 8-bit attention"),
    "accumulation_error": ("accumulation_error:main", "measure the kernel error against the number of keys"),
    "hopper_tilings": ("hopper_tilings:main", "time all tilings of the Hopper kernel"),
    "tiling_counts": ("tiling_counts:main", "add the emulator's estimates to the files of hopper_tilings"),
    "proposers": ("proposers:main", "compare the proposers of greenfast evolve on the files of hopper_tilings"),
    "revalidate": ("revalidate:main", "validate the winner of a search again, on another day or device"),
    "compile_time": ("compile_time:main", "time cold and cached compilation"),
    "launch_cost": ("launch_cost:main", "measure the host time of a launch"),
    "emulator_speed": ("emulator_speed:main", "measure the speed of the emulator"),
    "emulator_against_gpu": ("emulator_against_gpu:main", "compare outputs and counts of emulator and GPU"),
    "emulator_instructions": ("emulator_instructions:main", "compare every instruction of emulator and GPU"),
    "emulator_corpus": ("emulator_corpus:main", "run the corpus of kernels on the emulator"),
    "published_collections": ("published_collections:main", "try the emulator on published collections of kernels"),
}
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; return the exit code. argv: its name and arguments (default: this process's)."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    try:
        if name not in BENCHMARKS:
            raise unknown("benchmark", name, BENCHMARKS)
        require("python -m benchmarks", "judge")
        module, _, function = BENCHMARKS[name][0].partition(":")
        # Only this benchmark's module is imported: importing all of them would take seconds.
        code = getattr(importlib.import_module(f"benchmarks.{module}"), function)(arguments)
        return code if isinstance(code, int) else 0
    except GreenfastError as e:
        print(printable(f"benchmarks: {e}"), file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        print("benchmarks: interrupted; nothing half-written was kept", file=sys.stderr)
        return _INTERRUPTED


def usage() -> str:
    """Return the help."""
    lines = [f"  {name:22}{text}" for name, (_, text) in BENCHMARKS.items()]
    return "\n".join(
        ["usage: python -m benchmarks NAME ...", "", *lines, "", "python -m benchmarks NAME --help shows its options."]
    )


if __name__ == "__main__":
    sys.exit(main())
