"""The benchmark harness: the same work on several actor systems, in turn, in one run.

`run.py` beside this package is the command. It makes one environment per system, starts one fresh
interpreter per measurement (`python -m meshbench.child SYSTEM ITEM`), and writes a table.
"""
