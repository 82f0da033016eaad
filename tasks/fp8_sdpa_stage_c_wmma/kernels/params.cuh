// The arguments of all kernels of the ladder.
#pragma once

#include <cuda_fp16.h>

namespace greenfast {

struct LadderParams {
  const unsigned char* q;  // (batch x heads, seq_len, head_dim), quantized; also k and v
  const unsigned char* k;
  const unsigned char* v;
  const float* q_scale;  // (batch x heads); also k_scale and v_scale
  const float* k_scale;
  const float* v_scale;
  half* out;  // (batch x heads, seq_len, head_dim)
  int seq_len;
  float softmax_scale;
  long long* phase_cycles;  // (blocks, phases) in an instrumented build, else null
};

}  // namespace greenfast
