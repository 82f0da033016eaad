"""Norm and RoPE before quantization on the CPU: values by PyTorch and transformers, gradients, traces, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers.models.glm import modeling_glm
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.phi import modeling_phi

import greenfast
from greenfast.ops import block as block_operators
from greenfast.ops import sdpa
from greenfast.ops.quantized import QuantizedQKV
from tests.ops.launched import PretendedGpu
from tests.ops.launched import gpu as gpu
from tests.ops.test_host_caches import assert_launches_repeat

block: Any = greenfast.attention_block
quantize: Any = greenfast.quantize
COMPILE: Any = torch.compile
EPS = 1e-5
ROTATE_HALVES: Any = modeling_phi.apply_rotary_pos_emb
ROTATE_BY_ANGLES: Any = modeling_gpt_oss.apply_rotary_pos_emb
ROTATE_INTERLEAVED: Any = modeling_glm.apply_rotary_pos_emb


def tensors(
    head_dim: int, heads: tuple[int, int] = (4, 2), rows: int = 150, dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0, shift: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(head_dim)
    return [
        (torch.randn(2, rows, n, head_dim, generator=generator) * scale + shift).to(dtype).transpose(1, 2)
        for n in (heads[0], heads[1], heads[1])
    ]


def make_weights(head_dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(head_dim + 1)
    return [(torch.rand(head_dim, generator=generator) + 0.5).to(dtype) for _ in range(2)]


def make_angles(rope_dim: int, rows: int = 150, batch: int = 1) -> Tensor:
    """Return angles of a rotation, (batch, rows, rope_dim / 2), as RoPE has them."""
    frequencies = 10000.0 ** -torch.linspace(0.0, 1.0, rope_dim // 2)
    return (torch.arange(rows).view(1, -1, 1) + 7 * torch.arange(batch).view(-1, 1, 1)) * frequencies


def widen(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) else x


def normalize(x: Tensor, weight: Tensor | None) -> Tensor:
    """Normalize by PyTorch's RMSNorm: over the head dim, or with weights (H, D) over all heads."""
    if weight is None or weight.dim() == 1:
        return rms_norm(x, (x.shape[3],), weight, EPS)
    return rms_norm(x.transpose(1, 2), weight.shape, weight, EPS).transpose(1, 2)


def exact_rows(
    q: Tensor, k: Tensor, weights: list[Tensor] | None, angles: Tensor | None, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Return normalized and rotated Q and K in float64, by PyTorch and by transformers."""
    q, k = widen(q), widen(k)
    if weights is not None:
        q, k = (normalize(x, widen(w)) for x, w in zip((q, k), weights, strict=True))
    if angles is None:
        return q, k
    twice = torch.cat([angles.double(), angles.double()], -1)
    width = twice.shape[-1]
    if interleaved:
        return ROTATE_INTERLEAVED(q, k, twice.cos(), twice.sin())  # type: ignore[no-any-return]
    turned = ROTATE_HALVES(q[..., :width], k[..., :width], twice.cos(), twice.sin())
    q, k = (torch.cat([x, y[..., width:]], -1) for x, y in zip(turned, (q, k), strict=True))
    return q, k


def exact(
    q: Tensor, k: Tensor, v: Tensor, weights: Any, angles: Any, causal: bool = True, interleaved: bool = False
) -> Tensor:
    """Return norm, RoPE and attention in float64."""
    a, b = exact_rows(q, k, weights, angles, interleaved)
    return scaled_dot_product_attention(a, b, v.double(), is_causal=causal, enable_gqa=True)


def measure_error(x: Tensor, wanted: Tensor) -> float:
    return float(((x.double() - wanted).norm() / wanted.norm()).detach())


#: Head dim, rotated columns, interleaved.
ROTATIONS = [(64, 64, False), (128, 128, False), (128, 128, True), (256, 256, False), (256, 128, True), (64, 32, False),
             (40, 40, False), (72, 72, False), (72, 36, True), (80, 20, False)]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "rope_dim", "interleaved"), ROTATIONS)
@pytest.mark.parametrize("repeated", [False, True], ids=["angles", "repeated angles"])
def test_codes_are_those_of_rows_of_torch_and_transformers(
    head_dim: int, rope_dim: int, interleaved: bool, repeated: bool
) -> None:
    """Codes without Hadamard rotation and mean are Q and K themselves: E4M3 has 3 bits after the first."""
    q, k, v = tensors(head_dim)
    weights, angles = make_weights(head_dim, torch.bfloat16), make_angles(rope_dim)
    table = angles
    if repeated:
        table = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    options = dict(
        q_norm=weights[0], k_norm=weights[1], norm_eps=EPS, rope=(table.cos(), table.sin()), rope_dim=rope_dim,
        rope_interleaved=interleaved,
    )  # fmt: skip
    codes: QuantizedQKV = quantize(q, k, v, **options, subtract_key_mean=False, rotate=False)
    wanted = exact_rows(q, k, weights, angles, interleaved)
    for x, scale, rows, size in (
        (codes.query, codes.query_scale, wanted[0], 16), (codes.key, codes.key_scale, wanted[1], 128),
    ):  # fmt: skip
        each = scale.repeat_interleave(size, 2)[:, :, :150, None]
        found = (x.view(torch.float8_e4m3fn).double() * each)[..., :head_dim]
        limit = rows.abs() * (2**-4 + 2**-7) + each * 2**-9 + rows.abs().amax() * 2**-9
        assert ((found - rows).abs() <= limit).all()


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize("given", ["norm", "norm without weights", "rope", "both"])
def test_equals_separate_steps(precision: str, given: str) -> None:
    """The codes equal codes of rows that PyTorch has normalized and rotated in 16 bits."""
    q, k, v = tensors(64, dtype=torch.float16)
    weights = make_weights(64, torch.float16)
    angles = make_angles(64).squeeze(0)
    options: dict[str, Any] = {}
    a, b = q, k
    if given != "rope":
        plain = given == "norm without weights"
        options |= dict(q_norm=True if plain else weights[0], k_norm=True if plain else weights[1], norm_eps=EPS)
        a, b = (
            rms_norm(x.float(), (64,), None if plain else w.float(), EPS).half()
            for x, w in zip((a, b), weights, strict=True)
        )
    if given in ("rope", "both"):
        options["rope"] = (angles.cos(), angles.sin())
        turned = ROTATE_BY_ANGLES(a.float(), b.float(), angles.cos()[None], angles.sin()[None])
        a, b = (x.half() for x in turned)
    fused = quantize(q, k, v, **options, precision=precision, log_sum_exp=True)
    separate = quantize(a, b, v, precision=precision, log_sum_exp=True)
    for x, y in zip(fused.tensors(), separate.tensors(), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(fused.mean_scores, separate.mean_scores)
    assert torch.equal(block(q, k, v, **options, precision=precision), greenfast.attention(separate))


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_fine"])
@pytest.mark.parametrize(
    ("head_dim", "heads"),
    [(64, (4, 1)), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((128, (2, 2)), (72, (4, 2)), (256, (2, 1))))],
)
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e-3, 0.0), (1.0, 4.0), (1e15, 0.0)])
def test_attention_is_near_float64(
    precision: str, head_dim: int, heads: tuple[int, int], scale: float, shift: float
) -> None:
    q, k, v = tensors(head_dim, heads, scale=scale, shift=shift)
    v = tensors(head_dim, heads)[2]
    weights, angles = make_weights(head_dim), make_angles(head_dim, batch=2)
    found = block(q, k, v, True, precision=precision, q_norm=weights[0], k_norm=weights[1], norm_eps=EPS,
                  rope=(angles.cos(), angles.sin()))  # fmt: skip
    assert found.stride() == q.stride(), "the memory order of query"
    assert measure_error(found, exact(q, k, v, weights, angles)) < 0.06


def test_norms_over_all_heads() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(72, rows=90))
    weights = [
        (x * torch.linspace(0.5, 1.0, n).view(-1, 1)).requires_grad_()
        for x, n in zip(make_weights(72), (4, 2), strict=True)
    ]
    angles = make_angles(72, 90)
    options = dict(q_norm=weights[0], k_norm=weights[1], norm_eps=EPS, rope=(angles.cos(), angles.sin()))
    leaves = [q, k, v, *weights]
    found = block(q, k, v, True, **options)
    wide: Any = [x.detach().double().requires_grad_() for x in leaves]
    wanted = exact(wide[0], wide[1], wide[2], wide[3:], angles)
    assert measure_error(found, wanted) < 0.06
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    grads = [torch.autograd.grad(out, x, grad.to(out.dtype)) for out, x in ((found, leaves), (wanted, wide))]
    for x, y in zip(*grads, strict=True):
        assert measure_error(x, y) < 0.01


def test_rows_without_rotation() -> None:
    """Tokens with cos 1 and sin 0, such as text tokens, are not rotated."""
    q, k, v = tensors(64)
    cos, sin = make_angles(64).cos(), make_angles(64).sin()
    cos[:, 100:], sin[:, 100:] = 1.0, 0.0
    codes = quantize(q, k, v, rope=(cos, sin), subtract_key_mean=False)
    plain = quantize(q[:, :, 112:], k, v, subtract_key_mean=False)
    assert torch.equal(codes.query[:, :, 112:], plain.query)


def test_nan_stays_in_its_rows() -> None:
    q, k, v = tensors(64)
    q[0, 1, 20, 3], q[1, 0, 40, 5] = torch.nan, torch.inf
    angles = make_angles(64)
    out = block(q, k, v, True, q_norm=True, k_norm=True, rope=(angles.cos(), angles.sin()))
    rows = torch.zeros(2, 4, 150, dtype=torch.bool)
    rows[0, 1, 16:32] = rows[1, 0, 32:48] = True
    assert torch.equal(out.isnan().all(-1), rows)
    assert torch.equal(out.isnan().any(-1), rows)


def test_a_row_of_zeros_without_eps_is_nan_as_in_pytorch() -> None:
    q, k, v = tensors(64, rows=40)
    q[0, 0, 3] = 0.0
    out = block(q, k, v, q_norm=True, k_norm=True, norm_eps=0.0)
    assert rms_norm(q[0, 0, 3].float(), (64,), None, 0.0).isnan().all()
    assert out[0, 0, :16].isnan().all()
    assert not out[0, 0, 16:].isnan().any()


@pytest.mark.parametrize(("head_dim", "rope_dim", "interleaved"), [(64, 64, False), (72, 36, True), (80, 20, False)])
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_are_pytorchs(head_dim: int, rope_dim: int, interleaved: bool, weighted: bool) -> None:
    inputs = tensors(head_dim, rows=90)
    weights = make_weights(head_dim, torch.bfloat16)
    angles = make_angles(rope_dim, 90)
    grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(0))
    leaves = [x.requires_grad_() for x in (*inputs, *(weights if weighted else []))]
    q_norm, k_norm = leaves[3:] or (True, True)
    out = block(
        *leaves[:3], True, q_norm=q_norm, k_norm=k_norm, norm_eps=EPS, rope=(angles.cos(), angles.sin()),
        rope_dim=rope_dim, rope_interleaved=interleaved,
    )  # fmt: skip
    grads = torch.autograd.grad(out, leaves, grad.bfloat16())
    wide = [x.detach().double().requires_grad_() for x in leaves]
    wanted_out = exact(wide[0], wide[1], wide[2], wide[3:] or (None, None), angles, interleaved=interleaved)
    wanted = torch.autograd.grad(wanted_out, wide, grad.bfloat16().double())
    for x, y, leaf in zip(grads, wanted, leaves, strict=True):
        assert x.dtype == leaf.dtype
        assert x.stride() == leaf.stride()
        assert measure_error(x, y) < 0.01


def test_no_gradient_of_a_gradient_and_of_codes() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(64, rows=20))
    out = block(q, k, v, q_norm=True, k_norm=True)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="attention_block: its gradients are not differentiable"):
        torch.autograd.backward(grad.sum())
    codes = quantize(q, k, v, q_norm=True, k_norm=True)
    with pytest.raises(NotImplementedError, match="attention_block has gradients"):
        torch.autograd.backward(codes.query_scale.sum())
    with pytest.raises(NotImplementedError, match="attention_block: it has no forward-mode derivative"):
        torch.func.jvp(lambda x: block(x, k, v, q_norm=True, k_norm=True), (q,), (q,))


def test_compiled_without_breaks() -> None:
    q, k, v = tensors(64)
    weights = [x.requires_grad_() for x in make_weights(64)]

    def call(q: Tensor, k: Tensor, v: Tensor, angles: Tensor) -> Tensor:
        rope = (angles.cos(), angles.sin())
        out: Tensor = block(q, k, v, True, q_norm=weights[0], k_norm=weights[1], rope=rope)
        codes = quantize(q.detach(), k.detach(), v.detach(), rope=rope)
        return out + greenfast.attention(codes)

    compiled = COMPILE(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (150, 70):
        a, b, c = (x[:, :, :rows].detach().requires_grad_() for x in (q, k, v))
        results = [f(a, b, c, make_angles(64, rows)) for f in (compiled, call)]
        assert torch.equal(*results)
        grads = [torch.autograd.grad(x.sum(), [a, b, c, *weights]) for x in results]
        for x, y in zip(*grads, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["block", "quantize_block", "block_backward"])
def test_operators_are_well_formed(name: str) -> None:
    q, k, v = tensors(64, rows=20)
    angles = make_angles(64, 20)
    weights = make_weights(64)
    row_options = (*weights, *weights, angles.cos(), angles.sin(), "layer", EPS, 64, False)
    args = {
        "block": ("fp8", 1, 0.1),
        "quantize_block": ("int8", True, "block", True, True),
        "block_backward": ("fp8", 1, 0.1),
    }
    first = (torch.randn_like(q),) if name == "block_backward" else ()
    torch.library.opcheck(getattr(torch.ops.greenfast, name), (*first, q, k, v, *row_options, *args[name]))


def test_shapes_without_data() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(2, n, 300, 72, dtype=torch.float16) for n in (4, 2, 2))
        cos = torch.empty(300, 36)
        assert block(q, k, v, rope=(cos, cos)).shape == q.shape
        assert quantize(q, k, v, rope=(cos, cos)).query_scale.shape == (2, 4, 19)


def test_no_rows_and_no_keys() -> None:
    q, k, v = tensors(64)
    assert block(q[:, :, :0], k, v, q_norm=True, k_norm=True).shape == (2, 4, 0, 64)
    out = block(q, k[:, :, :0], v[:, :, :0], q_norm=True, k_norm=True)
    assert torch.equal(out, torch.zeros_like(q))


def test_without_norm_and_rope_it_is_sdpa() -> None:
    q, k, v = tensors(64)
    assert torch.equal(block(q, k, v, True, 0.2), greenfast.sdpa(q, k, v, is_causal=True, scale=0.2, enable_gqa=True))
    assert torch.equal(quantize(q, k, v, norm_eps=1.0).query, quantize(q, k, v).query)


TABLE = make_angles(64).cos()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(q_norm=torch.ones(64)), ValueError, "k_norm: None, q_norm a tensor"),
        (dict(q_norm=True, k_norm=torch.ones(64)), ValueError, "k_norm: a tensor, q_norm True"),
        (dict(q_norm=False, k_norm=False), TypeError, "q_norm: False; a tensor of weights"),
        (dict(q_norm=torch.ones(32), k_norm=torch.ones(64)), ValueError, r"q_norm: its shape is \(32,\); \(64,\)"),
        (dict(q_norm=torch.ones(64), k_norm=torch.ones(4, 64)), ValueError, r"k_norm: its shape is \(4, 64\)"),
        (dict(q_norm=torch.ones(64), k_norm=torch.ones(64).half()), TypeError, "k_norm: its dtype is torch.float16"),
        (dict(q_norm=torch.ones(4, 64), k_norm=torch.ones(64)), ValueError, "k_norm: it has 1 dimensions, q_norm 2"),
        (dict(q_norm=torch.ones(64).double(), k_norm=True), ValueError, "k_norm: True, q_norm a tensor"),
        (dict(q_norm=torch.ones(64).double(), k_norm=torch.ones(64).double()), TypeError, "q_norm: its dtype is"),
        (dict(q_norm=torch.ones(64, device="meta"), k_norm=torch.ones(64)), ValueError, "q_norm: it is on meta"),
        (dict(q_norm=True, k_norm=True, norm_eps=-1.0), ValueError, "norm_eps: -1.0; 0 or a positive number"),
        (dict(q_norm=True, k_norm=True, norm_eps="x"), TypeError, "norm_eps: 'x'"),
        (dict(rope=TABLE), TypeError, r"rope: a Tensor; a pair \(cos, sin\)"),
        (dict(rope=[TABLE.unsqueeze(0)]), TypeError, "rope: "),
        (dict(rope=(TABLE, None)), TypeError, "rope: it contains a NoneType"),
        (dict(rope=(TABLE, TABLE.half())), TypeError, "rope: cos is torch.float32 and sin torch.float16"),
        (dict(rope=(TABLE, TABLE[:, :, :16])), ValueError, r"rope: cos is \(.*the same shape is needed"),
        (dict(rope=(TABLE[:, :100], TABLE[:, :100])), ValueError, "rope: cos and sin have 100 rows, query 150"),
        (dict(rope=(TABLE[..., :16], TABLE[..., :16])), ValueError, "rope: cos and sin have 16 columns; 64 or 32 are"),
        (dict(rope=(TABLE, TABLE), rope_dim=66), ValueError, "rope_dim: 66; an even number from 2 to"),
        (dict(rope=(TABLE, TABLE), rope_dim=63), ValueError, "rope_dim: 63; an even number"),
        (dict(rope=(TABLE, TABLE), rope_dim=0), ValueError, "rope_dim 0; all three are needed"),
        (dict(rope_dim=64), ValueError, "rope_dim: 64; without rope"),
        (dict(rope=(TABLE.expand(3, -1, -1), TABLE.expand(3, -1, -1))), ValueError, "rope: cos and sin have batch 3"),
        (dict(rope=(TABLE[0, 0], TABLE[0, 0])), ValueError, r"rope: the shape of cos is \(32,\)"),
        (dict(rope=(TABLE, TABLE), rope_interleaved=1), TypeError, "rope_interleaved: 1; True or False"),
        (dict(rope=(TABLE.clone().requires_grad_(), TABLE)), TypeError, "rope: a table requires grad"),
        (dict(q_norm=True, k_norm=True, precision="fp8_token"), ValueError, "precision: 'fp8_token'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_refusals_name_the_argument(options: dict[str, Any], error: type[Exception], message: str) -> None:
    for call in (block, quantize):
        with pytest.raises(error, match=message):
            call(*tensors(64), **options)


def test_lengths_of_query_and_key_must_agree_with_rope() -> None:
    q, k, v = tensors(64)
    with pytest.raises(ValueError, match="rope: cos and sin have 150 rows, query 150 and key 149"):
        block(q, k[:, :, 1:], v[:, :, 1:], rope=(TABLE, TABLE))
    assert block(q, k[:, :, 1:], v[:, :, 1:], q_norm=True, k_norm=True).shape == q.shape


def repeated() -> list[partial[Any]]:
    """Return calls that differ in one argument."""
    q, k, v = tensors(64)
    weights, angles = make_weights(64), make_angles(64)
    both = {"q_norm": weights[0], "k_norm": weights[1]}
    rope = {"rope": (angles.cos(), angles.sin())}
    half = {"rope": (angles.cos()[..., :16], angles.sin()[..., :16])}
    wide = {"q_norm": weights[0].expand(4, 64).contiguous(), "k_norm": weights[1].expand(2, 64).contiguous()}
    options: list[dict[str, Any]] = [
        both, rope, both | rope, wide | rope, both | rope | {"is_causal": True}, both | {"norm_eps": 1e-5},
        {"scale": 0.5} | both,
        rope | {"rope_interleaved": True}, half | {"rope_dim": 32}, rope | {"precision": "int8"},
        {"q_norm": True, "k_norm": True}, {name: x.bfloat16() for name, x in both.items()},
        both | {"is_causal": True, "causal_alignment": "lower_right"},
        {name: torch.nn.Parameter(x) for name, x in both.items()},
        {"rope": (angles.cos().expand(2, -1, -1).contiguous(), angles.sin().expand(2, -1, -1).contiguous())},
        both | {"norm": "layer"},
        both | {"norm": "layer", "q_norm_bias": weights[1], "k_norm_bias": weights[0]},
        wide | {"norm": "layer", "q_norm_bias": wide["q_norm"] * 2, "k_norm_bias": wide["k_norm"] * 2},
    ]  # fmt: skip
    of_heads = tuple(x.unsqueeze(2).expand(-1, -1, 4, -1).contiguous().transpose(1, 2) for x in rope["rope"])
    return [*(partial(block, q, k, v, **each) for each in options), partial(block, q, q, q, **both, rope=of_heads)]


def test_a_repeated_call_launches_what_a_first_one_does(gpu: PretendedGpu) -> None:
    every = repeated()
    for call in every:
        values = [x for value in call.keywords.values() for x in (value if isinstance(value, tuple) else (value,))]
        gpu.keep(x for x in (*call.args, *values) if isinstance(x, Tensor))
    with torch.no_grad():
        assert_launches_repeat(gpu, every, 3, seed=1)
        for call in every:
            call()
            count = len(gpu.launched())
            over_heads = call.keywords.get("q_norm") is not None and getattr(call.keywords["q_norm"], "ndim", 0) == 2
            assert count == (3 if over_heads else 2), "one that quantizes, and one that attends"


def test_a_repeated_call_is_not_checked_again(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    every = repeated()
    gpu.keep(x for call in every for x in call.args)
    with torch.no_grad():
        for call in every:
            call()
        monkeypatch.setattr(sdpa, "check_tensors", None)
        for call in every:
            assert call().shape == (2, 4, 150, 64)
        with pytest.raises(TypeError, match="NoneType"):
            every[0](norm_eps=1e-4)


def test_quantize_launches_once(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "QUANTIZE_BLOCK", block_operators.BLOCKS.quantize_cuda)  # the dispatcher sees CPU tensors
    for call in repeated():
        options = {name: x for name, x in call.keywords.items() if "causal" not in name and name != "scale"}
        with torch.no_grad():
            quantize(*call.args, **options)
        assert len(gpu.launched()) == (2 if getattr(options.get("q_norm"), "ndim", 0) == 2 else 1)
