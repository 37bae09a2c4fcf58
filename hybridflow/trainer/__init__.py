"""Run and what it is made of: configuration, rows, checkpoints, validation, tracking, report."""
