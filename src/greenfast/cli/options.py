"""Every verb's options and the parsers of their values; an error lists the allowed values.

Imports nothing heavy, so that --help answers at once. Verbs are implemented in their files.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias


def words(text: str) -> list[str]:
    """Parse a comma-separated list of names."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; give names separated by commas")
    return found


def numbers(text: str) -> list[int]:
    """Parse a comma-separated list of whole numbers."""
    try:
        return [int(part) for part in words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers separated by commas") from None


def extent(text: str) -> tuple[int, int, int]:
    """Parse X, X,Y or X,Y,Z; omitted extents are 1."""
    sizes = numbers(text)
    if len(sizes) > 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give X, X,Y or X,Y,Z, whole numbers from 1 up")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def traced_warp(text: str) -> tuple[tuple[int, int, int], int]:
    """Parse X,Y,Z:WARP: a block (omitted indices are 0), and the number of a warp in it."""
    block, colon, warp = text.rpartition(":")
    parts = block.split(",")
    if not colon or len(parts) > 3 or not all(part.isascii() and part.isdigit() for part in (*parts, warp)):
        raise argparse.ArgumentTypeError(f"{text!r}: give X,Y,Z:WARP, such as 0,0,0:0")
    x, y, z = (*map(int, parts), 0, 0)[:3]
    return (x, y, z), int(warp)


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from {least} up")
        return int(text)

    return parse


def _number(is_allowed: Callable[[float], bool], allowed: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not is_allowed(value):
            raise argparse.ArgumentTypeError(f"{text!r}: give {allowed}")
        return value

    return parse


count, rounds = _whole(0), _whole(2)
tolerance = _number(lambda value: 0 <= value < math.inf, "a number from 0 up")
speedup = _number(lambda value: 1 <= value < 1000, "a ratio from 1 up, such as 1.15 for 15 % faster")
share = _number(lambda value: 0 < value <= 1, "a share above 0 and up to 1, such as 0.5")


def file_if_named(text: str) -> Path | None:
    """Parse a path; None for an empty text, as from an unset environment variable."""
    return Path(text) if text else None


def named_file(text: str) -> tuple[str, Path]:
    """Parse NAME=FILE."""
    name, equals, file = text.partition("=")
    if not (name and equals and file):
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=FILE.npy")
    return name, Path(file)


def _task(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", help="a task's name (see `greenfast list`), or the folder of a task of your own")


def _what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", type=words, metavar="A,B", help="shapes of the task's config (default: its own)")
    add(
        "--seeds",
        type=numbers,
        metavar="0,1",
        help="public seeds of the inputs (default: the task's; of an exam: secret)",
    )
    add("--format", metavar="FORMAT", help="number format of the task's config (default: its own)")
    add(
        "--arch",
        metavar="SM",
        help="target, such as sm_89 (default: the GPU's; without a GPU, for judge the one of a kept record of this "
        "comparison, else the task's)",
    )


def _where(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default="auto", help="auto, none, emulator, or a GPU's number (default: %(default)s)")
    add("--timeout", type=float, default=60.0, metavar="S", help="seconds that a GPU step may take")
    add("--out", type=Path, default=Path("results"), help="results folder (default: %(default)s)")


def _how_long(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--iters", type=int, metavar="N", help="timed launches per shape, seed and cache state")
    add("--warmup", type=int, metavar="N", help="untimed launches before them")
    add("--processes", type=int, metavar="N", help="fresh processes to spread them over")


def _html(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as one HTML file")


def _json(parser: argparse.ArgumentParser, output: str = "record") -> None:
    parser.add_argument("--json", action="store_true", help=f"print the {output} as JSON instead of text")


def judge(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast judge``."""
    add = parser.add_argument
    add(
        "subject",
        metavar="TASK|SOLUTION",
        help="a task's name (see `greenfast list`) or folder, to judge one of its variants; a folder of `greenfast "
        "init`; or a solution: a folder with solution.json, a .cu, .ptx or .py file with the JSON in its header, a "
        "solution of FlashInfer-Trace or SOL-ExecBench, a KernelBench file with ModelNew, robust-kbench's kernel.cu, "
        "or an answer of TritonBench",
    )
    add(
        "--problem",
        metavar="P",
        help="the problem of a solution: a task's name, a folder with config_forward.json, a definition of "
        "FlashInfer-Trace or SOL-ExecBench, a KernelBench file, a task folder of robust-kbench, or a file of "
        "TritonBench (default: the one that the solution names)",
    )
    add("--workloads", type=Path, metavar="FILE", help="a definition's workloads (default: next to it)")
    add("--traces", type=Path, metavar="FILE", help="also write it as FlashInfer-Trace's JSONL")
    add("--candidate", metavar="VARIANT", help="of a task: a variant's name, or TOGGLE=VALUE,... (default: the task's)")
    add(
        "--baseline",
        metavar="B",
        help="a variant, or the path of a solution (default: the rung before --candidate, else the task's baseline)",
    )
    _what(parser)
    _how_long(parser)
    _where(parser)
    add(
        "--speedup",
        type=speedup,
        metavar="RATIO",
        help="the speedup asked for (default: the rung's, or the task's for solutions)",
    )
    add(
        "--exam-seed",
        type=count,
        metavar="N",
        help="repeat the exam of this seed; it then does not count as a whole exam (default: a secret seed)",
    )
    add("--no-profile", action="store_true", help="take no Nsight Compute profile")
    quoting = parser.add_mutually_exclusive_group()
    quoting.add_argument(
        "--quote",
        type=Path,
        metavar="PATH",
        help="without a GPU, quote PERFORMANCE from a record of the same kernels: a run's folder, its record.json, or "
        "a folder of runs (default: the evidence folders in the task and next to its folder of tasks)",
    )
    quoting.add_argument("--no-quote", action="store_true", help="quote nothing: without a GPU, PERFORMANCE is PENDING")
    _html(parser)
    add("--junit", type=Path, metavar="FILE", help="also write the gates as JUnit XML")
    add(
        "--summary",
        type=file_if_named,
        metavar="FILE",
        help='also append a summary in Markdown, as for "$GITHUB_STEP_SUMMARY"; nothing where the name is empty',
    )
    _json(parser)
    add(
        "--require",
        type=words,
        default=["all"],
        metavar="GATE,...",
        help="gates that must have been decided, such as build,resources,correctness (default: all)",
    )


def init(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast init``."""
    add = parser.add_argument
    add("folder", type=Path, nargs="?", default=Path("my_kernel"), help="default: %(default)s")
    add("--language", choices=("cuda", "ptx", "triton", "family"), default="cuda", help="default: %(default)s")
    _json(parser, "folders and the next command")


def evolve(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast evolve``."""
    add = parser.add_argument
    add("task", nargs="?", help="a task's name (see `greenfast list`), or the folder of one")
    add("--resume", type=Path, metavar="RUN", help="go on with a run, from its folder")
    add(
        "--space", metavar="SPACE", help="a JSON file, or NAME for the task's space_NAME.json (default: its space.json)"
    )
    add(
        "--proposer",
        metavar="NAME",
        help="random, exhaustive, tpe, evolutionary, scripted, free, insight or full (default: random)",
    )
    add("--budget", metavar="gpu=12m,evals=256,time=1h", help="limits of the search (default: evals=64)")
    add("--islands", type=count, metavar="N", help="of the evolutionary proposer")
    add("--model", metavar="M", help="of free, insight and full: http:URL or mailbox:FOLDER")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="another option of the proposer")
    add(
        "--workers",
        default="local",
        metavar="W",
        help="local:N for N processes that build and emulate (default: one per core, at most the batch)",
    )
    add("--baseline", metavar="B", help="a rung, toggles or a solution (default: the task's)")
    add("--shapes", type=words, metavar="A,B", help="shapes that are raced (default: the gated ones)")
    add("--small", type=words, metavar="A,B", help="shapes for the emulator (default: the smallest)")
    add("--seeds", type=numbers, metavar="0,1", help="seeds of the search's inputs (default: 0)")
    add("--format", metavar="FORMAT", help="number format of the task's config (default: its own)")
    add("--arch", metavar="SM", help="target, such as sm_89 (default: the GPU's, else the task's)")
    add("--batch", type=count, default=8, metavar="N", help="candidates at a time (default: %(default)s)")
    add(
        "--screen",
        type=share,
        default=1.0,
        metavar="SHARE",
        help="share of a batch that the counts let into the race, such as 0.5 (default: all)",
    )
    add("--finalists", type=count, default=3, metavar="N", help="that are validated in whole (default: %(default)s)")
    add("--speedup", type=speedup, metavar="RATIO", help="the required speedup of a winner")
    add("--seed", type=int, default=0, metavar="N", help="of all that the search draws (default: 0)")
    add(
        "--insights",
        type=Path,
        metavar="FILE",
        help="insights.jsonl of earlier runs, for proposers (default: the task's)",
    )
    add(
        "--device",
        default="auto",
        help="auto, all, none, emulator, or GPUs' numbers such as 0 or 0,1; races spread over them, finalists are "
        "validated on the first (default: %(default)s)",
    )
    add("--timeout", type=float, default=60.0, metavar="S", help="seconds that a GPU step may take")
    add("--out", type=Path, default=Path("results"), help="results folder (default: %(default)s)")
    add("--json", action="store_true", help="print the result as JSON instead of text")


def build(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast build``."""
    add = parser.add_argument
    add("task", nargs="?", help="a task's name (see `greenfast list`) or folder")
    add("--arch", type=words, metavar="SM,...", help="targets (default: the task's; a GPU's, or sm_90a)")
    _json(parser, "result")
    of_task = parser.add_argument_group("variants of a task: resources and machine code")
    of_task.add_argument(
        "--variants", nargs="+", metavar="VARIANT", help="names or TOGGLE=VALUE,... settings (default: every rung)"
    )
    of_task.add_argument("--formats", type=words, metavar="A,B", help="number formats (default: the task's own)")
    of_task.add_argument("--shapes", type=words, metavar="A,B", help="shapes to build for (default: the task's)")
    of_task.add_argument("--sass", type=Path, metavar="FOLDER", help="also write each kernel's machine code there")
    of_calls = parser.add_argument_group("kernels of calls in PyTorch, into the cache: the first calls compile nothing")
    of_calls.add_argument("--library", action="store_true", help="build these kernels, and no task's")
    of_calls.add_argument("--head-dims", type=numbers, metavar="D,...", help="of the tensors (default: 64,128,256)")
    of_calls.add_argument("--dtypes", type=words, metavar="A,B", help="default: float16,bfloat16")
    of_calls.add_argument("--precisions", type=words, metavar="A,B", help="default: fp8,int8")
    of_calls.add_argument("--causal", choices=("both", "yes", "no"), help="with a causal mask (default: both)")
    of_calls.add_argument(
        "--log-sum-exp", action="store_true", help="also the kernels that return the log-sum-exp, for return_lse"
    )
    of_calls.add_argument(
        "--backward", type=words, metavar="A,B", help="also the kernels of training with backward=16bit_kept or 8bit"
    )
    of_calls.add_argument(
        "--lengths",
        type=numbers,
        metavar="N,...",
        help="lengths that queries and keys will have, in any pair (default: lengths that need every kernel)",
    )


def profile(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast profile``."""
    add = parser.add_argument
    _task(parser)
    add("--variant", metavar="VARIANT", help="a name, or TOGGLE=VALUE,... (default: the candidate)")
    add("--ncu", action="store_true", help="take a Nsight Compute profile only")
    add(
        "--phases",
        action="store_true",
        help="only count the cycles of the kernel's phases; on the emulator, their instructions and accesses",
    )
    add("--launches", type=int, default=3, metavar="N", help="profile the last of N (default: 3)")
    _what(parser)
    _where(parser)
    add("--json", action="store_true", help="print the result as JSON instead of a table")


def report(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast report``."""
    add = parser.add_argument
    add("run", type=Path, nargs="*", help="a run's folder or its record.json, or a folder of runs")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--short", action="store_true", help="the short form, to paste into a pull request")
    form.add_argument("--table", action="store_true", help="one verdict table of all the runs given")
    form.add_argument(
        "--compare", action="store_true", help="the timings of two runs, or two perf_baseline.json, next to each other"
    )
    form.add_argument("--schema", action="store_true", help="print the JSON Schema of records")
    add("--plot", type=Path, metavar="FILE", help="also draw a run's timings (.png or .svg)")
    _html(parser)
    add("--git", action="store_true", help="of a folder of runs: also versions in its git history")
    add("--shape", metavar="NAME", help="of a folder of runs: this shape (default: the one most gated)")
    add("--speedup", type=speedup, metavar="RATIO", help="with --compare: the speedup asked for")
    add("--out", type=Path, metavar="FILE", help="with --compare (default: results/COMPARE.md)")
    _json(parser, "records, the comparison or the history")


def list_(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast list``."""
    add = parser.add_argument
    add("task", nargs="?", help="list the variants of this task (default: list the tasks)")
    add("--choose", metavar="SM", help="which variant each shape should take on that target, and why (such as sm_90a)")
    add("--format", metavar="FORMAT", help="with --choose: the number format (default: the task's own)")
    add("--shapes", type=words, metavar="A,B", help="with --choose: shapes (default: all of the task)")
    add("--schema", action="store_true", help="print the JSON Schema of a task's config")
    _json(parser, "lists")


def run(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast run``."""
    add = parser.add_argument
    add(
        "script",
        type=Path,
        metavar="SCRIPT|PROGRAM",
        help="a Python script that launches Triton kernels, or with -m a module such as pytest; a CUDA source with "
        "main (.cu); or a CUDA program that was compiled with -cudart shared",
    )
    add("arguments", nargs=argparse.REMAINDER, help="the script's or program's own arguments")
    add("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    add(
        "--target",
        metavar="SM",
        help="GPU that Triton compiles for: sm_80, sm_90 (default), sm_100; or that nvcc does (default: sm_90a)",
    )
    add(
        "--nvcc",
        action="append",
        default=[],
        metavar="OPTION",
        help="of a CUDA source: an option or further file for nvcc, such as --nvcc=-Iinclude or --nvcc=other.cu",
    )
    add(
        "--orders",
        type=count,
        default=1,
        metavar="N",
        help="run each launch of a CUDA program in N orders of the warps",
    )
    add(
        "--autotune",
        choices=("first", "all"),
        default="first",
        help="of an autotuned kernel, run the first configuration that fits, or each once (default: %(default)s)",
    )
    add(
        "--benchmarks",
        choices=("skip", "once"),
        default="skip",
        help="calls of triton.testing.do_bench: skip or run once; times are NaN (default: %(default)s)",
    )
    add("--formal", choices=("fail", "report"), default="fail", help="formal findings: as in `greenfast emulate`")
    add("--seed", type=count, default=0, metavar="N", help="of the warps' order")
    add(
        "--suppressions",
        type=Path,
        metavar="FILE",
        help="known findings, one a line: kind=data-race kernel=*reduce* file=reduce.cu line=12 (each field optional)",
    )
    add("--error-exitcode", type=count, metavar="N", help="exit code if there are findings (default: 1, or 3)")
    add("--sarif", type=Path, metavar="FILE", help="also write the findings as SARIF 2.1.0, for CI systems")
    observe(parser)
    add("--json", action="store_true", help="print the report as JSON; the script's own output goes to stderr")


def emulate(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast emulate``."""
    add = parser.add_argument
    add("file", type=Path, help="a CUDA source, or a .ptx file")
    add("--kernel", metavar="NAME", help="its kernel (default: the only one)")
    add("--grid", type=extent, required=True, metavar="X[,Y[,Z]]", help="blocks")
    add("--block", type=extent, required=True, metavar="X[,Y[,Z]]", help="threads per block")
    add(
        "--arg",
        action="append",
        default=[],
        metavar="ARG",
        help="the next parameter: i32:128, in:x=f16[8,64]:normal, in:x=FILE.npy, out:y=f32[1024], "
        "inout:y=f32[1024]:zeros, or the name of a buffer given before; filled with zeros, ones, arange, normal, "
        "uniform, uniform:LOW:HIGH or a number; map:x[8,64]:128 is a tensor map over x, its box and swizzle; "
        "struct:i32=5,x,map=x[8,64]:128 a struct",
    )
    add(
        "--buffer",
        action="append",
        default=[],
        metavar="ARG",
        help="a buffer that no parameter points to, for tensor maps and structs: in:, out: or inout: as in --arg",
    )
    add("--smem", type=count, default=0, metavar="BYTES", help="dynamic shared memory per block")
    add("--arch", metavar="SM", help="target of a CUDA source (default: sm_90a)")
    add("--define", action="append", default=[], metavar="NAME[=VALUE]", help="a macro of the source")
    add("--include", action="append", default=[], type=Path, metavar="DIR", help="a folder of headers")
    add("--seed", type=count, default=0, metavar="N", help="of random elements and the warps' order")
    add(
        "--formal",
        choices=("fail", "report"),
        default="fail",
        help="on a broken rule of the PTX ISA with an effect that depends on timing, such as a bulk store that nothing "
        "waits for: exit 1 after the run (fail), or only report it (default: fail)",
    )
    add("--orders", type=count, metavar="N", help="run in N orders of the warps (default: 3, or 1 above 4096 threads)")
    add(
        "--expect",
        action="append",
        default=[],
        type=named_file,
        metavar="NAME=FILE.npy",
        help="the expected contents of an output",
    )
    add("--tolerance", type=tolerance, default=0.0, metavar="T", help="largest difference from it (default: 0)")
    add("--save", type=Path, metavar="DIR", help="write each output there as NAME.npy")
    observe(parser)
    add("--json", action="store_true", help="print the result as JSON instead of tables")


def observe(parser: argparse.ArgumentParser) -> None:
    """Options for observing the first order of the warps."""
    add = parser.add_argument
    add("--lines", action="store_true", help="print the source with executions and memory accesses of each line")
    add("--lines-html", type=Path, metavar="FILE", help="write the source with these counts as a web page")
    add(
        "--watch",
        action="append",
        default=[],
        metavar="[FILE:]LINE:EXPR,...",
        help="record the values of expressions when a thread reaches a line of a CUDA source",
    )
    add("--trace", type=Path, metavar="FILE", help="write each instruction of one warp, with its threads and values")
    add(
        "--trace-warp",
        type=traced_warp,
        default=((0, 0, 0), 0),
        metavar="X,Y,Z:WARP",
        help="the warp of --trace: its block and its number there (default: 0,0,0:0)",
    )


def doctor(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast doctor``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def completion(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast completion``."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    _json(parser, "script")


_Options: TypeAlias = tuple[str, Callable[[argparse.ArgumentParser], None]]
#: Verb -> (help, its options), in the order of --help.
VERBS: dict[str, _Options] = {
    "judge": ("judge a variant of a task, or a solution of your own, against a baseline through the gates", judge),
    "init": ("make a folder with a problem and a solution to start from", init),
    "evolve": ("search for a faster kernel under the gates", evolve),
    "build": ("compile a task's variants, or the kernels of calls in PyTorch ahead of time, without a GPU", build),
    "emulate": ("run a kernel of any CUDA or PTX file in the PTX emulator", emulate),
    "run": (
        "run a CUDA program, or a Python script with Triton kernels, without a GPU: kernels in the PTX emulator",
        run,
    ),
    "profile": ("Nsight Compute profile, and the share of each phase of a kernel", profile),
    "report": ("the report of a saved run, a comparison of two, or the history of a folder of runs", report),
    "list": ("the known tasks, or the variants of one", list_),
    "doctor": ("installed and missing parts of this machine, and remedies", doctor),
    "completion": ("a script by which a shell completes verbs and options", completion),
}
#: Verb -> example command lines of its --help, each with its effect.
EXAMPLES: dict[str, dict[str, str]] = {
    "judge": {
        "greenfast judge my_kernel": "your kernel, from `greenfast init`",
        "greenfast judge mine.cu --problem examples/matmul": "one file against a problem",
        "greenfast judge fp8_sdpa --candidate stage3a": "a rung of a task against the previous one",
        "greenfast judge my_kernel --require build,resources,correctness,evidence": "in CI, without a GPU",
    },
    "init": {
        "greenfast init my_kernel": "in CUDA",
        "greenfast init my_kernel --language triton": "in Triton, PTX, or as a family of variants",
    },
    "evolve": {
        "greenfast evolve fp8_sdpa --budget evals=16": "16 random candidates of the task's space",
        "greenfast evolve fp8_sdpa --proposer tpe --budget time=1h": "a Bayesian search",
        "greenfast evolve --resume RUN": "go on with a run",
    },
    "build": {
        "greenfast build fp8_sdpa --arch sm_90a": "registers, shared memory and spills of every rung",
        "greenfast build --library --arch sm_90a --head-dims 128": "compile what greenfast.sdpa will need",
    },
    "emulate": {
        "greenfast emulate kernel.cu --grid 4 --block 32 --arg inout:x=f32[128]:arange": "one argument, 128 floats",
        "greenfast emulate kernel.ptx --grid 1 --block 32 --arg in:x=FILE.npy --arg out:y=f32[32] --save DIR": "files",
    },
    "run": {
        "greenfast run main.cu -- 1024": "a CUDA program, compiled by nvcc and run with an argument",
        "greenfast run --sarif findings.sarif ./program": "a compiled one (-cudart shared), with its findings for CI",
        "greenfast run train.py": "a script that launches Triton kernels",
        "greenfast run -m pytest tests": "a module, such as the tests of a Triton project",
    },
    "profile": {
        "greenfast profile fp8_sdpa --phases --device emulator": "the instructions of each phase of a kernel",
        "greenfast profile fp8_sdpa --ncu": "a Nsight Compute profile, on a GPU",
    },
    "report": {
        "greenfast report RUN": "the report of a run",
        "greenfast report RUN --html run.html": "as a page",
        "greenfast report --compare RUN OTHER_RUN": "the timings of two runs",
        "greenfast report results --html history.html": "a history of all runs",
    },
    "list": {"greenfast list": "the tasks", "greenfast list fp8_sdpa": "the rungs and toggles of one"},
    "doctor": {"greenfast doctor": "exits with 0 if greenfast.sdpa works here"},
    "completion": {
        "greenfast completion bash > ~/.local/share/bash-completion/completions/greenfast": "bash",
        "greenfast completion zsh > ~/.zfunc/_greenfast": "zsh, with fpath+=~/.zfunc before compinit",
        "greenfast completion fish > ~/.config/fish/completions/greenfast.fish": "fish",
    },
}
