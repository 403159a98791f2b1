"""Our own inference engine (engine.py), its thread, its server and its clients."""
