"""vLLM's backend over vLLM's interface, or over its recorded signatures if vLLM is not installed; CPU tensors."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast
from tests.serving import vllm_interface

#: A folder with the package vllm, of an unpacked wheel: its interface is used, and compared with the recorded one.
FILES = "GREENFAST_VLLM_FILES"
HEADS, KV_HEADS, DIM = 4, 2, 64
LENGTHS, NEW = (40, 7, 129), (40, 1, 33)


INSTALLED = importlib.util.find_spec("vllm") is not None


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if FILES in os.environ:
        vllm_interface.install_files(monkeypatch, Path(os.environ[FILES]))
    elif not INSTALLED:
        vllm_interface.install(monkeypatch)
    yield importlib.import_module("greenfast.vllm")
    sys.modules.pop("greenfast.vllm")


@dataclass(frozen=True)
class Spec:
    kv_quant_mode: Any
    num_kv_heads: int = KV_HEADS
    head_size: int = DIM
    head_size_v: int = DIM
    state_content_bytes: int | None = None
    sliding_window: int | None = None


def cache_of(module: Any, dtype: str, blocks: int, size: int, *, between: bool) -> Tensor:
    """Return vLLM's cache: logical (blocks, kv_heads, tokens, bytes).

    With the layout BLHNC layers alternate in memory.
    """
    spec = module.GreenfastBackend.customize_spec(Spec(SimpleNamespace(is_per_token_head=dtype.endswith("head"))))
    content = spec.state_content_bytes or 2 * DIM
    layers = 2 if between else 1
    raw = torch.randint(0, 256, (blocks, layers, KV_HEADS, size, content), dtype=torch.uint8)
    return raw[:, -1]


def metadata(size: int) -> vllm_interface.CommonAttentionMetadata:
    pages = [-(-n // size) for n in LENGTHS]
    order, table, slots = torch.randperm(sum(pages)), torch.zeros(3, max(pages), dtype=torch.int32), []
    for b, (count, length, new) in enumerate(zip(pages, LENGTHS, NEW, strict=True)):
        own = order[sum(pages[:b]) :][:count]
        table[b, :count] = own.int()
        at = torch.arange(length - new, length)
        slots.append(own[at // size] * size + at % size)
    starts = torch.tensor([0, *NEW]).cumsum(0).int()
    return vllm_interface.CommonAttentionMetadata(
        starts, starts, torch.tensor(LENGTHS, dtype=torch.int32), 3, sum(NEW), max(NEW), max(LENGTHS), table,
        torch.cat(slots),
    )  # fmt: skip


def built(module: Any, common: Any, window: int | None, capture: bool) -> Any:
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_num_attention_heads=lambda parallel: HEADS), parallel_config=None
    )
    made = module.GreenfastMetadataBuilder(Spec(None, sliding_window=window), ["0"], config, torch.device("cpu"))
    return made.build_for_cudagraph_capture(common) if capture else made.build(0, common)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_per_token_head"])
@pytest.mark.parametrize(("size", "between", "window", "capture"), [(16, False, None, False), (64, True, 20, True)])
def test_a_step_is_attention_over_appended_keys(
    backend: Any, dtype: str, size: int, between: bool, window: int | None, capture: bool
) -> None:
    """Keys in two steps, padding in the second; the bits of greenfast's own cache, and float64 within FP8's error."""
    torch.manual_seed(0)
    common, total = metadata(size), sum(NEW)
    memory = cache_of(backend, dtype, 20, size, between=between)
    before = memory.clone()
    layer = SimpleNamespace(_k_scale=torch.tensor(0.01), _v_scale=torch.tensor([0.02]))
    sinks = torch.randn(HEADS)
    impl = backend.GreenfastImpl(HEADS, DIM, 0.1, KV_HEADS, None, window, dtype, 30.0, sinks=sinks)
    q, k, v = (torch.randn(total + 5, n, DIM, dtype=torch.bfloat16) for n in (HEADS, KV_HEADS, KV_HEADS))
    past = [torch.randn(sum(LENGTHS) - total, KV_HEADS, DIM, dtype=torch.bfloat16) for _ in range(2)]
    old = torch.cat([
        common.block_table_tensor[b].long()[at // size] * size + at % size
        for b, at in ((b, torch.arange(n - m)) for b, (n, m) in enumerate(zip(LENGTHS, NEW, strict=True)))
    ])  # fmt: skip
    impl.do_kv_cache_update(layer, *past, memory, old)
    impl.do_kv_cache_update(layer, k, v, memory, common.slot_mapping)
    out = torch.full((total + 5, HEADS, DIM), 7.0, dtype=torch.bfloat16)
    attn = built(backend, common, window, capture)
    assert (attn.plan is None) == capture
    assert impl.forward(layer, q, k, v, memory, attn, out) is out
    assert bool((out[total:] == 7).all())  # rows of padding are not written

    token = dtype.endswith("head")
    of_keys, of_values = (None, None) if token else (layer._k_scale, layer._v_scale.view(()))
    own = greenfast.PagedKVCache(
        20, size, KV_HEADS, DIM, scales="token" if token else "head", k_scale=of_keys, v_scale=of_values
    ).layer()
    for x, y, slots in ((*past, old), (k[:total], v[:total], common.slot_mapping)):
        greenfast.append_kv(None, x, y, own.k_cache, own.v_cache, slots, k_scale=own.k_scale, v_scale=own.v_scale)
    left = -1 if window is None else window - 1
    wanted = greenfast.flash_attn_varlen_func(
        q[:total], own.k_cache, own.v_cache, attn.query_start_loc, None, max(NEW), max(LENGTHS),
        seqused_k=attn.seq_lens, block_table=attn.block_table, k_descale=own.k_scale, v_descale=own.v_scale,
        softmax_scale=0.1, causal=True, window_size=(left, 0), softcap=30.0, s_aux=sinks,
    )  # fmt: skip
    assert isinstance(wanted, Tensor)
    assert torch.equal(out[:total], wanted)
    exact = reference(q[:total], k[:total], v[:total], past, window, sinks)
    assert float((out[:total].double() - exact).norm() / exact.norm()) < 0.06  # docs/serving.md
    written = {int(x) // size for x in (*old, *common.slot_mapping)}
    unwritten = [b for b in range(20) if b not in written]
    assert torch.equal(memory[unwritten], before[unwritten])


def reference(q: Tensor, k: Tensor, v: Tensor, past: list[Tensor], window: int | None, sinks: Tensor) -> Tensor:
    result, at, old = [], 0, 0
    for length, new in zip(LENGTHS, NEW, strict=True):
        keys, values = (
            torch.cat([p[old : old + length - new], x[at : at + new]]).double().repeat_interleave(HEADS // KV_HEADS, 1)
            for p, x in zip(past, (k, v), strict=True)
        )
        scores = 30 * torch.tanh(torch.einsum("qhd,khd->hqk", q[at : at + new].double(), keys) * 0.1 / 30)
        rows, columns = torch.arange(length - new, length).unsqueeze(1), torch.arange(length)
        seen = (columns <= rows) & (columns > rows - (window or length))
        scores = scores.masked_fill(~seen, -torch.inf)
        sink = sinks.double().view(-1, 1, 1).expand(-1, new, 1)
        weights = torch.cat([scores, sink], 2).softmax(-1)[..., :-1]
        result.append(torch.einsum("hqk,khd->qhd", weights, values))
        at, old = at + new, old + length - new
    return torch.cat(result)


def test_it_says_what_it_takes(backend: Any) -> None:
    b = backend.GreenfastBackend
    assert b.get_name() == "GREENFAST"
    assert b.get_impl_cls()
    assert b.get_builder_cls()
    assert b.get_supported_kernel_block_sizes() == [16, 32, 64, 128]
    assert b.get_supported_head_sizes() == [64, 128, 256]
    assert [x.name for x in b.supported_kv_cache_layouts()] == ["LBHNC", "BLHNC"]
    assert b.supports_compute_capability(SimpleNamespace(major=9, minor=0))
    assert not b.supports_compute_capability(SimpleNamespace(major=10, minor=0))
    assert b.customize_spec(Spec(SimpleNamespace(is_per_token_head=True))).state_content_bytes == 2 * DIM + 8
    assert b.customize_spec(Spec(SimpleNamespace(is_per_token_head=False))).state_content_bytes is None


def test_what_it_cannot_compute_is_refused(backend: Any) -> None:
    with pytest.raises(NotImplementedError, match="kv_cache_dtype auto; allowed: fp8"):
        backend.GreenfastImpl(HEADS, DIM, 0.1)
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        backend.GreenfastImpl(HEADS, DIM, 0.1, alibi_slopes=[0.1], kv_cache_dtype="fp8")
    impl = backend.GreenfastImpl(HEADS, DIM, 0.1, KV_HEADS, kv_cache_dtype="fp8")
    tokens_first = cache_of(backend, "fp8", 4, 16, between=False).transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="that are dense are needed"):
        impl.pages(SimpleNamespace(), tokens_first)
    common = metadata(16)
    common.causal = False
    with pytest.raises(NotImplementedError, match="only causal"):
        built(backend, common, None, False)


def test_measuring_memory_needs_no_cache(backend: Any) -> None:
    impl = backend.GreenfastImpl(HEADS, DIM, 0.1, KV_HEADS, kv_cache_dtype="fp8")
    x = torch.ones(3, HEADS, DIM, dtype=torch.bfloat16)
    assert bool((impl.forward(SimpleNamespace(), x, x, x, torch.empty(0), None, x.clone()) == 0).all())
    impl.do_kv_cache_update(SimpleNamespace(), x, x, torch.empty(0), torch.zeros(3, dtype=torch.int64))


def test_vllm_finds_it_by_its_entry_point(backend: Any) -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\ngreenfast = "greenfast.vllm:register"\n' in text
    backend.register()
    backend.register()
    if FILES in os.environ or INSTALLED:
        path: str = backend.AttentionBackendEnum["GREENFAST"].get_path()
    else:
        path = str(vllm_interface.REGISTERED["GREENFAST"])
    assert path == "greenfast.vllm.GreenfastBackend"


def test_the_recorded_interface_is_vllms() -> None:
    folder = os.environ.get(FILES)
    if folder is None:
        pytest.skip(f"{FILES} names no folder with vLLM's Python files")
    for module, members in vllm_interface.MODULES.items():
        tree = ast.parse((Path(folder) / (module.replace(".", "/") + ".py")).read_text())
        if module.endswith("kv_cache_interface"):
            tree = ast.parse((Path(folder) / "vllm/v1/kv_cache_layout.py").read_text())
        theirs = {x.name: x for x in tree.body if isinstance(x, ast.ClassDef | ast.FunctionDef)}
        for member in members:
            node = theirs[member.__name__]
            if isinstance(node, ast.FunctionDef):
                assert parameters(node) == list(inspect.signature(member).parameters)
                continue
            methods = {x.name: x for x in node.body if isinstance(x, ast.FunctionDef)}
            fields = {ast.unparse(t) for x in node.body for t in _targets(x)}
            for name, value in vars(member).items():
                raw = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                if inspect.isfunction(raw) and raw.__module__ == vllm_interface.__name__ and raw.__doc__ is None:
                    if name in methods:
                        assert parameters(methods[name]) == list(inspect.signature(raw).parameters), name
                    else:
                        assert hasattr(member, "__dataclass_fields__") or name.startswith("_"), name
            named = set(getattr(member, "__members__", ())) | set(getattr(member, "__dataclass_fields__", ()))
            assert named <= fields


def parameters(node: ast.FunctionDef) -> list[str]:
    return [x.arg for x in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _targets(node: ast.stmt) -> list[ast.expr]:
    return [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
