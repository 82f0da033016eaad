// How many rows share a scale of blocks.
#pragma once

namespace greenfast {

constexpr int kRowBlock = 128;   // of K or V
constexpr int kQueryBlock = 16;  // of Q: those of a warp

}  // namespace greenfast
