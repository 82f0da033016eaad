"""Time transformer layers of true size with PyTorch's attention and under greenfast.use, and measure their errors.

python -m benchmarks models [--model flux llama ...] [--attention torch cudnn fp8 int8 auto block] [--compile]
    [--rounds 5] [--json FILE]

Models have random weights and few layers of the published width: Flux (24 heads, 4,096 tokens of an image and 512 of
text), Wan 14B (40 heads; 480p is 32,760 tokens for 81 frames, 720p 75,600) and Llama 3 8B (32 heads over 8, 8,192
tokens, causal), all of head dim 128; four steps of Wan of which the first and the last are in 16 bits; and of
torch.nn.TransformerEncoderLayer a vision transformer as wide as ViT-L (16 heads of 64) on an image of 2048 x 2048 in
patches of 16, which is 16,384 tokens. ``block`` is a copy of the model after ``accelerate`` of the integrations: norm,
RoPE, quantization and attention in one call. With --compile, torch.compile compiles each model.

The attentions of a model run in turn, another first in each round. Then Q, K and V of each attention are taken from the
uncompiled model, and the error of some rows of the output is given against float64; ``block`` passes no Q, K and V of
its own, so it has the difference of the output only. ``share`` is the share of the time of PyTorch's attention in the
kernels of a forward pass with it. diffusers and transformers are needed for the models of each.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import greenfast
from benchmarks.options import make_parser
from benchmarks.records import write_run
from benchmarks.timing import interleave, time_gpu_ms
from greenfast.integrations.switch import build_multi_head_attention
from greenfast.numerics.attention import attention
from greenfast.spec.errors import UsageError

_SDPA = torch.nn.functional.scaled_dot_product_attention
ATTENTIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch": nullcontext,
    "cudnn": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    "fp8": lambda: greenfast.use("fp8"),
    "int8": lambda: greenfast.use("int8"),
    "auto": lambda: greenfast.use("auto"),
    "block": nullcontext,
}
_SAMPLED_ROWS, _SAMPLED_HEADS = 64, 4


@dataclass(frozen=True)
class TimedModel:
    """A model, the call that is timed, and its tokens."""

    model: nn.Module
    call: Callable[[], Tensor]
    layers: int
    tokens: int


@dataclass(frozen=True)
class ModelRun:
    """A measured combination: milliseconds of a forward pass, number of routed calls, and errors.

    difference: of the model's output from the one with PyTorch's attention, relative (Frobenius). errors: of each
    attention against float64 on the same Q, K and V; torch_errors: PyTorch's. compiled: by torch.compile. share: of
    attention in the time of the kernels with PyTorch's attention, None without a GPU.
    """

    model: str
    attention: str
    layers: int
    tokens: int
    median_ms: float
    rounds_ms: list[float]
    taken: int
    left: dict[str, int]
    difference: float
    errors: list[float]
    torch_errors: list[float]
    compiled: bool = False
    share: float | None = None


def flux(device: str, small: bool) -> TimedModel:
    """Make the two kinds of Flux's layers."""
    library: Any = importlib.import_module("diffusers")
    sizes = {"num_attention_heads": 2, "joint_attention_dim": 64, "pooled_projection_dim": 32} if small else {}
    side, text = (8, 16) if small else (64, 512)
    model = _made(lambda: library.FluxTransformer2DModel(num_layers=1, num_single_layers=2, **sizes), device)
    width, pooled = model.config.joint_attention_dim, model.config.pooled_projection_dim
    ids = torch.zeros(side * side, 3, device=device)
    ids[:, 1], ids[:, 2] = torch.arange(side).repeat_interleave(side), torch.arange(side).repeat(side)
    inputs = {
        "hidden_states": _normal(1, side * side, 64, device=device),
        "encoder_hidden_states": _normal(1, text, width, device=device),
        "pooled_projections": _normal(1, pooled, device=device),
        "timestep": torch.full((1,), 0.5, device=device).bfloat16(),
        "img_ids": ids,
        "txt_ids": torch.zeros(text, 3, device=device),
    }
    return TimedModel(model, lambda: model(**inputs, return_dict=False)[0], 3, side * side + text)


def _wan(latent: tuple[int, int, int]) -> Callable[[str, bool], TimedModel]:
    """Return a function that makes a layer of Wan 14B. latent: frames, height and width."""

    def make(device: str, small: bool) -> TimedModel:
        library: Any = importlib.import_module("diffusers")
        sizes = {"num_attention_heads": 2, "text_dim": 64, "ffn_dim": 256} if small else {}
        frames, height, width = (2, 8, 8) if small else latent
        model = _made(lambda: library.WanTransformer3DModel(num_layers=1, **sizes), device)
        inputs = {
            "hidden_states": _normal(1, 16, frames, height, width, device=device),
            "timestep": torch.full((1,), 500, device=device),
            "encoder_hidden_states": _normal(1, 512, model.config.text_dim, device=device),
        }
        return TimedModel(model, lambda: model(**inputs, return_dict=False)[0], 1, frames * height * width // 4)

    return make


def llama(device: str, small: bool) -> TimedModel:
    """Make two layers of Llama 3 8B with a prompt."""
    library: Any = importlib.import_module("transformers")
    sizes = {
        "hidden_size": 256 if small else 4096, "intermediate_size": 512 if small else 14336, "vocab_size": 32000,
        "num_attention_heads": 2 if small else 32, "num_key_value_heads": 1 if small else 8, "head_dim": 128,
    }  # fmt: skip
    config = library.LlamaConfig(num_hidden_layers=2, max_position_embeddings=131072, **sizes)
    model = _made(lambda: library.LlamaModel(config), device)
    tokens = torch.randint(0, 32000, (1, 128 if small else 8192), generator=torch.Generator().manual_seed(0)).to(device)
    return TimedModel(model, lambda: model(tokens, use_cache=False).last_hidden_state, 2, tokens.shape[1])


def vit(device: str, small: bool) -> TimedModel:
    """Make two of PyTorch's own layers with torch.nn.MultiheadAttention, on the patches of an image."""
    width, heads, side = (128, 2, 8) if small else (1024, 16, 128)

    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)

    model = _made(lambda: nn.Sequential(layer(), layer()), device)
    tokens = _normal(1, side * side, width, device=device)
    return TimedModel(model, lambda: model(tokens), 2, side * side)


def wan_steps(device: str, small: bool) -> TimedModel:
    """Make four steps of a layer of Wan at 480p; the first and the last use PyTorch's attention."""
    step = MODELS["wan_480p"](device, small)

    def call() -> Tensor:
        outs = []
        for index in range(4):
            with nullcontext() if 0 < index < 3 else greenfast.use(min_length=10**9):
                outs.append(step.call())
        return torch.cat(outs)

    return TimedModel(step.model, call, 4, step.tokens)


MODELS: dict[str, Callable[[str, bool], TimedModel]] = {
    "flux": flux,
    "wan_480p": _wan((21, 60, 104)),
    "wan_720p": _wan((21, 90, 160)),
    "wan_steps": wan_steps,
    "llama": llama,
    "vit": vit,
}


def _made(model: Callable[[], Any], device: str) -> Any:
    """Return a model with random weights in bfloat16."""
    torch.manual_seed(0)
    with torch.device(device):
        return model().to(torch.bfloat16).eval()


def _normal(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)


class _Recorded(TorchFunctionMode):
    """Records the arguments and the output of each attention call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor, bool, float, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.multi_head_attention_forward:
            with self:  # it calls attention
                return build_multi_head_attention()(*args, **kwargs)
        if func is not _SDPA:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        out = func(*args, **kwargs)  # greenfast.use, which is further out, sees it
        q, k, v = (given[name] for name in ("query", "key", "value"))
        self.calls.append((q, k, v, bool(given.get("is_causal")), given.get("scale") or q.shape[-1] ** -0.5, out))
        return out


def measure_errors(model: TimedModel) -> list[float]:
    """Return the error of each of the model's attentions in sampled rows and heads, relative to float64."""
    with _Recorded() as recorded:
        model.call()
    relative_errors = []
    for q, k, v, causal, scale, out in recorded.calls:
        rows = torch.linspace(0, q.shape[2] - 1, min(_SAMPLED_ROWS, q.shape[2]), device=q.device).long()
        heads, group = range(0, q.shape[1], max(1, q.shape[1] // _SAMPLED_HEADS)), q.shape[1] // k.shape[1]
        wanted = []
        for head in heads:
            of = slice(head // group, head // group + 1)
            mask = torch.arange(k.shape[2], device=q.device) <= rows.unsqueeze(1) if causal else None
            wanted.append(
                attention(q[0, head : head + 1, rows].float(), k[0, of].float(), v[0, of].float(), scale, mask)
            )
        exact = torch.cat(wanted)
        near = out[0, list(heads)][:, rows].double()
        relative_errors.append(float((near - exact).norm() / exact.norm()))
    return relative_errors


def measure(name: str, models: Mapping[str, TimedModel], rounds: int, compiled: bool = False) -> list[ModelRun]:
    """Measure a model with each attention, interleaved.

    models: by attention; ``torch``, which the others are compared with, is among them.
    """
    plain = models["torch"]
    outs: dict[str, Tensor] = {}
    routed: dict[str, Any] = {}
    with torch.inference_mode():
        own = {a: [] if a == "block" else _measure_errors_with(a, model) for a, model in models.items()}
    if compiled:
        torch.compiler.reset()
        for model in {id(model): model for model in models.values()}.values():
            model.model.compile(dynamic=False)

    def run(attention_name: str) -> float:
        with torch.inference_mode(), ATTENTIONS[attention_name]() as counts:
            took, out = _timed(models[attention_name].call)
        if attention_name not in outs:  # in the warm-up
            outs[attention_name], routed[attention_name] = out, counts
        return took

    times = interleave({a: partial(run, a) for a in models}, rounds, warmup=2 if compiled else 1)
    exact = outs["torch"].double()
    share = measure_share(plain.call) if torch.cuda.is_available() else None
    runs = []
    for a in models:
        counts = routed[a]
        runs.append(
            ModelRun(
                model=name, attention=a, layers=plain.layers, tokens=plain.tokens,
                median_ms=statistics.median(times[a]), rounds_ms=[round(t, 3) for t in times[a]],
                taken=counts.taken if counts else 0, left=dict(counts.fallen_back) if counts else {},
                difference=float((outs[a].double() - exact).norm() / exact.norm()),
                errors=own[a], torch_errors=own["torch"], compiled=compiled, share=share,
            )
        )  # fmt: skip
    return runs


def _measure_errors_with(attention_name: str, model: TimedModel) -> list[float]:
    with ATTENTIONS[attention_name]():
        return measure_errors(model)


def measure_share(call: Callable[[], Tensor]) -> float:
    """Return the share of PyTorch's attention in the time of the kernels of a call."""
    with torch.inference_mode(), torch.profiler.profile() as profile:
        call()
        torch.cuda.synchronize()
    events = profile.key_averages()
    attention_times = [e.device_time_total for e in events if "scaled_dot_product" in e.key]  # some contain others
    kernels = sum(e.self_device_time_total for e in events if e.device_type == DeviceType.CUDA)
    share: float = max(attention_times, default=0.0) / kernels
    return share


def _accelerated(make: Callable[[], TimedModel]) -> TimedModel:
    """Return another copy of a model, with greenfast's block as its attention."""
    timed = make()
    package = type(timed.model).__module__.partition(".")[0]
    if package not in ("diffusers", "transformers"):
        raise UsageError("--attention block: accelerate takes models of diffusers and transformers; leave out vit")
    integration = importlib.import_module(f"greenfast.integrations.{package}")
    integration.accelerate(timed.model)
    return timed


def _timed(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Return the milliseconds of a call on the GPU, nan without one, and its result."""
    return time_gpu_ms(call) if torch.cuda.is_available() else (float("nan"), call())


def main(argv: Sequence[str] | None = None) -> list[ModelRun]:
    """Measure, print and write the record."""
    parser = make_parser("models", __doc__)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument(
        "--attention", nargs="+", default=[a for a in ATTENTIONS if a != "block"], choices=ATTENTIONS, help="with torch"
    )
    parser.add_argument("--compile", action="store_true", help="compile each model by torch.compile")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="narrow models, for a try on the CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if "torch" not in args.attention:
        parser.error("--attention: torch is what the others are compared with; name it too")
    runs = []
    for name in args.model:
        make = partial(MODELS[name], args.device, args.small)
        shared = make()
        models = {a: _accelerated(make) if a == "block" else shared for a in args.attention}
        runs += measure(name, models, args.rounds, args.compile)
        plain = next(run.median_ms for run in runs if (run.model, run.attention) == (name, "torch"))
        for run in runs[-len(args.attention) :]:
            gain, listed_errors = plain / run.median_ms, ", ".join(f"{e:.4f}" for e in run.errors)
            print(
                f"{name:9} {run.tokens:6} tokens {run.attention:6} {run.median_ms:8.2f} ms {gain:6.3f}x  "
                f"{run.taken} routed  difference {run.difference:.4f}  errors {listed_errors}"
                + (f"  attention {run.share:.0%} of the kernels' time" if run.share else ""),
                flush=True,
            )
        del shared, models
    write_run(args, "models", ("diffusers", "transformers"), runs)
    return runs
