"""The launches of attention with masks on the emulator: the quantizer, the schedule and attention, against the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from greenfast.kernels.attention import heuristics, schedule
from greenfast.kernels.attention.config import Mask, MaskLists, Sizes
from greenfast.kernels.attention.heuristics import tiling
from greenfast.ops import cuda, masked
from greenfast.ops.block_mask import BlockMask
from greenfast.ops.launch_plans import LaunchPlan
from greenfast.ops.quantized import build_config
from greenfast.ops.reference import add_mean_scores, compute_mean_scores, quantize
from greenfast.spec.arch import Target
from greenfast.spec.problem import Case, OutputSpec
from tests.emulator.kernels import run_source

#: Multiprocessors of the pretended GPU: few, so that a block takes several work tiles.
MULTIPROCESSORS = 2


def run_plan(query: Tensor, key: Tensor, value: Tensor, inputs: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    """Run the launches of ``masked`` on the emulator, and return all of their buffers."""
    config = options.pop("config")
    lists = None
    if config.listed:
        lists = MaskLists(inputs["counts"].shape[0], inputs["counts"].shape[1], inputs["bits"].shape[0])
    plan = cuda._build_masked_plan(
        query, key, value, config, options["window"], options["shift"], lists, query.shape[3] ** -0.5, options["skip"],
        lengths="kv_lengths" in inputs, gathered="kv_rows" in inputs,
    )  # fmt: skip
    shapes = cuda.get_quantized_shapes(query.shape, key.shape, config)
    specs = {name: (shape, "uint8" if name.endswith("codes") else "float32") for name, shape in shapes.items()}
    tiles = query.shape[0] * -(-query.shape[2] // 64)
    specs |= {"tiles": ((tiles, schedule.TILE_WORDS), "int32"), "tile_count": ((2,), "int32")}
    row_shape = (*query.shape[:3], 2) if config.score_max else query.shape[:3]
    specs |= {"out": (query.shape, "uint16"), "lse": (row_shape, "float32")}
    found: dict[str, Any] = {"q": as_numpy(query), "k": as_numpy(key), "v": as_numpy(value)}
    return run_steps(plan, found | {name: x.numpy() for name, x in inputs.items()}, specs)


def run_steps(plan: LaunchPlan, found: dict[str, Any], specs: dict[str, Any]) -> dict[str, Any]:
    """Run the launches of a plan, and return all of their buffers. found: the inputs. specs: of the others."""
    for step in plan.steps:
        to_plan = {**{name: name for name in (*specs, *found)}, **step.names}
        known = {name: found[of] for name, of in to_plan.items() if of in found and of not in step.names}
        known |= {name: found[of] for name, of in step.names.items() if of in found}
        missing = {of for of in step.buffers() if of not in found}
        case = Case(known, {name: OutputSpec(*specs[name]) for name in missing})
        found |= run_source(step.source, step.launch, case).outputs
    return found


def as_numpy(x: Tensor) -> np.ndarray[Any, Any]:
    return x.view(torch.int16).numpy().view(np.uint16)


def make_tiles(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return booleans with empty, full and partial tiles, and some rows without any key."""
    mask = torch.rand(*shape, generator=generator) > 0.4
    mask[..., :128, 128:256] = True
    mask[..., 128:, :128] = False
    mask[..., 40:128, 256:] = False
    mask[..., 5:9, :] = False
    mask[..., 3, :-1] = False
    return mask


def make_skippable(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q and K with the largest weights at the first key, and near the query's place from the end."""
    generator = torch.Generator().manual_seed(1)
    places = torch.randn(-(-max(q.shape[2], k.shape[2]) // 64), q.shape[3], generator=generator)
    of_rows = 0.4 * places.repeat_interleave(64, 0)
    q = 1.0 + q.float() / 5 + of_rows[-q.shape[2] :]
    k = k.float() / 5 + of_rows[-k.shape[2] :]
    k[:, :, 0] += 5 * k.shape[3] ** -0.5
    return q.bfloat16(), k.bfloat16()


#: Head dim, precision, the shapes (batch, heads, kv_heads, q_len, kv_len), and what else differs.
CASES: dict[str, tuple[int, str, tuple[int, ...], dict[str, Any]]] = {
    "lengths, causal": (64, "fp8", (3, 1, 1, 140, 200), {"lengths": [200, 131, 0], "window": (-1, 0), "lse": True}),
    "chosen keys": (128, "int8", (2, 1, 1, 70, 200), {"chosen": True, "lse": True}),
    "window, lower right": (64, "fp8", (1, 2, 2, 150, 330), {"window": (90, 10), "alignment": 2, "lengths": [300]}),
    "softcap and sinks": (64, "int8_fine", (2, 2, 1, 70, 140), {"softcap": 3.0, "sinks": (-1.0, 60.0), "lse": True}),
    "tiles": (64, "fp8", (2, 2, 1, 140, 330), {"mask": (2, 2), "lse": True}),
    "tiles for all, head dim 128": (128, "int8_fine", (2, 1, 1, 80, 300), {"mask": (1, 1)}),
    "tiles of a batch, head dim 256": (256, "fp8", (2, 2, 1, 130, 300), {"mask": (2, 1), "lse": True}),
    "tiles of heads": (64, "int8", (2, 2, 2, 64, 270), {"mask": (1, 2), "sinks": (0.5, 1.0)}),
    "skip": (128, "int8", (1, 2, 1, 150, 520), {"skip": 0.2, "window": (-1, 0), "alignment": 2, "lse": True}),
    "skip, no mask": (64, "fp8", (1, 2, 2, 200, 650), {"skip": 0.3, "lse": True}),
    "skip, four warpgroups": (64, "int8", (1, 2, 2, 512, 390), {"skip": 0.2}),
    "skip in a window": (256, "fp8", (1, 1, 1, 130, 520), {"skip": 0.2, "window": (455, 10), "alignment": 2}),
    "skip, one level, lengths": (256, "int8", (2, 1, 1, 70, 520), {"skip": 0.1, "lengths": [520, 300], "lse": True}),
    "skip in tiles": (128, "int8_fine", (2, 2, 1, 200, 650), {"skip": 0.2, "mask": (2, 2), "lse": True}),
    "skip, softcap and sinks": (128, "fp8", (1, 2, 2, 100, 400), {"skip": 0.4, "softcap": 20.0, "sinks": (0.0, 9.0)}),
}  # fmt: skip
QUICK = ("lengths, causal", "chosen keys", "tiles", "tiles for all, head dim 128", "skip")


@pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_attention_with_masks_agrees_with_the_cpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few numbers are not finite: in padding they must not be seen, elsewhere by the rows that attend to them."""
    head_dim, precision, (batch, heads, kv_heads, q_len, kv_len), options = CASES[case]
    monkeypatch.setattr(cuda, "get_target", lambda device: Target("sm_90a", MULTIPROCESSORS))
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = (
        (torch.randn(batch, count, rows, head_dim, generator=generator) * 2 + 0.5).bfloat16()
        for count, rows in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    )
    left, right = window = options.get("window", (-1, -1))
    alignment, softcap, sinks = options.get("alignment", 1), options.get("softcap", 0.0), options.get("sinks")
    skip = options.get("skip", 0.0)
    if skip:
        q, k = make_skippable(q, k)
    inputs: dict[str, Tensor] = {}
    if "lengths" in options:
        inputs["kv_lengths"] = torch.tensor(options["lengths"], dtype=torch.int32)
        k[:, :, max(options["lengths"][:2]) :] = float("nan")
        v[1:, :, options["lengths"][min(1, batch - 1)] :] = float("inf")
    if options.get("chosen"):
        kept = torch.rand(batch, kv_len, generator=generator) > 0.5
        spec = masked._read_mask(kept[:, None, None], 0, q_len, kv_len, batch)
        assert spec.kv_lengths is not None
        assert spec.kv_rows is not None
        inputs |= {"kv_lengths": spec.kv_lengths, "kv_rows": spec.kv_rows}
        k, v = (x.masked_fill(kept.logical_not()[:, None, :, None], float("nan")) for x in (k, v))
    if "mask" in options:
        dense = make_tiles((*options["mask"], q_len, kv_len), generator)
        if skip:
            dense[..., 0] |= dense.any(-1)
        lists = BlockMask.from_bool(dense)
        inputs |= {"counts": lists.counts, "entries": lists.entries, "bits": lists.bits}
        q[0, 0, 50, 0], k[0, 0, -4, 0], v[-1, 0, -1, 0] = float("nan"), float("inf"), float("nan")
    if sinks:
        inputs["sinks"] = torch.tensor(sinks)
    lse = options.get("lse", False)
    config = replace(
        build_config(head_dim, torch.bfloat16, precision, key_mean=softcap == 0.0 and not sinks),
        mask=Mask.NONE if right < 0 else Mask.LOWER_RIGHT, log_sum_exp=lse, fuse_q_quant=True, scheduled=True,
        window=left >= 0, sinks=bool(sinks), softcap=softcap, listed="mask" in options,
        skip=skip > 0.0,
    )  # fmt: skip
    shift = kv_len - q_len if alignment == 2 else 0
    found = run_plan(q, k, v, inputs, config=config, window=window, shift=shift, skip=skip)
    names = ("kv_lengths", "kv_rows", "sinks", "counts", "entries", "bits")
    arguments = (q, k, v, *[inputs.get(name) for name in names], precision, alignment, left, right, softcap)
    wanted, wanted_lse = masked.MASKED_LSE(*arguments, skip, head_dim**-0.5)
    out = torch.from_numpy(found["out"].view(np.int16)).view(torch.bfloat16)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert wanted.isnan().any() == ("mask" in options)
    finite = ~wanted.isnan()
    assert (out.double() - wanted.double())[finite].norm() < 0.03 * wanted.double()[finite].norm()
    if skip:
        dense = masked.MASKED(*arguments, 0.0, head_dim**-0.5)
        assert (dense.double() - wanted.double())[finite].norm() > 0.06 * wanted.double()[finite].norm()
    if lse:
        sums = torch.from_numpy(found["lse"])
        if config.key_mean:
            scores = compute_mean_scores(q, torch.from_numpy(found["k_mean"]), rotated=True)
            sums = add_mean_scores(sums, scores, 2, head_dim**-0.5)
        assert torch.equal(sums.isnan(), wanted_lse.isnan())
        assert torch.equal(sums == -np.inf, wanted_lse == -np.inf)
        assert (sums - wanted_lse)[wanted_lse.isfinite()].abs().max() < 0.05


@pytest.mark.parametrize(("head_dim", "precision"), [(64, "fp8"), (128, "int8")])
def test_the_largest_score_of_a_row(head_dim: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the same log-sum-exp. Later tiles of a row have smaller scores, and rows of the second sequence no key."""
    monkeypatch.setattr(cuda, "get_target", lambda device: Target("sm_90a", MULTIPROCESSORS))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, n, head_dim, generator=generator).bfloat16() for n in (70, 400, 400))
    k[:, :, 200:] *= 0.1
    config = replace(
        build_config(head_dim, torch.bfloat16, precision), mask=Mask.NONE, log_sum_exp=True, fuse_q_quant=True,
        scheduled=True,
    )  # fmt: skip
    inputs = {"kv_lengths": torch.tensor([390, 0], dtype=torch.int32)}
    options: dict[str, Any] = {"window": (-1, -1), "shift": 0, "skip": 0.0}
    plain = run_plan(q, k, v, inputs, config=config, **options)
    found = run_plan(q, k, v, inputs, config=replace(config, score_max=True), **options)
    assert np.array_equal(found["out"], plain["out"])
    assert np.array_equal(found["lse"][..., 0], plain["lse"])
    largest = torch.from_numpy(found["lse"][..., 1])
    scores = q[:1].float() @ k[:1, :, :390].float().mT * head_dim**-0.5
    # The mean of the keys is not in either number.
    weights = torch.exp(largest[:1] - torch.from_numpy(plain["lse"][:1])), torch.softmax(scores, -1).amax(-1)
    torch.testing.assert_close(*weights, rtol=0.3, atol=0.0)
    assert (torch.log(weights[0] / weights[1]).mean().abs()) < 0.03
    assert (largest[1] == -np.inf).all()


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sequences have other tiles than one, unless the tiles are fixed."""
    monkeypatch.setattr(cuda, "get_target", lambda device: Target("sm_90a", MULTIPROCESSORS))
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(4, 1, rows, 64, generator=generator).bfloat16() for rows in (200, 300, 300))
    config = replace(
        build_config(64, torch.bfloat16, "fp8", key_mean=True), mask=Mask.LOWER_RIGHT, fuse_q_quant=True, scheduled=True
    )
    lengths = torch.tensor([150, 300, 0, 220], dtype=torch.int32)

    def attend(some: slice, keys: int) -> Any:
        options: dict[str, Any] = {"config": config, "window": (-1, 0), "shift": 0, "skip": 0.0}
        inputs = {"kv_lengths": lengths[some]}
        return run_plan(q[some], k[some, :, :keys], v[some, :, :keys], inputs, **options)["out"]

    few, many = Sizes(1, 1, 1, 200, 300), Sizes(4, 1, 1, 200, 300)
    assert tiling(config, few, MULTIPROCESSORS)[0] != tiling(config, many, MULTIPROCESSORS)[0]
    monkeypatch.setattr(heuristics, "BATCH_INVARIANT", True)
    batch = attend(slice(None), 300)
    assert np.array_equal(attend(slice(3, 4), 220), batch[3:])  # padded by other lengths of the batch


@pytest.mark.parametrize(
    ("precision", "head_dim", "options"),
    [
        ("fp8", 64, {"window": (70, 0), "alignment": 2, "lengths": [300, 90]}),
        pytest.param("int8_fine", 128, {"mask": (2, 1)}, marks=pytest.mark.slow),
        pytest.param("int8", 64, {"mask": (1, 2), "sinks": (0.5, 30.0), "softcap": 4.0}, marks=pytest.mark.slow),
    ],
)
def test_attention_on_codes_with_masks_agrees_with_the_cpu(
    precision: Any, head_dim: int, options: dict[str, Any]
) -> None:
    sizes = Sizes(2, 2, 1, 150, 300)
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v = (
        torch.randn(2, count, rows, head_dim, generator=generator).bfloat16()
        for count, rows in ((2, 150), (1, 300), (1, 300))
    )
    left, right = options.get("window", (-1, -1))
    alignment, softcap, sinks = options.get("alignment", 1), options.get("softcap", 0.0), options.get("sinks")
    config = build_config(head_dim, torch.bfloat16, precision, key_mean=not sinks)
    codes = quantize(q, k, v, config)
    inputs: dict[str, Tensor] = {}
    lists = None
    if "lengths" in options:
        inputs["kv_lengths"] = torch.tensor(options["lengths"], dtype=torch.int32)
    if "mask" in options:
        mask = BlockMask.from_bool(make_tiles((*options["mask"], 150, 300), generator))
        inputs |= {"counts": mask.counts, "entries": mask.entries, "bits": mask.bits}
        lists = MaskLists(options["mask"][0], options["mask"][1], mask.bits.shape[0])
    if sinks:
        inputs["sinks"] = torch.tensor(sinks)
    config = replace(
        config, mask=Mask.NONE if right < 0 else Mask.LOWER_RIGHT, log_sum_exp=True, scheduled=True, window=left >= 0,
        sinks=bool(sinks), softcap=softcap, listed=lists is not None, key_mean=False,
    )  # fmt: skip
    plan = cuda._build_codes_plan(
        config, sizes, (left, right), 150 if alignment == 2 else 0, lists, 0.1, 0.0, Target("sm_90a", MULTIPROCESSORS),
        0, lengths="kv_lengths" in inputs,
    )  # fmt: skip
    names = ("q_codes", "k_codes", "v_codes", "q_scale", "k_scale", "v_scale")
    found = {name: x.numpy() for name, x in zip(names, codes.tensors(), strict=False)}
    specs: dict[str, Any] = {"tiles": ((6, schedule.TILE_WORDS), "int32"), "tile_count": ((2,), "int32")}
    specs |= {"out": (q.shape, "uint16"), "lse": (q.shape[:3], "float32")}
    found = run_steps(plan, found | {name: x.numpy() for name, x in inputs.items()}, specs)
    given = [inputs.get(name) for name in ("kv_lengths", "sinks", "counts", "entries", "bits")]
    wanted, wanted_lse = torch.ops.greenfast.masked_codes_lse(
        *codes.tensors()[:6],
        *given,
        precision,
        head_dim,
        300,
        torch.bfloat16,
        alignment,
        left,
        right,
        softcap,
        0.0,
        0.1,
    )
    out, lse = torch.from_numpy(found["out"].view(np.int16)).view(torch.bfloat16), torch.from_numpy(found["lse"])
    assert float((out.double() - wanted.double()).norm()) < 0.03 * float(wanted.double().norm())
    assert torch.equal(lse == -np.inf, wanted_lse == -np.inf)
    assert (lse - wanted_lse)[wanted_lse.isfinite()].abs().max() < 0.05
