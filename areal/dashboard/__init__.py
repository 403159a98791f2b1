"""Looks at runs: what they recorded, as text, as JSON and as a page. Loads no torch."""
