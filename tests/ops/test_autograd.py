"""The operators under differentiation: they behave as PyTorch's attention, or raise."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import greenfast
from greenfast.ops import autograd, torch_ops
from tests.ops.gradient_cases import Sizes, case, gradients

sdpa: Any = greenfast.sdpa
func: Any = torch.func
ad: Any = forward_ad

CODES = r"greenfast\.attention: no gradient flows to codes; greenfast\.sdpa"
FORWARD_MODE = r"greenfast\.\w+: it has no forward-mode derivative"
TWICE = r"greenfast\.sdpa: its gradients are not differentiable"
LSE = r"greenfast\.sdpa: a gradient reaches its log-sum-exp.*lse\.detach\(\)"


def inputs(length: int = 33, *, grad: bool = False) -> Any:
    tensors, _ = case("biased 10", Sizes(length, length), torch.bfloat16)
    return [x.requires_grad_(grad) for x in tensors]


def loss(query: Any, key: Any, value: Any) -> Tensor:
    return sdpa(query, key, value, is_causal=True).float().square().sum()  # type: ignore[no-any-return]


def backward(tensors: list[Tensor], function: Callable[..., Tensor] = loss) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    function(*leaves).backward()  # type: ignore[no-untyped-call]
    return [x.grad for x in leaves if x.grad is not None]


def same(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_grad_mode_does_not_change_the_result() -> None:
    tensors = inputs(grad=True)
    trained = sdpa(*tensors)
    assert trained.requires_grad
    with torch.no_grad():
        plain = sdpa(*tensors)
    with torch.inference_mode():
        inferred = sdpa(*tensors)
    with_lse = sdpa(*tensors, return_lse=True)[0]
    same([trained, with_lse, inferred], [plain] * 3)
    direct = torch.ops.greenfast.sdpa(*tensors, "fp8", 0, 0.125)
    same([direct], [plain])
    assert direct.requires_grad, "as a call by the operator's own name"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    seen: list[Tensor] = []

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = sdpa(*tensors, is_causal=True, return_lse=True)
        seen.append(out.detach())
        return out, lse

    def kept(*tensors: Tensor) -> Tensor:
        out: Tensor = checkpoint(attend, *tensors, use_reentrant=reentrant)[0]  # a zero goes to the log-sum-exp
        return out.float().square().sum()

    with set_checkpoint_early_stop(False):
        same(backward(inputs(), kept), backward(inputs()))
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_graphs_that_are_kept_and_hooks() -> None:
    tensors = inputs(grad=True)
    norms: list[float] = []
    out = loss(*tensors)
    tensors[0].register_hook(lambda x: norms.append(float(x.norm())))
    first = torch.autograd.grad(out, tensors, retain_graph=True)
    same(torch.autograd.grad(out, tensors), first)
    assert norms[0] == norms[1] > 0
    unused = sdpa(*tensors, return_lse=True)[0] * 0
    assert not torch.autograd.grad(unused.sum(), tensors)[0].any()


@pytest.mark.parametrize("head_dim", [64, 72])
def test_results_may_be_changed_in_place(head_dim: int) -> None:
    tensors, grad = case("normal", Sizes(20, 20, head_dim), torch.bfloat16)

    def doubled(*x: Tensor) -> Tensor:
        out: Tensor = sdpa(*x)
        return out.mul_(2)

    same(gradients(doubled, tensors, grad), gradients(sdpa, tensors, 2 * grad))
    with torch.no_grad():
        out = sdpa(*tensors)
    assert out.mul_(torch.ones(1, dtype=out.dtype, requires_grad=True)).requires_grad


def test_transforms_of_functorch() -> None:
    tensors = inputs()
    wanted = backward(tensors)
    same(torch.func.grad(loss, (0, 1, 2))(*tensors), wanted)
    out, pullback = func.vjp(loss, *tensors)
    same(pullback(torch.ones_like(out)), wanted)
    many = [torch.stack([x, x.flip(2)]) for x in tensors]
    each = [torch.func.grad(loss, (0, 1, 2))(*(x[i] for x in many)) for i in range(2)]
    stacked = [torch.stack(x) for x in zip(*each, strict=True)]
    same(torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*many), stacked)
    same(torch.func.grad(lambda *x: torch.vmap(loss)(*x).sum(), (0, 1, 2))(*many), stacked)
    q, k, v = (x[:, :1, :3, :8] for x in tensors)
    rows = torch.func.jacrev(lambda q: sdpa(q, k, v)[0, 0, 1].float())(q)
    for i, row in enumerate(rows):
        same([row], [torch.func.grad(lambda q, i=i: sdpa(q, k, v)[0, 0, 1, i].float())(q)])


def test_a_training_step_by_functional_call() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    q, k, v = inputs()

    def step(parameters: dict[str, Tensor]) -> Tensor:
        return loss(torch.func.functional_call(layer, parameters, (q.float(),)).bfloat16(), k, v)

    result = torch.func.grad(step)(dict(layer.named_parameters()))
    step(dict(layer.named_parameters())).backward()  # type: ignore[no-untyped-call]
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(result[name], parameter.grad, rtol=1e-5, atol=1e-5 * float(parameter.grad.abs().max()))


def of_codes(*tensors: Any) -> Tensor:
    return greenfast.attention(greenfast.quantize(*tensors)).float().square().sum()


def test_forward_mode_is_refused() -> None:
    q, k, v = inputs(5)
    for function in (loss, of_codes):
        with pytest.raises(NotImplementedError, match=FORWARD_MODE):
            func.jvp(lambda q, f=function: f(q, k, v), (q,), (q,))
        with pytest.raises(NotImplementedError, match=FORWARD_MODE):
            torch.func.jacfwd(lambda q, f=function: f(q, k, v))(q)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=FORWARD_MODE):
            function(q, k, ad.make_dual(v, v))
        with torch.no_grad(), forward_ad.dual_level(), pytest.raises(NotImplementedError, match=FORWARD_MODE):
            function(ad.make_dual(q, q), k, v)
    with pytest.raises(NotImplementedError, match=FORWARD_MODE):
        torch.func.hessian(lambda q: loss(q, k, v))(q)
    with forward_ad.dual_level():
        ad.make_dual(q, q)
        assert ad.unpack_dual(sdpa(q, k, v)).tangent is None, "these are not dual"
    _, tangent = func.jvp(lambda x: (x * 2, sdpa(q, k, v))[0], (q,), (q,))
    assert torch.equal(tangent, q * 2)


def test_second_derivatives_are_refused() -> None:
    tensors = inputs(5, grad=True)
    first = torch.autograd.grad(loss(*tensors), tensors, create_graph=True)
    same(first, backward(tensors))
    with pytest.raises(NotImplementedError, match=TWICE):
        torch.autograd.grad(first[1].float().square().sum(), tensors)
    q, k, v = inputs(5)
    with pytest.raises(NotImplementedError, match=TWICE):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, k, v).sum())(q)
    with pytest.raises(NotImplementedError, match=TWICE):
        torch.func.jacrev(torch.func.jacrev(lambda q: loss(q, k, v)))(q)


def test_codes_work_in_grad_mode_but_refuse_gradients() -> None:
    tensors = inputs(grad=True)
    result = of_codes(*tensors)
    with torch.no_grad():
        assert torch.equal(result, of_codes(*tensors))
    with pytest.raises(NotImplementedError, match=CODES):
        torch.autograd.grad(result, tensors)
    quantized = greenfast.quantize(*tensors, log_sum_exp=True)
    for scales in (quantized.query_scale, quantized.key_mean, quantized.mean_scores):
        assert scales is not None
        with pytest.raises(NotImplementedError, match=r"greenfast\.quantize: no gradient flows to codes"):
            torch.autograd.grad(scales.sum(), tensors, allow_unused=True)
    with pytest.raises(NotImplementedError, match=CODES):
        torch.func.grad(of_codes)(*inputs())
    assert not torch.autograd.grad(of_codes(*tensors) * 0, tensors)[0].any()


def test_a_gradient_of_the_log_sum_exp_raises() -> None:
    tensors = inputs(grad=True)
    out, lse = sdpa(*tensors, is_causal=True, return_lse=True)
    with pytest.raises(NotImplementedError, match=LSE):
        torch.autograd.grad(out.sum() + lse.sum(), tensors, retain_graph=True)
    with pytest.raises(NotImplementedError, match=LSE):
        torch.autograd.grad(lse.sum(), tensors[0], retain_graph=True)
    same(torch.autograd.grad(out.float().square().sum() + lse.detach().sum(), tensors), backward(tensors))


def test_compiled() -> None:
    def both(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return sdpa(*tensors, is_causal=True, return_lse=True)  # type: ignore[no-any-return]

    tensors = inputs()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    same(backward(tensors, lambda *x: compiled(*x)[0].float().square().sum()), backward(tensors))
    leaves = inputs(grad=True)
    with pytest.raises(NotImplementedError, match=LSE):
        torch.autograd.grad(compiled(*leaves)[1].sum(), leaves)
    codes = torch.compile(of_codes, fullgraph=True, backend="aot_eager")
    result = codes(*leaves)
    assert torch.equal(result, of_codes(*leaves)), "inference in grad mode"
    with pytest.raises(NotImplementedError, match=CODES):
        torch.autograd.grad(result, leaves)
    q, k, v = tensors
    inner = torch.compile(lambda q: torch.func.grad(loss)(q, k, v), fullgraph=True, backend="aot_eager")
    same([inner(q)], backward(tensors)[:1])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return sdpa(self.layer(x), x, x, is_causal=True)  # type: ignore[no-any-return]


LENGTHS, STARTS = torch.tensor([20], dtype=torch.int32), torch.tensor([0, 20, 33], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "lengths"),
    [
        (lambda q, k, v, x: sdpa(q, k, v, kv_lengths=x), LENGTHS),
        (lambda q, k, v, x: sdpa(q, k, v, kv_lengths=x, backward="8bit"), LENGTHS),
        (
            lambda q, k, v, x: greenfast.varlen_attn(
                q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), STARTS, x, 20, 20
            ),
            STARTS,
        ),
    ],
    ids=["16bit", "8bit", "packed"],
)
def test_lengths_changed_before_the_backward_pass_are_refused(call: Callable[..., Tensor], lengths: Tensor) -> None:
    lengths = lengths.clone()
    out = call(*inputs(grad=True), lengths)
    lengths[-1] -= 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("decomposed", [False, True])
def test_an_export_in_grad_mode_equals_one_without(decomposed: bool) -> None:
    model, x = Model(), inputs()[0]
    exported = torch.export.export(model, (x,))
    if decomposed:
        exported = exported.run_decompositions()
    names = [str(node.target) for node in exported.graph.nodes]
    assert [name for name in names if "greenfast" in name] == ["greenfast.sdpa.default"]
    assert torch.equal(exported.module()(x), model(x))


def test_symbolic_tracing() -> None:
    model, (q, k, v) = Model(), inputs()
    traced = torch.fx.symbolic_trace(model)
    assert greenfast.sdpa in [node.target for node in traced.graph.nodes]
    assert torch.equal(traced(q), model(q))

    def kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        codes = greenfast.quantize(q, k, v, log_sum_exp=True)
        out, lse = greenfast.attention(codes, is_causal=True, return_lse=True)[:2]
        return out * lse.unsqueeze(-1)

    assert torch.equal(torch.fx.symbolic_trace(lambda q, k, v: greenfast.attention(
        greenfast.quantize(q, k, v), is_causal=True, return_lse=False))(q, k, v),
        greenfast.attention(greenfast.quantize(q, k, v), is_causal=True))  # fmt: skip
    assert kept(q, k, v).shape == q.shape


def test_subclasses_of_tensor_see_the_call() -> None:
    calls: list[Any] = []

    class Logged(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            plain: Any = super()
            return plain.__torch_function__(func, types, args, kwargs or {})

    q, k, v = inputs()
    result = sdpa(q, k.as_subclass(Logged), v)
    assert calls[0] is greenfast.sdpa
    assert type(result) is Logged, "as from PyTorch's attention"
    assert torch.equal(result.as_subclass(Tensor), sdpa(q, k, v))


def flops(function: Callable[[], Any]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())


def test_flops_equal_pytorchs() -> None:
    sizes = Sizes(20, 50, 72, heads=4, kv_heads=2)
    (q, k, v), _ = case("normal", sizes, torch.bfloat16)
    meta = [x.to("meta").repeat_interleave(4 // x.shape[1], 1) for x in (q, k, v)]
    one = 2 * 4 * 20 * 50 * 72  # multiplications and additions of one of the products
    aten = torch.ops.aten
    forward = flops(lambda: aten._scaled_dot_product_flash_attention(*meta, 0.0, True))
    assert flops(lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True)) == forward == 2 * one
    for precision in ("fp8", "fp8_token"):
        assert flops(lambda p=precision: sdpa(q, k, v, enable_gqa=True, precision=p)) == forward  # type: ignore[misc]
        assert flops(lambda p=precision: sdpa(q, k, v, enable_gqa=True, return_lse=True, precision=p)) == forward  # type: ignore[misc]
    assert flops(lambda: greenfast.attention(greenfast.quantize(q, k, v))) == forward
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = sdpa(*leaves, enable_gqa=True)
    assert flops(lambda: out.sum().backward()) == 5 * one, "as of FlashAttention's backward"


@pytest.mark.parametrize("op", ["sdpa", "sdpa_lse"])
@pytest.mark.parametrize("head_dim", [64, 72])
@pytest.mark.parametrize("grad", [False, True])
def test_the_registration(op: str, head_dim: int, grad: bool) -> None:
    tensors, _ = case("normal", Sizes(60, 60, head_dim), torch.bfloat16)
    tensors = [x.requires_grad_(grad) for x in tensors]
    # With gradients, the last check needs one for every output, but the log-sum-exp refuses it.
    names = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    some = names[: 3 if grad and op == "sdpa_lse" else 4]
    torch.library.opcheck(getattr(torch.ops.greenfast, op).default, (*tensors, "fp8", 1, 0.125), test_utils=some)


def test_the_registration_of_the_other_operators() -> None:
    (q, k, v), grad = case("normal", Sizes(150, 150), torch.bfloat16)
    for flags in ((True, "block", True, True), (True, "channel", True, True), (False, "head", False, False)):
        codes = torch_ops.QUANTIZE(q, k, v, "int8", *flags)
        torch.library.opcheck(torch_ops.QUANTIZE, (q, k, v, "int8", *flags))
        remaining = ("int8", 64, 150, torch.bfloat16, 0, 0.125)
        torch.library.opcheck(torch_ops.ATTENTION, (*codes[:6], *remaining))
        torch.library.opcheck(torch_ops.ATTENTION_LSE, (*codes[:6], *remaining))
        if flags[2]:
            torch.library.opcheck(torch_ops.MEAN_SCORES, (q, codes[6], True))
    others = torch.ops.greenfast
    strided = k.transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(others.sdpa_backward.default, (grad, q, strided, v, 2, 0.125))
    torch.library.opcheck(others.refuse_gradient.default, (torch.zeros(3), [2, 3], "none"))


def all_results(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return the results of every operator. The keys are biased, and their mean dominates the scores."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = sdpa(*leaves, is_causal=True, return_lse=True)
    (out.float() * torch.arange(64)).sum().backward()
    codes = greenfast.quantize(q, k, v, scales="head", value_scales="channel", log_sum_exp=True)
    saved = greenfast.attention(codes, return_lse=True)
    direct = torch.ops.greenfast.sdpa(q, k, v, "int8", 0, 0.125)
    return [out, lse, *[x.grad for x in leaves if x.grad is not None], *codes.tensors(), *saved, direct]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_operators_arithmetic_alone(dtype: torch.dtype) -> None:
    tensors = [x.to(dtype) for x in inputs(150)]
    wanted = all_results(*tensors)
    with torch.autocast("cpu", dtype):
        same(all_results(*tensors), wanted)
        compiled: Any = torch.compile(sdpa, fullgraph=True, backend="aot_eager")
        singles = [x.float() for x in tensors]
        same([compiled(*singles, return_lse=True)[1]], [sdpa(*tensors, return_lse=True)[1]])
        leaves = [x.requires_grad_() for x in singles]
        result = torch.autograd.grad(compiled(*leaves).sum(), leaves)
        same(result, torch.autograd.grad(sdpa(*leaves).sum(), leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8])
def test_autocast_casts_what_pytorch_casts(dtype: torch.dtype) -> None:
    q, k, v = (x.clamp(-100, 100).to(dtype) for x in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        explained = greenfast.explain(q, k, v)
        try:
            theirs = nn.functional.scaled_dot_product_attention(q, k, v).dtype
        except RuntimeError:
            theirs = dtype
        if theirs == torch.bfloat16:
            assert sdpa(q, k, v).dtype == torch.bfloat16
            assert explained.kernel == "reference"
        else:
            assert theirs == dtype
            with pytest.raises(TypeError, match=rf"query: its dtype is {dtype}"):
                sdpa(q, k, v)
            assert explained.kernel == "torch"
            assert str(dtype) in explained.reason


def test_a_first_import_in_inference_mode_does_not_end_training() -> None:
    """A public function imports its module at its first use."""
    with torch.inference_mode():
        first: Any = runpy.run_path(autograd.__file__)
    assert not first["_MARK"].is_inference()
    assert not autograd._MARK.is_inference()


def test_a_mask_that_inference_has_read_is_for_training_too() -> None:
    q, k, v = inputs()
    mask = torch.ones(33, 33, dtype=torch.bool).tril()
    with torch.inference_mode():
        wanted = sdpa(q, k, v, mask)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    result = sdpa(*leaves, mask)
    assert torch.equal(result, wanted)
    result.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)
