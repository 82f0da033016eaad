"""``accelerate`` on a GPU: tiny models of transformers and diffusers agree with themselves, and undo is exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from greenfast.integrations import diffusers, transformers
from tests.ops import test_accelerate

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]


def compare(model: Any, accelerate: Callable[..., Any], run: Callable[[], Tensor], limit: float) -> None:
    """Check a model with accelerate against itself, and that it computes the same bits afterwards."""
    before = run()
    with accelerate(model, min_length=0) as accelerated:
        assert accelerated.replaced
        assert 0.0 < test_accelerate.error(run(), before) < limit
        assert accelerated.routed.taken > 0
    assert torch.equal(run(), before)


@pytest.mark.parametrize("name", test_accelerate.MODELS)
def test_models_of_transformers(name: str) -> None:
    model = copy.deepcopy(test_accelerate.build(name)).cuda()
    tokens = test_accelerate.make_tokens().cuda()

    def run() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(tokens, use_cache=False).logits
        return logits

    compare(model, transformers.accelerate, run, test_accelerate.LIMIT)


@pytest.mark.parametrize("name", ["flux", "sd3", "wan", "hunyuan", "ltx", "cogvideox", "qwen"])
def test_models_of_diffusers(name: str) -> None:
    pytest.importorskip("diffusers")
    from tests.ops import test_diffusers

    model, inputs = test_diffusers.get(name)
    model = copy.deepcopy(model).cuda()

    def move(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.cuda()
        return type(x)(map(move, x)) if isinstance(x, list | tuple) else x

    def run() -> Tensor:
        with torch.no_grad():
            out: Tensor = model(**{key: move(x) for key, x in inputs.items()}, return_dict=False)[0]
        return out

    compare(model, diffusers.accelerate, run, test_diffusers.LIMIT)
