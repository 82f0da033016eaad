"""QuantizedQKV as users keep it: its fields agree; it is moved, saved, copied and mapped over like a tensor."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import greenfast
from greenfast import QuantizedQKV
from greenfast.ops import torch_ops
from greenfast.ops.arguments import check_once
from greenfast.ops.quantized import check_operator_codes


def made(**choices: Any) -> QuantizedQKV:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 40, 72), (2, 2, 300, 72), (2, 2, 300, 72))
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    result: QuantizedQKV = greenfast.quantize(q, k, v, **choices)
    return result


CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "int8"},
    {"subtract_key_mean": False},
    {"scales": "head"},
    {"value_scales": "channel"},
    {"value_scales": "head"},
    {"scales": "head", "value_scales": "channel"},
    {"log_sum_exp": True},
)
PLAIN = made()
LSE = made(log_sum_exp=True)


@pytest.mark.parametrize("scales", ["block", "head"])
def test_inputs_of_any_memory_order_have_the_same_codes(scales: Any) -> None:
    x = torch.randn(2, 40, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16().transpose(1, 2)
    codes, contiguous = (greenfast.quantize(y, y, y, scales=scales, rotate=False) for y in (x, x.contiguous()))
    assert torch.equal(greenfast.attention(codes), greenfast.attention(contiguous))


def changed(quantized: QuantizedQKV, **change: Any) -> QuantizedQKV:
    return QuantizedQKV(**{field.name: getattr(quantized, field.name) for field in fields(quantized)} | change)


def same(one: QuantizedQKV, other: QuantizedQKV) -> bool:
    mine, theirs = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return mine[1] == theirs[1] and all(torch.equal(x, y) for x, y in zip(mine[0], theirs[0], strict=True))


Q, K, V = PLAIN.query, PLAIN.key, PLAIN.value
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": None}, TypeError, r"query: a torch\.Tensor is needed, got NoneType"),
    ({"query": Q.view(torch.int8)}, TypeError, r"query: its dtype is torch\.int8; torch\.uint8 is needed"),
    ({"query_scale": PLAIN.query_scale.double()}, TypeError, r"query_scale: its dtype is torch\.float64"),
    ({"key_mean": PLAIN.key_mean.half()}, TypeError, r"key_mean: its dtype is torch\.float16"),  # type: ignore[union-attr]
    ({"key": K.to("meta")}, ValueError, "key: it is on meta, query on cpu"),
    ({"value_scale": PLAIN.value_scale.to("meta")}, ValueError, "value_scale: it is on meta"),
    ({"query": Q[0]}, ValueError, r"query: its shape is \(4, 40, 128\); \(batch, heads"),
    ({"query": Q[..., :64].contiguous()}, ValueError, r"query: its shape is .*64\); \(2, 4, 40, 128\) is needed"),
    ({"key": K[:, :, :299].contiguous()}, ValueError, r"key: its shape .* \(2, 2, 300, 128\) is needed"),
    ({"key": K[:1]}, ValueError, r"key: its shape"),
    ({"key": K[:, :0]}, ValueError, "key: it has 0 heads, query 4"),
    ({"query": torch.cat([Q, Q[:, :1]], 1)}, ValueError, "key: it has 2 heads, query 5"),
    ({"value": V[..., :288].contiguous()}, ValueError, r"value: its shape .* \(2, 2, 128, 304\) is needed"),
    ({"value": V.transpose(2, 3).contiguous()}, ValueError, "value: its shape"),
    ({"value": V[:, :1].contiguous()}, ValueError, "value: its shape"),
    ({"query_scale": PLAIN.query_scale[..., :2].contiguous()}, ValueError, r"query_scale: .* \(2, 4, 3\) or \(2, 4\)"),
    ({"query_scale": PLAIN.query_scale[..., 0].contiguous()}, ValueError, r"key_scale: .*; \(2, 2\) is needed"),
    ({"key_scale": PLAIN.key_scale[..., :2].contiguous()}, ValueError, r"key_scale: .* \(2, 2, 3\) is needed"),
    ({"value_scale": PLAIN.value_scale[..., :1].contiguous()}, ValueError, r"value_scale: .* or \(2, 2, 1, 128\)"),
    ({"key_mean": PLAIN.key_mean[..., :72].contiguous()}, ValueError, r"key_mean: .* \(2, 2, 128\) is needed"),  # type: ignore[index]
    (
        {"key": torch.empty_strided(K.shape, (300, 600, 1, 1200), dtype=torch.uint8)},
        ValueError,
        "key: it is not contig",
    ),
    ({"value_scale": torch.zeros(2, 3, 2).transpose(1, 2)}, ValueError, "value_scale: it is not contiguous"),
    ({"mean_scores": torch.zeros(2, 4, 41)}, ValueError, r"mean_scores: .* \(2, 4, 40\) is needed"),
    ({"mean_scores": torch.zeros(2, 4, 40).half()}, TypeError, r"mean_scores: its dtype is torch\.float16"),
    ({"precision": "fp4"}, ValueError, "precision: 'fp4'; allowed"),
    ({"head_dim": 64}, ValueError, r"query: its shape .*; \(2, 4, 40, 64\) is needed"),
    ({"head_dim": 70}, ValueError, "head_dim: 70; a multiple of 8 up to 256"),
    ({"head_dim": 512}, ValueError, "head_dim: 512"),
    ({"head_dim": 72.0}, TypeError, r"head_dim: 72\.0; a whole number"),
    ({"key_length": 301}, ValueError, r"key: its shape .* \(2, 2, 301, 128\) is needed"),
    ({"key_length": -1}, ValueError, "key_length: -1"),
    ({"key_length": "300"}, TypeError, "key_length: '300'; a whole number"),
    ({"dtype": torch.float32}, TypeError, r"dtype: torch\.float32; allowed are"),
    *(
        ({name: torch.zeros(9, 9)}, TypeError, rf"{name}: a tensor of torch\.float32 with 2 dimensions; ")
        for name in ("dtype", "key_length")
    ),
]


@pytest.mark.parametrize(("change", "error", "says"), WRONG, ids=[s for _, _, s in WRONG])
def test_fields_that_do_not_agree(change: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        changed(PLAIN, **change)


@pytest.mark.parametrize(
    ("change", "says"),
    [(c, s) for c, e, s in WRONG if not {"key_mean", "mean_scores"} & {*c} and e is ValueError],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else str(x)[:40],
)
@pytest.mark.parametrize("op", [torch_ops.ATTENTION, torch_ops.ATTENTION_LSE], ids=["attention", "attention_lse"])
def test_the_operators_check_too(op: Any, change: dict[str, Any], says: str) -> None:
    values = {field.name: getattr(PLAIN, field.name) for field in fields(PLAIN)} | change
    args = [values[field.name] for field in fields(PLAIN) if field.name not in ("key_mean", "mean_scores")]
    if any(x.is_meta for x in args[:6]):
        return  # the dispatcher takes the shapes alone
    with pytest.raises(ValueError, match=says):
        op(*args, 0, 1.0)


def test_the_check_per_kind_sees_every_difference() -> None:
    """A GPU's operator checks codes once per kind; every shape, stride, dtype and number is part of the kind."""
    args = tuple(getattr(PLAIN, f.name) for f in fields(PLAIN) if f.name not in ("key_mean", "mean_scores"))
    check_once(check_operator_codes, args[:6], args[6:])
    check_once(check_operator_codes, args[:6], args[6:])
    for change, error, says in WRONG:
        values = {f.name: getattr(PLAIN, f.name) for f in fields(PLAIN)} | change
        if {"key_mean", "mean_scores", "head_dim"} & {*change} or not isinstance(values["query"], Tensor):
            continue  # no operator takes the mean, and a schema converts its arguments to whole numbers
        wrong = tuple(values[f.name] for f in fields(PLAIN) if f.name not in ("key_mean", "mean_scores"))
        with pytest.raises(error, match=says):
            check_once(check_operator_codes, wrong[:6], wrong[6:])


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_what_quantize_gives_is_accepted(choices: dict[str, Any]) -> None:
    quantized = made(**choices)
    assert same(changed(quantized), quantized)
    assert greenfast.attention(quantized).shape == (2, 4, 40, 72)


def test_it_moves_to_a_device() -> None:
    moved = LSE.to("meta")
    assert moved.device == torch.device("meta")
    assert all(x.is_meta for x in pytree.tree_leaves(moved))
    assert (moved.head_dim, moved.key_length, moved.dtype) == (72, 300, torch.bfloat16)
    assert PLAIN.to("cpu") is PLAIN
    assert PLAIN.to(torch.device("cpu"), non_blocking=True) is PLAIN
    assert PLAIN.device == torch.device("cpu")
    for wrong in (torch.float16, None, PLAIN.query, True):
        with pytest.raises(TypeError, match="device: "):
            PLAIN.to(wrong)  # type: ignore[arg-type]


def test_its_size_and_what_it_shows() -> None:
    assert PLAIN.nbytes == sum(x.numel() * x.element_size() for x in PLAIN.tensors())
    assert LSE.nbytes == PLAIN.nbytes + 4 * 2 * 4 * 40
    assert "mean_scores=(2, 4, 40)" in repr(LSE)
    shown = repr(PLAIN)
    assert "query=(2, 4, 40, 128)" in shown
    assert "precision='fp8'" in shown
    assert "key_mean=(2, 2, 128)" in shown
    assert "tensor(" not in shown
    assert len(shown) < 350
    assert "key_mean" not in repr(made(subtract_key_mean=False))


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_it_is_saved_and_copied(choices: dict[str, Any]) -> None:
    quantized = made(**choices)
    file = io.BytesIO()
    torch.save({"codes": quantized}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["codes"]
    for other in (loaded, copy.deepcopy(quantized), copy.copy(quantized), pickle.loads(pickle.dumps(quantized))):
        assert type(other) is QuantizedQKV
        assert same(other, quantized)
        assert other is not quantized
    assert copy.deepcopy(quantized).query.data_ptr() != quantized.query.data_ptr()
    assert copy.copy(quantized).query is quantized.query
    assert torch.equal(greenfast.attention(loaded), greenfast.attention(quantized))


def test_codes_of_tensors_with_gradients_are_saved_without_history() -> None:
    """The scales have autograd history; a copy of their values has none."""
    q, k, v = (torch.randn(1, 2, 40, 64).bfloat16().requires_grad_() for _ in range(3))
    quantized = greenfast.quantize(q, k, v, log_sum_exp=True)
    assert quantized.query_scale.requires_grad
    file = io.BytesIO()
    torch.save(quantized, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for other in (loaded, copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized))):
        assert same(other, quantized)
        assert not any(x.requires_grad for x in pytree.tree_leaves(other))
    with pytest.raises(NotImplementedError, match=r"greenfast\.quantize"):
        torch.autograd.backward(copy.copy(quantized).query_scale.sum())


def test_a_file_whose_fields_do_not_agree_is_refused() -> None:
    wrong = pytree.tree_map(lambda x: x[:1], PLAIN)
    object.__setattr__(wrong, "key", PLAIN.key)
    file = io.BytesIO()
    torch.save(wrong, file)
    file.seek(0)
    with pytest.raises(ValueError, match="key: its shape"):
        torch.load(file, weights_only=True)


def test_it_is_a_pytree() -> None:
    leaves, spec = pytree.tree_flatten({"kept": [PLAIN]})
    assert len(leaves) == 7
    again = pytree.tree_unflatten(leaves, spec)["kept"][0]
    assert same(again, PLAIN)
    assert len(pytree.tree_leaves(made(subtract_key_mean=False))) == 6
    assert len(pytree.tree_leaves(LSE)) == 8
    assert same(pytree.tree_map(torch.clone, LSE), LSE)
    shapes = pytree.tree_map(lambda x: x.shape, PLAIN)
    assert shapes.query == (2, 4, 40, 128)
    assert "query=Size" in repr(shapes)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(PLAIN)[0]]
    assert sorted(paths)[-1] == ".value_scale"
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_results_of_tree_map_are_checked_before_kernels_read_them() -> None:
    again = pytree.tree_map(torch.clone, PLAIN)
    assert torch.equal(greenfast.attention(again), greenfast.attention(PLAIN))
    cut = pytree.tree_map(lambda x: x[:, :1], PLAIN)
    with pytest.raises(ValueError, match=r"_scale: its shape|not contiguous"):
        greenfast.attention(cut)


def test_through_compile_and_export() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(greenfast.attention, fullgraph=True, backend="eager")
    assert torch.equal(compiled(PLAIN), greenfast.attention(PLAIN))

    class Attention(torch.nn.Module):
        def forward(self, quantized: QuantizedQKV) -> Tensor:
            return greenfast.attention(quantized, is_causal=True)

    program = torch.export.export(Attention(), (PLAIN,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    assert torch.equal(loaded(PLAIN), greenfast.attention(PLAIN, is_causal=True))


def test_it_compares_by_identity() -> None:
    assert PLAIN == PLAIN
    assert made() != PLAIN
    assert len({PLAIN, PLAIN}) == 1
