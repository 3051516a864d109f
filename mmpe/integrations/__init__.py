"""Bridges to other libraries; each module imports its library, and only who uses the bridge imports the module."""
