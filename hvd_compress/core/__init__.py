"""Framework-neutral core: collectives, buckets, transports and `LocalWorld`."""
