"""Owns the schedule of one reduction with what comes before and after it element by element: sums, extremes, means.

Knows nothing of policies or of any one operator.
"""
