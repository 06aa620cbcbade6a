"""`./dev gpu`: everything that a single GPU can prove, in order of worth, in at most eight minutes.

It runs with the plain Python of a machine that has PyTorch and a GPU, and needs neither nox nor a network:

    ./dev gpu --wheels FOLDER     here, beforehand: build what that machine lacks, in gpu-wheels/ if no folder is named
    ./dev gpu                     there, in a copy of this checkout with that folder
    ./dev gpu --rehearse          anywhere: every step's program on the CPU, with small sizes

`steps.py` lists the steps, `running.py` runs each in a process of its own with a time limit, `page.py` writes what was found.
"""
