"""Owns how many threads and channels of a reduction over overlapping windows a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from kerneldecl.analysis.gpu_limits import SECTOR_BYTES
from kerneldecl.model import Access, Arch, Block, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, Timed, Work, access_widths, load_rounds, ranked, rounds
from kerneldecl.policies.gpu_reduce import largest_divisor
from kerneldecl.policies.shared.reduction import is_across, only_reduction
from kerneldecl.policies.shared.traffic import contiguous_axis, largest, moved_bytes, points

TEMPLATES = ("gpu_window",)
AUTO = {"cuda": 70}

THREADS = (128, 256, 64, 512)
SIDE = (8, 16, 32, 4, 64)
"""Neighbouring vectors of channels in a block."""
STRIPS = (1, 2, 4, 8)
"""Neighbouring pixels of a thread at most, where channels are no whole vectors."""
COLUMNS = (4, 8, 16)
"""Pixels of a column of a thread at most: as many as cut an image into equal parts."""
BOUNDED_ROUNDS = 3
"""How often a thread of a column waits for loads where the last column is not whole, so that each of its pixels is a branch: pools of
4 x 37 x 37 x 219 took 2 us longer with columns of 4 and of 7 than with single pixels (H200, 2026-11)."""
MAX_COLUMN_REGISTERS = 128
"""Registers of a thread at most that holds the windows of a column: with more, an SM has too few threads to hide their loads."""
MIN_LINE_THREADS, MAX_LINE_THREADS = 64, 1024
"""Threads of a block that goes over whole strips of channels as one line, at least and at most."""
LEAST_ACCESS = 4
"""Bytes of L1's bandwidth that an access of a lane takes at least."""
TAP_SHARE = 0.3
"""Part of DRAM's latency that each tap takes where a block has a part of the channels, in vectors that are not the widest: depthwise
convolutions with 9 and 25 taps took 2.2 and 4.4 us longer so, but none where images are powers of 2 wide; why is not known (H200,
2026-11)."""
MULTIPLY_ADD_CYCLES = 24.0
"""Cycles of a multiply-add after the one before it, with the conversions of both operands: three depthwise convolutions of
8-byte and 16-byte vectors took 0.3 to 0.9 us more than their loads (H200, 2026-11)."""
MAX_WINDOW = 64
"""Elements of a sliding window along its reduced axes at most: a thread's loads of them are unrolled."""
OTHER_REGISTERS = 24
"""Registers of a thread besides its results and its loads in flight."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return schedules of one reduction over sliding windows with contiguous channels; nothing for others, or for large windows."""
    found = only_reduction(space)
    if found is None or not _has_windows(found[0]) or not is_across(found[0]) or points(found[0], "reduce") > MAX_WINDOW:
        return ()
    return ranked("gpu_window", arch.the_gpu, _timed(space, found[0], arch.the_gpu), top_k)


def _has_windows(block: Block) -> bool:
    """Say whether an index of the largest operand is an output axis plus a reduced axis, as in a sliding window."""
    kinds = ({block.axes[axis].kind for axis, _ in index or ()} for index in largest(block).index)
    return any(len(each) == 2 for each in kinds)


def _timed(space: IterSpace, block: Block, gpu: Gpu) -> Iterator[Timed]:
    main = largest(block)
    column = contiguous_axis(block, main)
    assert column is not None, "it runs across contiguous memory"
    channels, window, element = block.axes[column].extent, points(block, "reduce"), dtype_bytes(main.dtype)
    is_divided = math.prod(block.axes[at].extent for at in _pixels(block, column)[-2:]).bit_count() > 1
    windows, moved, widest = points(block, "spatial") // channels, moved_bytes(space), max(access_widths(channels, element))
    for width, threads, rows, strip in _threads(block, column):
        read = points(block) * element * len(block.reads)
        # Where a block has a part of the channels, the loads of each tap wait for its weights.
        multiplies = len(block.reads) > 1
        taps = window if is_divided and 1 < width < widest and threads * width < channels and multiplies else 0
        work = Work(
            blocks=windows * channels // (max(1, rows) * threads * width * max(1, strip)),
            threads=threads * max(1, rows),
            regs_per_thread=OTHER_REGISTERS + width * max(1, strip) + math.ceil(4 * width * max(1, strip) * element / 4),
            flops=points(block) * (block.flops_per_point + ACCESS_FLOPS * _accesses(strip, width)),
            flops_per_s=gpu.simt_rate("float32"),
            dram_bytes=moved,
            l2_bytes=moved * max(1.0, SECTOR_BYTES / (min(channels, threads * width) * element)),
            moved_smem_bytes=read if strip == 0 else max(element, LEAST_ACCESS) * points(block) * _accesses(strip, width),
            rounds=_waits(block, column, strip, element) if strip else rounds(window * width * element) + TAP_SHARE * taps,
            serial_cycles=MULTIPLY_ADD_CYCLES * window * width if multiplies and not strip else 0.0,
        )
        yield {"threads": threads, "rows": rows, "width": width} | ({"strip": strip} if strip else {}), (work,)

    if _has_lines(channels, element):
        yield from _columns(block, column, gpu, moved)


def _columns(block: Block, column: int, gpu: Gpu, moved: int) -> Iterator[Timed]:
    """Yield columns of pixels whose windows threads load once, with the weights, where channels are no whole vectors."""
    pixels = _pixels(block, column)
    if len(pixels) < 2:
        return
    rows, element, channels = block.axes[pixels[-2]].extent, dtype_bytes(largest(block).dtype), block.axes[column].extent
    for strip in sorted({-(-rows // -(-rows // most)) for most in COLUMNS}):
        strips, loads = -(-rows // strip), sum(_box(block, access, {pixels[-2]: strip}) for access in block.reads)
        registers = OTHER_REGISTERS + strip + loads
        if registers > MAX_COLUMN_REGISTERS:
            continue
        lines = points(block, "spatial") // (rows * channels) * strips
        computed = points(block) / rows * strips * strip
        accesses = loads / (strip * points(block, "reduce"))
        waits = min(strip, BOUNDED_ROUNDS) if rows % strip else 1
        for threads in _line_threads(channels, lines):
            work = Work(
                blocks=lines * channels // threads,
                threads=threads,
                regs_per_thread=registers,
                flops=computed * (block.flops_per_point + ACCESS_FLOPS * accesses),
                flops_per_s=gpu.simt_rate("float32"),
                dram_bytes=moved,
                l2_bytes=moved * max(1.0, SECTOR_BYTES / (threads * element)),
                moved_smem_bytes=max(element, LEAST_ACCESS) * computed * accesses,
                rounds=max(waits, rounds(loads * element)),
            )
            yield {"threads": threads, "rows": 0, "width": 1, "column": strip}, (work,)


def _pixels(block: Block, column: int) -> list[int]:
    """Return the axes of images and their pixels, the columns last."""
    return [at for at, axis in enumerate(block.axes) if axis.kind == "spatial" and at != column and axis.extent > 1]


def _box(block: Block, access: Access, pixels: Mapping[int, int]) -> int:
    """Return the elements that one thread reads of an operand: those of the windows of so many pixels along some axes."""
    counts = {at: pixels.get(at, axis.extent if axis.kind == "reduce" else 1) for at, axis in enumerate(block.axes)}
    return math.prod(1 + sum(step * (counts[at] - 1) for at, step in index or ()) for index in access.index)


def _waits(block: Block, column: int, strip: int, element: int) -> int:
    """Return how often a thread waits for the loads of a strip's windows and of their weights, each of one element."""
    pixels = _pixels(block, column)
    return load_rounds(sum(_box(block, access, {pixels[-1]: strip}) for access in block.reads), element)


def _accesses(strip: int, width: int) -> float:
    """Return the accesses to memory for each product: a strip's pixels share each weight."""
    return (1 + 1 / strip) if strip else 1 / width


def _threads(block: Block, column: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the channels of a thread, the threads along channels and along pixels, and the pixels of a strip.

    Strips are 0 but where channels are no whole vectors: there threads also go over strips and channels as one line.
    """
    channels, spatial = block.axes[column].extent, points(block, "spatial")
    widths = access_widths(channels, dtype_bytes(largest(block).dtype))
    for width, side, block_threads in itertools.product(widths, SIDE, THREADS):
        threads = largest_divisor(channels // width, side)
        yield width, threads, largest_divisor(spatial // channels, max(1, block_threads // threads)), 0
    pixels = [block.axes[at].extent for at in _pixels(block, column)]
    if _has_lines(channels, dtype_bytes(largest(block).dtype)) and pixels:
        for strip in sorted({largest_divisor(pixels[-1], most) for most in STRIPS}):
            for threads in _line_threads(channels, spatial // (channels * strip)):
                yield 1, threads, 0, strip


def _has_lines(channels: int, element: int) -> bool:
    """Say whether threads should also go over pixels and channels as one line: where a row of them has less than a sector of a pixel.

    So it is where channels are no whole vectors, or a large prime number of them.
    """
    width = max(access_widths(channels, element))
    return width == 1 or largest_divisor(channels // width, max(SIDE)) * width * element < min(SECTOR_BYTES, channels * element)


def _line_threads(channels: int, strips: int) -> list[int]:
    """Return the threads of a block that go over strips and channels as one line: those of whole strips, if that makes two warps.

    With others, each thread divides by the channels where it begins: 17 us against 2.7 for 8 x 28 x 28 x 67, 400 against 355 for
    26 x 69 x 69 x 421 (H200, 2026-11).
    """
    whole = {channels * largest_divisor(strips, most // channels) for most in (*THREADS, MAX_LINE_THREADS) if most >= channels}
    enough = {threads for threads in whole if threads >= MIN_LINE_THREADS}
    return sorted(enough or {largest_divisor(strips * channels, most) for most in THREADS})
