"""Try the emulator on published collections: ``python -m benchmarks published_collections COLLECTION FOLDER``.

FOLDER is a local copy of the collection's repository: ``tritonbench`` (thunlp/TritonBench), ``kernelbench_com``
(Infatoshi/kernelbench.com; ``kernelbench_com_cuda``: its solutions with an extension in CUDA C++). Each program runs in
a confined process, and its outcome is written to ``--results``; a
program with an outcome is not run again. Run it three times: ``--mode emulator``, then ``--mode interpreter`` (Triton's
own interpreter, the independent results) and ``--mode torch`` (PyTorch's references); ``--json FILE`` then writes the
record of docs/trial.md. ``pygpubench`` (gpu-mode/pygpubench) writes its exploits as solutions for ``greenfast judge``.

Nothing of the collections is part of this project; the record has identifiers and verdicts.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import make_parser
from benchmarks.published_program import run_confined, warm_up
from benchmarks.published_readers import READERS, PublishedProgram, file_name, shuffled, write_exploits
from benchmarks.published_verdicts import update_record
from greenfast.spec.errors import UsageError


def run_programs(programs: Sequence[PublishedProgram], mode: str, results: Path, seconds: int) -> None:
    """Run the programs that have no outcome yet. The modes "interpreter" and "torch" run references too."""
    warm_up(mode)
    for program in programs:
        name, reference = file_name(program.identifier), file_name(program.problem)
        if program.reference and program.reference_mode == mode and launched(results, name):
            for seed in (1, 2):  # of random numbers drawn in the reference, and of uninitialised memory
                _run(
                    program.reference,
                    program.test,
                    mode,
                    results / f"references-{mode}" / f"{reference}~{seed}",
                    seed,
                    seconds,
                )
        if mode == "emulator" or (mode == "interpreter" and launched(results, name)):
            outcome = _run(
                program.source, program.test, mode, results / f"programs-{mode}" / name, 1, seconds, program.target
            )
            if mode == "emulator" and program.reference_mode == "interpreter" and outcome.get("faults"):
                # The test's inputs may be the cause, such as an index beyond its tensor: the reference shows it.
                target = results / f"references-{mode}" / f"{reference}~1"
                _run(program.reference, program.test, mode, target, 1, seconds)


def launched(results: Path, name: str) -> bool:
    """Return whether a program launched kernels in the emulator, so that independent results are of use."""
    path = results / "programs-emulator" / f"{name}.json"
    outcome = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return bool(outcome.get("launches") or outcome.get("faults") or outcome.get("ended"))


def _run(
    source: str, test: str, mode: str, target: Path, seed: int, seconds: int, gpu: str = "sm_80"
) -> dict[str, Any]:
    """Return the outcome of a program in the results folder; run it if there is none."""
    path = target.with_name(target.name + ".json")
    if path.is_file():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRITON_CACHE_DIR": f"{folder}/cache", "HOME": folder, "TMPDIR": folder}
        outcome = run_confined(
            {"source": source, "test": test, "mode": mode, "seed": seed, "target": gpu}, Path(folder), seconds
        )
        arrays = Path(folder) / "arrays.npz"
        if arrays.is_file():
            target.with_name(target.name + ".npz").write_bytes(arrays.read_bytes())
    path.write_text(json.dumps(outcome), encoding="utf-8")
    print(target.name, outcome.get("ended") or outcome.get("error") or "ended", outcome["seconds"], flush=True)
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Run a collection's programs in one mode, or write the record."""
    parser = make_parser("published_collections", __doc__)
    parser.add_argument("collection", choices=[*READERS, "pygpubench"])
    parser.add_argument("folder", type=Path, help="a local copy of the collection's repository")
    parser.add_argument(
        "--results", type=Path, required=True, metavar="DIR", help="folder of outcomes, or of solutions"
    )
    parser.add_argument("--mode", choices=["emulator", "interpreter", "torch"], help="run the programs in this mode")
    parser.add_argument("--number", type=int, metavar="N", help="only the first N of the random order")
    parser.add_argument("--seed", type=int, default=37, help="of the random order (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=40, help="processor time of a program (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the outcomes into a record; it keeps the column inspected"
    )
    args = parser.parse_args(argv)
    if not args.folder.is_dir():
        raise UsageError(f"{args.folder} is no folder; give a local copy of the collection's repository")
    if args.collection == "pygpubench":
        print(f"{write_exploits(args.folder, args.results)} exploits in {args.results}")
        return 0
    programs = shuffled(READERS[args.collection](args.folder), args.seed)[: args.number]
    if args.mode == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it at its import
    if args.mode:
        run_programs(programs, args.mode, args.results, args.seconds)
    if args.json:
        update_record(args.json, args.collection, programs, args.results, args.seed)
    return 0
