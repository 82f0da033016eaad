"""Solutions: kernels of other authors as data, and the process that runs their code."""
