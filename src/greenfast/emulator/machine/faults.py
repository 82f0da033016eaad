"""What the emulator finds wrong with a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenfast.spec.errors import GreenfastError

if TYPE_CHECKING:
    from greenfast.emulator.ptx.syntax import Instruction


class KernelFaultError(GreenfastError):
    """The kernel did something that no kernel may do; the message names kernel, source line, block and thread.

    printed: what the kernel had printed by then. unwritten: whether it is a read of a block's or a thread's own memory
    that nothing has written, which harms only if the value matters. read: of a data race of a load and a store, the
    load, whose value may not matter either.
    """

    exit_code = 1
    printed = ""
    unwritten = False
    read: Instruction | None = None
