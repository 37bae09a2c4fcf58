"""The single controller: worker groups, protocols, runtimes. Knows no model and no algorithm."""
