"""What runs on a rank: the roles, the engines they drive, and the scoring of rollouts."""
