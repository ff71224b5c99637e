"""What autopar is held against: run a part as `python -m benchmarks.<name>`."""
