"""Where processes run: schedulers start workers, controllers call the engines inside them.

Nothing here imports an engine: it is given an import path and builds the object where it belongs.
"""
