"""Inference engines behind one set of methods, for this process or another Python's.

Imports the standard library, torch and the engine alone, so that any Python that has an engine can
run it: `python -m caldera_engine`, with this package's folder as PYTHONPATH.
"""
