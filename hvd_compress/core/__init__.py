"""Framework-neutral core: messages, buckets, transports, and all ranks in one process."""
