"""What a plan costs: computation, communication, memory."""
