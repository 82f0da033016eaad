"""Sizes that only the run decides (unbacked symbols), and lengths that vary: graphs compute what eager calls do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import greenfast

pytestmark = pytest.mark.filterwarnings("ignore")
attend = F.scaled_dot_product_attention


def routed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with greenfast.use(min_length=1):
        return attend(q, k, v, **options)


@greenfast.use()
def decorated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v)


def left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with greenfast.use(min_length=10**9):
        return attend(q, k, v)


def codes(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return greenfast.attention(greenfast.quantize(q, k, v, log_sum_exp=True), is_causal=True, return_lse=True)


FORMS: dict[str, Callable[..., Any]] = {
    "plain": greenfast.sdpa,
    "causal": lambda q, k, v: greenfast.sdpa(q, k, v, is_causal=True),
    "lower right": lambda q, k, v: greenfast.sdpa(q, k, v, is_causal=True, causal_alignment="lower_right"),
    "lse": lambda q, k, v: greenfast.sdpa(q, k, v, return_lse=True, precision="int8"),
    "fine": lambda q, k, v: greenfast.sdpa(q, k, v, precision="int8_fine"),
    "auto": lambda q, k, v: greenfast.sdpa(q, k, v, precision="auto"),
    "auto, lower right": lambda q, k, v: greenfast.sdpa(
        q, k, v, is_causal=True, causal_alignment="lower_right", precision="auto"
    ),
    "use": routed,
    "use, causal": lambda q, k, v: routed(q, k, v, is_causal=True),
    "decorated": decorated,
    "left to PyTorch": left,
    "float32_as": lambda q, k, v: greenfast.sdpa(q.float(), k.float(), v.float(), float32_as=torch.bfloat16),
    "narrower value": lambda q, k, v: greenfast.sdpa(q, k, v[..., :16]),
    "rows of (B, S, H, D)": lambda q, k, v: greenfast.sdpa(
        *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    ),
    "codes": codes,
}


def of_batch(f: Callable[..., Any], x: Tensor, keep: Tensor) -> Any:
    return f(*x[keep].chunk(3, dim=-2))


def of_rows(f: Callable[..., Any], x: Tensor, keep: Tensor) -> Any:
    q, k, v = x.chunk(3, dim=-2)
    return f(q[:, :, keep], k, v)


def of_keys(f: Callable[..., Any], x: Tensor, keep: Tensor) -> Any:
    q, k, v = x.chunk(3, dim=-2)
    return f(q, k[:, :, keep], v[:, :, keep])


def of_both(f: Callable[..., Any], x: Tensor, keep: Tensor) -> Any:
    return f(*(part[:, :, keep] for part in x.chunk(3, dim=-2)))


def of_heads(f: Callable[..., Any], x: Tensor, keep: Tensor) -> Any:
    return f(*x[:, keep].chunk(3, dim=-2))


SIZES: dict[str, tuple[Callable[..., Any], int]] = {
    "batch": (of_batch, 5), "rows": (of_rows, 40), "keys": (of_keys, 40), "both": (of_both, 40), "heads": (of_heads, 4)
}  # fmt: skip


def inputs(size: str, share: float, seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    count = SIZES[size][1]
    keep = torch.rand(count) < share
    keep[0] = True
    return torch.randn(5, 4, 120, 64).bfloat16(), keep


class Model(torch.nn.Module):
    def __init__(self, size: str, form: str) -> None:
        super().__init__()
        self.size, self.form = size, form

    def forward(self, x: Tensor, keep: Tensor) -> Any:
        return SIZES[self.size][0](FORMS[self.form], x, keep)


def same(found: Any, wanted: Any, form: str) -> bool:
    if form in LEFT:  # PyTorch computes it, perhaps not by the kernel of eager calls
        return torch.allclose(found, wanted, rtol=1e-2, atol=1e-2)
    pairs = [(found, wanted)] if isinstance(wanted, Tensor) else zip(found, wanted, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def check(made: Callable[..., Any], size: str, form: str) -> None:
    with torch.no_grad():
        for share, seed in ((0.6, 0), (0.3, 1), (1.0, 2)):
            given = inputs(size, share, seed)
            assert same(made(*given), Model(size, form)(*given), form), (share, seed)


#: One size with every form, and every size with the forms that compare it. All the others are slow ones.
FAST = [
    ("batch", "auto, lower right"), ("keys", "lower right"), ("heads", "use"), ("both", "codes"), ("rows", "plain"),
    ("batch", "decorated"), ("batch", "narrower value"), ("heads", "lse"),
]  # fmt: skip
#: PyTorch's own attention cannot be traced with lengths that only the run decides.
LEFT = {"auto", "auto, lower right", "use", "use, causal", "decorated", "left to PyTorch"}
ALL = [(size, form) for size in SIZES for form in FORMS if size in ("batch", "heads") or form not in LEFT]
CASES = [pytest.param(*x, marks=() if x in FAST else pytest.mark.slow) for x in ALL]


@pytest.fixture(autouse=True)
def sizes_are_data() -> Iterator[None]:
    torch._dynamo.reset()
    config: Any = torch._dynamo.config
    with config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


@pytest.mark.parametrize(("size", "form"), CASES)
def test_compiled(size: str, form: str) -> None:
    check(torch.compile(Model(size, form), fullgraph=True, backend="aot_eager"), size, form)


@pytest.mark.parametrize(("size", "form"), CASES)
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exported(size: str, form: str, strict: bool) -> None:
    check(torch.export.export(Model(size, form), inputs(size, 0.5, 3), strict=strict).module(), size, form)


def packed(q: Tensor, k: Tensor, keep: Tensor, measured: bool) -> Tensor:
    """Attention over keys that a mask keeps, so that the number of keys is data."""
    lengths = keep.sum(1, dtype=torch.int32)
    starts_q = torch.arange(0, 3 * q.shape[1], q.shape[1], dtype=torch.int32)
    starts_k = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest: Any = k.shape[1]
    if measured:
        longest = lengths.max().item()
        check: Any = torch._check
        check(longest >= 0)
        check(longest <= k.shape[1])
    result = greenfast.flash_attn_varlen_func(
        q.flatten(0, 1), k[keep], k[keep], starts_q, starts_k, q.shape[1], longest, causal=True
    )
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("measured", [False, True])
def test_packed_keys_whose_number_is_data(measured: bool) -> None:
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    for seed, share in enumerate((0.6, 0.2, 1.1)):
        torch.manual_seed(seed)
        q, k, keep = (
            torch.randn(2, 24, 4, 64).bfloat16(),
            torch.randn(2, 40, 2, 64).bfloat16(),
            torch.rand(2, 40) < share,
        )
        assert torch.equal(compiled(q, k, keep, measured), packed(q, k, keep, measured))


@pytest.mark.parametrize("name", ["is_causal", "enable_gqa"])
def test_a_flag_that_compares_sizes(name: str) -> None:
    def call(x: Tensor) -> Tensor:
        flags: Any = {name: x.shape[2] > 3}
        result: Tensor = greenfast.sdpa(x, x, x, **flags)
        return result

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    for length in (20, 33, 2, 3):
        x = torch.randn(2, 4, length, 64).bfloat16()
        assert torch.equal(compiled(x), call(x))


def lengths_of_both(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Four routings: by the measurements, by a length, and by which of the lengths is larger."""
    auto = greenfast.sdpa(q, k, v, precision="auto", is_causal=True, causal_alignment="lower_right")
    with greenfast.use(min_length=64):
        return auto, decorated(q, k, v), attend(q, k, v), greenfast.sdpa(q, k, v, is_causal=True)


def qkv(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(queries)
    q, k, v = (torch.randn(2, 2, n, 64).bfloat16() for n in (queries, keys, keys))
    return q, k, v


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compare attention that may have run in FP8 or in PyTorch. FP8's relative error is about 0.05."""
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).norm() < 0.1 * b.norm()


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_has_the_lengths_that_were_declared(strict: bool) -> None:
    class Lengths(torch.nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return lengths_of_both(*args)

    queries, keys = torch.export.Dim("queries", max=10**6), torch.export.Dim("keys", max=10**6)
    sizes = ({2: queries}, {2: keys}, {2: keys})
    made = torch.export.export(Lengths(), qkv(40, 48), dynamic_shapes=(sizes,), strict=strict).module()
    for example in (qkv(40, 48), qkv(100, 30), qkv(30, 100)):
        assert_close(made(*example), lengths_of_both(*example))


def test_a_declared_range_of_lengths_has_one_graph() -> None:
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lengths_of_both, fullgraph=True, backend=counter)
    for example in (qkv(40, 48), qkv(100, 30), qkv(30, 100)):
        for x in example:
            torch._dynamo.mark_dynamic(x, 2, min=2, max=10**6)
        assert_close(compiled(*example), lengths_of_both(*example))
    assert counter.frame_count == 1


def test_a_mask_at_the_last_key_of_lengths_that_only_the_run_decides() -> None:
    """PyTorch computes it with a mask that is added to the scores."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return greenfast.sdpa(q, k, v, precision="auto", is_causal=True, causal_alignment="lower_right")

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for queries, keys in ((40, 48), (100, 30), (30, 100)):
        example = qkv(queries, keys)
        for x in example:
            torch._dynamo.decorators.mark_unbacked(x, 2)
        q, k, v = (x.double() for x in example)
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        exact = attend(q, k, v, mask).nan_to_num(0.0)
        assert (compiled(*example).double() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("form", ["plain", "auto", "use", "float32_as", "narrower value"])
def test_sizes_that_are_tensors(form: str) -> None:
    """torch.jit.trace makes tensors of sizes."""
    traced = torch.jit.trace(FORMS[form], qkv(20, 33), check_trace=False)  # type: ignore[no-untyped-call]
    for example in (qkv(20, 33), qkv(50, 7)):
        assert same(traced(*example), FORMS[form](*example), form)
