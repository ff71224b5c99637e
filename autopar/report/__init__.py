"""What is made of a plan for people and for other tools: the page, and exporters."""
