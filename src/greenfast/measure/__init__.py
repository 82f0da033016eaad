"""Floor 3: interleaved timing over processes, and the statistics of what it gives."""
