"""PagedServe: an LLM serving engine and its simulator, driven by the same policy objects.

The sub-packages are the repository's top-level folders; each is imported as
``pagedserve.<folder>``. Importing this package imports nothing heavy.
"""

__version__ = "0.1.0"
