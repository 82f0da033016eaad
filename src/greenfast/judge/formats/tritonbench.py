"""TritonBench: its files of problems and answers.

A problem is a Python file: a reference program, a line of #, and a test that calls the program's functions. In channel
G the reference is in Triton, in channel T in PyTorch. An answer is another program with the same functions: a Python
file, or the row of the problem in a JSONL file of ``LLM_generated``. Each call of the test becomes a shape of the task.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from greenfast.judge.formats.converted import (
    PROGRAM,
    REFERENCE,
    TEST,
    Files,
    callable_config,
    render_problem_module,
    safe_name,
    task_config,
    write_problem,
)
from greenfast.judge.store import write_files
from greenfast.judge.task import CONFIG_NAME
from greenfast.spec.errors import UsageError
from greenfast.spec.files import read_file

#: Separates the program from its test.
SEPARATOR = "#" * 146
#: The file of a converted folder with the code that makes the calls.
ENTRY = "entry.py"


def is_tritonbench(path: Path) -> bool:
    """Return whether a file is a problem of TritonBench."""
    return path.suffix == ".py" and path.is_file() and SEPARATOR.encode() in read_file(path)


def split_problem(text: str) -> tuple[str, str]:
    """Return the program and the test of a problem's file; the test is empty if there is none."""
    program, *tests = text.split(SEPARATOR)
    return program, tests[-1] if tests else ""


def read_answers(file: Path) -> list[tuple[str, str]]:
    """Return the rows of a JSONL file of ``LLM_generated``: the file of each one's problem, and the answer's program.

    The file is empty for a row of no or of several problems. Raises UsageError for a file of another form.
    """
    try:
        folder, channel = file.resolve().parents[2], file.resolve().parent.name.split("_")[1]
        find = {"G": _find_by_label, "T": _find_by_description}[channel]
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [(problem, extract_code(row["predict"])) for problem, row in zip(find(folder, rows), rows, strict=True)]
    except (IndexError, KeyError, TypeError, ValueError, OSError) as e:
        raise UsageError(
            f"{file}: cannot be read ({type(e).__name__}: {e}); a file of answers is in TritonBench's "
            "LLM_generated/Bench_G_... or Bench_T_..., next to its folder data, and its rows have the key predict"
        ) from None


def extract_code(text: str) -> str:
    """Return the program in a model's answer: its last fenced block of Python, or all of it."""
    for token in ("<|im_end|>", "<|EOT|>", "<|endoftext|>"):
        text = text.replace(token, "")
    if "```python" in text:
        return text.split("```python")[-1].split("```")[0]
    return text.split("```")[1] if "```" in text else text


def _find_by_label(folder: Path, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the file of each row's problem, or an empty text: the first unused one that contains the row's label."""
    problems = json.loads((folder / "data" / "TritonBench_G_v1.json").read_text(encoding="utf-8"))
    for row in rows:
        label = row["label"].replace("<|im_end|>", "").replace("<|EOT|>", "")
        same = [p for p in problems if label in p["output"]]
        if same:
            problems.remove(same[0])
        yield same[0]["file"] if same else ""


def _find_by_description(folder: Path, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the file of each row's problem, or an empty text: the one with the description in the row's prompt."""
    problems = json.loads((folder / "data" / "TritonBench_T_v1.jsonl").read_text(encoding="utf-8"))
    for row in rows:
        prompt = row.get("instruction") or row["prompt"]
        text = prompt.split("Functional Description: ")[-1].split("Wrapper Entry Information:")[0].replace("\n", "")
        same = [p["file"] for p in problems if text.strip() and text in p["description"].replace("\n", "")]
        yield same[0] if len(same) == 1 else ""


def import_problem(path: Path, parent: Path) -> Path | None:
    """Write the task folder of a problem below ``parent`` and return it; None for a file of another format.

    The baseline is its reference. Runs the reference and its test, kernels in the emulator.
    Raises UsageError if no call of the test can be judged.
    """
    if not is_tritonbench(path):
        return None
    program, test = split_problem(read_file(path).decode(errors="replace"))
    if not test.strip():
        raise UsageError(f"{path}: has no test after its line of #; a problem of TritonBench has one")
    name = safe_name(path.stem)
    folder = write_problem(parent / name, {TEST: test}, reference={PROGRAM: program})
    problem = importlib.import_module("greenfast.judge.formats.test_calls").CallProblem(folder)  # it imports PyTorch
    return write_files(
        folder,
        {
            "problem.py": render_problem_module(
                f"{name}: a problem of TritonBench", "test_calls", "CallProblem", "Path(__file__).parent"
            ),
            CONFIG_NAME: task_config(name, f"TritonBench's {name}", problem.shapes, left_out=problem.left_out),
            f"{REFERENCE}/{ENTRY}": problem.entry,
            f"{REFERENCE}/solution.json": _call_solution(REFERENCE, problem.arguments),
        },
    )


def import_solution(path: Path, problem: Path) -> tuple[str, Files] | None:
    """Convert an answer. Return its name and files; None for a file of another format.

    problem: the folder of the converted problem. Raises UsageError for a JSONL file without an answer to it.
    """
    if not (problem / TEST).is_file() or not path.is_file() or path.suffix not in (".jsonl", ".py"):
        return None
    if path.suffix == ".py" and b"GREENFAST" in read_file(path):  # a solution of greenfast's own format
        return None
    if path.suffix == ".jsonl":
        programs = [code for file, code in read_answers(path) if safe_name(Path(file).stem) == problem.name]
        if not programs:
            raise UsageError(f"{path}: has no answer to {problem.name}")
        program = programs[0]
    else:
        program, _ = split_problem(read_file(path).decode(errors="replace"))
    reference = problem / REFERENCE
    arguments = json.loads(read_file(reference / "solution.json"))["launches"][0]["args"]
    entry = read_file(reference / ENTRY)
    name = safe_name(path.stem)
    return name, {PROGRAM: program, ENTRY: entry, "solution.json": _call_solution(name, arguments)}


def _call_solution(name: str, arguments: Sequence[str]) -> str:
    return callable_config(name, ENTRY, "", {"kernel": "run", "args": list(arguments)})
