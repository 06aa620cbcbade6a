"""What every other room may use: errors, settings, enums shared with the native layer, the pointer to this process, and its identity.

It imports nothing from Mesh but the native module.
"""
