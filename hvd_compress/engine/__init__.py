"""Code that all adapters share: the catalogue of methods, statistics, the search for buckets, and `LocalWorld`."""
