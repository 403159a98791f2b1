"""Where processes run: schedulers start workers, controllers call the engines inside them.

Nothing here imports an engine: a worker builds it from an import path.
"""
