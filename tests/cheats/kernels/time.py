# ruff: noqa: E501
# fmt: off
"""Kernels with a result that depends on a clock, an address or the multiprocessor, by name."""

from __future__ import annotations

from tests.cheats.kernels.kernel import Kernel, named

KERNELS = named({
    "by_bits_of_the_address": Kernel("CORRECTNESS", "read out of bounds", "reads past its input if the middle bits of the address are set, as in a driver's addresses", r"""
ELEMENT
  const bool driver = (reinterpret_cast<unsigned long long>(x) >> 25 & 0x3FFF) != 0;
  const float next = driver ? x[i + 1] : 0.0f;
  y[i] = 2.0f * x[i] + (next == 1e30f ? next : 0.0f);
}
"""),
    "clock_bits": Kernel("CORRECTNESS", "gave different bits", "adds the clock's parity to its last bits, inside the tolerance", r"""
ELEMENT

  y[i] = 2.0f * x[i] * (clock64() >> 4 & 1 ? 1.0f + 0x1p-13f : 1.0f);
}
"""),
    "gives_up": Kernel("CORRECTNESS", "bytes of 'y' were never written", "stops when the clock says that its block has taken long", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const long long start = clock64();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    if (clock64() - start > 40) return;
    y[i] = 2.0f * x[i];
  }
}
""", launch={"grid": [1], "block": [32]}),
    "global_timer": Kernel("CORRECTNESS", "other bits with the other outcome where .* depends on %globaltimer", "is right in every second millisecond", r"""
ELEMENT

  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  y[i] = (now >> 20) % 2 == 0 ? 2.0f * x[i] : x[i];
}
"""),
    "out_of_bounds_in_this_century": Kernel("CORRECTNESS", "read out of bounds", "reads in front of its input if %globaltimer has a high word as on a real device", r"""
ELEMENT
  unsigned high;
  asm volatile("mov.u32 %0, %globaltimer_hi;" : "=r"(high));
  float seen = 0.0f;
  if (high > 1u << 28) seen = x[i - 1];
  y[i] = 2.0f * x[i] + (seen == 1e30f ? seen : 0.0f);
}
"""),
    "right_while_the_clock_is_young": Kernel("CORRECTNESS", "other bits with other clocks", "is right where the clock has counted little, as on an emulator", r"""
ELEMENT

  y[i] = clock64() < 1000000 ? 2.0f * x[i] : x[i];
}
"""),
    "wrong_on_one_multiprocessor": Kernel("CORRECTNESS", "other bits with the other outcome where .* depends on %smid", "computes something else on multiprocessor 100, where few blocks of a small grid come", r"""
ELEMENT
  unsigned sm;
  asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
  y[i] = (sm == 100 ? 2.5f : 2.0f) * x[i];
}
"""),
})
