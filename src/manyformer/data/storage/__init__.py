"""Files of prepared data: caches, archives, shards."""
