// Warpgroup matrix products on E4M3 with float32 accumulators, and on int8 with int32, and the registers of a warpgroup
// (PTX ISA, "wgmma.mma_async", "setmaxnreg"; sm_90a).
//
// Of the accumulator of an m64nN product, warp w of the warpgroup holds rows 16 w .. 16 w + 15: lane l holds, of rows
// l / 4 and l / 4 + 8, columns 8 j + 2 (l % 4) and the next one, in d[4 j], d[4 j + 1] and d[4 j + 2], d[4 j + 3].
#pragma once

#include "ptx/mbarrier.cuh"

namespace greenfast::ptx {

// Sets the registers per thread of this warpgroup (setmaxnreg); the sum over all warps must fit the multiprocessor.
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Descriptors of K-major operands in shared memory with rows of `kSwizzle` bytes (32, 64 or 128) in the TMA swizzle of
// that width. Rows, and groups of 8 rows, are contiguous.
template <int kSwizzle>
struct Operand {
  static_assert(kSwizzle == 32 || kSwizzle == 64 || kSwizzle == 128, "rows are 32, 64 or 128 bytes");
  static constexpr unsigned kHigh = 8 * kSwizzle >> 4 | (kSwizzle == 128 ? 1u : kSwizzle == 64 ? 2u : 3u) << 30;
  unsigned low;

  __device__ explicit Operand(const void* smem) : low(shared_address(smem) >> 4 | 1 << 16) {}

  // The descriptor at an offset in bytes, a multiple of 16.
  __device__ __forceinline__ unsigned long long at(unsigned bytes) const {
    return static_cast<unsigned long long>(kHigh) << 32 | (low + bytes / 16);
  }
};

// Orders earlier accesses to registers and shared memory before the warpgroup's next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `kPending` groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to accumulators, or to A operands in registers, across this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(int (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(unsigned (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// The operands in the instruction's text, such as %0 to %31, and their registers.
#define GF_D4 "%0,%1,%2,%3"
#define GF_D8 GF_D4 ",%4,%5,%6,%7"
#define GF_D32                                            \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15" \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define GF_D36 GF_D32 ",%32,%33,%34,%35"
#define GF_D64                                                       \
  GF_D32                                                             \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define GF_D68 GF_D64 ",%64,%65,%66,%67"
#define GF_D128                                                                  \
  GF_D64                                                                         \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"             \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"             \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define GF_R8(how, d, i) \
  how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3]), how(d[i + 4]), how(d[i + 5]), how(d[i + 6]), how(d[i + 7])
#define GF_R4(how, d, i) how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3])
#define GF_R32(how, d, i) GF_R8(how, d, i), GF_R8(how, d, i + 8), GF_R8(how, d, i + 16), GF_R8(how, d, i + 24)
#define GF_ALL4(how, d) GF_R4(how, d, 0)
#define GF_ALL8(how, d) GF_R8(how, d, 0)
#define GF_ALL32(how, d) GF_R32(how, d, 0)
#define GF_ALL36(how, d) GF_R32(how, d, 0), GF_R4(how, d, 32)
#define GF_ALL64(how, d) GF_R32(how, d, 0), GF_R32(how, d, 32)
#define GF_ALL68(how, d) GF_ALL64(how, d), GF_R4(how, d, 64)
#define GF_ALL128(how, d) GF_ALL64(how, d), GF_R32(how, d, 64), GF_R32(how, d, 96)
#define GF_A(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// One wgmma: d (64 x n) = a b, or d += a b; a is 64 x 32 and b 32 x n.
#define GF_WGMMA(n, registers, a_text, b_text, accumulate, outputs, ...)                                          \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " #accumulate ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #n \
               "k32.f32.e4m3.e4m3 {" registers "}, " a_text ", " b_text ", p, 1, 1;\n\t}"                         \
               : outputs                                                                                          \
               : __VA_ARGS__)

#define GF_WGMMA_INT(n, registers, a_text, b_text, accumulate, outputs, ...)                                      \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " #accumulate ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #n \
               "k32.s32.s8.s8 {" registers "}, " a_text ", " b_text ", p;\n\t}"                                   \
               : outputs                                                                                          \
               : __VA_ARGS__)

// For each width: d = a b and d += a b, with a in shared memory or in registers. In registers, a[0] and a[1] hold
// columns 4 (l % 4) .. + 3 of rows l / 4 and l / 4 + 8 (l: the lane); a[2] and a[3] those 16 further on.
#define GF_WGMMA_E4M3(n, count, registers, all, d0, d1, d2, d3, d4)                                            \
  __device__ __forceinline__ void wgmma_set(float (&d)[count], unsigned long long a, unsigned long long b) {   \
    GF_WGMMA(n, registers, d0, d1, 0, all("=f", d), "l"(a), "l"(b));                                           \
  }                                                                                                            \
  __device__ __forceinline__ void wgmma_add(float (&d)[count], unsigned long long a, unsigned long long b) {   \
    GF_WGMMA(n, registers, d0, d1, 1, all("+f", d), "l"(a), "l"(b));                                           \
  }                                                                                                            \
  __device__ __forceinline__ void wgmma_set(float (&d)[count], const unsigned (&a)[4], unsigned long long b) { \
    GF_WGMMA(n, registers, "{" d0 "," d1 "," d2 "," d3 "}", d4, 0, all("=f", d), GF_A(a), "l"(b));             \
  }                                                                                                            \
  __device__ __forceinline__ void wgmma_add(float (&d)[count], const unsigned (&a)[4], unsigned long long b) { \
    GF_WGMMA(n, registers, "{" d0 "," d1 "," d2 "," d3 "}", d4, 1, all("+f", d), GF_A(a), "l"(b));             \
  }

GF_WGMMA_E4M3(8, 4, GF_D4, GF_ALL4, "%4", "%5", "%6", "%7", "%8")
GF_WGMMA_E4M3(16, 8, GF_D8, GF_ALL8, "%8", "%9", "%10", "%11", "%12")
GF_WGMMA_E4M3(64, 32, GF_D32, GF_ALL32, "%32", "%33", "%34", "%35", "%36")
GF_WGMMA_E4M3(72, 36, GF_D36, GF_ALL36, "%36", "%37", "%38", "%39", "%40")
GF_WGMMA_E4M3(128, 64, GF_D64, GF_ALL64, "%64", "%65", "%66", "%67", "%68")
GF_WGMMA_E4M3(136, 68, GF_D68, GF_ALL68, "%68", "%69", "%70", "%71", "%72")
GF_WGMMA_E4M3(256, 128, GF_D128, GF_ALL128, "%128", "%129", "%130", "%131", "%132")

// The same for int8 scores.
#define GF_WGMMA_S8(n, count, registers, all, d0, d1)                                                      \
  __device__ __forceinline__ void wgmma_set(int (&d)[count], unsigned long long a, unsigned long long b) { \
    GF_WGMMA_INT(n, registers, d0, d1, 0, all("=r", d), "l"(a), "l"(b));                                   \
  }                                                                                                        \
  __device__ __forceinline__ void wgmma_add(int (&d)[count], unsigned long long a, unsigned long long b) { \
    GF_WGMMA_INT(n, registers, d0, d1, 1, all("+r", d), "l"(a), "l"(b));                                   \
  }

GF_WGMMA_S8(128, 64, GF_D64, GF_ALL64, "%64", "%65")
GF_WGMMA_S8(256, 128, GF_D128, GF_ALL128, "%128", "%129")

#undef GF_WGMMA_S8
#undef GF_WGMMA_E4M3
#undef GF_WGMMA_INT
#undef GF_WGMMA
#undef GF_A
#undef GF_ALL128
#undef GF_ALL68
#undef GF_ALL64
#undef GF_ALL36
#undef GF_ALL32
#undef GF_ALL8
#undef GF_ALL4
#undef GF_R32
#undef GF_R8
#undef GF_R4
#undef GF_D128
#undef GF_D68
#undef GF_D64
#undef GF_D36
#undef GF_D32
#undef GF_D8
#undef GF_D4

}  // namespace greenfast::ptx
