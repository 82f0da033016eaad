"""Floor 3: the kernel families and the problems that they solve."""
