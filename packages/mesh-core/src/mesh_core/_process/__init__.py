"""Processes from their first line to their last: the object that holds everything, workers, the fork server, host agents.

The top of the kernel: it imports every room below, and no feature.
"""
