"""Places to store checkpoints; other packages add their own by a plugin of the kind ``store``."""

from mesh_stores._contract import STORES, Store, StoreCapabilities, StorePlugin
from mesh_stores._open import open_store

__all__ = ["STORES", "Store", "StoreCapabilities", "StorePlugin", "open_store"]
