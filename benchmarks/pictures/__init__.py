"""The pictures of docs/images, each a module that returns an SVG; `style.py` has their colours."""
