"""The passes: each takes a Program and returns a new one; none imports another."""
