// Rows that share a block scale.
#pragma once

namespace greenfast {

constexpr int kRowBlock = 128;   // rows of K or V
constexpr int kQueryBlock = 16;  // rows of Q: one warp's

// With fine scales each row of Q has a scale, and each of kKeyGroups key groups of a block of K: keys 2 g and 2 g + 1
// of each 8. One thread holds the scores of a group, so it needs no more scales than without.
constexpr int kKeyGroups = 4;

}  // namespace greenfast
