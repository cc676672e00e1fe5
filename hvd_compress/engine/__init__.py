"""What all adapters share: the catalogue, statistics, buckets that are tuned, and ranks within one process."""
