"""The entry point: parse, run one verb, and turn errors into messages and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

from greenfast import __version__
from greenfast.cli.options import EXAMPLES, VERBS
from greenfast.spec.errors import GreenfastError
from greenfast.spec.extras import require
from greenfast.spec.printable import PrintableStream, printable

#: 0: all requested gates hold. 1: a kernel fell short. 2: usage or configuration. 3: the machine. 5: a solution's code
#: ended without a verdict. 130: interrupted. `judge` has more: the gates' codes, and two of cli/judge.py.
EXIT_USAGE = 2
EXIT_INTERNAL = 3
EXIT_INTERRUPTED = 130

#: The verbs with an exit code that judges a kernel.
_JUDGING = ("build", "emulate", "evolve", "judge", "run")
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
#: Module of a verb -> the extra that it needs, if that is not ``judge``; None: the core installation.
_EXTRAS = {"completion": None, "doctor": None, "emulate": "emulator", "init": None, "library": None, "run": "emulator"}
#: Verb of earlier versions -> the command that replaces it, and the argument that it had by default.
_MOVED_VERBS = {
    "bench": ("python -m benchmarks kernel", ""),
    **{f"bench {name}": (f"python -m benchmarks {name}", "") for name in ("kernel", "peers", "routing", "serving")},
    "bench operator": ("python -m benchmarks sdpa", ""),
    "bench parallel": ("python -m benchmarks parallel", ""),
    "compare": ("greenfast report --compare", ""),
    "history": ("greenfast report", ""),
    "tasks": ("greenfast list", ""),
    "validate": ("greenfast judge", ""),
    "variants": ("greenfast list", "fp8_sdpa"),
    "warmup": ("greenfast build --library", ""),
}
#: (command, its option of earlier versions) -> the option that replaces it.
_MOVED_OPTIONS = {
    ("greenfast judge", "--against"): "--baseline",
    ("greenfast evolve", "--against"): "--baseline",
    **{(f"greenfast {verb}", "--required"): "--speedup" for verb in ("judge", "evolve", "report --compare")},
}


def parser() -> argparse.ArgumentParser:
    """Build the parser of all verbs."""
    top = argparse.ArgumentParser(
        prog="greenfast",
        description="Verdicts on GPU kernels: green (built, inside its budget, correct) before fast.",
        epilog="start: greenfast init my_kernel, then greenfast judge my_kernel. "
        "exit codes: 0 all requested gates hold, 1 a kernel fell short, 2 usage or configuration, 3 the "
        "machine, 5 a solution's code ended without a verdict; judge: from 11 which gate failed, 4 not all was judged",
    )
    top.add_argument("--version", action="version", version=f"greenfast {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (text, options) in VERBS.items():
        examples = "\n".join(f"  {command}\n      {use}" for command, use in EXAMPLES[name].items())
        options(
            verbs.add_parser(
                name,
                help=text,
                description=text[0].upper() + text[1:] + ".",
                epilog=f"examples:\n{examples}",
                formatter_class=_HelpFormatter,
            )
        )
    return top


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps descriptions, and prints an epilog with examples as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)


def find_moved_command(arguments: Sequence[str]) -> tuple[str, str] | None:
    """Return an earlier version's verb or option, and today's command; None for a command of today."""
    verb, rest = " ".join(arguments[:2]), arguments[2:]
    if verb not in _MOVED_VERBS:
        verb, rest = "".join(arguments[:1]), arguments[1:]
    command, default = _MOVED_VERBS.get(verb, (f"greenfast {verb}", ""))
    split = [word.partition("=") for word in rest]
    words = [f"{_MOVED_OPTIONS.get((command, name), name)}{equals}{value}" for name, equals, value in split]
    moved = [verb] if verb in _MOVED_VERBS else [name for name, *_ in split if (command, name) in _MOVED_OPTIONS]
    if not moved:
        return None
    valued = [word.startswith("--") and word != "--json" for word in ("", *rest)]
    has_argument = any(not word.startswith("-") and not value for word, value in zip(rest, valued, strict=False))
    today = " ".join(filter(None, (command, "" if has_argument else default, shlex.join(words))))
    return moved[0], today


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: this process's); return the exit code.

    Output to a file or a pipe, such as a CI log, is escaped by ``printable``.
    """
    streams = sys.stdout, sys.stderr
    made = [None if stream is None or stream.isatty() else PrintableStream(stream) for stream in streams]
    sys.stdout, sys.stderr = (new or old for new, old in zip(made, streams, strict=True))
    try:
        return _main(argv)
    finally:
        for stream in filter(None, made):
            with contextlib.suppress(OSError, ValueError):  # the reader closed the pipe
                stream.flush()
        sys.stdout, sys.stderr = streams


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    moved = find_moved_command(arguments)
    if moved:
        old, today = moved
        print(f"greenfast: {old!r} is now: {today}", file=sys.stderr)
        if not old.startswith("--"):
            return EXIT_USAGE
        arguments = shlex.split(today)[1:]  # a renamed option has one meaning, so that earlier scripts run
    args = parser().parse_args(arguments)
    args.command = shlex.join(["greenfast", *arguments])
    code: int | None = None
    try:
        name = "library" if getattr(args, "library", False) else args.verb
        extra = _EXTRAS.get(name, "judge")
        if extra:
            require(f"greenfast {args.verb}", extra)
        # Only the verb's module is imported: importing all of them would slow down every command.
        verb = importlib.import_module(f"greenfast.cli.{name}")
        code = int(verb.run(args))
        sys.stdout.flush()  # here, where a closed pipe is handled
        return code
    except GreenfastError as e:
        print(printable(f"greenfast: {e}"), file=sys.stderr)
        return e.exit_code
    except SystemExit as e:  # of a problem's module: its exit code must not pass for a verdict
        print(f"greenfast: a module of the task called sys.exit({e.code!r}); there is no verdict", file=sys.stderr)
        return EXIT_INTERNAL
    except KeyboardInterrupt:
        print("greenfast: interrupted; nothing half-written was kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    except MemoryError as e:
        print(f"greenfast: out of memory: {e}; ask for smaller shapes", file=sys.stderr)
        return EXIT_INTERNAL
    except BrokenPipeError:  # the reader closed the pipe, as in `greenfast ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code is None and args.verb in _JUDGING:  # 0 would pass for a verdict
            print("greenfast: standard output was closed before the result; there is no verdict", file=sys.stderr)
            return EXIT_INTERNAL
        return code or 0
    except Exception as e:
        if (
            isinstance(e, OSError) and e.errno in _FULL and e.filename is None
        ):  # of a file we name, it is a MachineError
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the buffered rest
            print(f"greenfast: the output cannot be written ({e.strerror})", file=sys.stderr)
            return EXIT_INTERNAL
        place = _place_in_task(e)
        if place is not None:
            said = f"{place.filename}:{place.lineno}, in {place.name}: {type(e).__name__}: {e}"
            print(printable(f"greenfast: the task's own module failed: {said} (at: {place.line})"), file=sys.stderr)
            return EXIT_USAGE
        traceback.print_exc()
        print("greenfast: this is a bug in greenfast", file=sys.stderr)
        return EXIT_INTERNAL


def _place_in_task(error: Exception) -> traceback.FrameSummary | None:
    """Find the innermost line of a task's module that an error came through; None if it is greenfast's own.

    A task's module is a file below neither this package nor Python and its packages.
    """
    frames = traceback.extract_tb(error.__traceback__)
    package = str(Path(__file__).parents[1]) + os.sep
    known = (package, *(path + os.sep for path in sysconfig.get_paths().values()), "<")
    started = next((n for n, frame in enumerate(frames) if frame.filename.startswith(package)), len(frames))
    of_task = [frame for frame in frames[started:] if not frame.filename.startswith(known)]
    return of_task[-1] if of_task else None
