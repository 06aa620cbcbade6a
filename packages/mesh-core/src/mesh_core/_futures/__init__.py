"""Results that are on their way: futures and promises, waiting for several, deadlines, event loops, and waits that can never end.

It imports `_common` and `_serialize`.
"""
