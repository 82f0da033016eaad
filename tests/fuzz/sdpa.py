"""Random calls of ``greenfast.sdpa`` and ``greenfast.attention``, compared with attention in float64.

The limit of the output is the bound of the kernel's error (docs/correctness.md) on the dequantized numbers. The limit
of codes is half a step of their format, of gradients three times the error of 16-bit attention.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import greenfast
from greenfast.numerics.attention import E4M3_POLYNOMIAL_WEIGHTS, attention_with_bounds
from greenfast.ops import reference, warmup
from greenfast.ops.quantized import PRECISIONS, QuantizedQKV
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource
from tests.fuzz.calls import Run, differ, repeated
from tests.ops.gradient_cases import bound as gradient_bound
from tests.ops.gradient_cases import error as gradient_error
from tests.ops.gradient_cases import gradients, torch_attention

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 256, 257, 300, 511, 513, 700, 1000, 1024, 2048, 3000, 4096)
LAYOUTS = ("dense", "transposed", "packed", "sliced", "odd", "shared")
VALUES = ("normal", "normal", "uniform", "biased", "outliers", "logits", "constant", "tiny", "sink", "zeros")
#: The limit of the task fp8_attention; three times as much for variants (docs/correctness.md).
RELATIVE = 0.03
FORMAT = {"fp8": 0.075, "int8": 0.06, "int8_fine": 0.06}
_sdpa: Any = greenfast.sdpa
_attend: Any = greenfast.attention
#: Head dim, dtype and precision of the drawn kernels; 80 represents padded head dims.
KINDS: tuple[tuple[int, torch.dtype, Any], ...] = (
    *((d, torch.bfloat16, p) for d in (64, 128, 256) for p in PRECISIONS),
    *((80, torch.float16, p) for p in PRECISIONS),
    (128, torch.float16, "fp8"), (256, torch.float16, "int8"),
)  # fmt: skip
_STEP = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
#: Of a score's products, where they are E4M3: each is cut off at some 13 bits below the sum so far, which is why large
#: scores are too small. Found on an H200: 0.0017 of a score of 95 at head dim 256.
_SCORES = 2.0**-8
_FEW = 128 * 128 * 4  # scores of a call on the CPU, at most


@dataclass(frozen=True)
class SdpaDraw:
    """A call; causal: 0, 1 (aligned at the first key) or 2 (at the last)."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: torch.dtype
    precision: Any
    causal: int
    scale: float | None
    layout: str
    values: str
    return_lse: bool
    gradients: bool
    masked: bool
    seed: int

    def options(self) -> dict[str, Any]:
        return {
            "is_causal": self.causal > 0,
            "causal_alignment": "lower_right" if self.causal == 2 else "upper_left",
            "scale": self.scale,
        }

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V with their values and in their layout."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        q = normal(self.batch, self.heads, self.q_len, self.head_dim)
        k, v = (normal(self.batch, self.kv_heads, self.kv_len, self.head_dim) for _ in "kv")
        if self.values == "uniform":
            q, k, v = (torch.rand(x.shape, generator=generator) for x in (q, k, v))
        elif self.values == "biased":
            k = k + 10 * normal(self.head_dim)
        elif self.values == "outliers":
            q, k, v = (x + 20 * normal(*x.shape) * (torch.rand(x.shape, generator=generator) < 1e-3) for x in (q, k, v))
        elif self.values == "logits":
            q, k = 2 * q, 2 * k
        elif self.values == "constant":
            q = q + 3
        elif self.values == "tiny":
            q, k, v = q * 1e-3, k * 1e-4, v * (1e-4 if self.dtype == torch.float16 else 1e-20)
        elif self.values == "sink":
            k[..., 0, :] = 4 * q[:, :1].mean(2).expand_as(k[..., 0, :])
            v[..., 0, :] *= 0.01
        elif self.values == "zeros":
            q[..., : self.q_len // 2, :], k[..., self.kv_len // 2 :, :] = 0, 0
            v[..., : self.kv_len // 3, :] = 0
        q, k, v = (x.to(self.dtype).to(device) for x in (q, k, v))
        return self._laid_out(q), self._laid_out(k), self._laid_out(v)

    def _laid_out(self, x: Tensor) -> Tensor:
        if self.layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if self.layout == "packed":  # a third of one projection
            rows = x.permute(2, 0, 1, 3)
            return torch.stack([rows, -rows, rows + 1], 3).permute(1, 2, 0, 3, 4)[..., 0, :]
        if self.layout == "sliced":
            return torch.cat([x[:, :, :1] * torch.nan, x, x[:, :, :1] * torch.nan], 2)[:, :, 1:-1]
        if self.layout == "odd":
            return torch.cat([x[..., :1], x], 3)[..., 1:]
        if self.layout == "shared":  # heads in one memory
            return x[:, :1].expand_as(x)
        return x

    def faults(self, run: Run) -> list[str]:
        q, k, v = self.tensors(run.device)
        if self.masked:
            return self._mask_faults(q, k, v)
        before = [x.clone() for x in (q, k, v)]
        options = self.options() | {"precision": self.precision, "enable_gqa": True}
        result, wrong = repeated(run, lambda: _sdpa(q, k, v, return_lse=self.return_lse, **options))
        codes = greenfast.quantize(q, k, v, precision=self.precision, log_sum_exp=True)
        of_codes, more = repeated(run, lambda: _attend(codes, return_lse=self.return_lse, **self.options()))
        wrong += [f"attention on codes, {fault}" for fault in more]
        wrong += differ("sdpa and attention on its codes", result[0], of_codes[0])
        wrong += [f"codes of {fault}" for fault in code_faults(codes, q, k, v)]
        wrong += self._output_faults(codes, result, q, k, v)
        wrong += self._slice_faults(codes, of_codes[0])
        if self.gradients:
            wrong += self._gradient_faults([q, k, v])
        for name, x, old in zip("qkv", (q, k, v), before, strict=True):
            wrong += differ(f"{name} before and after the calls", old, x)
        return wrong

    def _mask(self, device: str) -> Tensor | None:
        if not self.causal:
            return None
        last = torch.arange(self.q_len, device=device).unsqueeze(1)
        if self.causal == 2:
            last = last + self.kv_len - self.q_len
        return torch.arange(self.kv_len, device=device) <= last

    def _factor(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def _output_faults(
        self, codes: QuantizedQKV, found: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor
    ) -> list[str]:
        share, d = self.heads // self.kv_heads, self.head_dim
        of_q = reference.dequantize_queries(codes).double().flatten(0, 1)
        of_k, of_v = (
            x.double().repeat_interleave(share, 1).flatten(0, 1)
            for x in (reference.dequantize_keys(codes), reference.dequantize_values(codes))
        )
        mask, factor = self._mask(q.device.type), self._factor()
        wanted, (bound,) = attention_with_bounds(of_q, of_k, of_v, factor, mask, (E4M3_POLYNOMIAL_WEIGHTS,))
        wanted, bound = wanted[..., :d], bound[..., :d]
        out = found[0].flatten(0, 1).double()
        off = (out - wanted).abs()
        beyond = ~(off <= bound + _STEP[self.dtype] * wanted.abs())
        wrong = []
        if beyond.any():
            at = beyond.nonzero()[0].tolist()
            wrong.append(
                f"out: {int(beyond.sum())} of {out.numel()} beyond the kernel's bound, first at {at}: "
                f"{float(out[tuple(at)])}, {float(wanted[tuple(at)])} is right, {float(bound[tuple(at)])} allowed"
            )
        limit = RELATIVE * (1 + 1024 / out.numel()) * (1 if self.values in ("normal", "uniform") else 3)
        if not float(off.norm()) <= limit * float(wanted.norm()) + 1e-30:
            wrong.append(f"out: relative kernel error {float(off.norm() / wanted.norm())}, {limit} allowed")
        exact_k = k.double().repeat_interleave(share, 1).flatten(0, 1)
        exact_q = q.double().flatten(0, 1)
        if self.values in ("normal", "uniform", "biased") and self.q_len * self.heads >= 64 and self.kv_len > 8:
            exact_v = v.double().repeat_interleave(share, 1).flatten(0, 1)
            exact = _attention(exact_q, exact_k, exact_v, factor, mask)
            most = FORMAT[self.precision] * max(1.0, factor * d**0.5)
            if not float((out - exact).norm()) <= most * float(exact.norm()):
                wrong.append(f"out: {float((out - exact).norm() / exact.norm())} off attention in float64")
        if self.return_lse:
            wrong += self._lse_faults(found[1].flatten(0, 1).double(), codes, (of_q, of_k), (exact_q, exact_k), mask)
        return wrong

    def _lse_faults(
        self, lse: Tensor, codes: QuantizedQKV, numbers: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> list[str]:  # fmt: skip
        """Check the log-sum-exp of the codes' scores, and the contribution of the keys' mean."""
        assert codes.key_mean is not None
        share, d = self.heads // self.kv_heads, self.head_dim
        matrix = reference.build_rotation(codes.key_mean.shape[-1]).to(lse.device).double()
        mean = (codes.key_mean.double() @ matrix.T)[..., :d].repeat_interleave(share, 1).flatten(0, 1)
        added = (exact[0] @ mean.unsqueeze(-1)).squeeze(-1) * self._factor()
        wrong = []
        lost = _SCORES if codes.precision == "fp8" else 2.0**-13 * numbers[0].shape[-1] / 32
        for h in range(len(lse)):
            scores = numbers[0][h] @ numbers[1][h].T * self._factor()
            sizes = (numbers[0][h].abs() @ numbers[1][h].abs().T).amax(-1) * self._factor()
            if mask is not None:
                scores = scores.masked_fill(~mask, -torch.inf)
            wanted = torch.logsumexp(scores, -1) + added[h]
            none = wanted == -torch.inf
            if not torch.equal(none, lse[h] == -torch.inf):
                wrong.append(f"lse of head {h}: -inf elsewhere")
                continue
            reach = (exact[0][h].abs() @ mean[h].abs()) * self._factor()
            # int8's shift may cost 2^-9 of an octave (attention/softmax.cuh).
            allowed = 2e-3 + lost * sizes + 2.0**-17 * reach
            beyond = ~((lse[h] - wanted).abs() <= allowed) & ~none
            if beyond.any():
                at = int(beyond.nonzero()[0])
                wrong.append(f"lse of head {h}, row {at}: {float(lse[h, at])}, {float(wanted[at])} is right")
        return wrong[:4]

    def _slice_faults(self, codes: QuantizedQKV, whole: Tensor) -> list[str]:
        """Check codes of one sequence of the batch, as views."""
        if self.batch == 1:
            return []
        at = slice(1, 2)
        part = QuantizedQKV(
            codes.query[at], codes.key[at], codes.value[at], codes.query_scale[at], codes.key_scale[at],
            codes.value_scale[at], None, codes.precision, codes.head_dim, codes.key_length, codes.dtype,
        )  # fmt: skip
        result, wanted = _attend(part, **self.options()).double(), whole[at].double()  # perhaps of other tiles
        off = float((result - wanted).norm())
        if off <= 6 * RELATIVE * float(wanted.norm()) + 1e-30:
            return []
        return [f"codes of a slice of the batch: {off / float(wanted.norm())} off the whole"]

    def _mask_faults(self, q: Tensor, k: Tensor, v: Tensor) -> list[str]:
        """A mask that no kernel has is refused, never left out."""
        generator = torch.Generator().manual_seed(self.seed)
        mask = torch.rand(self.q_len, self.kv_len, generator=generator) < 0.7
        mask[0, 0] = False
        inputs = mask if self.seed % 2 else torch.where(mask, 0.0, -3.0).to(self.dtype)
        try:
            _sdpa(q, k, v, inputs.to(q.device), enable_gqa=True, precision=self.precision)
        except NotImplementedError:
            return []
        return ["attn_mask: left out without a word"]

    def _gradient_faults(self, tensors: list[Tensor]) -> list[str]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        grad = torch.randn(self.batch, self.heads, self.q_len, self.head_dim, generator=generator)
        grad = grad.to(self.dtype).to(tensors[0].device)
        options = self.options() | {"scale": None, "precision": self.precision, "enable_gqa": True}
        mask = self._mask(grad.device.type)
        result = gradients(lambda *x: _sdpa(*x, **options), tensors, grad)
        exact = gradients(lambda q, k, v: _differentiable(q, k, v, mask), [x.double() for x in tensors], grad.double())
        theirs = gradients(lambda q, k, v: torch_attention(q, k, v, self.causal), tensors, grad)
        wrong = []
        one_key = self.kv_len == 1 or (
            self.causal == 1 and self.q_len == 1
        )  # all queries attend to it: dQ and dK are 0
        for name, mine, other, wanted in zip("qkv", result, theirs, exact, strict=True):
            if one_key and name != "v":
                continue
            limit, off = gradient_bound(other.nan_to_num(), wanted, grad), gradient_error(mine, wanted, grad)
            if not off <= limit:
                wrong.append(f"gradient of {name}: relative error {off}, {limit} allowed")
        return wrong


def sources(target: Target) -> Iterator[KernelSource]:
    """All kernels that draws need."""
    for head_dim, dtype, precision in KINDS:
        name = str(dtype).removeprefix("torch.")
        yield from warmup.kernels_for(
            target, head_dims=(head_dim,), dtypes=(name,), precisions=(precision,), log_sum_exp=True
        )


def _differentiable(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention in the tensors' dtype by PyTorch's products, with rows of zeros where all is masked."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask is None:
        return torch.softmax(scores, -1) @ v
    none = ~mask.any(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(~mask & ~none, -torch.inf), -1).masked_fill(none, 0.0) @ v


def _attention(q: Tensor, k: Tensor, v: Tensor, factor: float, mask: Tensor | None) -> Tensor:
    """Compute attention in float64, head by head."""
    result = torch.empty_like(q)
    for h in range(len(q)):
        scores = q[h] @ k[h].T * factor
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        result[h] = torch.softmax(scores, -1).nan_to_num(0.0) @ v[h]
    return result


def code_faults(codes: QuantizedQKV, q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    """Codes that are further from the rotated tensors than half a step of their format."""
    assert codes.key_mean is not None
    size = codes.query.shape[-1]
    matrix = reference.build_rotation(size).to(q.device).double()

    def wide(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x.double(), (0, size - x.shape[-1]))

    keys = wide(k) @ matrix
    wanted = {
        "q": (wide(q) @ matrix, reference.dequantize_queries(codes), codes.precision),
        "k": (keys - codes.key_mean.double().unsqueeze(2), reference.dequantize_keys(codes), codes.precision),
        "v": (wide(v), reference.dequantize_values(codes), "fp8"),
    }
    wrong = []
    for name, (exact, numbers, precision) in wanted.items():
        rows = 128 if name != "q" else 1 if codes.precision == "int8_fine" else 16
        limit = _largest(exact.abs(), rows)  # of the block
        in_float32 = 2.0**-16 * (_largest(keys.abs(), rows) + limit if name == "k" else limit)
        step = 2.0**-4 * exact.abs() + limit * 2.0**-10 / 448 if precision == "fp8" else limit / 127 / 2
        beyond = ~((numbers.double() - exact).abs() <= step * (1 + 2.0**-8) + in_float32)
        if beyond.any():
            first = beyond.nonzero()[0].tolist()
            wrong.append(f"{name}: {int(beyond.sum())} of {beyond.numel()} off, first at {first}")
    return wrong


def _largest(x: Tensor, rows: int) -> Tensor:
    """The largest number of each block of rows, (B, H, length, 1)."""
    length = x.shape[2]
    padded = torch.nn.functional.pad(x.amax(-1), (0, -length % rows))
    blocks = padded.view(*padded.shape[:2], -1, rows).amax(-1)
    result: Tensor = blocks.repeat_interleave(rows, 2)[..., :length].unsqueeze(-1)
    return result


def draw(rng: random.Random, seed: int, on_gpu: bool) -> SdpaDraw:
    """A call, small on the CPU."""
    limit = 1 << 26 if on_gpu else _FEW
    kv_heads, group = rng.choice([1, 1, 2, 3, 5, 8, 16]), rng.choice([1, 1, 1, 2, 4, 7])
    batch, heads = rng.choice([1, 1, 2, 3]), kv_heads * group
    q_len, kv_len = (rng.choice(LENGTHS) if rng.random() < 0.7 else rng.randint(1, 1500) for _ in range(2))
    if rng.random() < 0.4:
        kv_len = q_len
    if on_gpu and rng.random() < 0.1:  # all blocks of a launch run at once, beside the quantizer's last ones
        batch, kv_heads, heads, q_len = 1, 16, rng.choice([16, 32]), rng.choice([1024, 2048])
        kv_len = q_len
    while batch * heads * q_len * kv_len > 2 * limit:
        if heads > 4 and rng.random() < 0.5:
            kv_heads, heads = 1, group
            batch = 1
        elif q_len >= kv_len and q_len > 1:
            q_len = -(-q_len // 2)
        else:
            kv_len = -(-kv_len // 2)
    head_dim, dtype, precision = rng.choice(KINDS)
    return SdpaDraw(
        batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim,
        dtype=dtype, precision=precision, causal=rng.choice([0, 1, 1, 2]),
        scale=rng.choice([None, None, None, 0.05, 0.3]), layout=rng.choice(LAYOUTS), values=rng.choice(VALUES),
        return_lse=rng.random() < 0.4, gradients=rng.random() < 0.25 and q_len * kv_len * heads * batch < limit / 4,
        masked=rng.random() < 0.04, seed=seed,
    )  # fmt: skip
