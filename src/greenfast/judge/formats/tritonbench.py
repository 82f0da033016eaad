"""TritonBench: its files of problems and answers.

A problem is a Python file: a reference program, a line of #, and a test that calls the program's functions. In channel
G the reference is in Triton, in channel T in PyTorch. An answer is another program with the same functions: a Python
file, or the row of the problem in a JSONL file of ``LLM_generated``. Each call of the test becomes a shape of the task.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from greenfast.spec.errors import UsageError
from greenfast.spec.files import read_file

#: Separates the program from its test.
SEPARATOR = "#" * 146
#: The reference or an answer, what makes the calls, and the test, in a converted folder.
PROGRAM, ENTRY, TEST = "program.py", "entry.py", "test.py"
#: Allowed error of an element by the dtype of the output, relative to the sum of its size and the output's root mean
#: square. TF32 products and other orders of sums stay below; a wrong kernel is rarely within it.
TOLERANCES = {"float16": 4e-3, "bfloat16": 3e-2}
DEFAULT_TOLERANCE = 2e-3


def is_tritonbench(path: Path) -> bool:
    """Return whether a file is a problem of TritonBench."""
    return path.suffix == ".py" and path.is_file() and SEPARATOR.encode() in read_file(path)


def is_tritonbench_answer(path: Path, problem: Path) -> bool:
    """Return whether a file is an answer, for a converted problem of TritonBench."""
    is_answer = path.suffix == ".jsonl" or (path.suffix == ".py" and b"GREENFAST" not in read_file(path))
    return (problem / TEST).is_file() and is_answer


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
