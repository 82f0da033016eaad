"""Masks by tiles: attention that skips tiles beside dense attention, ``varlen_attn``, cuDNN and FlexAttention.

python -m benchmarks masks [--cases CASE ...] [--json FILE]     on a Hopper GPU
python -m benchmarks masks --skipping     the tiles that a skip_threshold skips, and the error, on any machine

Each case is timed interleaved in one process, as graphs of calls from bfloat16 tensors. The mask is made before the
calls, except by the backends that make it. Errors are relative (Frobenius), against attention in float64 of a sample of
rows of two heads. ``efficiency`` is the speedup over ``dense`` divided by the ideal one, the ratio of the tiles that
both visit. ``making`` is the time to make the mask as a share of ``mask``. ``bool`` keeps the kernels' form of its mask
after the first call. ``skipped`` is the share of the tiles of 64 queries and 128 keys that ``skip_threshold`` skips, in
two heads.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import greenfast
from benchmarks.options import make_parser
from benchmarks.records import write_measurements
from benchmarks.registry import GREENFAST, TORCH, BoundCall, Suite, time_backends
from greenfast import BlockMask
from greenfast.ops import reference
from greenfast.ops.masked import MaskSpec

TILE, HEAD_DIM = 128, 128
#: Query heads, KV heads.
HEADS = ((32, 8), (24, 24))
TOKENS = 16384
DENSITIES = (0.5, 0.25, 0.125)
DOCUMENTS = (4000, 120, 2500, 3100, 33, 1700, 2048, 2883)
WINDOW_TOKENS, WINDOW = 32768, 1024
#: Keys of each sequence, half of them padding.
PADDED = (4096, 2048, 1500, 548)
#: The first skips nothing, and shows the cost of the votes.
THRESHOLDS = (1e-30, 1e-3, 1e-2, 0.1)
_SAMPLED_ROWS, _MAX_ERROR = 256, 0.15
_sdpa: Any = greenfast.sdpa
_varlen_attn: Any = greenfast.varlen_attn


@dataclass(frozen=True)
class MaskInputs:
    """The inputs of one case.

    q: bfloat16 (B, H, S, D); k, v: (B, HK, S, D). allows: whether a query attends to a key, as a ``mask_mod`` of
    FlexAttention: (batch, head, query, key) -> bool. mask: the same by tiles. lists: the counts and the indices of full
    tiles, if the mask consists of these. documents: the lengths of documents. options: of ``sdpa``, in place of a mask.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    allows: Callable[[Any, Any, Any, Any], Any]
    mask: BlockMask
    lists: tuple[Tensor, Tensor] | None = None
    documents: Tensor | None = None
    lengths: Sequence[int] = ()
    causal: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grouped(self) -> bool:
        """Whether query heads share KV heads."""
        return self.q.shape[1] != self.k.shape[1]

    def attend(self, **options: Any) -> Callable[[], Tensor]:
        """Return the call of ``greenfast.sdpa`` with these options."""
        return lambda: _sdpa(self.q, self.k, self.v, enable_gqa=self.grouped, **options)


BACKENDS = Suite()
_register = BACKENDS.register


@_register("dense", "greenfast.sdpa without the mask", "fp8", GREENFAST, attention=False)
def _dense(inputs: MaskInputs) -> BoundCall:
    return BoundCall(inputs.attend(is_causal=inputs.causal))


@_register("mask", "greenfast.sdpa with a BlockMask", "fp8", GREENFAST)
def _mask(inputs: MaskInputs) -> BoundCall:
    return BoundCall(inputs.attend(attn_mask=inputs.mask))


@_register("options", "greenfast.sdpa with a window, lengths or skipped tiles", "fp8", GREENFAST)
def _options(inputs: MaskInputs) -> BoundCall:
    return BoundCall(inputs.attend(**inputs.options))


@_register("bool", "greenfast.sdpa with a boolean mask that was seen before", "fp8", GREENFAST)
def _bool(inputs: MaskInputs) -> BoundCall:
    return BoundCall(inputs.attend(attn_mask=inputs.mask.to_bool().contiguous()))


@_register("from_bool", "BlockMask.from_bool", "none", GREENFAST, attention=False)
def _from_bool(inputs: MaskInputs) -> BoundCall:
    dense = inputs.mask.to_bool().contiguous()
    return BoundCall(lambda: BlockMask.from_bool(dense).counts)


@_register("from_segments", "BlockMask.from_segments", "none", GREENFAST, attention=False)
def _from_segments(inputs: MaskInputs) -> BoundCall:
    assert inputs.documents is not None
    documents = inputs.documents
    return BoundCall(lambda: BlockMask.from_segments(documents, causal=inputs.causal).counts)


@_register("from_blocks", "BlockMask.from_blocks", "none", GREENFAST, attention=False)
def _from_blocks(inputs: MaskInputs) -> BoundCall:
    assert inputs.lists is not None
    counts, indices = inputs.lists
    return BoundCall(lambda: BlockMask.from_blocks(counts, indices, inputs.q.shape[2], inputs.k.shape[2]).counts)


@_register("varlen", "greenfast.varlen_attn", "fp8", GREENFAST)
def _varlen(inputs: MaskInputs) -> BoundCall:
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v))
    starts = torch.tensor([0, *inputs.lengths], device=q.device).cumsum(0).int()
    window = inputs.options.get("window", (-1, 0 if inputs.causal else -1))

    def call() -> Tensor:
        longest = max(inputs.lengths)
        out: Tensor = _varlen_attn(q, k, v, starts, starts, longest, longest, enable_gqa=True, window_size=window)
        return out.transpose(0, 1).unsqueeze(0)

    return BoundCall(call)


@_register("cudnn", "cuDNN FP8 block-sparse (Sage)", "fp8", ("cudnn", "nvidia-cudnn-frontend"))
def _cudnn(inputs: MaskInputs) -> BoundCall:
    """Bind cuDNN's block-sparse attention, which quantizes in each call. Every block of rows has the same count."""
    forward: Any = importlib.import_module("cudnn").BSA.block_sparse_attention_fp8_forward
    if inputs.grouped or inputs.lists is None:
        raise ValueError(
            "cuDNN's FP8 block-sparse attention needs lists of blocks, and as many KV heads as query heads"
        )
    indices = inputs.lists[1].contiguous()
    return BoundCall(
        lambda: forward(inputs.q, inputs.k, inputs.v, indices, indices.shape[3], sparse_block_size=TILE)["o_tensor"]
    )


@_register("flex", "FlexAttention bf16, compiled", "bf16", TORCH)
def _flex(inputs: MaskInputs) -> BoundCall:
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    lengths, device = (inputs.q.shape[2], inputs.k.shape[2]), inputs.q.device
    if inputs.lists is None:
        mask = flex.create_block_mask(inputs.allows, inputs.q.shape[0], None, *lengths, device)
    else:
        counts, indices = inputs.lists
        indices = torch.nn.functional.pad(indices, (0, -(-lengths[1] // TILE) - indices.shape[3]))  # as Flex needs it
        mask = flex.BlockMask.from_kv_blocks(
            torch.zeros_like(counts), indices, counts, indices, BLOCK_SIZE=TILE, seq_lengths=lengths
        )
    compile_function: Any = torch.compile
    torch.compiler.reset()  # each case has sizes of its own, and eight of them would be the limit
    compiled = compile_function(flex.flex_attention, dynamic=False)
    return BoundCall(lambda: compiled(inputs.q, inputs.k, inputs.v, block_mask=mask, enable_gqa=inputs.grouped))


def make_tensors(batch: int, heads: tuple[int, int], tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q, K and V, (batch, heads, tokens, HEAD_DIM) of bfloat16."""
    torch.manual_seed(0)
    sizes = [(batch, n, tokens, HEAD_DIM) for n in (heads[0], heads[1], heads[1])]
    q, k, v = (torch.randn(size, device=device, dtype=torch.bfloat16) for size in sizes)
    return q, k, v


def make_blocks(heads: tuple[int, int], density: float, tokens: int = TOKENS, device: str = "cuda") -> MaskInputs:
    """Return inputs with random lists of full tiles for each head, as many in every block of rows."""
    q, k, v = make_tensors(1, heads, tokens, device)
    tiles = -(-tokens // TILE)
    count = max(1, round(density * tiles))
    indices = torch.rand(1, heads[0], tiles, tiles, device=device).argsort(-1)[..., :count].sort(-1).values.int()
    counts = torch.full(indices.shape[:3], count, dtype=torch.int32, device=device)
    table = torch.zeros((heads[0], tiles, tiles), dtype=torch.bool, device=device)
    table = table.scatter(-1, indices[0].long(), True)

    def allows(b: Any, h: Any, row: Any, key: Any) -> Any:
        return table[h, row // TILE, key // TILE]

    return MaskInputs(q, k, v, allows, BlockMask.from_blocks(counts, indices, tokens, tokens), lists=(counts, indices))


def make_documents(
    heads: tuple[int, int], causal: bool, lengths: Sequence[int] = DOCUMENTS, device: str = "cuda"
) -> MaskInputs:
    """Return inputs of one sequence that consists of documents."""
    q, k, v = make_tensors(1, heads, sum(lengths), device)
    documents = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device)).int()

    def allows(b: Any, h: Any, row: Any, key: Any) -> Any:
        same = documents[row] == documents[key]
        return same & (key <= row) if causal else same

    mask = BlockMask.from_segments(documents, causal=causal)
    return MaskInputs(q, k, v, allows, mask, documents=documents, lengths=lengths, causal=causal)


def make_window(
    heads: tuple[int, int], tokens: int = WINDOW_TOKENS, width: int = WINDOW, device: str = "cuda"
) -> MaskInputs:
    """Return inputs with a causal window of ``width`` keys."""

    def allows(b: Any, h: Any, row: Any, key: Any) -> Any:
        return (key <= row) & (key > row - width)

    q, k, v = make_tensors(1, heads, tokens, device)
    return MaskInputs(
        q, k, v, allows, _make_mask(allows, 1, tokens, device), lengths=(tokens,),
        causal=True, options={"window": (width - 1, 0)},
    )  # fmt: skip


def make_padding(heads: tuple[int, int], lengths: Sequence[int] = PADDED, device: str = "cuda") -> MaskInputs:
    """Return inputs of a batch with padded keys."""
    used, tokens = torch.tensor(lengths, device=device).int(), max(lengths)

    def allows(b: Any, h: Any, row: Any, key: Any) -> Any:
        return (key < used[b]) & (row >= 0)

    q, k, v = make_tensors(len(lengths), heads, tokens, device)
    return MaskInputs(q, k, v, allows, _make_mask(allows, len(lengths), tokens, device), options={"kv_lengths": used})


def make_local(heads: tuple[int, int], threshold: float, tokens: int = TOKENS, device: str = "cuda") -> MaskInputs:
    """Return causal inputs with the largest weights near the query and at the first key, a sink.

    Q and K are N(0, 1/2), plus a common part of the same size; its correlation falls by 1/e in 256 tokens, and in Q
    plus 0.7, which the sink has 1.5 of.
    """
    q, k, v = make_tensors(1, heads, tokens, device)
    keep = math.exp(-1 / 256)
    steps = torch.randn(tokens, HEAD_DIM, device=device) * math.sqrt(1 - keep**2)
    decay = keep ** torch.arange(tokens, dtype=torch.float64, device=device)
    # A sum over all earlier steps, in chunks in which the decay does not underflow.
    places = torch.empty_like(steps)
    last = torch.randn(HEAD_DIM, dtype=torch.float64, device=device)
    for first in range(0, tokens, 4096):
        chunk = steps[first : first + 4096].double()
        weights = decay[: len(chunk)].unsqueeze(1)
        grown = (last * keep + (chunk / weights).cumsum(0)) * weights
        places[first : first + 4096], last = grown.float(), grown[-1]
    q, k = 0.7 * (q + places.bfloat16()) + 0.7, 0.7 * (k + places.bfloat16())
    k[:, :, 0] += 1.5
    documents = torch.zeros(tokens, dtype=torch.int32, device=device)
    options = {"skip_threshold": threshold, "is_causal": True}
    mask = BlockMask.from_segments(documents, causal=True)
    return MaskInputs(q, k, v, lambda b, h, row, key: key <= row, mask, causal=True, options=options)


def measure_skipping(inputs: MaskInputs) -> float:
    """Return the share of tiles with a key that are skipped, in the first and the last head of the first sequence."""
    threshold, (_, heads, length, _) = inputs.options["skip_threshold"], inputs.q.shape
    order = MaskSpec(lists=inputs.options["attn_mask"]).tile_order() if "attn_mask" in inputs.options else None
    group, skipped, attended = heads // inputs.k.shape[1], 0, 0
    for head in (0, heads - 1):
        part = (inputs.q[:1, head, None], inputs.k[:1, head // group, None], inputs.v[:1, head // group, None])
        codes = greenfast.quantize(*part)
        q, k = reference.dequantize_queries(codes), reference.dequantize_keys(codes)
        for first in range(0, length, TILE):
            rows = torch.arange(first, min(first + TILE, length), device=q.device).unsqueeze(1)
            keys = torch.arange(k.shape[2], device=q.device)
            scores = q[:, :, first : first + TILE] @ k.transpose(2, 3) / math.sqrt(inputs.q.shape[3])
            scores = scores.masked_fill(~inputs.allows(0, head, rows, keys), -math.inf)
            any_key = torch.nn.functional.max_pool2d(
                (scores > -math.inf).float(), (reference.SKIP_ROWS, TILE), ceil_mode=True
            ).bool()
            attended += int(any_key.sum())
            of_rows = None if order is None else order[:1, :1, first // TILE, None]
            skipped += int((any_key & reference.find_skipped_tiles(scores, threshold, of_rows)).sum())
    return skipped / attended


class _Layer(torch.nn.Module):
    """A layer of a small language model, with heads of 64 columns and rotary embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def project(self, x: Tensor) -> list[Tensor]:
        """Return Q, K and V, (batch, heads, tokens, 64)."""
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, 64)).permute(2, 0, 3, 1, 4)
        place = torch.arange(x.shape[1]).unsqueeze(1) * 10000.0 ** (-torch.arange(32) / 32)
        turned = []
        for part in (q, k):
            a, b = part.chunk(2, -1)
            turned.append(torch.cat([a * place.cos() - b * place.sin(), a * place.sin() + b * place.cos()], -1))
        return [*turned, v]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = self.mlp(self.second(x))
        return x + added


def train_model(text: bytes, steps: int, tokens: int, width: int = 128, layers: int = 2) -> list[list[Tensor]]:
    """Train a language model of bytes on the CPU, and return Q, K and V of each layer on the end of the text."""
    torch.manual_seed(0)
    symbols = torch.tensor(list(text))
    embed, head = torch.nn.Embedding(256, width), torch.nn.Linear(width, 256)
    blocks = [_Layer(width) for _ in range(layers)]
    parameters = [x for module in (embed, head, *blocks) for x in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        start = int(torch.randint(0, len(symbols) - 2 * tokens, ()))
        some = symbols[start : start + tokens + 1]
        x = embed(some[None, :-1])
        for block in blocks:
            x = block(x)
        loss = torch.nn.functional.cross_entropy(head(x)[0], some[1:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    print(f"trained: loss {loss.item():.2f} nats a byte")
    result = []
    with torch.no_grad():
        x = embed(symbols[None, -tokens:])
        for block in blocks:
            result.append([part.bfloat16() for part in block.project(x)])
            x = block(x)
    return result


def compare_thresholds(inputs: MaskInputs, diagonal_first: bool = False) -> list[dict[str, float]]:
    """Return for each threshold the share of skipped tiles, and the error.

    diagonal_first: the causal mask is a BlockMask with one head; its partial tiles come first.
    """
    rows = []
    for threshold in THRESHOLDS:
        options = {
            "skip_threshold": threshold,
            **({"attn_mask": inputs.mask} if diagonal_first else {"is_causal": True}),
        }
        error = measure_error(inputs, inputs.attend(**options)())
        skipped = measure_skipping(replace(inputs, options=options))
        rows.append({"threshold": threshold, "skipped": round(skipped, 3), "error": round(error, 4)})
    return rows


def print_skipping(tokens: int = 1024, steps: int = 700) -> None:
    """Print the skipped tiles and errors of synthetic local attention, and of a small model trained on the pages."""
    local = make_local((2, 1), 0.0, 4 * tokens, "cpu")
    cases = {"local": local}
    pages = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    for n, (q, k, v) in enumerate(train_model(b"".join(page.read_bytes() for page in pages), steps, tokens)):
        mask = BlockMask.from_segments(torch.zeros(tokens, dtype=torch.int32), causal=True)
        cases[f"trained, layer {n}"] = MaskInputs(q, k, v, local.allows, mask, causal=True)
    for case, inputs in cases.items():
        for diagonal_first in (False, True):
            for row in compare_thresholds(inputs, diagonal_first):
                print({"case": case, "diagonal first": diagonal_first, **row}, flush=True)


def _make_mask(allows: Callable[..., Any], batch: int, tokens: int, device: str) -> BlockMask:
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    return BlockMask.from_flex(flex.create_block_mask(allows, batch, None, tokens, tokens, device))


_MAKERS = ("from_bool", "bool")
#: Case -> how its inputs are made for heads, and its backends.
CASES: dict[str, tuple[Callable[[tuple[int, int]], MaskInputs], tuple[str, ...]]] = {
    **{
        f"blocks {density:.1%}": (
            lambda heads, density=density: make_blocks(heads, density),  # type: ignore[misc]
            ("dense", "mask", "from_blocks", "cudnn", "flex"),
        )
        for density in DENSITIES
    },
    "documents": (
        lambda heads: make_documents(heads, False), ("dense", "mask", *_MAKERS, "from_segments", "varlen", "flex"),
    ),
    "causal documents": (
        lambda heads: make_documents(heads, True), ("dense", "mask", *_MAKERS, "from_segments", "varlen", "flex"),
    ),
    "window": (make_window, ("dense", "mask", "options", "varlen", "flex")),
    "padding": (make_padding, ("dense", "mask", "options", "flex")),
    **{
        f"local, skip {threshold:g}": (
            lambda heads, threshold=threshold: make_local(heads, threshold),  # type: ignore[misc]
            ("dense", "options"),
        )
        for threshold in THRESHOLDS
    },
}  # fmt: skip


def measure_error(inputs: MaskInputs, out: Tensor) -> float:
    """Return the relative error of a sample of rows of the first and the last head of the last sequence."""
    batch, heads, length, _ = inputs.q.shape
    rows = torch.arange(0, length, -(-length // _SAMPLED_ROWS), device=inputs.q.device)
    keys = torch.arange(inputs.k.shape[2], device=inputs.q.device)
    group, b = heads // inputs.k.shape[1], batch - 1
    difference = norm = 0.0
    for head in (0, heads - 1):
        q, k, v = inputs.q[b, head, rows], inputs.k[b, head // group], inputs.v[b, head // group]
        scores = q.double() @ k.double().T / math.sqrt(q.shape[1])
        allowed = inputs.allows(b, head, rows.unsqueeze(1), keys.unsqueeze(0))
        expected = torch.softmax(scores.masked_fill(~allowed, -math.inf), -1).nan_to_num(0.0) @ v.double()
        difference += float((out[b, head, rows].double() - expected).square().sum())
        norm += float(expected.square().sum())
    return math.sqrt(difference / norm)


def compare_with_dense(us: Mapping[str, float], density: float, dense_density: float) -> dict[str, float]:
    """Return the efficiency of each attention of greenfast: its speedup over ``dense`` / the ideal one."""
    if "dense" not in us:
        return {}
    ideal = us["dense"] * density / dense_density
    return {name: round(ideal / us[name], 3) for name in ("mask", "options", "bool", "varlen") if name in us}


def compare_making(us: Mapping[str, float]) -> dict[str, float]:
    """Return the time to make the mask, as a share of one attention with it."""
    makers = ("from_bool", "from_segments", "from_blocks")
    return {name: round(us[name] / us["mask"], 4) for name in makers if name in us and "mask" in us}


def render_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of a record without skipped tiles as a table in Markdown."""
    lines = [
        "| heads q:kv, head dim | mask | tiles visited | dense, µs | with options | BlockMask | varlen_attn "
        "| of the ideal speedup | cuDNN FP8 | FlexAttention bf16 | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.get("skipped") is not None:
            continue
        us, (heads, kv_heads, head_dim) = row["us"], row["heads"]
        names = ("dense", "options", "mask", "varlen", "cudnn", "flex")
        cells = [f"{us[name]:.0f}" if us.get(name) else "-" for name in names]
        best = max(row["efficiency"].get(name) or 0.0 for name in ("mask", "options"))
        error = max(row["error"].get(name) or 0.0 for name in ("mask", "options"))
        lines.append(
            f"| {heads}:{kv_heads}, {head_dim} | {row['case']} | {row['density']:.1%} | {' | '.join(cells[:4])} | "
            f"{best:.2f} | {' | '.join(cells[4:])} | {error:.3f} |"
        )
    return "\n".join(lines)


def render_skipping(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of a record with skipped tiles as a table in Markdown."""
    lines = [
        "| heads q:kv, head dim | threshold | tiles skipped | without the option, µs | with it | speedup | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        us, (heads, kv_heads, head_dim) = row["us"], row["heads"]
        if row.get("skipped") is None or us.get("options") is None:
            continue
        threshold = row["case"].rsplit(" ", 1)[1]
        lines.append(
            f"| {heads}:{kv_heads}, {head_dim} | {threshold} | {row['skipped']:.0%} | {us['dense']:.0f} | "
            f"{us['options']:.0f} | {us['dense'] / us['options']:.2f}x | {row['error']['options']:.3f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the times, and write the record if asked to."""
    parser = make_parser("masks", __doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    parser.add_argument("--skipping", action="store_true", help="print what thresholds skip, without times")
    args = parser.parse_args(argv)
    if args.skipping:
        return print_skipping()
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    rows = []
    for heads in HEADS:
        for case in args.cases:
            make, names = CASES[case]
            inputs = make(heads)
            tiles = -(-inputs.q.shape[2] // TILE)
            density, dense_density = float(inputs.mask.density), (tiles + 1) / (2 * tiles) if inputs.causal else 1.0
            measured = time_backends(BACKENDS, inputs, names, partial(measure_error, inputs), _MAX_ERROR)
            efficiency = compare_with_dense(measured["us"], density, dense_density)
            row = {"heads": (*heads, HEAD_DIM), "case": case, "density": round(density, 4), "efficiency": efficiency}
            if "skip_threshold" in inputs.options:
                row["skipped"] = round(measure_skipping(inputs), 4)
            rows.append(row | {"making": compare_making(measured["us"])} | measured)
            print(rows[-1], flush=True)
            del inputs
            torch.cuda.empty_cache()
    backends = [backend.describe() for backend in BACKENDS.values()]
    write_measurements(args.json, "masks", torch.cuda.get_device_name(), backends=backends, times=rows)
