"""``precision="fp8_token"``: a row depends on its query and the keys that it attends to, and on nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import greenfast

#: Batch, heads, KV heads, queries, keys, head dim.
SHAPES = ((1, 2, 2, 128, 128, 64), (2, 4, 2, 37, 37, 128), (2, 3, 3, 20, 52, 80), (1, 2, 1, 150, 150, 256))


def _inputs(shape: tuple[int, ...], *, rows_first: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, kv_heads, q_len, kv_len, head_dim = shape
    made = []
    for n, length in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)):
        x = torch.randn(batch, n, length, head_dim).bfloat16()
        made.append(x.transpose(1, 2).contiguous().transpose(1, 2) if rows_first else x)
    return made[0], made[1], made[2]


def _exact(query: Tensor, key: Tensor, value: Tensor, causal: int) -> tuple[Tensor, Tensor]:
    """Return attention and log-sum-exp in float64; rows without keys are 0 and -inf."""
    share = query.shape[1] // key.shape[1]
    k, v = (x.double().repeat_interleave(share, 1) for x in (key, value))
    scores = query.double() @ k.mT / math.sqrt(query.shape[-1])
    if causal:
        shift = k.shape[2] - query.shape[2] if causal == 2 else 0
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(shift)
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def _later_tokens(x: Tensor, first: int, change: Any) -> Tensor:
    changed = x.clone()
    changed[:, :, first:] = change(changed[:, :, first:])
    return changed


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
def test_rows_do_not_depend_on_later_tokens(shape: tuple[int, ...], alignment: Any, rows_first: bool) -> None:
    torch.manual_seed(0)
    query, key, value = _inputs(shape, rows_first=rows_first)
    q_len, kv_len = shape[3:5]
    first = q_len - 5  # this row and those after it may change
    first_key = first + (kv_len - q_len if alignment == "lower_right" else 0)

    def rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = greenfast.sdpa(
            q, k, v, is_causal=True, enable_gqa=True, causal_alignment=alignment, precision="fp8_token", return_lse=True
        )
        assert out.transpose(1, 2).is_contiguous() if rows_first else out.is_contiguous()
        return out[:, :, :first], lse[:, :, :first]

    expected = rows(query, key, value)
    changes: tuple[Any, ...] = (
        lambda x: -x,
        lambda x: x * 8,
        lambda x: x * 300,
        lambda x: x * 1e-30,
        lambda x: x * math.nan,
        lambda x: x * math.inf,
    )
    for change in changes:
        result = rows(
            _later_tokens(query, first, change),
            _later_tokens(key, first_key, change),
            _later_tokens(value, first_key, change),
        )
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_the_other_precisions_do_depend_on_them() -> None:
    """docs/operator.md claims this. If the test fails, the page and the docstring of sdpa can promise more."""
    torch.manual_seed(1)
    query, key, value = _inputs((1, 1, 1, 128, 128, 64))
    later = _later_tokens(key, 127, lambda x: x * 300)
    for precision in ("fp8", "int8", "int8_fine"):
        first, second = (
            greenfast.sdpa(query, k, value, is_causal=True, precision=precision)[:, :, :127].double()
            for k in (key, later)
        )
        assert 0.02 < float((first - second).norm() / first.norm()) < 1


@pytest.mark.parametrize("causal", [0, 1, 2])
@pytest.mark.parametrize(("q_len", "kv_len"), [(64, 64), (70, 33), (33, 70), (1, 200), (200, 1)])
def test_errors_against_float64(q_len: int, kv_len: int, causal: int) -> None:
    torch.manual_seed(2)
    query, key, value = _inputs((2, 4, 2, q_len, kv_len, 64))
    out, lse = greenfast.sdpa(
        query, key, value, is_causal=causal > 0, enable_gqa=True, precision="fp8_token", return_lse=True,
        causal_alignment="lower_right" if causal == 2 else "upper_left",
    )  # fmt: skip
    exact, exact_lse = _exact(query, key, value, causal)
    assert float((out.double() - exact).norm() / exact.norm()) < 0.07
    blind = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, blind)
    assert not out[blind].any()
    # E4M3 rounds a number by 2.6 % (root mean square), so a score of N(0, 1) inputs by 0.036. With few keys the
    # log-sum-exp errs by as much; six deviations, for queries and keys of 1.2 times the usual norm.
    assert float((lse[~blind] - exact_lse[~blind]).abs().max()) < 6 * 0.036 * 1.2


@pytest.mark.parametrize("factor", [1e-15, 1e15])
def test_tiny_and_huge_values(factor: float) -> None:
    torch.manual_seed(3)
    query, key, value = _inputs((1, 2, 2, 40, 40, 64))
    out = greenfast.sdpa(query / factor, key * factor, value * factor, is_causal=True, precision="fp8_token")
    exact, _ = _exact(query, key, value, 1)
    assert float((out.double() / factor - exact).norm() / exact.norm()) < 0.07


def test_gradients_are_those_of_fp8() -> None:
    torch.manual_seed(4)
    made = _inputs((2, 4, 2, 30, 30, 64))
    result = []
    for precision in ("fp8", "fp8_token"):
        inputs = [x.clone().requires_grad_() for x in made]
        out = greenfast.sdpa(*inputs, is_causal=True, enable_gqa=True, precision=precision)  # type: ignore[call-overload]
        result.append(torch.autograd.grad(out.float().sum() + out[..., 0].float().sum(), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*result, strict=True))


def test_transforms_and_graphs() -> None:
    torch.manual_seed(5)
    query, key, value = _inputs((3, 2, 2, 20, 20, 64))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return greenfast.sdpa(q, k, v, is_causal=True, precision="fp8_token")

    expected = call(query, key, value)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(query, key, value), expected)
    stacked = [x.unsqueeze(1) for x in (query, key, value)]
    assert torch.equal(torch.vmap(call)(*stacked).squeeze(1), expected)
    assert call(*(x.to("meta") for x in (query, key, value))).shape == expected.shape
    exported = torch.export.export(_Module(call), (query, key, value)).module()
    assert torch.equal(exported(query, key, value), expected)


class _Module(torch.nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> Tensor:
        out: Tensor = self.call(*tensors)
        return out


def test_forms_autocast_and_routing() -> None:
    torch.manual_seed(6)
    query, key, value = _inputs((1, 2, 2, 20, 20, 64))
    expected = greenfast.sdpa(query, key, value, precision="fp8_token")
    plain = greenfast.sdpa(query[0], key[0], value[0], precision="fp8_token")
    assert torch.equal(plain, expected[0])
    cast = greenfast.sdpa(query.float(), key.float(), value.float(), precision="fp8_token", float32_as=torch.bfloat16)
    assert torch.equal(cast, expected.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(greenfast.sdpa(query.float(), key.float(), value.float(), precision="fp8_token"), expected)
    narrow = value[..., :24].contiguous()  # its scales are those of 24 channels
    wide = greenfast.sdpa(query, key, torch.nn.functional.pad(narrow, (0, 40)), precision="fp8_token")
    assert torch.equal(greenfast.sdpa(query, key, narrow, precision="fp8_token"), wide[..., :24])
    with greenfast.use(precision="fp8_token", min_length=0) as routed:
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(query, key, value), expected)
    assert routed.taken == 1
    assert greenfast.explain(query, key, value, precision="fp8_token").precision == "fp8_token"
    empty = greenfast.sdpa(query, key[:, :, :0], value[:, :, :0], precision="fp8_token")
    assert empty.shape == query.shape
    assert not empty.any()


def test_where_it_is_refused() -> None:
    query, key, value = _inputs((1, 1, 1, 8, 8, 64))
    with pytest.raises(ValueError, match="precision: 'fp8_token'; allowed are"):
        greenfast.quantize(query, key, value, precision="fp8_token")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="enable_gqa"):
        greenfast.sdpa(query, key, value, enable_gqa=1, precision="fp8_token")  # type: ignore[call-overload]
    with pytest.raises(NotImplementedError, match="masks other than causal ones"):
        greenfast.sdpa(query, key, value, torch.zeros(8, 8).bool(), precision="fp8_token")
