"""The cost model against what is published and what is measured."""
