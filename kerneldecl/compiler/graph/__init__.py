"""Owns the passes that turn an imported Relax module into operators that rules compute.

Knows nothing of files, rules or artifacts. `pipeline` has the order; every pass can be used alone.
"""
