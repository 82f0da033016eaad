"""Floor 2: load and launch kernels on a device, each variant in a process of its own."""
