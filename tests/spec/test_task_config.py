"""A task's config is checked when it is read: an error names the file, the key and what is allowed there."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from greenfast.judge.task import Task, TaskConfig, load_task
from greenfast.spec.errors import UsageError

SHIPPED = sorted((Path(__file__).parents[2] / "tasks").glob("*/config_forward.json"))
ATTENTION: dict[str, Any] = json.loads(next(p for p in SHIPPED if "sdpa" in p.parent.name).read_text())


def read(folder: Path, config: object) -> Task:
    (folder / "config_forward.json").write_text(json.dumps(config))
    return load_task(folder)


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    """The attention task's config with one value replaced, or added."""
    config = copy.deepcopy(ATTENTION)
    place: Any = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return config


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in ATTENTION.items() if k != key}


def doubled(key: str, **changes: Any) -> dict[str, Any]:
    """The config with the first entry of a list again, changed a little."""
    first = ATTENTION[key][0]
    return changed(key, to=[*ATTENTION[key], {**first, **changes} if isinstance(first, dict) else first])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.parent.name)
def test_a_shipped_config_is_valid(path: Path) -> None:
    assert load_task(path.parent).folder == path.parent


def test_the_thresholds_of_the_mission_are_the_configs(tmp_path: Path) -> None:
    config = read(tmp_path, ATTENTION).config
    for fmt, (max_abs, mean_abs) in {"int8": (0.06, 0.02), "e4m3": (0.13, 0.015)}.items():
        error = config.gates(fmt).error
        assert (error.max_abs_err, error.mean_abs_err, error.pct_bad, error.bad_abs_err) == (max_abs, mean_abs, 1, 0.06)
        assert config.gates(fmt).kernel_error.relative_error == 0.002
        assert config.gates(fmt).kernel_error.bound_factor == 1.0
    assert (config.timing.warmup_iters, config.timing.timed_iters) == (100, 500)
    assert config.timing.blocks >= 20
    assert config.timing.processes >= 3
    assert config.seeds == [0, 1, 2]
    sizes = {
        "small": (1, 1, 32, 64),
        "mission": (1, 8, 512, 64),
        "mission_b2": (2, 8, 256, 64),
        "long": (1, 8, 2048, 64),
    }
    for name, size in sizes.items():
        shape = config.shape(name)
        assert tuple(shape.dims[d] for d in "BHSD") == size
        assert shape.name == "b{}_h{}_s{}_d{}".format(*size)
        assert config.shape(shape.name) is shape
        assert config.shape_names[name] == shape.name
    assert (config.defaults.baseline, config.defaults.candidate) == ("stage1", "stage2")
    assert config.defaults.shapes == ["b1_h1_s32_d64", "b1_h8_s512_d64"]
    assert config.timing.gate_shapes == ["b1_h8_s512_d64"]


E4M3 = ("formats", "e4m3")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        # types
        (changed("seeds", to="0,1"), r"Expected `array`, got `str` - at `\$\.seeds`"),
        (changed("seeds", 0, to="0"), r"Expected `int`, got `str` - at `\$\.seeds\[0\]`"),
        (changed("timing", "timed_iters", to=2.5), r"Expected `int`, got `float` - at `\$\.timing\.timed_iters`"),
        (changed("timing", "timed_iters", to=True), r"Expected `int`, got `bool` - at `\$\.timing\.timed_iters`"),
        (changed("shapes", 0, "dims", "S", to=None), r"Expected `int`, got `null` - at `\$\.shapes\[0\]\.dims"),
        ([], "Expected `object`, got `array`"),
        # bounds
        (
            changed(*E4M3, "error", "max_abs_err", to=-0.1),
            r"Expected `float` >= 0\.0 - at `\$\.formats\[\.\.\.\]\.error\.max_abs_err`",
        ),
        (changed(*E4M3, "error", "pct_bad", to=101), r"Expected `float` <= 100\.0 - at .*\.error\.pct_bad`"),
        (changed(*E4M3, "kernel_error", "bound_factor", to=-1), r">= 0\.0 - at .*\.kernel_error\.bound_factor`"),
        (changed("shapes", 1, "dims", "S", to=0), r"Expected `int` >= 1 - at `\$\.shapes\[1\]\.dims\[\.\.\.\]`"),
        (changed("seeds", to=[-1]), r"Expected `int` >= 0 - at `\$\.seeds\[0\]`"),
        (changed("seeds", to=[]), r"Expected `array` of length >= 1 - at `\$\.seeds`"),
        (changed("shapes", to=[]), r"length >= 1 - at `\$\.shapes`"),
        (changed("timing", "blocks", to=1), r"Expected `int` >= 2 - at `\$\.timing\.blocks`"),
        (changed("timing", "confidence", to=1.0), r"Expected `float` < 1\.0 - at `\$\.timing\.confidence`"),
        (changed("rungs", 3, "required_speedup", to=0.15), r">= 1\.0 - at `\$\.rungs\[3\]\.required_speedup`"),
        (changed("rungs", 3, "budget", "registers", to=0), r">= 1 - at `\$\.rungs\[3\]\.budget\.registers`"),
        (changed("shapes", 0, "name", to="a/b"), r"matching regex .* at `\$\.shapes\[0\]\.name`"),
        (changed("defaults", "results", to="../.."), r"matching regex .* at `\$\.defaults\.results`"),
        # keys
        (changed("sedes", to=[0]), r"unknown field `sedes`"),
        (changed(*E4M3, "error", "max_err", to=1), r"unknown field `max_err` - at `\$\.formats\[\.\.\.\]\.error`"),
        (changed("rungs", 0, "buget", to={}), r"unknown field `buget` - at `\$\.rungs\[0\]`"),
        (without("shapes"), "missing required field `shapes`"),
        (
            changed("rungs", 0, "promises", to={"at_least": {"mma": 1}}),
            r"Invalid enum value 'mma' - at `key` in `\$\.rungs\[0\]\.promises\.at_least`; allowed: cp_async, hmma, ",
        ),
        # names that must be unique, or must exist
        (doubled("shapes"), "shapes: 'b1_h1_s32_d64' appears more than once"),
        (doubled("shapes", name="other"), "shapes: 'small' appears more than once"),
        (
            doubled("shapes", name="small2", aliases=[]),
            r"shapes \(dims\): 'B=1, D=64, H=1, S=32' appears more than once",
        ),
        (doubled("rungs"), "rungs: 'scalar' appears more than once"),
        (doubled("seeds"), "seeds: '0' appears more than once"),
        (changed("defaults", "baseline", to="stage9"), "defaults.baseline: 'stage9' is not one of scalar, wmma_qk, st"),
        (changed("defaults", "candidate", to=""), "defaults.candidate: '' is not one of scalar, "),
        (changed("defaults", "format", to="fp4"), "defaults.format: 'fp4' is not one of e4m3, int8"),
        (
            changed("defaults", "shapes", to=["big"]),
            "defaults.shapes: 'big' is not one of b1_h1_s32_d64, b1_h8_s512_d64",
        ),
        (changed("defaults", "arch", to="sm_70"), "defaults.arch: unknown target 'sm_70'; allowed: sm_100, sm_120"),
        (changed("timing", "gate_shapes", to=["big"]), "timing.gate_shapes: 'big' is not one of b1_h1_s32_d64, "),
        (changed("rungs", 3, "after", to="stage0"), "rungs.stage2.after: 'stage0' is not one of scalar"),
        (changed("rungs", 0, "toggles", to={"USE": 1}), "rungs.scalar.toggles: 'USE' is not one of USE_CP_ASYNC, "),
        (
            changed("rungs", 0, "toggles", to={"USE_KV_LUT": 2}),
            r"rungs.scalar.toggles.USE_KV_LUT: 2 is not one of \[0, 1\]",
        ),
        (
            changed("rungs", 0, "promises", to={"more_than_predecessor": ["hmma"]}),
            "rungs.scalar.promises.more_than_predecessor: the rung names no `after`",
        ),
        (changed("toggles", "USE_KV_LUT", "default", to=3), r"toggles.USE_KV_LUT.default: 3 is not one of \[0, 1\]"),
    ],
)
def test_an_error_names_what_is_allowed(tmp_path: Path, config: object, said: str) -> None:
    with pytest.raises(UsageError, match=rf"config_forward\.json: .*{said}") as caught:
        read(tmp_path, config)
    assert str(tmp_path) in str(caught.value)


def test_several_wrong_names_are_reported_at_once(tmp_path: Path) -> None:
    config = changed("defaults", "baseline", to="a")
    config["defaults"]["candidate"] = "b"
    with pytest.raises(UsageError, match=r"defaults\.baseline: 'a' .*; defaults\.candidate: 'b'"):
        read(tmp_path, config)


@pytest.mark.parametrize("raw", [b"", b"{", b'{"name": "\xff"}', b"{} {}"])
def test_invalid_json_is_named(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config_forward.json").write_bytes(raw)
    with pytest.raises(UsageError, match=r"config_forward\.json: "):
        load_task(tmp_path)


@pytest.fixture
def config() -> TaskConfig:
    return msgspec.convert(ATTENTION, TaskConfig)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda c: c.shape("big"), "unknown shape of task fp8_sdpa 'big'; allowed: b16_h8_s512_d64, b1_h1_s32_d64, "),
        (lambda c: c.rung("stage9"), "unknown variant of task fp8_sdpa 'stage9'; allowed: kv_lut, scalar, stage1"),
        (lambda c: c.gates("fp4"), "unknown format of task fp8_sdpa 'fp4'; allowed: e4m3, int8"),
        (lambda c: c.variant("stage9"), "unknown variant of task fp8_sdpa 'stage9'; allowed: kv_lut"),
        (lambda c: c.variant("USE_X=1"), "unknown toggle of task fp8_sdpa 'USE_X'; allowed: DEBUG_PRINT, USE_CP"),
        (lambda c: c.variant("USE_KV_LUT=2"), r"USE_KV_LUT=2: allowed values are \[0, 1\]"),
        (lambda c: c.variant("USE_FUSED_SOFTMAX_PV=3"), r"USE_FUSED_SOFTMAX_PV=3: allowed values are \[0, 1, 2\]"),
        (lambda c: c.variant("USE_KV_LUT=-1"), r"USE_KV_LUT=-1: allowed values are \[0, 1\]"),
        (lambda c: c.variant("USE_KV_LUT=on"), "'USE_KV_LUT=on' is not TOGGLE=INTEGER"),
        (lambda c: c.variant("USE_KV_LUT=--1"), "'USE_KV_LUT=--1' is not TOGGLE=INTEGER"),
        (lambda c: c.variant("USE_KV_LUT=²"), "'USE_KV_LUT=²' is not TOGGLE=INTEGER"),
        (lambda c: c.variant("USE_KV_LUT=1,"), "'' is not TOGGLE=INTEGER"),
        (lambda c: c.variant("USE_KV_LUT=1,USE_KV_LUT=0"), "USE_KV_LUT is given twice"),
    ],
)
def test_an_unknown_name_is_answered_with_the_known_ones(
    config: TaskConfig, ask: Callable[[TaskConfig], object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        ask(config)


def test_a_rung_switches_on_only_what_it_names(config: TaskConfig) -> None:
    assert not any(config.variant("scalar").values.values())
    on = {name for name, value in config.variant("stage1").values.items() if value}
    assert on == {"USE_WMMA_QK", "USE_CP_ASYNC"}


def test_toggles_fill_in_the_defaults_and_find_their_rung(config: TaskConfig) -> None:
    assert config.variant("USE_WMMA_PV=1").name == "stage2"
    assert config.variant(" USE_WMMA_PV = 0 , USE_CP_ASYNC = 1 ").name == "stage1"
    assert config.toggle_variant({}).name == "stage2"
    nothing = ",".join(f"{name}=0" for name in config.toggles)
    assert config.variant(nothing).name == "scalar"
    own = config.variant("USE_CP_ASYNC=0")
    assert own.name == "USE_WMMA_QK=1+USE_WMMA_PV=1"
    assert own.values["USE_CP_ASYNC"] == 0


def test_a_separate_error_gate_for_some_shapes() -> None:
    gates = load_task(SHIPPED[0].parents[1] / "fp8_attention").config.gates("e4m3")
    assert gates.select({"S": 512, "CAUSAL": 1}).error.max_abs_err == 0.23
    assert gates.select({"S": 1}).error.pct_bad == 12.0
    assert gates.select({"S": 512}).error == gates.error
