// Where an attention kernel writes the rows of O.
#pragma once

namespace greenfast {

// Strides in elements, multiples of 8; columns are neighbours.
struct OutputRows {
  long long gap;  // from where a batch's last head ends to the next batch's first
  long long head, row;
  unsigned heads;  // of a batch; a signed division would take registers that some kernels have to spill
  int columns;     // the caller's head_dim: a multiple of 8, up to the kernel's

  // The offset of row 0 of a head, counted over all batches.
  __device__ __forceinline__ long long first(unsigned of_all) const {
    return of_all * head + (gap == 0 ? 0 : of_all / heads * gap);
  }
};

}  // namespace greenfast
