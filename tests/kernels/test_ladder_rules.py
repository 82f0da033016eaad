"""What the ladder refuses in Python and in the kernel, and what it renders and launches."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest

from greenfast.device.compiler import compile_kernel
from greenfast.spec.arch import Target
from greenfast.spec.errors import CompileError, UsageError
from greenfast.spec.kernel import PHASE_BUFFER, KernelSource
from tasks.fp8_sdpa_stage_c_wmma import problem as sdpa_problem
from tasks.fp8_sdpa_stage_c_wmma.kernels import family as ladder
from tests.kernels.ladder_task import CONFIG, FORMS, RUNGS, SMALL, all_toggles, is_full_fusion, is_legal, toggles

ADA = Target("sm_89")
POINTERS = {"uint8": "const unsigned char*", "float32": "const float*", "float16": "half*"}
FUSED_RULE = r"USE_FUSED_SOFTMAX_PV=1 needs USE_WMMA_PV=1"
SWIZZLE_RULE = r"USE_XOR_SWIZZLE=1 needs USE_WMMA_QK=1 and USE_WMMA_PV=1"
FULL_FUSION_RULE = r"USE_FUSED_SOFTMAX_PV=2 (needs|excludes) USE_\w+=1"
FORM_RULE = rf"({'|'.join(FORMS)})=1 (needs USE_FUSED_SOFTMAX_PV=2|excludes USE_\w+=1)"


def render(rung: str = "stage2", fmt: str = "e4m3", head_dim: int = 64) -> KernelSource:
    return ladder.kernel(toggles(rung), fmt, {**SMALL, "D": head_dim})


def cfg(source: KernelSource) -> dict[str, str]:
    """The members of the rendered Cfg."""
    return dict(re.findall(r"static constexpr \S+ (k\w+) = ([^;]+);", source.source))


# The rules


def test_exactly_the_illegal_combinations_are_refused() -> None:
    legal, refused = 0, 0
    for t in all_toggles():
        if is_legal(t):
            legal += bool(ladder.kernel(t, "e4m3", SMALL).source)
            continue
        with pytest.raises(UsageError, match="|".join((FUSED_RULE, SWIZZLE_RULE, FULL_FUSION_RULE, FORM_RULE))):
            ladder.kernel(t, "e4m3", SMALL)
        refused += 1
    assert legal + refused == math.prod(len(toggle.values) for toggle in CONFIG.toggles.values())
    assert refused > 0


@pytest.mark.parametrize(
    ("rung", "changes", "rule"),
    [
        ("stage1", {"USE_FUSED_SOFTMAX_PV": 1}, FUSED_RULE),
        ("stage1", {"USE_XOR_SWIZZLE": 1}, SWIZZLE_RULE),
        ("stage2", {"USE_XOR_SWIZZLE": 1, "USE_WMMA_QK": 0}, SWIZZLE_RULE),
        ("scalar", {"USE_XOR_SWIZZLE": 1}, SWIZZLE_RULE),
        ("stage3b", {"USE_CP_ASYNC": 0}, "USE_FUSED_SOFTMAX_PV=2 needs USE_CP_ASYNC=1"),
        ("stage3b", {"USE_WMMA_QK": 0}, "USE_FUSED_SOFTMAX_PV=2 needs USE_WMMA_QK=1"),
        ("stage3b", {"USE_WMMA_PV": 0}, "USE_FUSED_SOFTMAX_PV=2 needs USE_WMMA_PV=1"),
        ("stage3b", {"USE_XOR_SWIZZLE": 1}, "USE_FUSED_SOFTMAX_PV=2 excludes USE_XOR_SWIZZLE=1"),
        ("stage3b_pipe3", {"USE_KV_LUT": 1}, "USE_FUSED_SOFTMAX_PV=2 excludes USE_KV_LUT=1"),
        ("stage2", {"USE_THREE_STAGE_PIPE": 1}, "USE_THREE_STAGE_PIPE=1 needs USE_FUSED_SOFTMAX_PV=2"),
        ("stage3a", {"USE_THREE_STAGE_PIPE": 1}, "USE_THREE_STAGE_PIPE=1 needs USE_FUSED_SOFTMAX_PV=2"),
        ("stage2", {"USE_WARP_SPECIALIZATION": 1}, "USE_WARP_SPECIALIZATION=1 needs USE_FUSED_SOFTMAX_PV=2"),
        ("stage3b_pipe3", {"USE_WARP_SPECIALIZATION": 1}, "USE_THREE_STAGE_PIPE=1 excludes USE_WARP_SPECIALIZATION=1"),
        ("stage2", {"USE_PERSISTENT_CTAS": 1}, "USE_PERSISTENT_CTAS=1 needs USE_FUSED_SOFTMAX_PV=2"),
        ("stage3b_specialized", {"USE_PERSISTENT_CTAS": 1}, "USE_WARP_SPECIALIZATION=1 excludes USE_PERSISTENT_CTAS=1"),
    ],
)
def test_the_refusal_names_the_rule(rung: str, changes: dict[str, int], rule: str) -> None:
    with pytest.raises(UsageError, match=rule):
        ladder.kernel(toggles(rung, **changes), "e4m3", SMALL)


@pytest.mark.parametrize("fmt", ["fp8", "E4M3", ""])
def test_unknown_format(fmt: str) -> None:
    with pytest.raises(UsageError, match=f"unknown format {fmt!r}; allowed: e4m3, int8"):
        render(fmt=fmt)


@pytest.mark.parametrize("head_dim", [16, 63, 65, 96, 256])
def test_other_head_dims(head_dim: int) -> None:
    with pytest.raises(UsageError, match=f"D={head_dim}: the ladder has kernels for 64, 128"):
        render(head_dim=head_dim)


@pytest.mark.parametrize(
    "dims", [{}, {"B": 1, "H": 1, "S": 32}, {**SMALL, "S": 0}, {**SMALL, "B": -1}, {"M": 4, "N": 4, "K": 4}]
)
def test_other_dimensions(dims: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="needs B, H, S and D, each at least 1; got"):
        ladder.kernel(toggles("stage2"), "e4m3", dims)


def test_more_heads_than_a_grid_holds() -> None:
    assert ladder.kernel(toggles("stage2"), "e4m3", {**SMALL, "B": 13107, "H": 5}).source
    with pytest.raises(UsageError, match="B=8192, H=8: 65536 heads; a grid holds 65535"):
        ladder.kernel(toggles("stage2"), "e4m3", {**SMALL, "B": 8192, "H": 8})


@pytest.mark.parametrize(
    ("rung", "edit", "message"),
    [
        ("stage3a_swizzle", ("MmaScores", "WmmaScores"), "WMMA loads take one stride for all rows"),
        ("stage3a_swizzle", ("MmaOutput", "WmmaOutput"), "WMMA loads take one stride for all rows"),
        ("wmma_qk", ("kHeadDim = 64", "kHeadDim = 192"), "head_dim is 64 or 128"),
        ("stage2", ("kHeadDim = 64", "kHeadDim = 192"), "head_dim is 64 or 128"),
        (
            "stage2",
            ("kSmemBytes = ", "kSmemBytes = 128 + "),
            "the plan of shared memory in Python differs from the map",
        ),
        ("stage3b", ("kHeadDim = 64", "kHeadDim = 192"), "head_dim is 64 or 128"),
        ("stage3b", ("kStages = 2", "kStages = 1"), "two stages or three"),
        (
            "stage3b_pipe3",
            ("kSmemBytes = ", "kSmemBytes = 128 + "),
            "the plan of shared memory in Python differs from the map",
        ),
        ("stage3b_specialized", ("kHeadDim = 64", "kHeadDim = 192"), "head_dim is 64 or 128"),
        ("stage3b_specialized", ("kStages = 2", "kStages = 3"), "two stages"),
        ("stage3b_persistent", ("kHeadDim = 64", "kHeadDim = 192"), "head_dim is 64 or 128"),
        ("stage3b_persistent", ("kStages = 2", "kStages = 3"), "two stages"),
        (
            "stage3b_persistent",
            ("kSmemBytes = ", "kSmemBytes = 128 + "),
            "the plan of shared memory in Python differs from the map",
        ),
        (
            "stage3b_specialized",
            ("kSmemBytes = ", "kSmemBytes = 128 + "),
            "the plan of shared memory in Python differs from the map",
        ),
    ],
)
def test_the_kernel_refuses_it_too(rung: str, edit: tuple[str, str], message: str) -> None:
    """Without Python's check: a Cfg that says what Python would not render."""
    source = render(rung)
    assert source.source.count(edit[0]) == 1
    with pytest.raises(CompileError) as caught:
        compile_kernel(dataclasses.replace(source, source=source.source.replace(*edit)), ADA)
    assert f'static assertion failed with "{message}"' in str(caught.value)
    headers = re.findall(r'#include "(\w+\.cuh)"', source.source)
    assert any(f"{header}(" in str(caught.value) for header in headers)


# What is rendered


@pytest.mark.parametrize(
    "path", sorted(set(ladder.FOLDER.glob("*.cuh")) - {ladder.FOLDER / "common.cuh"}), ids=lambda path: path.stem
)
def test_a_rung_opens_with_its_change_its_reason_and_its_record(path: Path) -> None:
    assert path.stem in RUNGS
    change, reason, measured = path.read_text().splitlines()[:3]
    assert change.startswith("// ")
    assert reason.startswith("// Why: ")
    (record,) = re.findall(r"^// Measured: .*(evidence/[\w/-]+)\)", measured)
    assert (ladder.FOLDER.parents[2] / record / "record.json").is_file()


@pytest.mark.parametrize("fmt", CONFIG.formats)
@pytest.mark.parametrize("rung", RUNGS)
def test_cfg_says_what_the_toggles_say(rung: str, fmt: str) -> None:
    source, t = render(rung, fmt), toggles(rung)
    always = {
        "kHeadDim": "64",
        "kFormat": {"e4m3": "greenfast::Format::kE4M3", "int8": "greenfast::Format::kInt8"}[fmt],
        "kSmemBytes": str(source.dynamic_smem_bytes),
        "kDebugPrint": "false",
        "kPhaseClocks": "false",
    }
    assert source.phases == ()
    if is_full_fusion(t):
        assert cfg(source) == always | {"kStages": "3" if t["USE_THREE_STAGE_PIPE"] else "2"}
        assert source.block == (256 + 32 * t["USE_WARP_SPECIALIZATION"], 1, 1)
        return
    assert cfg(source) == always
    assert source.block == (128, 1, 1)
    cores = "Mma" if t["USE_XOR_SWIZZLE"] else "Wmma"
    parts = {
        "Dequantizer": "LutDequantizer" if t["USE_KV_LUT"] else "ConvertDequantizer",
        "KvLayout": "XorSwizzledLayout" if t["USE_XOR_SWIZZLE"] else "PaddedLayout",
        "PTile": "PInScoreTile" if t["USE_FUSED_SOFTMAX_PV"] else "OwnPTile",
        "Scores": f"{cores if t['USE_WMMA_QK'] else 'Scalar'}Scores",
        "Output": f"{cores if t['USE_WMMA_PV'] else 'Scalar'}Output",
    }
    assert dict(re.findall(r"using (\w+) = greenfast::(\w+)", source.source)) == parts
    assert f"attention_{'prefetched' if t['USE_CP_ASYNC'] else 'direct'}<Cfg>" in source.source
    headers = re.findall(r'#include "(\w+)\.cuh"', source.source)
    assert (headers[0], headers[-1]) == ("scalar", rung), "the last part is the rung's own"


def test_every_toggle_that_can_be_switched_changes_the_kernel() -> None:
    for name, toggle in CONFIG.toggles.items():
        rung = "stage3b" if name in FORMS else "stage2"
        sources = {ladder.kernel(toggles(rung, **{name: v}), "e4m3", SMALL).source for v in toggle.values}
        assert len(sources) == len(toggle.values), name


def test_shapes_share_a_kernel_unless_the_head_dim_differs() -> None:
    def rendered(**dims: int) -> KernelSource:
        return ladder.kernel(toggles("stage2"), "e4m3", {**SMALL, **dims})

    assert rendered() == rendered(B=3, H=5, S=777)
    assert rendered() != rendered(D=128)


# The shared-memory plan: the kernel's own sizeof is asked for every legal combination in one translation unit


def plans(correction: int = 0) -> KernelSource:
    sources = [
        ladder.kernel(t, "e4m3", {**SMALL, "D": head_dim}).source
        for t in all_toggles()
        for head_dim in ladder.HEAD_DIMS
        if is_legal(t)
    ]
    configs = sorted(
        {re.findall(r"struct Cfg (\{.*?\n\});.*attention_(\w+)<Cfg>", source, re.DOTALL)[0] for source in sources}
    )
    storages = {
        "direct": "SharedStorage",
        "prefetched": "PrefetchedStorage",
        "registers": "RegistersStorage",
        "specialized": "SpecializedStorage",
        "persistent": "PersistentStorage",
    }
    text = [f'#include "{header.name}"' for header in sorted(ladder.FOLDER.glob("*.cuh"))]
    for i, (struct, function) in enumerate(configs):
        size = f"sizeof(greenfast::{storages[function]}<Cfg{i}>)"
        text.append(f"struct Cfg{i} {struct};")
        text.append(f'static_assert({size} == Cfg{i}::kSmemBytes + {correction}, "plan {i}");')
    text.append('extern "C" __global__ void plans() {}')
    assert len(configs) == 2 * sum(map(is_legal, all_toggles()))
    return dataclasses.replace(render(), entry="plans", source="\n".join(text))


def test_every_shared_memory_plan_is_the_kernels() -> None:
    assert compile_kernel(plans(), ADA).resources.spill_bytes == 0
    with pytest.raises(CompileError, match='static assertion failed with "plan 0"'):
        compile_kernel(plans(128), ADA)


# The launch


@pytest.mark.parametrize(("B", "H"), [(1, 1), (2, 8)])
def test_grid_covers_every_query_once(B: int, H: int) -> None:
    for S in range(1, 201):
        x, y, z = ladder.launch({}, "e4m3", {"B": B, "H": H, "S": S, "D": 64}).grid
        assert 32 * (x - 1) < S <= 32 * x
        assert (y, z) == (B * H, 1)


@pytest.mark.parametrize(("head_dim", "blocks"), [(64, 2), (128, 1)])
def test_persistent_blocks_are_what_the_multiprocessors_hold(
    head_dim: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"__launch_bounds__(256, {blocks})" in render("stage3b_persistent", head_dim=head_dim).source
    for multiprocessors in (1, 58, 132):
        monkeypatch.setattr(ladder, "_PERSISTENT_ON", Target("sm_90a", multiprocessors))
        for S, works in ((32, 6), (33, 12), (2048, 384)):
            dims = {"B": 2, "H": 3, "S": S, "D": head_dim}
            found = ladder.launch(toggles("stage3b_persistent"), "e4m3", dims)
            assert found.grid == (min(works, blocks * multiprocessors), 1, 1)
            assert found.args[-1] == np.int32(6)


@pytest.mark.parametrize("rung", ["stage2", "stage3b_persistent"])
@pytest.mark.parametrize("head_dim", ladder.HEAD_DIMS)
def test_arguments_are_the_parameters_of_the_kernel(head_dim: int, rung: str) -> None:
    dims = {"B": 2, "H": 3, "S": 40, "D": head_dim}
    parameters = re.findall(r"fp8_sdpa\(([^)]*)\)", render(rung, head_dim=head_dim).source)[0].split(",")
    declared = [re.sub(r"\s+", " ", parameter).strip().rpartition(" ") for parameter in parameters]
    case = sdpa_problem.make_case(dims, 0, "e4m3")
    dtypes = {name: str(a.dtype) for name, a in case.inputs.items()} | {n: o.dtype for n, o in case.outputs.items()}
    args = ladder.launch(toggles(rung), "e4m3", dims).args
    assert len(args) == len(declared)
    for arg, (kind, _, name) in zip(args, declared, strict=True):
        if arg == PHASE_BUFFER:
            assert (kind, name) == ("long long*", "phase_cycles")
        elif isinstance(arg, str):
            assert (kind, name) == (POINTERS[dtypes.pop(arg)], arg)
        else:
            assert (type(arg), kind) in [(np.int32, "int"), (np.float32, "float")]
    assert dtypes == {}, "every buffer of the case is passed"
    values = {name: arg for arg, (_, _, name) in zip(args, declared, strict=True) if not isinstance(arg, str)}
    heads = {"heads": np.int32(6)} if rung == "stage3b_persistent" else {}
    assert values == {"seq_len": np.int32(40), "softmax_scale": np.float32(1 / math.sqrt(head_dim))} | heads


# The instrumented build


@pytest.mark.parametrize(
    ("rung", "phases", "scope"),
    [("stage2", ladder.PHASES, "greenfast::"), ("stage3b", ladder.REGISTER_PHASES, "greenfast::RegistersPhase::")],
)
def test_phases_are_those_of_the_kernel(rung: str, phases: tuple[str, ...], scope: str) -> None:
    source = ladder.kernel(toggles(rung), "e4m3", SMALL, instrumented=True)
    assert source.phases == phases
    assert cfg(source)["kPhaseClocks"] == "true"
    enumerators = {
        "Q load": "kQLoad",
        "K/V prefetch": "kKvPrefetch",
        "dequantization": "kDequantize",
        "QK^T": "kQK",
        "softmax": "kSoftmax",
        "P*V": "kPV",
        "combine": "kCombine",
        "store": "kStore",
    }
    checks = [f"static_assert({scope}{enumerators[p]} == {i});" for i, p in enumerate(source.phases)]
    checks.append(f"static_assert({scope}{'kCount' if rung == 'stage3b' else 'kPhaseCount'} == {len(checks)});")
    text = [source.source.partition("struct Cfg")[0], *checks, 'extern "C" __global__ void phases() {}']
    order = dataclasses.replace(source, entry="phases", source="\n".join(text))
    assert compile_kernel(order, ADA).resources.stack_bytes == 0


def test_defaults_and_rungs_are_what_the_task_documents() -> None:
    """The runner's environment variables alone give Stage 2."""
    assert CONFIG.toggle_variant({}).name == "stage2"
    assert CONFIG.defaults.format in ladder._FORMATS
    assert set(CONFIG.formats) == set(ladder._FORMATS)
