"""A cluster in place of this machine's processes: candidates are compiled and measured by workers of Dask distributed (extra `cluster`)."""
