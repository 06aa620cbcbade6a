"""The shape of meshes and where their ranks are: the base class of all meshes, locations, and meshes of values.

It imports `_common` and the native module.
"""
