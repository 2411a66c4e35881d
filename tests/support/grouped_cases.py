"""Owns the small grouped GEMMs that their templates are tested with, on the emulated GPU and on a real one.

Knows nothing of how they are run. A case is a line: attributes, and parameters that differ from the plain ones.
"""

from __future__ import annotations

from typing import Any

RULE = "matmul_grouped"
SMS = 3
"""SMs of the GPU that kernels are built for: so few that CTAs have several tiles."""
PLAIN = {"block_m": 128, "block_n": 64, "consumers": 2, "stages": 3, "cluster_n": 1, "raster_group": 2}
SMALL: dict[str, Any] = {"rows": 300, "groups": 5, "n": 136, "k": 200, "dtype": "float16"}
MASKED: dict[str, Any] = {"masked": True, "rows": 100}
FLOAT8: dict[str, Any] = {"dtype": "float8_e4m3fn", "k": 336, "rows": 200, "n": 264}
GROUPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "contiguous": ({}, {}),
    "clusters, rows of no group": ({"used": 170, "dtype": "bfloat16"}, {"cluster_n": 2}),
    "masked, clusters": (MASKED | {"dtype": "bfloat16"}, {"cluster_n": 2, "raster_group": 1}),
    "weights with n last": ({"layout": "nn"}, {"block_m": 64, "consumers": 1, "block_n": 128}),
    "masked, weights with n last": (MASKED | {"layout": "nn"}, {}),
    "two MMA tiles of each consumer": ({}, {"block_m": 256}),
    "three consumers, clusters of four": ({"n": 264}, {"block_m": 192, "consumers": 3, "cluster_n": 4}),
    "a consumer some k-tiles behind the other": ({"k": 400}, {"kernel_schedule": "staggered", "stages": 4}),
    "masked, a consumer behind the other, clusters": (MASKED, {"kernel_schedule": "staggered", "cluster_n": 2}),
    "consumers in turns": ({"used": 170}, {"kernel_schedule": "pingpong", "block_m": 64}),
    "consumers in turns, two MMA tiles of each": ({"groups": 3, "n": 200}, {"kernel_schedule": "pingpong", "block_n": 128}),
    "masked, consumers in turns, clusters": (MASKED, {"kernel_schedule": "pingpong", "cluster_n": 2}),
    "a buffer for each of three chunks": ({"n": 264}, {"block_n": 192}),
    "bfloat16 of float16": ({"out_dtype": "bfloat16"}, {}),
    "more groups than rows": ({"groups": 70, "rows": 40, "n": 64, "k": 64}, {"block_m": 64, "consumers": 1}),
    "more groups than threads": ({"groups": 400, "rows": 30, "n": 16, "k": 16}, {"block_m": 64, "consumers": 1}),
    "one group": ({"groups": 1}, {}),
    "float8, clusters": (FLOAT8, {"block_n": 128, "cluster_n": 2}),
    "masked float8, two MMA tiles of one consumer": (FLOAT8 | MASKED | {"rows": 80}, {"consumers": 1}),
}
OFFSETS = {
    "all rows in one group": (0, 300, 300, 300, 300),
    "all rows in the last group": (0, 0, 0, 0, 300),
    "no row in any group": (0, 0, 0, 0, 0),
    "groups of one row": (1, 2, 3, 4, 5),
    "edges of tiles": (64, 128, 129, 256, 300),
    "one row at each end": (1, 1, 299, 299, 300),
}
