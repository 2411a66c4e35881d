"""Owns how one thread has TMA load a CTA's boxes of an operand's tile to a stage, or prefetch them to L2.

Knows nothing of who waits for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.script import tirx as T

from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.operands import Operand, TmaBoxes

ENCODE = "runtime.cuTensorMapEncodeTiled"
LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes{}"
MULTICAST = ".multicast::cluster"
PREFETCH = "cp.async.bulk.prefetch.tensor.{}d.L2.global"


class TmaLoader(NamedTuple):
    """What loading one operand's tiles takes, while a kernel's script is read."""

    operand: Operand
    map: Any
    """The tensor map, a variable of the kernel."""
    stages: Any
    """The operand's stages in shared memory."""
    share: Any
    """Which of the CTAs that share the tile this one is."""
    mask: Any = None
    """CTAs that receive the boxes as bits; None for this one alone."""
    tail_map: Any = None
    """The tensor map of the last rows, where they have one."""

    @property
    def boxes(self) -> TmaBoxes:
        assert self.operand.tma is not None
        return self.operand.tma

    def number_of(self, piece: Any) -> Any:
        """Return the number of one of this CTA's boxes."""
        return self.share * self.boxes.per_cta + piece

    def loaded_bytes(self, row: Any) -> Any:
        """Return the bytes of a tile that begins at a row, as many as `load_tile` has loaded by all CTAs that share it."""
        return self.operand.stage_bytes if self.boxes.tail is None else self.boxes.tail.loaded_bytes(row)

    def tail_row(self, row: Any) -> Any:
        """Return where in the last rows of an operand, which begin at a row, this CTA's box begins."""
        assert self.boxes.tail is not None
        return 0 if self.boxes.tail.ctas == 1 else self.share * self.boxes.tail.box_rows(row)

    def exists(self, number: Any) -> Any:
        return True if self.boxes.total == 0 else number < self.boxes.total


@T.inline
def _load_box(loader, row, at, stage, number, barrier):
    batch, k_tile = meta_vars(at)
    boxes = T.meta_var(loader.boxes)
    if loader.mask is None:
        T.ptx[LOAD.format(boxes.map.rank, "")](
            loader.stages.ptr_to([stage, boxes.first_row(number) * loader.operand.row_elements]),
            T.address_of(loader.map),
            *boxes.coords(batch, row, k_tile, number),
            barrier,
        )
    else:
        T.ptx[LOAD.format(boxes.map.rank, MULTICAST)](
            loader.stages.ptr_to([stage, boxes.first_row(number) * loader.operand.row_elements]),
            T.address_of(loader.map),
            *boxes.coords(batch, row, k_tile, number),
            barrier,
            loader.mask,
        )


@T.inline
def _load_rows(loader, row, at, stage, barrier):
    """Have one thread load its box of a tile: of a full one, of the last rows alone, or nothing behind them."""
    batch, k_tile = meta_vars(at)
    boxes = T.meta_var(loader.boxes)
    if boxes.tail.fills(row):
        _load_box(loader, row, at, stage, loader.number_of(0), barrier)
    elif boxes.tail.begins(row):
        first = T.meta_var(loader.tail_row(row))
        place = T.meta_var(loader.stages.ptr_to([stage, first * loader.operand.row_elements]))
        if loader.mask is None:
            T.ptx[LOAD.format(boxes.map.rank, "")](
                place, T.address_of(loader.tail_map), *boxes.coords(batch, row + first, k_tile, 0), barrier
            )
        else:
            T.ptx[LOAD.format(boxes.map.rank, MULTICAST)](
                place, T.address_of(loader.tail_map), *boxes.coords(batch, row + first, k_tile, 0), barrier, loader.mask
            )


@T.inline
def load_tile(loader, row, at, stage, barrier):
    """Have one thread start the loads of a CTA's boxes of a tile; `at` is its batch and k-tile, `barrier` counts the bytes."""
    if loader.boxes.tail is not None:
        _load_rows(loader, row, at, stage, barrier)
    else:
        for piece in T.unroll(loader.boxes.per_cta):
            number = T.meta_var(loader.number_of(piece))
            if loader.exists(number):
                _load_box(loader, row, at, stage, number, barrier)


@T.inline
def prefetch_tile(loader, row, at):
    """Have one thread prefetch to L2 what `load_tile` will load."""
    batch, k_tile = meta_vars(at)
    boxes = T.meta_var(loader.boxes)
    if boxes.tail is not None:
        if boxes.tail.fills(row):
            T.ptx[PREFETCH.format(boxes.map.rank)](T.address_of(loader.map), *boxes.coords(batch, row, k_tile, loader.number_of(0)))
        elif boxes.tail.begins(row):
            first = T.meta_var(loader.tail_row(row))
            T.ptx[PREFETCH.format(boxes.map.rank)](T.address_of(loader.tail_map), *boxes.coords(batch, row + first, k_tile, 0))
    else:
        for piece in T.unroll(boxes.per_cta):
            number = T.meta_var(loader.number_of(piece))
            if loader.exists(number):
                T.ptx[PREFETCH.format(boxes.map.rank)](T.address_of(loader.map), *boxes.coords(batch, row, k_tile, number))
