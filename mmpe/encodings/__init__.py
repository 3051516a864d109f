"""Encodings, one family a file; the registry imports every file of this folder."""
