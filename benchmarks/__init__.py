"""Benchmarks against peers and bounds. Each module prints one JSON line: {"name", "value", "target", "ok", ...}."""
