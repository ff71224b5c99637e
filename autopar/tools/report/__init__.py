"""The page of a plan, for people.

page.py writes the page of `plan.report`, from the facts that facts.py gathers, the figures of
figures.py and the pictures of pictures.py and pipeline.py.
"""
