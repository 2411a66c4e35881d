"""Owns the declaration of a workspace whose models are compiled for this machine, one candidate for each function."""

from __future__ import annotations

WORKLOADS = """\
edition = 1

[artifact]
name = "models"
version = "0.1.0"

[target.host]
arch = "host"

[defaults]
top_k = 1
"""
