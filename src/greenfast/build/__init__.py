"""Floor 1: NVRTC, the cache, the compiler's report and the machine code. Needs no GPU."""
