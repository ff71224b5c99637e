"""The zoo: tiny models of many architectures, each planned and proven on four simulated ranks.

`catalog.py` lists the models by name; `text_models.py`, `media_models.py` and `torch_models.py`
build them. `rows.py` measures one model, `page.py` writes docs/models.md from the rows.
"""
