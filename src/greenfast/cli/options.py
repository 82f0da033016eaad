"""Every verb's options. Imports nothing heavy, so that --help answers at once; verbs are implemented in their files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from greenfast.cli.values import count, extent, file_if_named, named_file, numbers, share, speedup, tolerance, words


def _task(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", help="a task's name (see `greenfast list`), or the folder of a task of your own")


def _what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", type=words, metavar="A,B", help="shapes of the task's config (default: its own)")
    parser.add_argument(
        "--seeds",
        type=numbers,
        metavar="0,1",
        help="public seeds of the inputs (default: the task's; of an exam: secret)",
    )
    parser.add_argument("--format", metavar="FORMAT", help="number format of the task's config (default: its own)")
    parser.add_argument(
        "--arch",
        metavar="SM",
        help="target, such as sm_89 (default: the GPU's; without a GPU, for judge the one of a kept record of this "
        "comparison, else the task's)",
    )


def _where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help="auto, none, emulator, or a GPU's number (default: %(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds that a GPU step may take")
    parser.add_argument("--out", type=Path, default=Path("results"), help="results folder (default: %(default)s)")


def _how_long(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--iters", type=int, metavar="N", help="timed launches per shape, seed and cache state")
    parser.add_argument("--warmup", type=int, metavar="N", help="untimed launches before them")
    parser.add_argument("--processes", type=int, metavar="N", help="fresh processes to spread them over")


def _html(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as one HTML file")


def _json(parser: argparse.ArgumentParser, what: str = "record") -> None:
    parser.add_argument("--json", action="store_true", help=f"print the {what} as JSON instead of text")


def judge(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast judge``."""
    parser.add_argument(
        "subject",
        metavar="TASK|SOLUTION",
        help="a task's name (see `greenfast list`) or folder, to judge one of its variants; or a solution: a folder "
        "with solution.json, a .cu, .ptx or .py file with the JSON in its header, a solution of FlashInfer-Trace or "
        "SOL-ExecBench, or a KernelBench file with ModelNew",
    )
    parser.add_argument(
        "--problem",
        metavar="P",
        help="what a solution solves: a task's name, a folder with config_forward.json, a definition of "
        "FlashInfer-Trace or SOL-ExecBench, or a KernelBench file (default: what the solution names)",
    )
    parser.add_argument("--workloads", type=Path, metavar="FILE", help="a definition's workloads (default: next to it)")
    parser.add_argument("--traces", type=Path, metavar="FILE", help="also write it as FlashInfer-Trace's JSONL")
    parser.add_argument(
        "--candidate", metavar="VARIANT", help="of a task: a variant's name, or TOGGLE=VALUE,... (default: the task's)"
    )
    parser.add_argument(
        "--baseline",
        metavar="B",
        help="a variant, or the path of a solution (default: the rung before --candidate, else the task's baseline)",
    )
    _what(parser)
    _how_long(parser)
    _where(parser)
    parser.add_argument(
        "--speedup",
        type=speedup,
        metavar="RATIO",
        help="the speedup asked for (default: the rung's, or the task's for solutions)",
    )
    parser.add_argument(
        "--exam-seed",
        type=count,
        metavar="N",
        help="repeat the exam of this seed, which is then not the whole exam (default: a secret one)",
    )
    parser.add_argument("--no-profile", action="store_true", help="take no Nsight Compute profile")
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
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write the gates as JUnit XML")
    parser.add_argument(
        "--summary",
        type=file_if_named,
        metavar="FILE",
        help='also append a summary in Markdown, as for "$GITHUB_STEP_SUMMARY"; nothing where the name is empty',
    )
    _json(parser)
    parser.add_argument(
        "--require",
        type=words,
        default=["all"],
        metavar="GATE,...",
        help="gates that must have been decided, such as build,resources,correctness (default: all)",
    )


def init(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast init``."""
    parser.add_argument("folder", type=Path, nargs="?", default=Path("my_kernel"), help="default: %(default)s")
    parser.add_argument(
        "--language", choices=("cuda", "ptx", "triton", "family"), default="cuda", help="default: %(default)s"
    )


def evolve(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast evolve``."""
    parser.add_argument("task", nargs="?", help="a task's name (see `greenfast list`), or the folder of one")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with a run, from its folder")
    parser.add_argument(
        "--space", metavar="SPACE", help="a JSON file, or NAME for the task's space_NAME.json (default: its space.json)"
    )
    parser.add_argument(
        "--proposer",
        metavar="NAME",
        help="random, exhaustive, tpe, evolutionary, scripted, free, insight or full (default: random)",
    )
    parser.add_argument(
        "--budget", metavar="gpu=12m,evals=256,time=1h", help="limits of the search (default: evals=64)"
    )
    parser.add_argument("--islands", type=count, metavar="N", help="of the evolutionary proposer")
    parser.add_argument("--model", metavar="M", help="of free, insight and full: http:URL or mailbox:FOLDER")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="another option of the proposer"
    )
    parser.add_argument(
        "--workers",
        default="local",
        metavar="W",
        help="local:N for N processes that build and emulate (default: one per core, at most the batch)",
    )
    parser.add_argument("--baseline", metavar="B", help="a rung, toggles or a solution (default: the task's)")
    parser.add_argument("--shapes", type=words, metavar="A,B", help="shapes that are raced (default: the gated ones)")
    parser.add_argument("--small", type=words, metavar="A,B", help="shapes for the emulator (default: the smallest)")
    parser.add_argument("--seeds", type=numbers, metavar="0,1", help="seeds of the search's inputs (default: 0)")
    parser.add_argument("--format", metavar="FORMAT", help="number format of the task's config (default: its own)")
    parser.add_argument("--arch", metavar="SM", help="target, such as sm_89 (default: the GPU's, else the task's)")
    parser.add_argument(
        "--batch", type=count, default=8, metavar="N", help="candidates at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--screen",
        type=share,
        default=1.0,
        metavar="SHARE",
        help="share of a batch that the counts let into the race, such as 0.5 (default: all)",
    )
    parser.add_argument(
        "--finalists", type=count, default=3, metavar="N", help="that are validated in whole (default: %(default)s)"
    )
    parser.add_argument("--speedup", type=speedup, metavar="RATIO", help="the required speedup of a winner")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that the search draws (default: 0)")
    parser.add_argument(
        "--insights",
        type=Path,
        metavar="FILE",
        help="insights.jsonl of earlier runs, for proposers (default: the task's)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        help="auto, all, none, emulator, or GPUs' numbers such as 0 or 0,1; races spread over them, finalists are "
        "validated on the first (default: %(default)s)",
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds that a GPU step may take")
    parser.add_argument("--out", type=Path, default=Path("results"), help="results folder (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of text")


def build(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast build``."""
    parser.add_argument("task", nargs="?", help="a task's name (see `greenfast list`) or folder")
    parser.add_argument(
        "--arch", type=words, metavar="SM,...", help="targets (default: the task's; a GPU's, or sm_90a)"
    )
    of_task = parser.add_argument_group("variants of a task: resources and machine code")
    of_task.add_argument(
        "--variants", nargs="+", metavar="VARIANT", help="names or TOGGLE=VALUE,... settings (default: every rung)"
    )
    of_task.add_argument("--formats", type=words, metavar="A,B", help="number formats (default: the task's own)")
    of_task.add_argument("--shapes", type=words, metavar="A,B", help="shapes to build for (default: the task's)")
    of_task.add_argument("--sass", type=Path, metavar="FOLDER", help="also write each kernel's machine code there")
    of_task.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
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
        "--lengths",
        type=numbers,
        metavar="N,...",
        help="lengths that queries and keys will have, in any pair (default: lengths that need every kernel)",
    )


def profile(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast profile``."""
    _task(parser)
    parser.add_argument("--variant", metavar="VARIANT", help="a name, or TOGGLE=VALUE,... (default: the candidate)")
    parser.add_argument("--ncu", action="store_true", help="take a Nsight Compute profile only")
    parser.add_argument(
        "--phases",
        action="store_true",
        help="only count the cycles of the kernel's phases; on the emulator, what they execute",
    )
    parser.add_argument("--launches", type=int, default=3, metavar="N", help="profile the last of N (default: 3)")
    _what(parser)
    _where(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")


def report(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast report``."""
    parser.add_argument("run", type=Path, nargs="*", help="a run's folder or its record.json, or a folder of runs")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--short", action="store_true", help="the short form, to paste into a pull request")
    what.add_argument("--table", action="store_true", help="one verdict table of all the runs given")
    what.add_argument(
        "--compare", action="store_true", help="the timings of two runs, or two perf_baseline.json, next to each other"
    )
    what.add_argument("--schema", action="store_true", help="print the JSON Schema of records")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a run's timings (.png or .svg)")
    _html(parser)
    parser.add_argument("--git", action="store_true", help="of a folder of runs: also versions in its git history")
    parser.add_argument("--shape", metavar="NAME", help="of a folder of runs: this shape (default: the one most gated)")
    parser.add_argument("--speedup", type=speedup, metavar="RATIO", help="with --compare: the speedup asked for")
    parser.add_argument("--out", type=Path, metavar="FILE", help="with --compare (default: results/COMPARE.md)")


def list_(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast list``."""
    parser.add_argument("task", nargs="?", help="the task whose variants are listed (default: list the tasks)")
    parser.add_argument(
        "--choose", metavar="SM", help="which variant each shape should take on that target, and why (such as sm_90a)"
    )
    parser.add_argument("--format", metavar="FORMAT", help="with --choose: the number format (default: the task's own)")
    parser.add_argument("--shapes", type=words, metavar="A,B", help="with --choose: shapes (default: all of the task)")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of a task's config")
    _json(parser, "lists")


def emulate(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast emulate``."""
    parser.add_argument("file", type=Path, help="a CUDA source, or a .ptx file")
    parser.add_argument("--kernel", metavar="NAME", help="its kernel (default: the only one)")
    parser.add_argument("--grid", type=extent, required=True, metavar="X[,Y[,Z]]", help="blocks")
    parser.add_argument("--block", type=extent, required=True, metavar="X[,Y[,Z]]", help="threads per block")
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="ARG",
        help="the next parameter: i32:128, in:x=f16[8,64]:normal, in:x=FILE.npy, out:y=f32[1024], "
        "inout:y=f32[1024]:zeros, or the name of a buffer given before; filled with zeros, ones, arange, normal, "
        "uniform, uniform:LOW:HIGH or a number; map:x[8,64]:128 is a tensor map over x, its box and swizzle; "
        "struct:i32=5,x,map=x[8,64]:128 a struct",
    )
    parser.add_argument(
        "--buffer",
        action="append",
        default=[],
        metavar="ARG",
        help="a buffer that no parameter points to, for tensor maps and structs: in:, out: or inout: as in --arg",
    )
    parser.add_argument("--smem", type=count, default=0, metavar="BYTES", help="dynamic shared memory per block")
    parser.add_argument("--arch", metavar="SM", help="target of a CUDA source (default: sm_90a)")
    parser.add_argument("--define", action="append", default=[], metavar="NAME[=VALUE]", help="a macro of the source")
    parser.add_argument("--include", action="append", default=[], type=Path, metavar="DIR", help="a folder of headers")
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="of random elements and the warps' order")
    parser.add_argument(
        "--formal",
        choices=("fail", "report"),
        default="fail",
        help="a broken rule of the PTX ISA whose effect depends on timing, such as a bulk store that nothing waits "
        "for: exit 1 after the run (fail), or report it alone (default: fail)",
    )
    parser.add_argument(
        "--orders", type=count, metavar="N", help="run in N orders of the warps (default: 3, or 1 above 4096 threads)"
    )
    parser.add_argument(
        "--expect",
        action="append",
        default=[],
        type=named_file,
        metavar="NAME=FILE.npy",
        help="what an output must hold",
    )
    parser.add_argument(
        "--tolerance", type=tolerance, default=0.0, metavar="T", help="largest difference from it (default: 0)"
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="write each output there as NAME.npy")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")


def doctor(parser: argparse.ArgumentParser) -> None:
    """Options of ``greenfast doctor``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


_Options: TypeAlias = tuple[str, Callable[[argparse.ArgumentParser], None]]
#: Verb -> (help, its options), in the order of --help.
VERBS: dict[str, _Options] = {
    "judge": ("judge a variant of a task, or a solution of your own, against a baseline through the gates", judge),
    "init": ("make a folder with a problem and a solution to start from", init),
    "evolve": ("search for a faster kernel under the gates", evolve),
    "build": ("compile a task's variants, or the kernels of calls in PyTorch ahead of time, without a GPU", build),
    "emulate": ("run a kernel of any CUDA or PTX file in the PTX emulator", emulate),
    "profile": ("Nsight Compute profile, and the share of each phase of a kernel", profile),
    "report": ("the report of a saved run, a comparison of two, or the history of a folder of runs", report),
    "list": ("the known tasks, or the variants of one", list_),
    "doctor": ("what this machine has, what is missing, and the remedy", doctor),
}
