"""Compare the machine code of all kernels with a list of it: no clean-up or renaming may change one instruction.

    python -m scripts.machine_code --write FILE                                  (all kernels)
    python -m scripts.machine_code --check FILE                                  (exit 1 if a kernel differs)
    python -m scripts.machine_code --groups 3 --write tests/machine_code.txt     (renew the list that tests sample)

Needs no GPU. The kernels are those of the tasks, of serving, of the comparisons, of the records under evidence/, and of
the tests on a GPU. A line holds a kernel's key, a hash of its machine code (``device.identity.code_hash``: names, paths
and line numbers do not count), its registers, shared memory and threads, and after ``#`` its parameters, which are for
the reader alone. The key is a group and a number in the group's order, so it does not depend on names either.

The compiler runs once for each kernel, some 40 minutes on one core; kernels that the cache holds take milliseconds.
After an interruption the same command goes on from the cache.

Functions that are not inlined are laid out by their names. Those in today's kernels are the compiler's own; one of the
project's would make a renaming a difference.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.records import read_record
from benchmarks.routing import routing
from benchmarks.sdpa import operator
from benchmarks.serving import serving as serving_comparison
from greenfast.device.compiler import compile_kernel, compiler_version
from greenfast.device.identity import code_hash
from greenfast.judge.record_io import RECORD
from greenfast.judge.store import write_whole
from greenfast.judge.task import find_task, load_family, task_names
from greenfast.kernels import HEAD_DIMS
from greenfast.kernels.merge import merge
from greenfast.kernels.serving import attention as serving
from greenfast.kernels.serving.config import VALUE_LAYOUTS, ServingConfig
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, GreenfastError, UsageError
from greenfast.spec.kernel import KernelSource, render_program
from scripts.refresh_hashes import COMPARED, ROOT, recorded_kernels
from tests.fuzz import serving as fuzz_serving
from tests.gpu import compile_ahead

HOPPER, ADA = Target("sm_90a"), Target("sm_89")
_CONSTANT = re.compile(r"^  static constexpr \w+ \w+ = (.*);$", re.MULTILINE)
_TYPE = re.compile(r"^  using \w+ = (.*);$", re.MULTILINE)
_LABEL_LENGTH = 48

#: A kernel, its target and a label.
Entry = tuple[KernelSource, Target, str]


@dataclass(frozen=True)
class Configuration:
    """One kernel of the list. key: group and number. label: its parameters, for the reader."""

    key: str
    label: str
    source: KernelSource
    target: Target


def task_kernels() -> Iterator[Entry]:
    """Yield the kernels of every rung of every task, for all of its formats and shapes."""
    for name in task_names():
        task = find_task(name)
        family, config = load_family(task), task.config
        for rung, fmt, shape in product(config.rungs, config.formats, config.shapes):
            try:
                program = render_program(family, config.rung_variant(rung).values, fmt, shape.dims)
            except UsageError:  # the rung is not for this shape
                continue
            for step in program.steps:
                for target in (HOPPER,) if step.kernel.requires else (HOPPER, ADA):
                    yield step.kernel, target, f"{rung.name} {fmt} {shape.name}"


def serving_kernels() -> Iterator[Entry]:
    """Yield the kernels of serving in every row tile, and of the fuzzer's calls; and those that merge results."""
    tiles: tuple[tuple[bool, int], ...] = ((False, 0), (True, 0), (False, 8), (False, 16))
    kinds = product(HEAD_DIMS, tiles, VALUE_LAYOUTS, (False, True))
    for n, (head_dim, (wide, rows), layout, token_scales) in enumerate(kinds):
        config = ServingConfig(
            head_dim=head_dim, query=("bfloat16", "float16", "e4m3")[n % 3], out=("bfloat16", "float16")[n // 3 % 2],
            wide=wide, few_rows=rows, token_scales=token_scales, softcap=n % 5 == 0, value_layout=layout,
        )  # fmt: skip
        yield serving.kernel(config), HOPPER, ""
        yield serving.plan_kernel(config), HOPPER, ""
    yield from ((source, HOPPER, "") for source in fuzz_serving.sources(HOPPER))
    types = ("float16", "bfloat16", "float32")
    for a, b, in_place in product(types, types[:2], (False, True)):
        yield merge.kernel(64, a, b, a, in_place=in_place), HOPPER, ""


def compared_kernels() -> Iterator[Entry]:
    """Yield the kernels that the comparisons of the operator, of routing and of serving time."""
    for comparison in (operator(), routing(), serving_comparison()):
        for name, (source, _) in (comparison.kernels() if comparison.kernels else {}).items():
            yield source, Target(comparison.arch), name


def kernels_of_records() -> Iterator[Entry]:
    """Yield the kernels of the records under evidence/, for the targets of the records."""
    for path in [*sorted((ROOT / "evidence").glob(f"*/*/{RECORD}")), *(ROOT / path for path in COMPARED)]:
        for source, arch in recorded_kernels(read_record(path)):
            yield source, Target(arch), ""


def kernels_of_gpu_tests() -> Iterator[Entry]:
    """Yield the kernels that the tests on a GPU run."""
    yield from ((source, HOPPER, "") for source in compile_ahead.sources(HOPPER))


#: Groups in the order of the list. A kernel of two groups is in the first one.
GROUPS: Mapping[str, Callable[[], Iterator[Entry]]] = {
    "tasks": task_kernels,
    "serving": serving_kernels,
    "compared": compared_kernels,
    "records": kernels_of_records,
    "gpu-tests": kernels_of_gpu_tests,
}


def configurations(groups: Iterable[str] = tuple(GROUPS)) -> list[Configuration]:
    """Return the kernels of some groups, each kernel once. groups: the first ones of ``GROUPS``, in their order."""
    listed: dict[tuple[KernelSource, Target], Configuration] = {}
    for group in groups:
        number = 0
        for source, target, label in GROUPS[group]():
            if (source, target) not in listed:
                parameters = " ".join((label, *_CONSTANT.findall(source.source), *_TYPE.findall(source.source)))
                listed[source, target] = Configuration(
                    f"{group}/{number:03}", f"{target.name} {parameters.strip()[:_LABEL_LENGTH]}", source, target
                )
                number += 1
    return list(listed.values())


def code_of(configuration: Configuration, use_cache: bool = True) -> str:
    """Compile a kernel; return the hash of its machine code, its registers, shared memory and threads."""
    source = configuration.source
    kernel = compile_kernel(source, configuration.target, use_cache=use_cache)
    resources = kernel.resources
    threads = "x".join(map(str, source.block))
    return f"{code_hash(kernel)} {resources.registers} {resources.smem_bytes} {threads}"


def code_of_all(wanted: list[Configuration], workers: int | None = None) -> dict[str, str]:
    """Compile kernels in threads, as NVRTC runs without the GIL, and print a line of progress.

    Returns ``code_of`` by key; for a kernel that does not compile, the first line of the error.
    """
    start, codes = time.monotonic(), dict[str, str]()
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        jobs = {pool.submit(code_of, configuration): configuration.key for configuration in wanted}
        try:
            for job in as_completed(jobs):
                try:
                    codes[jobs[job]] = job.result()
                except CompileError as e:
                    codes[jobs[job]] = f"does not compile: {str(e).splitlines()[0]}"
                _report(len(codes), len(wanted), time.monotonic() - start)
        finally:
            pool.shutdown(cancel_futures=True)
    return codes


def _report(done: int, total: int, seconds: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {total} kernels, {seconds:.0f} s", end="\n" if done == total else "", file=sys.stderr)
    elif done == total or done % 20 == 0:
        print(f"{done} of {total} kernels, {seconds:.0f} s", file=sys.stderr, flush=True)


def read_list(file: Path) -> tuple[str, dict[str, str]]:
    """Return the compiler of a list, and the code of its kernels by key. Raises UsageError for another file."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise UsageError(f"{file}: {e.strerror}; --write makes it") from None
    if not lines or not lines[0].startswith("# compiler: "):
        raise UsageError(f'{file}: its first line is not "# compiler: ..."; --write makes such a list')
    entries = (line.split("#")[0].split(maxsplit=1) for line in lines[1:])
    return lines[0].removeprefix("# compiler: "), {entry[0]: entry[1].strip() for entry in entries if len(entry) == 2}


def write_list(file: Path, wanted: list[Configuration], codes: Mapping[str, str]) -> None:
    """Write a list. Raises CompileError if a kernel did not compile."""
    failed = [f"{key} {code}" for key, code in codes.items() if code.startswith("does not compile")]
    if failed:
        raise CompileError("; ".join(failed))
    lines = [f"{c.key} {codes[c.key]} # {c.label}\n" for c in wanted]
    write_whole(file, "".join([f"# compiler: {compiler_version()}\n", *lines]))


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a line for each key with another code, for each key that is missing, and for each new one."""
    known = {code: key for key, code in before.items()}
    lines = []
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key, "not in the list"), now.get(key, "no such kernel today")
        if old != new:
            same = f" (the code of {known[new]} in the list)" if new in known else ""
            lines.append(f"{key}: {old} -> {new}{same}")
    return lines


def check(
    file: Path, groups: list[str] | None = None, sample: int | None = None, seed: int = 0, workers: int | None = None
) -> list[str]:
    """Return the differences of today's kernels from a list. sample: check only so many, drawn with the seed.

    groups: those that the list has by default.
    Raises UsageError if the list was made by another compiler.
    """
    compiler, before = read_list(file)
    if compiler != compiler_version():
        raise UsageError(
            f"{file}: it was made by {compiler}, and this is {compiler_version()}: they cannot be compared"
        )
    if groups is None:
        of_list = {key.partition("/")[0] for key in before}
        groups = [group for group in GROUPS if group in of_list]
    wanted = configurations(groups)
    keys = {c.key for c in wanted}
    before = {key: code for key, code in before.items() if key.partition("/")[0] in groups}
    lacking = {key: "not in the sample" for key in keys - before.keys()}
    if sample is not None:
        wanted = random.Random(seed).sample(wanted, min(sample, len(wanted)))
        before = {key: code for key, code in before.items() if key not in keys or key in {c.key for c in wanted}}
    codes = code_of_all(wanted, workers)
    # In many threads NVRTC rarely gives a kernel other registers (2 of 1,158 once): alone, it gives the usual ones.
    for configuration in wanted:
        code = codes[configuration.key]
        if code != before.get(configuration.key, code) and not code.startswith("does not compile"):
            codes[configuration.key] = code_of(configuration, use_cache=False)
    return differences(before, lacking | codes)


def main() -> int:
    """Check or write a list; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", type=Path, metavar="FILE", help="compare with this list; exit 1 on a difference")
    action.add_argument("--write", type=Path, metavar="FILE", help="write the list")
    parser.add_argument(
        "--groups", type=int, metavar="N", help=f"the first N of {', '.join(GROUPS)} (default: the list's, or all)"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="check only N kernels")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    parser.add_argument("--workers", type=int, metavar="N", help="threads (default: one per processor)")
    args = parser.parse_args()
    groups = None if args.groups is None else list(GROUPS)[: args.groups]
    try:
        if args.write:
            if args.sample is not None:
                parser.error("--write writes all kernels of its groups; leave --sample out")
            wanted = configurations(groups or list(GROUPS))
            write_list(args.write, wanted, code_of_all(wanted, args.workers))
            return 0
        changed = check(args.check, groups, args.sample, args.seed, args.workers)
    except GreenfastError as e:
        print(f"machine_code: {e}", file=sys.stderr)
        return e.exit_code
    print("\n".join([*changed, f"{len(changed)} kernels differ from {args.check}" if changed else "no kernel differs"]))
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
