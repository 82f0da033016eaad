"""The problems that kernels solve: inputs, references and error bounds."""
