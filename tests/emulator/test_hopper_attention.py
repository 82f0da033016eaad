"""The Hopper attention kernel on the emulator: its tiles and turns, masks, grouped heads and lengths that differ."""

from __future__ import annotations

import pytest

from greenfast.attention import fast_problem, hopper
from greenfast.build.compiler import compile_kernel
from greenfast.emulator.grid import run_grid
from greenfast.numerics.errors import error_stats, worst_bound_ratio
from greenfast.spec.arch import Target

TOGGLES = {"USE_WGMMA": 1}
#: A shape, and of how many multiprocessors: few make several warpgroups a block, and blocks that do several pieces.
CASES = {
    "one query": ({"B": 1, "H": 2, "S": 1, "D": 64}, 132),
    "grouped heads, last query": ({"B": 1, "H": 8, "HK": 2, "S": 33, "KV": 333, "D": 128, "CAUSAL": 2}, 132),
    "queries without a key": ({"B": 1, "H": 4, "HK": 1, "S": 200, "KV": 70, "D": 64, "CAUSAL": 2}, 132),
    "three warpgroups, turns": ({"B": 1, "H": 2, "S": 450, "D": 64}, 1),
    "three warpgroups, causal": ({"B": 1, "H": 2, "S": 450, "D": 64, "CAUSAL": 1}, 1),
    "three warpgroups, head dim 128": ({"B": 1, "H": 3, "S": 380, "D": 128, "CAUSAL": 1}, 1),
    "two warpgroups, head dim 256": ({"B": 1, "H": 2, "S": 300, "D": 256, "CAUSAL": 1}, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dims, multiprocessors = CASES[name]
    monkeypatch.setattr(hopper, "MULTIPROCESSORS", multiprocessors)
    tiles, _ = hopper.tiling(dims)
    words = ("one", "two", "three")
    assert name.startswith(words[tiles.consumers - 1]) or multiprocessors == 132
    source = hopper.kernel(TOGGLES, "e4m3", dims)
    case = fast_problem.make_case(dims, 0, "e4m3")
    result = run_grid(
        compile_kernel(source, Target("sm_90a")).ptx,
        source.entry,
        source.block,
        source.dynamic_smem_bytes,
        hopper.launch(TOGGLES, "e4m3", dims),
        case.inputs,
        case.outputs,
        seed=5,
    )
    assert not any(result.unwritten.values())
    references = fast_problem.references(dims, 0, "e4m3")
    out = fast_problem.decode(result.outputs, "e4m3")
    assert worst_bound_ratio(out, references.exact, references.bounds["e4m3"]) <= 1
    assert error_stats(out, references.exact, 1).relative_error <= 0.03
