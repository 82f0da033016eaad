// What all kernels of the ladder take.
#pragma once

#include <cuda_fp16.h>

namespace greenfast {

struct LadderParams {
  const unsigned char* q;  // (heads, seq_len, head_dim) codes, as k and v; heads counts batch x heads
  const unsigned char* k;
  const unsigned char* v;
  const float* q_scale;  // (heads), as k_scale and v_scale
  const float* k_scale;
  const float* v_scale;
  half* out;  // (heads, seq_len, head_dim)
  int seq_len;
  float softmax_scale;
  long long* phase_cycles;  // (blocks, phases) in an instrumented build, else null
};

}  // namespace greenfast
