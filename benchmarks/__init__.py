"""Benchmarks against peers and bounds. Each module's `main()` prints one JSON line: {"name", "value", "target", "ok", ...}."""
