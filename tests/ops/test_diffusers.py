"""Tiny random models of diffusers with accelerate, on the CPU, against their own processors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import greenfast
from greenfast.integrations import models
from greenfast.integrations.diffusers import accelerate
from greenfast.ops.block import BLOCK, QKTransform

library: Any = pytest.importorskip("diffusers")
COMPILE: Any = torch.compile
#: A relative error of attention in FP8 (evidence/h200/peers has 0.053 for Gaussian inputs), for a model of two layers.
LIMIT = 0.06


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def make_flux() -> tuple[Any, dict[str, Any]]:
    model = library.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    inputs = dict(
        hidden_states=draw(2, 64, 4), encoder_hidden_states=draw(2, 19, 32, seed=1), pooled_projections=draw(2, 32),
        timestep=torch.tensor([1.0, 1.0]), img_ids=torch.arange(64).view(64, 1).expand(64, 3).float(),
        txt_ids=torch.zeros(19, 3),
    )  # fmt: skip
    return model, inputs


def make_sd3() -> tuple[Any, dict[str, Any]]:
    """Make Stable Diffusion 3.5: norms of Q and K, and a second attention of the image in the first block."""
    model = library.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64, out_channels=4,
        dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    inputs = dict(
        hidden_states=draw(2, 4, 16, 16), encoder_hidden_states=draw(2, 21, 32, seed=1), pooled_projections=draw(2, 64),
        timestep=torch.tensor([1.0, 1.0]),
    )  # fmt: skip
    return model, inputs


def make_wan() -> tuple[Any, dict[str, Any]]:
    model = library.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
    )  # fmt: skip
    inputs = dict(
        hidden_states=draw(2, 4, 2, 8, 8), encoder_hidden_states=draw(2, 12, 16, seed=1), timestep=torch.tensor([5, 5])
    )
    return model, inputs


def make_hunyuan() -> tuple[Any, dict[str, Any]]:
    model = library.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(4, 4, 8),
    )  # fmt: skip
    mask = torch.ones(2, 12)
    mask[1, 7:] = 0
    inputs = dict(
        hidden_states=draw(2, 4, 1, 8, 8), encoder_hidden_states=draw(2, 12, 16, seed=1),
        pooled_projections=draw(2, 8), timestep=torch.tensor([5, 5]), encoder_attention_mask=mask,
        guidance=torch.tensor([1000.0, 1000.0]).bfloat16(),
    )  # fmt: skip
    return model, inputs


def make_ltx() -> tuple[Any, dict[str, Any]]:
    model = library.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=2, caption_channels=16, qk_norm="rms_norm_across_heads",
    )  # fmt: skip
    inputs = dict(
        hidden_states=draw(2, 64, 8), encoder_hidden_states=draw(2, 12, 16, seed=1), timestep=torch.tensor([5.0, 5.0]),
        encoder_attention_mask=torch.ones(2, 12).bool(), num_frames=1, height=8, width=8,
    )  # fmt: skip
    return model, inputs


def make_cogvideox() -> tuple[Any, dict[str, Any]]:
    model = library.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=16, num_layers=2, sample_width=8, sample_height=8, sample_frames=5, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=12, use_rotary_positional_embeddings=True,
    )  # fmt: skip
    angles = torch.arange(32).view(32, 1) * 0.1 * torch.arange(1, 9)
    tables = tuple(x.repeat_interleave(2, 1) for x in (angles.cos(), angles.sin()))
    inputs = dict(
        hidden_states=draw(2, 2, 4, 8, 8), encoder_hidden_states=draw(2, 12, 16, seed=1), timestep=torch.tensor([5, 5]),
        image_rotary_emb=tables,
    )  # fmt: skip
    return model, inputs


def make_qwen() -> tuple[Any, dict[str, Any]]:
    model = library.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, guidance_embeds=False, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    mask = torch.ones(2, 12).bool()
    mask[1, 7:] = False
    inputs = dict(
        hidden_states=draw(2, 64, 16), encoder_hidden_states=draw(2, 12, 16, seed=1),
        encoder_hidden_states_mask=mask, timestep=torch.tensor([1.0, 1.0]), img_shapes=[[(1, 8, 8)]] * 2,
    )  # fmt: skip
    return model, inputs


#: Name -> the model, the number of replaced layers, and of calls of them that are computed here.
CASES: dict[str, tuple[Callable[[], tuple[Any, dict[str, Any]]], int, int]] = {
    "flux": (make_flux, 2, 2),
    "sd3": (make_sd3, 3, 3),
    "wan": (make_wan, 4, 4),
    "hunyuan": (make_hunyuan, 2, 2),
    "ltx": (make_ltx, 4, 2),
    "cogvideox": (make_cogvideox, 2, 2),
    "qwen": (make_qwen, 2, 2),
}
CACHE: dict[str, tuple[Any, dict[str, Any]]] = {}


def get(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a model in bfloat16 and its inputs; the norms' weights have a trained model's spread."""
    if name not in CACHE:
        torch.manual_seed(0)
        model, inputs = CASES[name][0]()
        for label, parameter in model.named_parameters():
            if "norm_" in label and parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        CACHE[name] = model.to(torch.bfloat16).eval(), inputs
    return CACHE[name]


def run(name: str) -> Tensor:
    model, inputs = get(name)
    with torch.no_grad():
        out: Tensor = model(**inputs, return_dict=False)[0]
    return out.float()


def error(result: Tensor, wanted: Tensor) -> float:
    return float((result - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", CASES)
def test_a_model_agrees_with_its_own_processors(name: str) -> None:
    model, _ = get(name)
    before = {key: id(x) for key, x in model.attn_processors.items()}
    plain = run(name)
    accelerated = accelerate(model, min_length=0)
    result = run(name)
    assert len(accelerated.replaced) == CASES[name][1]
    assert accelerated.routed.taken >= CASES[name][2]
    assert 0.0 < error(result, plain) < LIMIT
    accelerated.undo()
    assert {key: id(x) for key, x in model.attn_processors.items()} == before
    assert torch.equal(run(name), plain)
    kept = greenfast.Policy(tuple(accelerated.replaced))
    with accelerate(model, min_length=0, policy=kept) as exact:
        assert torch.equal(run(name), plain), "all layers in 16 bits"
    assert exact.routed.taken == 0
    with accelerate(model, min_length=10**6) as short:
        assert torch.equal(run(name), plain), "the layers' own code"
    assert short.routed.taken == 0
    assert short.routed.fallen_back


class OperatorCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps norm and RoPE of the calls of the operator that normalizes, rotates, quantizes and attends."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.transforms: list[QKTransform] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is BLOCK:
            self.transforms.append(QKTransform(*args[3:13]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "norm", "dims"), [("ltx", "rms", (2, 4)), ("cogvideox", "layer", (1, 2))])
def test_norm_and_rope_reach_the_operator(name: str, norm: str, dims: tuple[int, int]) -> None:
    """LTX has norms over all heads and tables of each head, CogVideoX LayerNorm with biases: no pass by PyTorch."""
    with accelerate(get(name)[0], min_length=0) as accelerated, OperatorCalls() as calls:
        run(name)
    assert len(calls.transforms) == accelerated.routed.taken == CASES[name][2]
    for transform in calls.transforms:
        assert transform.norm == norm
        assert (transform.q_norm_bias is None) == (norm == "rms")
        assert transform.q_norm is not None
        assert transform.cos is not None
        assert (transform.q_norm.dim(), transform.cos.dim()) == dims


@pytest.mark.parametrize("name", CASES)
def test_errors_of_layers_are_attentions(name: str) -> None:
    """Against attention in float32, without errors of the layers before."""
    model, inputs = get(name)
    plain = run(name)
    result = greenfast.calibrate(model, dict(**inputs, return_dict=False))
    assert len(result.layers) == CASES[name][2]
    assert all(0.0 < x < LIMIT for x in result.layers.values())
    assert torch.equal(run(name), plain)


def test_float32_attention_in_place_of_fp8_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processors without quantization: what remains are roundings to bfloat16."""

    def attend(query: Any, key: Any, value: Any, **options: Any) -> Tensor:
        return models.attend_exactly(query, key, value, **options).bfloat16()

    monkeypatch.setattr(models, "_ATTENTION_BLOCK", attend)
    for name in CASES:
        plain = run(name)
        with accelerate(get(name)[0], min_length=0):
            assert error(run(name), plain) < 0.012, name


@pytest.mark.parametrize("name", ["wan", "qwen"])
def test_graphs_and_gradients(name: str) -> None:
    model, inputs = get(name)
    weights = [x for key, x in model.named_parameters() if "attn" in key and ("norm_k" in key or "to_q.weight" in key)]
    plain = torch.autograd.grad(model(**inputs, return_dict=False)[0].float().square().sum(), weights)
    with accelerate(model, min_length=0):
        mine = torch.autograd.grad(model(**inputs, return_dict=False)[0].float().square().sum(), weights)
        eager = run(name)
        compiled = COMPILE(model, backend="aot_eager")
        with torch.no_grad():
            assert error(compiled(**inputs, return_dict=False)[0].float(), eager) < 1e-2
    for one, other in zip(mine, plain, strict=True):
        if other.norm() > 0:
            assert error(one.float(), other.float()) < 5 * LIMIT


def test_packed_projections() -> None:
    model = copy.deepcopy(get("wan")[0])
    _, inputs = get("wan")
    for block in model.blocks:
        block.attn1.fuse_projections()
        block.attn2.fuse_projections()
    with torch.no_grad():
        plain = model(**inputs, return_dict=False)[0].float()
        with accelerate(model, min_length=0) as accelerated:
            assert error(model(**inputs, return_dict=False)[0].float(), plain) < LIMIT
    assert accelerated.routed.taken == 4


class Pipeline:
    """A pipeline's loop over denoising steps."""

    def __init__(self, model: Any, inputs: dict[str, Any]) -> None:
        self.transformer, self.inputs = model, inputs
        self.scheduler = SimpleNamespace(step_index=None, timesteps=torch.arange(5))

    def __call__(self) -> list[Tensor]:
        outs = []
        for step in range(5):
            with torch.no_grad():
                outs.append(self.transformer(**self.inputs, return_dict=False)[0].float())
            self.scheduler.step_index = step + 1
        self.scheduler.step_index = None
        return outs


def test_first_and_last_steps_in_16_bits() -> None:
    pipe = Pipeline(*get("wan"))
    plain = run("wan")
    with accelerate(pipe, min_length=0, policy=greenfast.Policy(first_steps=2, last_steps=1)):
        assert [torch.equal(out, plain) for out in pipe()] == [True, True, False, False, True]
    calibrated = greenfast.calibrate(pipe, (), limit=1e-5)
    assert calibrated.policy.layers == tuple(sorted(calibrated.layers))
    assert len(greenfast.calibrate(pipe, ()).steps) == 5
    assert "step 4" in str(greenfast.calibrate(pipe, ()))


def test_refusals_name_what_is_not_known() -> None:
    model, _ = get("flux")
    with pytest.raises(ValueError, match=r"UNet2DModel: not known\. Known: FluxTransformer2DModel"):
        accelerate(type("UNet2DModel", (torch.nn.Module,), {})())
    with pytest.raises(TypeError, match="model: a str"):
        accelerate("flux")
    with pytest.raises(ValueError, match="policy: no layers other in FluxTransformer2DModel"):
        accelerate(model, policy=greenfast.Policy(("other",)))
    with pytest.raises(ValueError, match="policy: steps need a pipeline"):
        accelerate(model, policy=greenfast.Policy(first_steps=1))
    with pytest.raises(TypeError, match="policy: a dict"):
        accelerate(model, policy={})  # type: ignore[arg-type]
    with accelerate(model, min_length=0), pytest.raises(ValueError, match="it is accelerated already"):
        accelerate(model)
    layer = model.single_transformer_blocks[0].attn
    own = layer.processor
    layer.processor = lambda *args, **kwargs: own(*args, **kwargs)
    try:
        with accelerate(model, min_length=0) as accelerated:
            assert accelerated.left == {"single_transformer_blocks.0.attn": "function is not known"}
            assert "left: single_transformer_blocks.0.attn: function" in str(accelerated)
    finally:
        layer.processor = own
