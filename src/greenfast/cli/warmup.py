"""``greenfast warmup``."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from greenfast.cli.console import show
from greenfast.device import cache
from greenfast.device.compiler import CompiledKernel
from greenfast.judge.environment import choose_device, choose_target, device_info

if TYPE_CHECKING:
    from types import ModuleType

_DEFAULT_TARGET = "sm_90a"
_GPU_TIMEOUT_S = 30.0
_CAUSAL = {"both": (False, True), "yes": (True,), "no": (False,)}


class _Steps:
    """A progress bar, or a line per compiled kernel where the output is no terminal."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._plain = not sys.stdout.isatty()
        columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(), transient=True, disable=self._plain)
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> _Steps:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, kernel: CompiledKernel) -> None:
        self._done += 1
        self._progress.advance(self._task)
        if self._plain and not kernel.from_cache:
            show(f"{self._done}/{self._total} {kernel.source.entry} {kernel.compile_ms:.0f} ms")


def _operator() -> ModuleType:
    """``greenfast.operator.warmup``, which loads PyTorch: other verbs, and --help, do without."""
    return importlib.import_module("greenfast.operator.warmup")


def run(args: argparse.Namespace) -> int:
    """Compile into the cache what calls in PyTorch will ask for."""
    device = None if args.arch else device_info(choose_device("auto"), _GPU_TIMEOUT_S)
    target = choose_target(args.arch, device, _DEFAULT_TARGET)
    if not args.arch and (device is None or device.kind != "gpu"):
        show(f"no GPU here: compiling for {target.name}, {target.description}; --arch names another target")
    operator = _operator()
    left_out: list[str] = []
    sources = operator.kernels_for(
        target,
        head_dims=args.head_dims,
        dtypes=args.dtypes,
        precisions=args.precisions,
        causal=_CAUSAL[args.causal],
        log_sum_exp=args.log_sum_exp,
        lengths=args.lengths or operator.LENGTHS,
        left_out=left_out.append,
    )
    if left_out:
        show(f"without a kernel on {target.name}, so that calls refuse them: {'; '.join(left_out)}")
    with _Steps(len(sources)) as steps:
        done = operator.warm(sources, target, steps)
    entries, size = cache.usage()
    show(
        f"{target.name}: {done.compiled} kernels compiled, {done.cached} already cached, {done.seconds:.1f} s\n"
        f"{cache.cache_dir()}: {entries} entries, {size / 2**20:.1f} MiB"
    )
    return 0
