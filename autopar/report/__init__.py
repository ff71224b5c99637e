"""What is made of a plan for people and for other tools.

page.py writes the page of `plan.report`, from the facts that facts.py gathers, the figures of
figures.py and the pictures of pictures.py; advise/ has the exporters.
`cli`, `api` and `Plan.report` call this package.
"""
