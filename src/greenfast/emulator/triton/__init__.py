"""Triton kernels on CPU tensors, without a GPU: ``activate`` (docs/emulating-triton.md). Needs the extra ``triton``."""

from greenfast.emulator.triton.activation import Activation, LaunchReport, activate

__all__ = ["Activation", "LaunchReport", "activate"]
