"""The ladder of attention kernels, from a scalar one to full fusion."""
