"""PASK-bench: a reference harness for parser-aware KV persistence."""

__version__ = "0.1.0"
