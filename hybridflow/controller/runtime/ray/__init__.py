"""The Ray runtime: worker groups on a cluster. Imported only where run.runtime is ray."""
