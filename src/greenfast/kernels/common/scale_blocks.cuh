// How many rows share a scale of blocks.
#pragma once

namespace greenfast {

constexpr int kRowBlock = 128;   // of K or V
constexpr int kQueryBlock = 16;  // of Q: those of a warp

// With fine scales a row of Q has one of its own, and of a block of K four groups of keys have: those whose scores one
// thread holds of a row, 2 g, 2 g + 1 of each 8. So a thread needs no more of them than without.
constexpr int kKeyGroups = 4;

}  // namespace greenfast
