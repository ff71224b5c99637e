"""What planning takes, and how good its plans are."""
