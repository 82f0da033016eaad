"""What kernels are asked to compute: inputs, references and bounds on errors."""
