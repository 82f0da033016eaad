"""A differential fuzzer: ``python -m tests.fuzz --device cuda --seconds 60 --seed 1``.

It draws calls of the operators, compares each with attention in float64, repeats it to find races, and checks guard
bytes around its allocations. Each call has a number; ``--only NUMBER`` draws the same one again, for the same device.
The exit code is 1 if a call is wrong. ``--compile`` compiles the kernels of all draws for Hopper, without a GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from greenfast.ops import warmup
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource
from tests.fuzz import sdpa, serving
from tests.fuzz.calls import Draw, Run

_DRAWS: tuple[tuple[str, int, Any], ...] = (
    ("sdpa", 5, sdpa.draw),
    ("serving", 4, serving.draw_serving),
    ("keys", 2, serving.draw_keys),
    ("append", 1, serving.draw_append),
)
_MANY = 1 << 32  # seeds of one run begin at its seed times this


def draw(number: int, on_gpu: bool, kinds: tuple[str, ...] = ()) -> tuple[str, Draw]:
    """The call of this number, and its kind."""
    rng = random.Random(number)
    allowed = [d for d in _DRAWS if not kinds or d[0] in kinds]
    name, _, make = rng.choices(allowed, [weight for _, weight, _ in allowed])[0]
    return name, make(rng, number % (1 << 31), on_gpu)


def sources(target: Target) -> Iterator[KernelSource]:
    """The kernels of all draws."""
    yield from sdpa.sources(target)
    yield from serving.sources(target)


def faults_of(call: Draw, run: Run) -> list[str]:
    """Return the faults of a call; an exception is a fault too."""
    try:
        return call.faults(run)
    except Exception as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        return [f"{type(e).__name__} in {last.name}, line {last.lineno}: {str(e)[:300]}"]


def fuzz(arguments: argparse.Namespace) -> int:
    """Run calls until the time is over; returns how many were wrong."""
    start, done, wrong = time.monotonic(), Counter[str](), 0
    on_gpu, kinds = arguments.device == "cuda", tuple(arguments.kinds.split(",")) if arguments.kinds else ()
    number = arguments.seed * _MANY if arguments.only is None else arguments.only
    while True:
        name, call = draw(number, on_gpu, kinds)
        run = Run(arguments.device, arguments.repeats, busy=random.Random(-number - 1).random() < 0.3)
        if arguments.verbose:
            print(number, name, call, flush=True)
        begun = time.monotonic()
        faults = faults_of(call, run)
        if arguments.verbose:
            print(f"  {time.monotonic() - begun:.2f} s", flush=True)
        done[name] += 1
        if faults:
            wrong += 1
            of_kinds = f" --kinds {arguments.kinds}" if arguments.kinds else ""
            print(f"WRONG: python -m tests.fuzz --device {arguments.device} --only {number}{of_kinds}\n  {call}")
            for fault in faults[:6]:
                print(f"  - {fault}", flush=True)
            if any("CUDA" in fault and "rror" in fault for fault in faults):
                print("  the device is in doubt after that; this process ends", flush=True)
                break
        number += 1
        if arguments.only is not None or time.monotonic() - start > arguments.seconds or wrong >= arguments.most:
            break
    calls = ", ".join(f"{n} {name}" for name, n in sorted(done.items()))
    took = time.monotonic() - start
    print(f"seed {arguments.seed}: {sum(done.values())} calls ({calls}), {wrong} wrong, {took:.0f} s")
    return wrong


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, help="of each call; 20 on a GPU, 2 on the CPU by default")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one call")
    parser.add_argument("--kinds", help=f"of {','.join(name for name, _, _ in _DRAWS)}, with commas between them")
    parser.add_argument("--most", type=int, default=20, help="stop after so many wrong calls")
    parser.add_argument("--compile", action="store_true", help="only compile the kernels of all draws")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    if arguments.compile:
        done = warmup.warm(dict.fromkeys(sources(Target("sm_90a"))), Target("sm_90a"))
        print(f"{done.compiled} kernels compiled, {done.cached} cached, {done.seconds:.0f} s")
        return
    if arguments.repeats is None:
        arguments.repeats = 20 if arguments.device == "cuda" else 2
    torch.set_num_threads(1)  # several processes share the machine
    sys.exit(min(1, fuzz(arguments)))


if __name__ == "__main__":
    main()
