"""Where worker groups run."""
