"""The report: tables and figures made from runs alone. `sections.py` and `figures.py` describe
them, one module per experiment fills them in, `picture.py` and `interactive.py` draw a figure,
`page.py` writes the HTML page."""
