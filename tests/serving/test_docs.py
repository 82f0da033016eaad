"""docs/flash_attn.md names every argument."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from greenfast import flash_attn

DOCS = Path(__file__).parents[2] / "docs"
#: Arguments with the same meaning as in FlashAttention.
THE_SAME = {"q", "k_cache", "v_cache", "cu_seqlens_q", "max_seqlen_q", "softcap", "cache_batch_idx", "cu_seqlens_k_new"}
THE_SAME |= {"rotary_seqlens"}


def test_the_page_names_every_argument() -> None:
    page = (DOCS / "flash_attn.md").read_text(encoding="utf-8")
    named = {name for quoted in re.findall(r"`([^`]+)`", page) for name in re.findall(r"\w+", quoted)}
    for name in flash_attn.__all__:
        assert set(inspect.signature(getattr(flash_attn, name)).parameters) <= named | THE_SAME
