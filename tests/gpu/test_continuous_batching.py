"""transformers' continuous batching on a GPU: pages of its cache, CUDA graphs, and every layer against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import greenfast
from tests.serving.test_continuous_batching import Watch, gemma, generate, llama, made, mistral, oss, prompts, watch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_gpu")]
__all__ = ["watch"]

IN_ORDER = {"use_cuda_graph": False, "use_async_batching": False}


@pytest.fixture(autouse=True)
def registered() -> None:
    pytest.importorskip("transformers", minversion="5.20")
    greenfast.register_continuous_batching()


@pytest.mark.parametrize("make", [llama, gemma, oss, mistral])
def test_every_layer_of_every_step_is_attention_within_the_error_of_fp8(make: Callable[[], Any], watch: Watch) -> None:
    """Where codes and scales of a page lie side by side, as the cache of transformers has them."""
    generate(made(make).cuda(), prompts(1, 40, 150, 17, 97), 5, max_batch_tokens=64, num_blocks=64, **IN_ORDER)
    assert watch.with_tables == {False, True}
    assert watch.chunked
    assert 0 < watch.error < 2**-4 / 3**0.5


@pytest.mark.parametrize("make", [llama, mistral])
def test_graphs_and_asynchronous_steps_change_no_token(make: Callable[[], Any]) -> None:
    model, inputs = made(make).cuda(), prompts(1, 40, 150, 17, 97)
    plain = generate(model, inputs, 12, max_batch_tokens=64, num_blocks=64, **IN_ORDER)
    found = generate(model, inputs, 12, max_batch_tokens=64, num_blocks=64)
    assert [x.generated_tokens for x in found] == [x.generated_tokens for x in plain]
