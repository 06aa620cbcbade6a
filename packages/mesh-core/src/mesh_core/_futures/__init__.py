"""Results that are on their way: futures, promises, waiting for several at once, deadlines, event loops, and deadlock checks.

It imports `_common` and `_serialize`.
"""
