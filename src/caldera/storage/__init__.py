"""Files in other places, named by URLs: S3, HDFS, HTTP and every other store that fsspec knows."""

from __future__ import annotations

from caldera.storage.paths import below_url, cache_folder, is_fetched, is_url, local_path, shown_url

__all__ = ["below_url", "cache_folder", "is_fetched", "is_url", "local_path", "shown_url"]
