"""Owns what several tests need: workspaces, stand-ins, iteration spaces, small cases.

Knows nothing of which tests need it.
"""
