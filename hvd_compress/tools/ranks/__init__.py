"""A rank of a job: the part that the workers of benchmarks and of comparisons share."""
