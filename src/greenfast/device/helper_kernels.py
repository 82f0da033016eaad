"""The judge's own kernels around a launch: wait, empty the L2 cache, overwrite memory of the chip, digest memory."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cuda.bindings import driver

from greenfast.device.bound_launch import BoundLaunch, check
from greenfast.device.compiler import compile_kernel
from greenfast.device.gpu import GUARD_BYTES, Gpu, GuardedBuffer, whole_pages
from greenfast.device.session import KernelImage
from greenfast.spec.arch import Target
from greenfast.spec.kernel import KernelSource, Launch

#: Longer than the host needs to queue one timed iteration, so that the device never waits for the host within one.
_SPIN_NS = 60_000
#: As in instruments.cu: the ranges of one launch of the digest, and 64-bit fields of a range.
RANGES, FIELDS = 4, 5
_PARAMETERS = struct.Struct(f"<{RANGES * FIELDS + 1}Q")
_DIGEST_THREADS, _CLOBBER_THREADS = 256, 1024
_BLOCKS_PER_SM = 4


class DigestRange(NamedTuple):
    """Device memory to be digested, a multiple of 16 bytes. Its digest is added to the 64-bit number at ``sum``.

    first: the number of its first 64-bit word. mask_key: the key of its XOR mask, 0 for none.
    """

    pointer: int
    nbytes: int
    first: int
    sum: int
    mask_key: int = 0


@cache
def source(entry: str) -> KernelSource:
    """Return a kernel of instruments.cu."""
    file = Path(__file__).with_name("instruments.cu")
    return KernelSource(
        entry=entry, source=file.read_text(encoding="utf-8"), name=file.name, include_dirs=(), block=(1, 1, 1)
    )


class Instruments:
    """The instruments of one device; every method queues work on its stream."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._cubin = compile_kernel(source("digest"), Target.of_device(gpu.capability)).cubin
        properties = gpu.device.properties
        self._blocks = _BLOCKS_PER_SM * properties.multiprocessor_count
        flushed = whole_pages(2 * properties.l2_cache_size + 2 * GUARD_BYTES)
        self.flushed = GuardedBuffer(flushed - 2 * GUARD_BYTES)
        self.flush_l2()
        self._spin = self._prepare("spin", 1, 0, Launch((1, 1, 1), (np.int64(_SPIN_NS),)))
        shared = properties.max_shared_memory_per_block_optin
        # One block fills a multiprocessor, so each gets one; twice as many, in case that one has two of the first.
        grid = (2 * properties.multiprocessor_count, 1, 1)
        self._clobber_smem = self._prepare(
            "clobber_smem", _CLOBBER_THREADS, shared, Launch(grid, (np.uint64(0), np.uint32(shared // 8)))
        )
        self._fill_local = self._prepare("fill_local", _CLOBBER_THREADS, 0, Launch(grid, (np.uint32(0),)))
        self._digests: dict[tuple[int, int], BoundLaunch] = {}

    def _prepare(self, entry: str, threads: int, shared: int, plan: Launch) -> BoundLaunch:
        image = KernelImage(self._cubin, entry, (threads, 1, 1), shared)
        return BoundLaunch(
            self._gpu.load(image), image.block, shared, plan, {}, int(self._gpu.stream.handle), name=entry
        )

    def spin(self) -> None:
        """Keep the device busy while the host queues more work, without touching memory."""
        self._spin()

    def flush_l2(self) -> None:
        """Write zeros over twice the L2 cache. This also keeps the device busy."""
        check(driver.cuMemsetD8Async(self.flushed.pointer, 0, self.flushed.nbytes, self._gpu.stream.handle))

    def clobber_smem(self, key: int) -> None:
        """Fill the shared memory of every multiprocessor with a pattern that is drawn from the key."""
        self._clobber_smem.write(0, key.to_bytes(8, "little"))
        self._clobber_smem()

    def fill_local(self, byte: int) -> None:
        """Fill local memory with a byte: 1 KiB of each thread that can be resident."""
        self._fill_local.write(0, bytes([byte] * 4))
        self._fill_local()

    def apply_mask(self, pointer: int, nbytes: int, key: int) -> None:
        """Apply an XOR mask to device memory, a multiple of 16 bytes. The same key removes it."""
        plan = Launch((self._blocks, 1, 1), (np.uint64(pointer), np.uint64(nbytes // 16), np.uint64(key)))
        self._prepare("apply_mask", _DIGEST_THREADS, 0, plan)()

    def digest(self, ranges: Sequence[DigestRange], key: int) -> None:
        """Add each range's digest under a 64-bit key to its sum."""
        for batch in (ranges[i : i + RANGES] for i in range(0, len(ranges), RANGES)):
            pairs = max(r.nbytes for r in batch) // 16
            launch = self._prepare_digest(max(1, min(self._blocks, -(-pairs // _DIGEST_THREADS))), len(batch))
            fields = [field for r in batch for field in (r.pointer, r.nbytes // 16, r.first, r.sum, r.mask_key)]
            fields += [0] * (RANGES * FIELDS - len(fields))
            launch.write(0, _PARAMETERS.pack(*fields, key))
            launch()

    def _prepare_digest(self, blocks: int, rows: int) -> BoundLaunch:
        """Return the launch of a digest with this grid. Its ranges are written before each launch."""
        if (blocks, rows) not in self._digests:
            plan = Launch((blocks, rows, 1), (bytes(_PARAMETERS.size),))
            self._digests[blocks, rows] = self._prepare("digest", _DIGEST_THREADS, 0, plan)
        return self._digests[blocks, rows]
