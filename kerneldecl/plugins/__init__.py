"""Plug-ins: rules, policies, templates and archs, each one file, found by its stem.

A file in the workspace's folder of the kind comes before the standard one of that name; a stem that starts with an
underscore, and everything in subfolders, is private to its neighbours.
"""
