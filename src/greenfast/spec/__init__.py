"""Floor 0: plain data. Tasks, variants, kernels, targets, records and errors."""
