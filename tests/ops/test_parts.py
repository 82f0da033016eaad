"""A sequence in two parts: the quantizing kernel on the emulator, the operators on the CPU, and the launches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import greenfast
from greenfast.kernels.attention.config import AttentionConfig, Sizes, Strides
from greenfast.kernels.quantize import qkv
from greenfast.ops import block as block_operators
from greenfast.ops import cuda, parts, reference, sdpa
from greenfast.ops.block import RowArguments
from greenfast.ops.parts import TwoParts
from greenfast.ops.quantized import QuantizedQKV
from greenfast.spec.problem import Array, Case, OutputSpec
from tests.emulator.kernels import run_source
from tests.ops.launched import PretendedGpu
from tests.ops.launched import gpu as gpu
from tests.ops.test_block import EPS, make_angles, make_weights
from tests.ops.test_host_caches import assert_launches_repeat
from tests.ops.test_qkv_quantizer import assert_close_codes, config_for, get_storage

block: Any = greenfast.attention_block
quantize: Any = greenfast.quantize
sdpa_of_joined: Any = greenfast.sdpa
QKV = tuple[Tensor, Tensor, Tensor]


def make_qkv(layout: str, rows: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, seed: int = 0) -> QKV:
    """Return Q, K and V (1, H, S, D) as contiguous tensors, as (B, S, H, D), or as views of one projection."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(1, rows, heads[0] + 2 * heads[1], head_dim, generator=generator).to(dtype)
    q, k, v = (x.transpose(1, 2) for x in torch.split(packed, [heads[0], heads[1], heads[1]], 2))
    if layout == "packed":
        return q, k, v
    if layout == "rows":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        return q, k, v
    return q.contiguous(), k.contiguous(), v.contiguous()


def parse(first: QKV, second: QKV, **options: Any) -> TwoParts:
    """Return the parts of a call as the operators take them."""
    query, key, value = ([x, y] for x, y in zip(first, second, strict=True))
    row = RowArguments(
        query, key, value, options.get("q_norm"), options.get("k_norm"), "rms",
        None, None, EPS, options.get("rope"), options.get("rope_dim"), options.get("rope_interleaved", False),
    )  # fmt: skip
    result = parts.parse_parts(row)
    assert result is not None
    return result


def run(two: TwoParts, config: AttentionConfig) -> dict[str, Array]:
    """Run the kernel on parts in the emulator."""
    prologue = two.build_prologue()
    tensors = [x for x in two.flatten()[:14] if x is not None]
    return run_kernel(two.first[:3], two.query_shape, two.key_shape, dict(zip(
        ("q", "k", "v", *prologue.buffers()), tensors, strict=True
    )), config, prologue)  # fmt: skip


def run_kernel(
    strided: QKV, query_shape: Any, key_shape: Any, inputs: dict[str, Tensor], config: AttentionConfig,
    prologue: qkv.Prologue,
) -> dict[str, Array]:  # fmt: skip
    sizes = Sizes(query_shape[0], query_shape[1], key_shape[1], query_shape[2], key_shape[2])
    strides = Strides(*(x.stride()[:3] for x in strided))
    shapes = cuda.get_quantized_shapes(query_shape, key_shape, config)
    outputs = {
        name: OutputSpec(shape, "uint8" if name.endswith("codes") else "float32")
        for name, shape in shapes.items()
        if name != "k_mean" or config.key_mean
    }
    case = Case({name: get_storage(x) for name, x in inputs.items()}, outputs)
    source = qkv.kernel(config, sizes, prologue=prologue)
    return run_source(source, qkv.launch(config, sizes, strides, prologue=prologue), case).outputs


def run_joined(two: TwoParts, config: AttentionConfig) -> dict[str, Array]:
    """Run the kernel on the joined tensors, with the norms of the first part and one pair of tables."""
    q, k, v = (torch.cat([x, y], 2) for x, y in zip(two.first[:3], two.second[:3], strict=True))
    options: Any = parts.get_options(two)
    tables: list[Any] = [None, None]
    if two.rope_dim:
        tables = [torch.cat(pair, -2) for pair in zip(options[0][4:6], options[1][4:6], strict=True)]
    whole = options[0]._replace(cos=tables[0], sin=tables[1])
    prologue = block_operators.build_prologue(whole, 1)
    inputs = [x for x in (q, k, v, *whole.tensors) if x is not None]
    return run_kernel((q, k, v), q.shape, k.shape, dict(zip(
        ("q", "k", "v", *prologue.buffers()), inputs, strict=True
    )), config, prologue)  # fmt: skip


def make_tables(rows: int, rope_dim: int, dtype: torch.dtype, twice: bool = False) -> tuple[Tensor, Tensor]:
    angles = make_angles(rope_dim, rows)[0]
    angles = angles.repeat_interleave(2, -1) if twice else angles
    return angles.cos().to(dtype), angles.sin().to(dtype)


#: Head dim, rows of both parts, heads of Q and K, layout, dtype, choices of the quantizer, tables, rotated columns,
#: interleaved.
JOINED: list[Any] = [
    (64, (37, 60), (2, 1), "packed", torch.bfloat16, dict(rotate=True, key_mean=True), "whole", 64, False),
    (64, (77, 80), (2, 2), "rows", torch.float16, dict(precision="int8"), "second", 64, True),
    (128, (129, 16), (1, 1), "heads", torch.bfloat16, dict(precision="int8_fine", rotate=True), "own", 128, True),
    (64, (0, 40), (2, 1), "rows", torch.bfloat16, dict(rotate=True, key_mean=True), "second", 64, True),
    (64, (40, 0), (2, 1), "rows", torch.bfloat16, dict(rotate=True, key_mean=True), "whole", 64, False),
    (72, (20, 21), (2, 1), "packed", torch.bfloat16, dict(rotate=True), "first", 20, False),
    (256, (23, 20), (1, 1), "rows", torch.float16, dict(rotate=True, key_mean=True), "whole", 256, False),
    (64, (33, 40), (2, 1), "heads", torch.bfloat16, dict(rotate=True, key_mean=True), "", 0, False),
]
SLOW_JOINED: list[Any] = [
    (256, (40, 33), (1, 1), "packed", torch.bfloat16, dict(precision="int8", key_mean=True), "own", 128, True),
    (128, (226, 60), (2, 1), "rows", torch.bfloat16, dict(rotate=True, key_mean=True), "second", 128, True),
    (64, (260, 70), (2, 2), "packed", torch.bfloat16, dict(precision="int8_fine", key_mean=True), "whole", 64, True),
    (80, (17, 130), (1, 1), "rows", torch.float16, dict(rotate=True), "own", 80, False),
]


@pytest.mark.parametrize(
    ("head_dim", "rows", "heads", "layout", "dtype", "choices", "tables", "rope_dim", "interleaved"),
    [*JOINED, *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW_JOINED)],
    ids=str,
)
def test_codes_of_parts_are_those_of_joined_tensors(
    head_dim: int, rows: tuple[int, int], heads: tuple[int, int], layout: str, dtype: torch.dtype,
    choices: dict[str, Any], tables: str, rope_dim: int, interleaved: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With equal weights for both parts all codes, scales and the mean have the bits of one tensor."""
    if rows[0] > 200:  # blocks take several tiles of K
        monkeypatch.setattr(qkv, "_MANY_TILES", 1)
    first, second = (make_qkv(layout, n, heads, head_dim, dtype, seed) for seed, n in enumerate(rows))
    weights = make_weights(head_dim)
    dtypes = {"own": torch.bfloat16, "first": torch.bfloat16}
    options: dict[str, Any] = dict(q_norm=weights[0], k_norm=weights[1], rope_interleaved=interleaved)
    if tables:
        cos, sin = make_tables(sum(rows), rope_dim, dtypes.get(tables, torch.float32), twice=tables == "whole")
        each: list[Any] = [(cos[: rows[0]], sin[: rows[0]]), (cos[rows[0] :], sin[rows[0] :])]
        own = {"own": each, "first": [each[0], None], "second": [None, each[1]], "whole": (cos, sin)}
        if tables == "whole" and not interleaved:  # each angle once
            own["whole"] = make_tables(sum(rows), rope_dim, torch.float32)
        options |= dict(rope=own[tables], rope_dim=rope_dim)
    two = parse(first, second, **options)
    assert two.own_tables == (tables in ("own", "first", "second"))
    config = config_for(head_dim, dtype, **choices)
    result, wanted = run(two, config), run_joined(two, config)
    assert result.keys() == wanted.keys()
    for name, x in wanted.items():
        assert np.array_equal(result[name], x), name
    if tables and 0 < rows[0] < 100 and heads[0] > 1:  # heads share the angles of a tile
        monkeypatch.setattr(qkv, "choose_sharing", lambda *_: qkv.Sharing(1, heads[1], heads[0], True))
        for name, x in run(two, config).items():
            assert np.array_equal(x, wanted[name]), name


@pytest.mark.parametrize(
    ("head_dim", "rows", "norm", "precision"),
    [(64, (37, 60), "bfloat16", "fp8"), (256, (23, 20), "float32", "int8"), (72, (20, 21), "bfloat16", "int8_fine")],
)
def test_norms_of_both_parts(head_dim: int, rows: tuple[int, int], norm: str, precision: str) -> None:
    """Each row has the weights of its part, and each part its own angles: the codes equal PyTorch's."""
    first, second = (make_qkv("packed", n, (2, 1), head_dim, torch.bfloat16, n) for n in rows)
    weights = [x.to(getattr(torch, norm)) for x in (*make_weights(head_dim), *(4 * y for y in make_weights(head_dim)))]
    rope_dim = 20 if head_dim == 72 else head_dim
    tables = [make_tables(n, rope_dim, torch.float32) for n in rows]
    two = parse(
        first, second, q_norm=weights[::2], k_norm=weights[1::2], rope=tables, rope_dim=rope_dim,
        rope_interleaved=head_dim == 64,
    )  # fmt: skip
    config = config_for(head_dim, torch.bfloat16, precision=precision, rotate=True, key_mean=True)
    result = run(two, config)
    expected: QuantizedQKV = reference.quantize(*two.transform(), config)
    assert_close_codes(result, expected)


# The operators


def make_call(rows: tuple[int, int] = (37, 150), heads: tuple[int, int] = (4, 2), head_dim: int = 64) -> dict[str, Any]:
    """Return the arguments of a call on text and image tokens (B, S, H, D)."""
    both = [make_qkv("rows", n, heads, head_dim, torch.bfloat16, n) for n in rows]
    text, image = make_weights(head_dim), [x * 3 for x in make_weights(head_dim)]
    query, key, value = ([x, y] for x, y in zip(*both, strict=True))
    return dict(
        query=query, key=key, value=value, q_norm=[text[0], image[0]], k_norm=[text[1], image[1]], norm_eps=EPS,
        rope=[None, make_tables(rows[1], head_dim, torch.float32)], rope_interleaved=True,
    )  # fmt: skip


def join_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``sdpa`` on the same rows, normalized, rotated and joined by PyTorch."""
    first, second = zip(*(call[name] for name in ("query", "key", "value")), strict=True)
    two = parse(first, second, **{name: call.get(name) for name in ("q_norm", "k_norm", "rope", "rope_interleaved")})
    return dict(zip(("query", "key", "value"), two.transform(), strict=True))


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize(
    "options",
    [
        {}, dict(is_causal=True), dict(is_causal=True, causal_alignment="lower_right", scale=0.3),
        dict(return_lse=True), dict(window=(40, 3)), dict(softcap=20.0, return_lse=True),
        dict(sinks=torch.tensor([0.1, 1.0, -2.0, 0.5])), dict(skip_threshold=1e-3),
        dict(attn_mask=torch.rand(1, 1, 187, 187, generator=torch.Generator().manual_seed(1)) < 0.5),
        dict(kv_lengths=torch.tensor([150])),
    ],
    ids=lambda x: " ".join(x) or "none",
)  # fmt: skip
def test_attention_is_that_of_joined_tensors(options: dict[str, Any], precision: str) -> None:
    call = make_call()
    results = block(**call, **options, precision=precision)
    wanted = sdpa_of_joined(**join_call(call), **options, enable_gqa=True, precision=precision)
    if not options.get("return_lse"):
        results, wanted = (results,), (wanted,)
    if not {*options} - {"is_causal", "causal_alignment", "scale"}:
        assert results[0].transpose(1, 2).is_contiguous(), "the memory order of query"
        assert torch.equal(results[0], wanted[0])
    for x, y in zip(results, wanted, strict=True):
        assert torch.allclose(x, y, atol=1e-2)


@pytest.mark.parametrize("rows", [(37, 150), (0, 90), (90, 0), (1, 1)])
@pytest.mark.parametrize("choices", [{}, dict(scales="head"), dict(precision="int8_fine", log_sum_exp=True)], ids=str)
def test_codes_are_those_of_joined_rows(rows: tuple[int, int], choices: dict[str, Any]) -> None:
    call = make_call(rows)
    results, wanted = quantize(**call, **choices), quantize(**join_call(call), **choices)
    for x, y in zip(results.tensors(), wanted.tensors(), strict=True):
        assert torch.equal(x, y)
    if choices.get("log_sum_exp"):
        assert torch.allclose(results.mean_scores, wanted.mean_scores)


def test_keys_of_other_lengths_without_rope() -> None:
    """The keys have another boundary than the queries."""
    call = make_call()
    keys = make_qkv("heads", 20, (4, 2), 64, torch.bfloat16)
    call |= dict(rope=None, key=[keys[1], call["key"][1]], value=[keys[2], call["value"][1]])
    out = block(**call)
    assert out.shape == (1, 4, 187, 64)
    assert torch.allclose(out, greenfast.sdpa(**join_call(call), enable_gqa=True), atol=1e-2)


def test_explain_names_the_pass_that_reads_both_parts() -> None:
    call = make_call()
    inputs = [call[name] for name in ("query", "key", "value")]
    explain: Any = greenfast.explain

    def reason(*tensors: Any, **options: Any) -> str:
        return str(explain(*(tensors or inputs), enable_gqa=True, target="sm_90a", **options).reason)

    names = {name: call[name] for name in ("q_norm", "rope")}
    end = "in the pass that quantizes Q, K and V; it reads both parts in place"
    assert reason(**names).endswith(f"; norm and RoPE {end}")
    assert reason(rope=call["rope"]).endswith(f"; RoPE {end}")
    assert reason().endswith("; one pass that quantizes Q, K and V reads both parts in place")
    copied = "; RoPE by PyTorch, before quantization; norms of the parts by PyTorch, then joined by a copy"
    assert reason(**names, kv_lengths=torch.tensor([9])).endswith(copied)
    fused = "in the pass that quantizes Q, K and V"
    assert reason(q_norm=torch.ones(4, 64)).endswith(f"; norm {fused}; parts joined by a copy")
    own = f"; RoPE {fused}; norms of the parts by PyTorch, then joined by a copy"
    assert reason(**names, norm="layer").endswith(own)
    needs_grad = [[x.detach().requires_grad_() for x in parts] for parts in inputs]
    assert reason(*needs_grad, **names).endswith(own)
    masked = reason(*needs_grad, **names, window=(9, 9))
    assert masked.endswith(
        "; RoPE by PyTorch, before quantization; norms of the parts by PyTorch, then joined by a copy"
    )
    assert reason(*([*x, x[0]] for x in inputs)).endswith("; parts joined by a copy")
    assert "parts" not in explain(*inputs, dropout_p=0.1, q_norm=True).reason, "PyTorch's own attention"


@pytest.mark.parametrize("name", ["block_parts", "quantize_parts"])
def test_operators_are_well_formed(name: str) -> None:
    call = make_call((20, 30))
    first, second = zip(*(call[x] for x in ("query", "key", "value")), strict=True)
    two = parse(first, second, **{x: call[x] for x in ("q_norm", "k_norm", "rope", "rope_interleaved")})
    choices = {"block_parts": ("fp8", 1, 0.1), "quantize_parts": ("int8", True, "block", True, True)}
    torch.library.opcheck(getattr(torch.ops.greenfast, name), (*two.flatten(), *choices[name]))
    leaf = two._replace(first=two.first._replace(query=two.first.query.clone().requires_grad_()))
    result = getattr(torch.ops.greenfast, name)(*leaf.flatten(), *choices[name])
    with pytest.raises(NotImplementedError, match=r"greenfast\..*: .* greenfast.attention_block has"):
        torch.autograd.backward((result if name == "block_parts" else result[3]).sum())


def test_traced_without_data_and_with_other_lengths() -> None:
    call = make_call()

    def attend(query: Any, key: Any, value: Any, rope: Any) -> Tensor:
        options = {name: x for name, x in call.items() if name in ("q_norm", "k_norm", "norm_eps", "rope_interleaved")}
        out: Tensor = block(query, key, value, rope=rope, **options)
        return out + greenfast.attention(quantize(query, key, value, rope=rope, **options))

    compiled: Any = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in ((37, 150), (20, 64)):
        other = make_call(rows)
        inputs = [other[name] for name in ("query", "key", "value", "rope")]
        assert torch.equal(compiled(*inputs), attend(*inputs))
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(2, 5, n, 64, dtype=torch.float16).transpose(1, 2) for n in (4, 2, 2))
        out = block([q, q], [k, k], [v, v], q_norm=True, k_norm=True)
        assert (out.shape, out.stride()) == ((2, 4, 10, 64), (10 * 256, 64, 256, 1))
    with FlopCounterMode(display=False) as counter:
        block(**call)
    assert counter.get_total_flops() == 2 * 2 * 4 * 187 * 187 * 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rope=[None, (torch.ones(149, 32),) * 2]), "cos and sin have 149 rows, query 150"),
        (dict(rope=(torch.ones(186, 32),) * 2), "cos and sin have 186 rows, query 187"),
        (dict(rope=[None, (torch.ones(150, 16),) * 2]), "cos and sin have 16 columns; 64 or 32 are needed"),
        (dict(q_norm=[torch.ones(64), torch.ones(32)]), r"q_norm: its shape is \(32,\)"),
        (dict(norm_eps=-1.0), "norm_eps: -1.0"),
        (dict(rope=None, rope_dim=64), "rope_dim: 64; without rope"),
        (dict(rope=[None, (torch.ones(150, 32), 1)]), "rope: for each part"),
    ],
)
def test_refusals_name_the_argument(change: dict[str, Any], message: str) -> None:
    for function in (block, quantize):
        with pytest.raises((TypeError, ValueError), match=message):
            function(**make_call() | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x._replace(second=x.second._replace(query=x.second.query.half())), "query's|dtype"),
        (lambda x: x._replace(second=x.second._replace(query=x.second.query[:, :2])), "query: its shapes are"),
        (lambda x: x._replace(second=x.second._replace(q_norm=None)), "q_norm: weights of both parts"),
        (lambda x: x._replace(second=x.second._replace(q_norm=x.second.q_norm.half())), "q_norm: weights"),
        (lambda x: x._replace(own_tables=False), "rope: the tables of the first part span both"),
    ],
)
def test_operators_refuse_parts_that_do_not_fit(change: Any, message: str) -> None:
    call = make_call((20, 30))
    first, second = zip(*(call[x] for x in ("query", "key", "value")), strict=True)
    two = parse(first, second, **{x: call[x] for x in ("q_norm", "k_norm", "rope", "rope_interleaved")})
    with pytest.raises((TypeError, ValueError), match=message):
        torch.ops.greenfast.block_parts(*change(two).flatten(), "fp8", 0, 0.1)


# The launches


def list_calls() -> list[partial[Any]]:
    """Return calls that differ in one argument."""
    call = make_call()
    weights = make_weights(64)
    changes: list[dict[str, Any]] = [
        {}, dict(is_causal=True), dict(rope=None), dict(rope=make_tables(187, 64, torch.float32)), dict(norm_eps=1e-5),
        dict(rope_interleaved=False), dict(q_norm=None, k_norm=None), dict(q_norm=True, k_norm=True),
        dict(q_norm=weights[0], k_norm=weights[1]), dict(precision="int8"),
        dict(rope=[make_tables(37, 64, torch.float32), None]),
        {name: [torch.nn.Parameter(x) for x in call[name]] for name in ("q_norm", "k_norm")},
        {name: call[name][::-1] for name in ("query", "key", "value")} | dict(rope=None),
    ]  # fmt: skip
    return [partial(block, **call | change) for change in changes]


def keep_tensors(gpu: PretendedGpu, calls: list[partial[Any]]) -> None:
    for call in calls:
        values: list[Any] = [*call.keywords.values()]
        while values:
            x = values.pop()
            if isinstance(x, list | tuple):
                values += x
            elif isinstance(x, Tensor):
                gpu.keep([x])


def test_parts_are_read_in_place_by_one_pass(gpu: PretendedGpu) -> None:
    every = list_calls()
    keep_tensors(gpu, every)
    with torch.no_grad():
        assert_launches_repeat(gpu, every, 3, seed=1)
        for call in every:
            call()
            quantizing, _ = gpu.launched()
            for name in ("query", "key", "value"):
                for x in call.keywords[name]:
                    assert x.data_ptr().to_bytes(8, "little") in quantizing.arguments, "the caller's own memory"


def test_a_repeated_call_is_not_parsed_again(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list_calls()
    keep_tensors(gpu, every)
    with torch.no_grad():
        for call in every:
            call()
        monkeypatch.setattr(sdpa, "parse_parts", None)
        for call in every:
            assert call().shape == (1, 4, 187, 64)
        with pytest.raises(TypeError, match="NoneType"):
            every[0](norm_eps=1e-4)


def test_calls_that_no_kernel_reads_are_joined(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "PARTS", None)
    call = make_call()
    weights = [torch.rand(n, 64) for n in (4, 2)]
    tables = call["rope"][1]
    for change in (
        dict(q_norm=weights[0], k_norm=weights[1]), {name: [None, call[name][1]] for name in ("q_norm", "k_norm")},
        dict(rope=[make_tables(37, 64, torch.bfloat16), tables]),
        {name: [*call[name], call[name][0]] for name in ("query", "key", "value", "q_norm", "k_norm")}
        | dict(rope=None),
    ):  # fmt: skip
        assert block(**call | change).shape[3] == 64
        assert len(gpu.launched()) >= 2


def test_copies_are_made_of_what_the_kernel_cannot_read(gpu: PretendedGpu) -> None:
    call = make_call()
    odd = torch.empty(1, 4, 150, 65, dtype=torch.bfloat16)[..., 1:].copy_(call["query"][1])
    call |= dict(query=[call["query"][0], odd])
    with torch.no_grad():
        block(**call)
    assert len(gpu.launched()) == 2
    assert odd.data_ptr() not in [x.data_ptr() for x in call["key"]]


def test_the_kernel_is_rendered_by_what_parts_have() -> None:
    call = make_call()
    first, second = zip(*(call[x] for x in ("query", "key", "value")), strict=True)
    two = parse(first, second, **{x: call[x] for x in ("q_norm", "k_norm", "rope", "rope_interleaved")})
    prologue = two.build_prologue()
    config = config_for(64, torch.bfloat16)
    sizes = Sizes(1, 4, 2, 187, 187)
    other = parse(first, second, q_norm=True, k_norm=True, rope=make_tables(187, 64, torch.float32))
    sources = [qkv.kernel(config, sizes, prologue=x) for x in (prologue, other.build_prologue())]
    assert "kOwnTables = true" in sources[0].source
    assert "kOwnTables = false" in sources[1].source
    moved = replace(prologue, second=replace(prologue.second, q_rows=100, kv_rows=100))  # type: ignore[type-var]
    assert qkv.kernel(config, sizes, prologue=moved) == sources[0], "the boundary is an argument"
