"""Pure functions of reinforcement learning: advantages, losses, their aggregation, KL. Knows no engine and no batch."""
