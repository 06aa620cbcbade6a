"""Processes from start to exit: the object that holds everything, workers, the fork server, host agents.

The top of the kernel: it imports every room below, and no feature.
"""
