"""One self-contained, interactive page per report: data (data.py), its parts (page.html, .css, .js), and their joining."""
