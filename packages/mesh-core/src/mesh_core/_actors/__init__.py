"""What an actor class is: its base class, its endpoints, and how results of endpoints are combined. Running actors are in `_hosting`.

It imports only `_common`.
"""
