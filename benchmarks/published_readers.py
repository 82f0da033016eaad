"""Readers of published collections of kernels (docs/trial.md). Each takes the folder of a local copy."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from greenfast.judge.formats.tritonbench import read_answers, split_problem

#: Sizes that the emulator computes in seconds, by problem of kernelbench.com: the names of the reference's globals.
SHAPES: dict[str, dict[str, int]] = {
    "01_fp8_gemm": {"M": 32, "N": 256, "K": 512},
    "02_kda_cutlass": {"B": 1, "T": 128, "H": 2, "K": 128, "V": 128, "CHUNK_SIZE": 64},
    "03_paged_attention": {
        "BATCH": 2, "NUM_HEADS": 8, "NUM_KV_HEADS": 2, "HEAD_DIM": 128, "SEQ_LEN": 200, "PAGE_SIZE": 16
    },
    "05_topk_bitonic": {"batch": 4, "n": 4096, "k": 8},
    "06_sonic_moe_swiglu": {"T_total": 96, "H": 256, "I": 256, "E": 4, "K": 2},
    "07_w4a16_gemm": {"M": 16, "N": 256, "K": 512},
}  # fmt: skip


@dataclass(frozen=True)
class PublishedProgram:
    """A program of a collection with its test.

    reference: a program with the right results in the same test; empty if the test computes them itself. label: the
    verdict of the collection's authors. target: the GPU; TritonBench's own runs are on an A100.
    """

    identifier: str
    problem: str
    source: str
    test: str
    reference: str = ""
    reference_mode: str = "torch"
    label: str = ""
    target: str = "sm_80"


def read_tritonbench(folder: Path) -> list[PublishedProgram]:
    """Return TritonBench's published answers in the order of their identifiers, each distinct program once."""
    programs: dict[str, PublishedProgram] = {}
    known: set[tuple[str, str]] = set()
    for file in sorted((folder / "LLM_generated").glob("Bench_*/*.jsonl")):
        channel = file.parent.name.split("_")[1]
        mode = {"G": "interpreter", "T": "torch"}[channel]
        for problem, source in read_answers(file):
            path = folder / "data" / f"TritonBench_{channel}_v1" / problem
            identifier = f"{channel}/{file.stem}/{path.stem}"
            if not path.is_file() or (problem, source) in known or identifier in programs:
                continue
            reference, test = split_problem(path.read_text(encoding="utf-8"))
            if test:
                known.add((problem, source))
                name = f"{channel}/{path.stem}"
                programs[identifier] = PublishedProgram(identifier, name, source, test, reference, mode)
    return [programs[name] for name in sorted(programs)]


def read_kernelbench_com(folder: Path, *, with_extension: bool = False) -> list[PublishedProgram]:
    """Return the labelled runs of kernelbench.com's deck "hard" with a published solution that is Triton or PyTorch.

    with_extension: those with an extension in CUDA C++ instead.
    The solutions of runs before 14 June 2026 belong to an earlier reference of 01_fp8_gemm, ``fp8_gemm_before.py`` in
    the folder: ``git show 2a92c94:benchmarks/hard/problems/01_fp8_gemm/reference.py``.
    """
    ending = "_solution.py.txt"
    solutions = {f.name.removesuffix(ending): f for f in (folder / "public/runs").rglob(f"*{ending}")}
    programs = []
    for file in sorted((folder / "benchmarks/hard/results/annotations").glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        label, problem = (re.search(rf"^{key}:\s*(\w+)", text, re.MULTILINE) for key in ("verdict", "problem"))
        if not label or not problem or problem[1] not in SHAPES or file.stem not in solutions:
            continue
        source = solutions[file.stem].read_text(encoding="utf-8", errors="replace")
        if ("load_inline" in source or "cpp_extension" in source) != with_extension:
            continue
        reference = folder / f"benchmarks/hard/problems-h100/{problem[1]}/reference.py"
        if problem[1] == "01_fp8_gemm" and file.stem < "20260614_13":
            reference = folder / "fp8_gemm_before.py"
        test = _model_test(reference.read_text(encoding="utf-8"), problem[1])
        target = "sm_90" if with_extension else "sm_80"
        programs.append(PublishedProgram(file.stem, problem[1], source, test, label=label[1], target=target))
    return programs


def _model_test(reference: str, problem: str) -> str:
    """Return a test that calls a solution's Model twice, on different inputs, and the reference's on copies of them."""
    return f"""
import sys as _sys, types as _types, torch as _torch
_reference = _types.ModuleType("reference")
exec(compile({reference!r}, "reference.py", "exec"), _reference.__dict__)
_sys.modules["reference"] = _reference
_reference.__dict__.update({SHAPES[problem]!r})
_torch.manual_seed(42)
_expected_model = _reference.Model(*_reference.get_init_inputs()).to("cuda").eval()
_model = Model(*_reference.get_init_inputs()).to("cuda").eval()
_model.load_state_dict(_expected_model.state_dict(), strict=True)
result = {{}}
for _call, _factor in (("first", 1.0), ("second", -0.75)):
    _torch.manual_seed(43 if _factor == 1.0 else 44)
    _inputs = [_input.to("cuda") for _input in _reference.get_inputs()]
    if {problem != "02_kda_cutlass"} and _factor != 1.0:
        _inputs[0] = (_inputs[0].float() * _factor).to(_inputs[0].dtype)
    with _torch.no_grad():
        result[_call + " expected"] = _expected_model(*[_input.clone() for _input in _inputs])
        _output = _model(*_inputs)
    result[_call + " got"] = _output.clone() if isinstance(_output, _torch.Tensor) else [_o.clone() for _o in _output]
"""


READERS: dict[str, Callable[[Path], list[PublishedProgram]]] = {
    "tritonbench": read_tritonbench,
    "kernelbench_com": read_kernelbench_com,
    "kernelbench_com_cuda": partial(read_kernelbench_com, with_extension=True),
}

_KERNELS = {
    "right": "0.2989 * tl.load(x + 3 * i, mask=m) + 0.587 * tl.load(x + 3 * i + 1, mask=m) "
    "+ 0.114 * tl.load(x + 3 * i + 2, mask=m)",
    "wrong": "tl.zeros((256,), tl.float32)",
}


def write_exploits(folder: Path, target: Path) -> int:
    """Write each exploit of pygpubench as two solutions for ``greenfast judge``; return the number of exploits.

    The exploit's own code runs at the import of the solution, on CPU tensors, and its ``kernel`` is called there. The
    Triton kernel is right, or writes zeros: an exploit that fools the judge makes the wrong one pass.
    """
    target.mkdir(parents=True, exist_ok=True)
    files = sorted((folder / "exploits").glob("submission_*.py"))
    for file in files:
        text = re.sub(r"device=(['\"])cuda\1", 'device="cpu"', file.read_text(encoding="utf-8"))
        for name, value in _KERNELS.items():
            (target / f"{file.stem.removeprefix('submission_')}_{name}.py").write_text(
                f"""GREENFAST = {{
    "name": "ported",
    "language": "triton",
    "launches": [
        {{"kernel": "gray", "grid": ["ceildiv(N * N, 256)"], "args": ["x", "y", "int32(N * N)"], "num_warps": 4}}
    ],
}}
import triton
import triton.language as tl


@triton.jit
def gray(x, y, n):
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    m = i < n
    tl.store(y + i, {value}, mask=m)


try:
    exec(compile({text!r}, "exploit", "exec"), globals())
    import torch

    for _ in range(3):
        kernel(torch.empty(8, 8), torch.rand(8, 8, 3))
except Exception as error:
    print("the exploit ended:", error)
""",
                encoding="utf-8",
            )
    return len(files)


def shuffled(programs: list[PublishedProgram], seed: int) -> list[PublishedProgram]:
    """Return the programs in a random order, so that each prefix is a random sample."""
    order = list(programs)
    random.Random(seed).shuffle(order)
    return order


def file_name(identifier: str) -> str:
    """Return the name of a program's files in the results folder."""
    return identifier.replace("/", "~")
