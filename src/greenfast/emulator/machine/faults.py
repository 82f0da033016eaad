"""What the emulator finds wrong with a kernel."""

from __future__ import annotations

from greenfast.spec.errors import GreenfastError


class KernelFaultError(GreenfastError):
    """The kernel did something that no kernel may do; the message names kernel, source line, block and thread.

    printed: what the kernel had printed by then. unwritten: whether it is a read of a block's or a thread's own memory
    that nothing has written, which harms only if the value matters.
    """

    exit_code = 1
    printed = ""
    unwritten = False
