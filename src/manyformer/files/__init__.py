"""Files on disk: atomic writing, typed JSON records, and folders whose files are verified before they are read."""
