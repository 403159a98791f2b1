"""Offline evaluation: scores of models on suites, kept in a database of their own.

targets.py + suites.py  ->  settings.py (a config)  ->  runner.py (episodes)  ->  store.py
store.py  ->  report.py (with metrics.py: pure)  ->  `areal eval`
"""
