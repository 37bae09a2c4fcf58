"""Losses, one file each: functions of flat response tokens (torch), one value per token; lower is better."""
