"""``greenfast build --library``: the kernels of calls in PyTorch, into the cache. Needs no extras."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from typing import TextIO

from greenfast.cli.progress import ProgressLine
from greenfast.device import cache
from greenfast.device.compiler import CompiledKernel
from greenfast.device.gpu import device_count
from greenfast.device.worker import gpu_info
from greenfast.spec.arch import Target
from greenfast.spec.errors import UsageError

_DEFAULT_TARGET = "sm_90a"
#: The options of ``greenfast build TASK``.
_OF_TASK = ("task", "variants", "formats", "shapes", "sass")
_GPU_TIMEOUT_S = 30.0
_CAUSAL = {"both": (False, True), "yes": (True,), "no": (False,)}


class _Steps:
    """Counts compiled kernels: on a terminal's progress line, otherwise with a line for each in a stream."""

    def __init__(self, total: int, stream: TextIO, progress: ProgressLine) -> None:
        self._total, self._done = total, 0
        self._stream, self._progress = stream, progress

    def __call__(self, kernel: CompiledKernel) -> None:
        self._done += 1
        self._progress.step = f"compiling {self._done}/{self._total}"
        if not kernel.from_cache and not self._stream.isatty():
            print(f"{self._done}/{self._total} {kernel.source.entry} {kernel.compile_ms:.0f} ms", file=self._stream)


def _targets(names: list[str] | None, stream: TextIO) -> list[Target]:
    """Return the targets of ``--arch``, else of the first GPU (queried in a separate process), else Hopper."""
    if names:
        return [Target.parse(name) for name in names]
    if device_count():
        return [Target.of_device(gpu_info(0, _GPU_TIMEOUT_S).capability)]
    target = Target(_DEFAULT_TARGET)
    print(f"no GPU here: compiling for {target.name}, {target.description}; --arch names another target", file=stream)
    return [target]


def run(args: argparse.Namespace) -> int:
    """Compile the kernels of PyTorch calls into the cache."""
    for option in _OF_TASK:
        if getattr(args, option):
            raise UsageError(f"--library: leave out {'the task' if option == 'task' else f'--{option}'}")
    steps_to = sys.stderr if args.json else sys.stdout
    targets = _targets(args.arch, steps_to)
    operator = importlib.import_module("greenfast.ops.warmup")  # only now, because it imports PyTorch
    results = []
    for target in targets:
        left_out: list[str] = []
        sources = operator.kernels_for(
            target,
            head_dims=args.head_dims or (64, 128, 256),
            dtypes=args.dtypes or ("float16", "bfloat16"),
            precisions=args.precisions or ("fp8", "int8"),
            causal=_CAUSAL[args.causal or "both"],
            log_sum_exp=args.log_sum_exp,
            backward=args.backward or (),
            lengths=args.lengths or operator.LENGTHS,
            left_out=left_out.append,
        )
        if left_out:
            print(f"no kernel on {target.name}, so calls refuse these: {'; '.join(left_out)}", file=steps_to)
        with ProgressLine("compiling") as progress:
            done = operator.warm(sources, target, _Steps(len(sources), steps_to, progress))
        results.append({"target": target.name, "left_out": left_out, **dataclasses.asdict(done)})
        text = f"{target.name}: {done.compiled} kernels compiled, {done.cached} already cached, {done.seconds:.1f} s"
        print(text, file=steps_to)
    entries, size = cache.usage()
    if args.json:
        folder = {"folder": str(cache.cache_dir()), "entries": entries, "bytes": size}
        print(json.dumps({"targets": results, "cache": folder}, indent=2))
        return 0
    print(f"{cache.cache_dir()}: {entries} entries, {size / 2**20:.1f} MiB")
    return 0
