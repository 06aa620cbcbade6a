"""What every other room may use: errors, settings, enums shared with the native layer, the pointer to this process, and who runs where.

It imports nothing of Mesh but the native module.
"""
