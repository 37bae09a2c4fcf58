"""Rollout engines: what samples from the policy."""
